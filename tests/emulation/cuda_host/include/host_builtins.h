/* Qualifiers, vector types, index variables, plain memory accesses: the part of CUDA C++ that needs no threads. */
#pragma once

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __managed__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __restrict__ __restrict

/* One copy for the block that runs: thread-local storage of the host thread, whose extent the runtime can look up.
 * `used` keeps the compiler from taking for zero what nobody writes. */
#define __shared__ static thread_local __attribute__((used))

#define PAGEDKERN_VECTORS_(type, name, a1, a2, a3, a4)                                                           \
  struct alignas(a1) name##1 { type x; };                                                                        \
  struct alignas(a2) name##2 { type x, y; };                                                                     \
  struct alignas(a3) name##3 { type x, y, z; };                                                                  \
  struct alignas(a4) name##4 { type x, y, z, w; };                                                               \
  inline name##1 make_##name##1(type x) { return {x}; }                                                          \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; }                                               \
  inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }                                    \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
PAGEDKERN_VECTORS_(signed char, char, 1, 2, 1, 4)
PAGEDKERN_VECTORS_(unsigned char, uchar, 1, 2, 1, 4)
PAGEDKERN_VECTORS_(short, short, 2, 4, 2, 8)
PAGEDKERN_VECTORS_(unsigned short, ushort, 2, 4, 2, 8)
PAGEDKERN_VECTORS_(int, int, 4, 8, 4, 16)
PAGEDKERN_VECTORS_(unsigned int, uint, 4, 8, 4, 16)
PAGEDKERN_VECTORS_(long long, longlong, 8, 16, 8, 16)
PAGEDKERN_VECTORS_(unsigned long long, ulonglong, 8, 16, 8, 16)
PAGEDKERN_VECTORS_(float, float, 4, 8, 4, 16)
PAGEDKERN_VECTORS_(double, double, 8, 16, 8, 16)
#undef PAGEDKERN_VECTORS_

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

/* The runtime sets them whenever it goes from one thread to another. */
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
constexpr int warpSize = 32;

/* Loads and stores with a cache hint: the hint is dropped. */
#define PAGEDKERN_LOAD_(name) \
  template <typename T>       \
  inline T name(const T *p) { \
    return *p;                \
  }
PAGEDKERN_LOAD_(__ldg)
PAGEDKERN_LOAD_(__ldca)
PAGEDKERN_LOAD_(__ldcg)
PAGEDKERN_LOAD_(__ldcs)
PAGEDKERN_LOAD_(__ldcv)
PAGEDKERN_LOAD_(__ldlu)
#undef PAGEDKERN_LOAD_
#define PAGEDKERN_STORE_(name)       \
  template <typename T>              \
  inline void name(T *p, T value) {  \
    *p = value;                      \
  }
PAGEDKERN_STORE_(__stwb)
PAGEDKERN_STORE_(__stcg)
PAGEDKERN_STORE_(__stcs)
PAGEDKERN_STORE_(__stwt)
#undef PAGEDKERN_STORE_

namespace pagedkern_host {

template <size_t... I>
struct index_sequence {};
template <size_t N, size_t... I>
struct make_index_sequence : make_index_sequence<N - 1, N - 1, I...> {};
template <size_t... I>
struct make_index_sequence<0, I...> {
  using type = index_sequence<I...>;
};

/* Ends the launch with an error that names the thread. */
[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

} // namespace pagedkern_host

#undef assert
#define assert(condition) \
  ((condition) ? (void)0 : pagedkern_host::fail("assertion failed at %s:%d: %s", __FILE__, __LINE__, #condition))
[[noreturn]] inline void __trap() { pagedkern_host::fail("__trap()"); }
