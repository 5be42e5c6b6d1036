/* Device functions on numbers. The fast ones (__expf, __fdividef ...) are computed exactly rounded or better here. */
#pragma once

inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return powf(10.0f, x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __log10f(float x) { return log10f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __tanhf(float x) { return tanhf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float rsqrtf(float x) { return float(1.0 / sqrt(double(x))); }
inline float __frsqrt_rn(float x) { return rsqrtf(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }

/* Conversions to integers saturate, and NaN becomes 0, as on the device. */
namespace pagedkern_host {
template <typename I>
inline I saturate(double x, double low, double high, I least, I greatest) {
  return x != x ? I(0) : x <= low ? least : x >= high ? greatest : I(x);
}
} // namespace pagedkern_host
#define PAGEDKERN_TO_INTEGER_(suffix, rounded)                                                                       \
  inline int __float2int_##suffix(float x) {                                                                         \
    return pagedkern_host::saturate<int>(rounded, -2147483648.0, 2147483647.0, -2147483647 - 1, 2147483647);         \
  }                                                                                                                  \
  inline unsigned __float2uint_##suffix(float x) {                                                                   \
    return pagedkern_host::saturate<unsigned>(rounded, 0.0, 4294967295.0, 0u, 4294967295u);                          \
  }                                                                                                                  \
  inline long long __float2ll_##suffix(float x) {                                                                    \
    return pagedkern_host::saturate<long long>(rounded, -9223372036854775808.0, 9223372036854775808.0,               \
                                               -9223372036854775807LL - 1, 9223372036854775807LL);                   \
  }
PAGEDKERN_TO_INTEGER_(rn, rint(double(x)))
PAGEDKERN_TO_INTEGER_(rz, trunc(double(x)))
PAGEDKERN_TO_INTEGER_(ru, ceil(double(x)))
PAGEDKERN_TO_INTEGER_(rd, floor(double(x)))
#undef PAGEDKERN_TO_INTEGER_
inline float __int2float_rn(int x) { return float(x); }
inline float __uint2float_rn(unsigned x) { return float(x); }
inline float __ll2float_rn(long long x) { return float(x); }

namespace pagedkern_host {
template <typename To, typename From>
inline To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}
} // namespace pagedkern_host
inline int __float_as_int(float x) { return pagedkern_host::bits<int>(x); }
inline unsigned __float_as_uint(float x) { return pagedkern_host::bits<unsigned>(x); }
inline float __int_as_float(int x) { return pagedkern_host::bits<float>(x); }
inline float __uint_as_float(unsigned x) { return pagedkern_host::bits<float>(x); }
inline long long __double_as_longlong(double x) { return pagedkern_host::bits<long long>(x); }
inline double __longlong_as_double(long long x) { return pagedkern_host::bits<double>(x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline unsigned __brev(unsigned x) {
  unsigned y = 0;
  for (int i = 0; i < 32; ++i) y |= (x >> i & 1u) << (31 - i);
  return y;
}
inline unsigned __umulhi(unsigned x, unsigned y) { return unsigned((unsigned long long)x * y >> 32); }
inline int __mulhi(int x, int y) { return int((long long)x * y >> 32); }
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
  return (unsigned long long)((unsigned __int128)x * y >> 64);
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return unsigned(((unsigned long long)high << 32 | low) << (shift & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return unsigned(((unsigned long long)high << 32 | low) >> (shift & 31));
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  unsigned long long bytes = (unsigned long long)y << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    unsigned pick = selector >> (4 * i) & 15;
    unsigned byte = unsigned(bytes >> (8 * (pick & 7))) & 255;
    result |= (pick & 8 ? (byte & 128 ? 255u : 0u) : byte) << (8 * i); /* bit 3 spreads the sign */
  }
  return result;
}
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; ++i) c += int((signed char)(a >> (8 * i))) * int((signed char)(b >> (8 * i)));
  return c;
}

#define PAGEDKERN_MIN_MAX_(type)                                      \
  inline type min(type a, type b) { return b < a ? b : a; }           \
  inline type max(type a, type b) { return a < b ? b : a; }
PAGEDKERN_MIN_MAX_(int)
PAGEDKERN_MIN_MAX_(unsigned)
PAGEDKERN_MIN_MAX_(long)
PAGEDKERN_MIN_MAX_(unsigned long)
PAGEDKERN_MIN_MAX_(long long)
PAGEDKERN_MIN_MAX_(unsigned long long)
#undef PAGEDKERN_MIN_MAX_
inline unsigned min(unsigned a, int b) { return min(a, unsigned(b)); }
inline unsigned min(int a, unsigned b) { return min(unsigned(a), b); }
inline unsigned max(unsigned a, int b) { return max(a, unsigned(b)); }
inline unsigned max(int a, unsigned b) { return max(unsigned(a), b); }
inline long long min(long a, long long b) { return b < a ? b : a; }
inline long long min(long long a, long b) { return b < a ? b : a; }
inline long long max(long a, long long b) { return a < b ? b : a; }
inline long long max(long long a, long b) { return a < b ? b : a; }
inline long min(long a, int b) { return b < a ? b : a; }
inline long min(int a, long b) { return b < a ? b : a; }
inline long max(long a, int b) { return a < b ? b : a; }
inline long max(int a, long b) { return a < b ? b : a; }
inline long long min(long long a, int b) { return b < a ? b : a; }
inline long long min(int a, long long b) { return b < a ? b : a; }
inline long long max(long long a, int b) { return a < b ? b : a; }
inline long long max(int a, long long b) { return a < b ? b : a; }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
