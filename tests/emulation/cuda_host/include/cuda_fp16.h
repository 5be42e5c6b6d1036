/* __half and __half2: arithmetic in float32, rounded once to nearest even, which for + - * / and sqrt is exact rounding. */
#pragma once
#include "host_floats.h"

struct __half_raw {
  unsigned short x;
};
struct __half {
  unsigned short bits_;
  __half() = default;
  __half(const __half_raw &raw) : bits_(raw.x) {}
  __half(float x) : bits_(pagedkern_host::half_of_float(x)) {}
  __half(double x) : bits_(pagedkern_host::half_of_float(float(x))) {}
  __half(int x) : bits_(pagedkern_host::half_of_float(float(x))) {}
  operator float() const { return pagedkern_host::float_of_half(bits_); }
  operator __half_raw() const { return {bits_}; }
};
struct alignas(4) __half2 {
  __half x, y;
  __half2() = default;
  __half2(__half x_, __half y_) : x(x_), y(y_) {}
};
typedef __half half;
typedef __half2 half2;

#define PAGEDKERN_SCALAR_ __half
#define PAGEDKERN_PAIR_ __half2
#include "host_narrow.h"
#undef PAGEDKERN_SCALAR_
#undef PAGEDKERN_PAIR_

inline __half __float2half(float x) { return x; }
inline __half __float2half_rn(float x) { return x; }
inline __half __double2half(double x) { return x; }
inline float __half2float(__half x) { return x; }
inline __half __int2half_rn(int x) { return x; }
inline __half __ushort_as_half(unsigned short x) { return __half_raw{x}; }
inline __half __short_as_half(short x) { return __half_raw{(unsigned short)x}; }
inline unsigned short __half_as_ushort(__half x) { return x.bits_; }
inline short __half_as_short(__half x) { return short(x.bits_); }

inline __half2 __floats2half2_rn(float x, float y) { return {x, y}; }
inline __half2 __float22half2_rn(float2 v) { return {v.x, v.y}; }
inline __half2 __float2half2_rn(float x) { return {x, x}; }
inline float2 __half22float2(__half2 v) { return {v.x, v.y}; }
inline __half2 __half2half2(__half x) { return {x, x}; }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __half2 make_half2(__half x, __half y) { return {x, y}; }
inline __half __low2half(__half2 v) { return v.x; }
inline __half __high2half(__half2 v) { return v.y; }
