/* OCP FP8 E4M3 and E5M2: types, and conversions with the saturation that CUDA names. */
#pragma once
#include "cuda_bf16.h"
#include "cuda_fp16.h"

typedef unsigned char __nv_fp8_storage_t;
typedef unsigned short __nv_fp8x2_storage_t;
typedef unsigned int __nv_fp8x4_storage_t;
enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };
struct alignas(4) __half2_raw {
  unsigned short x, y;
};

namespace pagedkern_host {

/* NaN for any NaN; with SATFINITE the largest finite value for anything larger, infinity too. */
inline unsigned char fp8_of_float(float x, __nv_saturation_t saturation, __nv_fp8_interpretation_t kind) {
  bool e4m3 = kind == __NV_E4M3;
  unsigned b = bits<unsigned>(x), sign = b >> 24 & 0x80u, rest = b & 0x7fffffffu;
  unsigned greatest = e4m3 ? 0x7eu : 0x7bu, beyond = e4m3 ? 0x7fu : 0x7cu; /* E4M3 has NaN after its greatest */
  if (rest > 0x7f800000u) return (unsigned char)(sign | 0x7fu);
  float magnitude = bits<float>(rest);
  unsigned rounded = rest >= 0x47800000u + (1u << 23) /* 131072 */ ? beyond
                     : e4m3                                       ? round_magnitude<4, 3>(magnitude)
                                                                  : round_magnitude<5, 2>(magnitude);
  if (rounded > greatest) rounded = saturation == __NV_SATFINITE ? greatest : beyond;
  return (unsigned char)(sign | rounded);
}

/* Both formats are subsets of half. */
inline unsigned short half_of_fp8(unsigned char x, __nv_fp8_interpretation_t kind) {
  if (kind == __NV_E5M2) return (x & 0x7fu) > 0x7cu ? 0x7fff : (unsigned short)(x << 8);
  unsigned sign = (x & 0x80u) << 8, rest = x & 0x7fu;
  if (rest == 0x7fu) return 0x7fff;
  float magnitude = float_of_half((unsigned short)(rest << 7)) * 256.0f; /* the biases differ by 8 */
  return (unsigned short)(sign | half_of_float(magnitude));
}

} // namespace pagedkern_host

inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(float x, __nv_saturation_t s, __nv_fp8_interpretation_t kind) {
  return pagedkern_host::fp8_of_float(x, s, kind);
}
inline __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 v, __nv_saturation_t s, __nv_fp8_interpretation_t kind) {
  return (unsigned short)(__nv_cvt_float_to_fp8(v.y, s, kind) << 8 | __nv_cvt_float_to_fp8(v.x, s, kind));
}
inline __nv_fp8_storage_t __nv_cvt_halfraw_to_fp8(__half_raw x, __nv_saturation_t s, __nv_fp8_interpretation_t kind) {
  return pagedkern_host::fp8_of_float(pagedkern_host::float_of_half(x.x), s, kind);
}
inline __half_raw __nv_cvt_fp8_to_halfraw(__nv_fp8_storage_t x, __nv_fp8_interpretation_t kind) {
  return {pagedkern_host::half_of_fp8(x, kind)};
}
inline __half2_raw __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t x, __nv_fp8_interpretation_t kind) {
  return {pagedkern_host::half_of_fp8((unsigned char)x, kind),
          pagedkern_host::half_of_fp8((unsigned char)(x >> 8), kind)};
}

template <__nv_fp8_interpretation_t KIND>
struct pagedkern_fp8_ {
  __nv_fp8_storage_t __x;
  pagedkern_fp8_() = default;
  explicit pagedkern_fp8_(float x) : __x(pagedkern_host::fp8_of_float(x, __NV_SATFINITE, KIND)) {}
  explicit pagedkern_fp8_(__half x) : pagedkern_fp8_(float(x)) {}
  explicit pagedkern_fp8_(__nv_bfloat16 x) : pagedkern_fp8_(float(x)) {}
  explicit operator float() const { return pagedkern_host::float_of_half(pagedkern_host::half_of_fp8(__x, KIND)); }
  explicit operator __half() const { return __half_raw{pagedkern_host::half_of_fp8(__x, KIND)}; }
  explicit operator __nv_bfloat16() const { return float(*this); }
};
typedef pagedkern_fp8_<__NV_E4M3> __nv_fp8_e4m3;
typedef pagedkern_fp8_<__NV_E5M2> __nv_fp8_e5m2;
