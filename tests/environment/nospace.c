/* Preloaded: a disk that is full once NOSPACE_AFTER bytes have been written into files of the folder NOSPACE_FOLDER. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <dlfcn.h>

static long written;

ssize_t write(int file, const void *data, size_t size)
{
    ssize_t (*real)(int, const void *, size_t) = dlsym(RTLD_NEXT, "write");
    const char *folder = getenv("NOSPACE_FOLDER"), *after = getenv("NOSPACE_AFTER");
    char link[64], path[4096];
    if (folder && after) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", file);
        ssize_t length = readlink(link, path, sizeof path - 1);
        if (length > 0 && !strncmp(path, folder, strlen(folder))) {
            long left = atol(after) - written;
            if (left <= 0) {
                errno = ENOSPC;
                return -1;
            }
            if ((long)size > left)
                size = (size_t)left;
            written += (long)size;
        }
    }
    return real(file, data, size);
}
