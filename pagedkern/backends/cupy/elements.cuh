/* Numbers of the ABI's dtypes: how they are read, written, converted and moved. */
#ifndef PAGEDKERN_ELEMENTS_CUH
#define PAGEDKERN_ELEMENTS_CUH

#include "instance.cuh"
#include "ptx.cuh"

INLINE int size_of(int dtype) { /* bytes */
  return dtype == PAGEDKERN_DTYPE_FLOAT32 ? 4 : dtype <= PAGEDKERN_DTYPE_BFLOAT16 ? 2 : 1;
}

INLINE float infinity() { return __uint_as_float(0x7f800000u); }

/* float8 is exactly a float32 whose exponent is too small by a constant: put its bits in place and multiply. */
INLINE float from_e4m3(unsigned code) {
  const float x = __uint_as_float((code & 0x7fu) << 20) * 0x1p120f;
  const unsigned value = (code & 0x7fu) == 0x7fu ? 0x7fc00000u : __float_as_uint(x);
  return __uint_as_float(value | (code & 0x80u) << 24);
}

INLINE float from_e5m2(unsigned code) { return from_half(code << 8); } /* the upper half of a float16 */

INLINE float from_int8(unsigned code) { return (float)(signed char)code; }

INLINE float from_byte(unsigned code, int dtype) {
  code &= 0xffu;
  return dtype == PAGEDKERN_DTYPE_INT8 ? from_int8(code)
         : dtype == PAGEDKERN_DTYPE_FLOAT8_E4M3FN ? from_e4m3(code) : from_e5m2(code);
}

/* Two codes of 8 bits, in the upper bytes of the two halves of `codes`, as a pair of float16 or bfloat16. Exact: both
 * hold every number of 8 bits. */
INLINE unsigned pair_from_bytes(unsigned codes, int dtype, bool bf16) {
  unsigned pair = codes; /* e5m2 is the upper half of a float16 */
  if (dtype == PAGEDKERN_DTYPE_INT8) {
    pair = sub_half2(codes >> 8 ^ 0x64806480u, 0x64806480u); /* 1024 + (x + 128), less 1152 */
  } else if (dtype == PAGEDKERN_DTYPE_FLOAT8_E4M3FN) {
    const unsigned magnitude = (codes & 0x7f007f00u) >> 1;              /* its exponent is 8 too small */
    const unsigned nan = (magnitude + 0x00800080u) & 0x40004000u;       /* 0x7f was NaN: make the exponent all ones */
    pair = mul_half2(magnitude, 0x5c005c00u) | (nan - (nan >> 5)) | (codes & 0x80008000u);
  }
  if (!bf16) return pair;
  return __byte_perm(__float_as_uint(from_half(pair & 0xffffu)), __float_as_uint(from_half(pair >> 16)), 0x7632);
}

INLINE float from_16_bits(unsigned bits, int dtype) {
  return dtype == PAGEDKERN_DTYPE_BFLOAT16 ? from_bfloat16(bits & 0xffffu) : from_half(bits & 0xffffu);
}

/* One element. */
INLINE float load_element(const void *from, long long index, int dtype) {
  switch (size_of(dtype)) {
  case 4: return ((const float *)from)[index];
  case 2: return from_16_bits(((const unsigned short *)from)[index], dtype);
  default: return from_byte(((const unsigned char *)from)[index], dtype);
  }
}

/* Four elements from an address aligned to their size. */
INLINE float4 load_4(const unsigned char *from, int dtype) {
  switch (size_of(dtype)) {
  case 4: return *(const float4 *)from;
  case 2: {
    const uint2 x = *(const uint2 *)from;
    return make_float4(from_16_bits(x.x, dtype), from_16_bits(x.x >> 16, dtype), from_16_bits(x.y, dtype),
                       from_16_bits(x.y >> 16, dtype));
  }
  default: {
    const unsigned x = *(const unsigned *)from;
    return make_float4(from_byte(x, dtype), from_byte(x >> 8, dtype), from_byte(x >> 16, dtype),
                       from_byte(x >> 24, dtype));
  }
  }
}

/* float8 of a number that is NaN or no larger than the largest code, to nearest even. `mantissa` bits, `bias` of the
 * exponent: 3 and 7, or 2 and 15. */
INLINE unsigned to_float8(float x, int mantissa, int bias) {
  const unsigned bits = __float_as_uint(x), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7fu;
  if (magnitude < (unsigned)(128 - bias) << 23) { /* subnormal: a multiple of the smallest code */
    const float codes_of_one = __uint_as_float((unsigned)(126 + bias + mantissa) << 23);
    return sign | (unsigned)rintf(__uint_as_float(magnitude) * codes_of_one);
  }
  const int dropped = 23 - mantissa;
  const unsigned rounded = magnitude + ((1u << (dropped - 1)) - 1) + (magnitude >> dropped & 1);
  return sign | ((rounded >> dropped) - ((unsigned)(127 - bias) << mantissa));
}

/* NaN stays. */
INLINE float clamped(float x, float least, float most) { return x < least ? least : x > most ? most : x; }

/* One element into memory, `x` already divided by the scale of a quantized cache. */
INLINE void store_element(void *to, long long index, int dtype, float x) {
  unsigned char *bytes = (unsigned char *)to;
  switch (dtype) {
  case PAGEDKERN_DTYPE_FLOAT32: ((float *)to)[index] = x; break;
  case PAGEDKERN_DTYPE_FLOAT16: ((unsigned short *)to)[index] = (unsigned short)pack(x, 0.0f, false); break;
  case PAGEDKERN_DTYPE_BFLOAT16: ((unsigned short *)to)[index] = (unsigned short)pack(x, 0.0f, true); break;
  case PAGEDKERN_DTYPE_FLOAT8_E4M3FN: bytes[index] = to_float8(clamped(x, -448.0f, 448.0f), 3, 7); break;
  case PAGEDKERN_DTYPE_FLOAT8_E5M2: bytes[index] = to_float8(clamped(x, -57344.0f, 57344.0f), 2, 15); break;
  default: bytes[index] = x != x ? 0 : (unsigned char)(signed char)(int)rintf(clamped(x, -128.0f, 127.0f));
  }
}

/* Move `bytes`, a multiple of `unit`, in steps of `unit` bytes, to which both addresses are aligned. */
INLINE void copy_bytes(unsigned char *to, const unsigned char *from, int bytes, int unit) {
  for (int at = 0; at < bytes; at += unit) {
    switch (unit) {
    case 16: *(uint4 *)(to + at) = *(const uint4 *)(from + at); break;
    case 8: *(uint2 *)(to + at) = *(const uint2 *)(from + at); break;
    case 4: *(unsigned *)(to + at) = *(const unsigned *)(from + at); break;
    case 2: *(unsigned short *)(to + at) = *(const unsigned short *)(from + at); break;
    default: to[at] = from[at];
    }
  }
}

#endif /* PAGEDKERN_ELEMENTS_CUH */
