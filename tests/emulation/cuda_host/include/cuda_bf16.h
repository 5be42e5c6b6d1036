/* __nv_bfloat16 and __nv_bfloat162: arithmetic in float32, rounded once to nearest even. */
#pragma once
#include "host_floats.h"

struct __nv_bfloat16_raw {
  unsigned short x;
};
struct __nv_bfloat16 {
  unsigned short bits_;
  __nv_bfloat16() = default;
  __nv_bfloat16(const __nv_bfloat16_raw &raw) : bits_(raw.x) {}
  __nv_bfloat16(float x) : bits_(pagedkern_host::bfloat16_of_float(x)) {}
  __nv_bfloat16(double x) : bits_(pagedkern_host::bfloat16_of_float(float(x))) {}
  __nv_bfloat16(int x) : bits_(pagedkern_host::bfloat16_of_float(float(x))) {}
  operator float() const { return pagedkern_host::float_of_bfloat16(bits_); }
  operator __nv_bfloat16_raw() const { return {bits_}; }
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
  __nv_bfloat162() = default;
  __nv_bfloat162(__nv_bfloat16 x_, __nv_bfloat16 y_) : x(x_), y(y_) {}
};
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;

#define PAGEDKERN_SCALAR_ __nv_bfloat16
#define PAGEDKERN_PAIR_ __nv_bfloat162
#include "host_narrow.h"
#undef PAGEDKERN_SCALAR_
#undef PAGEDKERN_PAIR_

inline __nv_bfloat16 __float2bfloat16(float x) { return x; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
inline float __bfloat162float(__nv_bfloat16 x) { return x; }
inline __nv_bfloat16 __int2bfloat16_rn(int x) { return x; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short x) { return __nv_bfloat16_raw{x}; }
inline __nv_bfloat16 __short_as_bfloat16(short x) { return __nv_bfloat16_raw{(unsigned short)x}; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits_; }
inline short __bfloat16_as_short(__nv_bfloat16 x) { return short(x.bits_); }

inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {x, y}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 v) { return {v.x, v.y}; }
inline __nv_bfloat162 __float2bfloat162_rn(float x) { return {x, x}; }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {v.x, v.y}; }
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 x) { return {x, x}; }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
inline __nv_bfloat162 make_bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 v) { return v.x; }
inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 v) { return v.y; }
