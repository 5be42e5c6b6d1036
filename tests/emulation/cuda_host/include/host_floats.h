/* The bit patterns of narrow floating-point formats, from and to float32, rounded to nearest even. */
#pragma once

namespace pagedkern_host {

inline float float_of_half(unsigned short h) {
  unsigned sign = (h & 0x8000u) << 16, rest = h & 0x7fffu;
  if (rest >= 0x7c00u) return bits<float>(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  float magnitude = bits<float>(rest << 13) * 0x1p112f; /* exact, subnormals too */
  return bits<float>(sign | bits<unsigned>(magnitude));
}

inline float float_of_bfloat16(unsigned short h) { return bits<float>(unsigned(h) << 16); }

/* Sign and magnitude bits of a format with E exponent bits and M mantissa bits, no special case but overflow: values
 * too large give `limit` or more. x is finite and not negative. */
template <int E, int M>
inline unsigned round_magnitude(float x) {
  constexpr int bias = (1 << (E - 1)) - 1;
  unsigned b = bits<unsigned>(x);
  int exponent = int(b >> 23) - 127;
  if (exponent < 1 - bias) { /* subnormal there: adding this makes float32 itself round at the right place */
    float magic = bits<float>(unsigned(127 + 1 - bias - M + 23) << 23);
    return bits<unsigned>(x + magic) - bits<unsigned>(magic);
  }
  b += (1u << (22 - M)) - 1 + (b >> (23 - M) & 1);
  return (b >> (23 - M)) - (unsigned(127 - bias) << M);
}

inline unsigned short half_of_float(float x) {
  unsigned b = bits<unsigned>(x), sign = b >> 16 & 0x8000u, rest = b & 0x7fffffffu;
  if (rest > 0x7f800000u) return 0x7fff;
  if (rest >= 0x47800000u) return (unsigned short)(sign | 0x7c00u); /* 65536 and more */
  return (unsigned short)(sign | round_magnitude<5, 10>(bits<float>(rest)));
}

inline unsigned short bfloat16_of_float(float x) {
  unsigned b = bits<unsigned>(x);
  if ((b & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return (unsigned short)((b + 0x7fffu + (b >> 16 & 1)) >> 16);
}

/* Rounds to odd: rounding the result once more, to half the bits or fewer, is then as good as rounding the exact sum. */
inline float add_to_odd(float product, float c) {
  double s = double(product) + c, back = s - product;
  double error = (product - (s - back)) + (c - back);
  if (error != 0 && s - s == 0) {
    unsigned long long b = bits<unsigned long long>(s);
    if (!(b & 1)) s = bits<double>((error > 0) == (s > 0) ? b + 1 : b - 1);
  }
  float f = float(s);
  double lost = s - double(f);
  if (lost != 0 && f - f == 0) {
    unsigned b = bits<unsigned>(f);
    if (!(b & 1)) f = bits<float>((lost > 0) == (f > 0) ? b + 1 : b - 1);
  }
  return f;
}

} // namespace pagedkern_host
