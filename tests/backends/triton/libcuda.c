/* A driver for a machine without a GPU: it loads and runs nothing, and shows each launch to `on_launch`.
 * Only what Triton's launcher calls is here, and only as much as it looks at. */

enum { SHARED_BYTES = 232448, THREADS = 1024 };

typedef struct { /* the head of CUlaunchConfig */
    unsigned grid[3], block[3], shared;
    void *stream;
} Config;

void (*on_launch)(const Config *, void *function, void **parameters);

int cuLaunchKernelEx(const Config *config, void *function, void **parameters, void **extra) {
    (void)extra;
    on_launch(config, function, parameters);
    return 0;
}

int cuModuleGetFunction(void **function, void *module, const char *name) {
    static char functions[4096];
    static int count;
    (void)module, (void)name;
    *function = &functions[count++];
    return 0;
}

int cuModuleLoadData(void **module, const void *image) {
    *module = (void *)image;
    return 0;
}

int cuPointerGetAttribute(void *value, int attribute, unsigned long long pointer) {
    (void)attribute;
    *(unsigned long long *)value = pointer;
    return 0;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)attribute, (void)device;
    *value = SHARED_BYTES;
    return 0;
}

int cuFuncGetAttribute(int *value, int attribute, void *function) {
    (void)attribute, (void)function;
    *value = THREADS;
    return 0;
}

int cuCtxGetCurrent(void **context) {
    *context = &on_launch; /* any but null: there is one */
    return 0;
}

#define SUCCEEDS(name) int name(void) { return 0; }
SUCCEEDS(cuCtxGetDevice)
SUCCEEDS(cuCtxGetLimit)
SUCCEEDS(cuCtxSetCurrent)
SUCCEEDS(cuCtxSetLimit)
SUCCEEDS(cuDeviceGet)
SUCCEEDS(cuDevicePrimaryCtxRetain)
SUCCEEDS(cuDriverGetVersion)
SUCCEEDS(cuFuncSetAttribute)
SUCCEEDS(cuFuncSetCacheConfig)
SUCCEEDS(cuGetErrorString)
SUCCEEDS(cuModuleUnload)
SUCCEEDS(cuStreamIsCapturing)
