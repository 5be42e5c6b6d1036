/* The 16-bit formats as bit patterns, which is what fragments of matrices hold. */
#pragma once

namespace pagedkern_host {

inline float float_of_half(unsigned short h) {
  unsigned sign = (h & 0x8000u) << 16, rest = h & 0x7fffu;
  if (rest >= 0x7c00u) return bits<float>(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  float magnitude = bits<float>(rest << 13) * 0x1p112f; /* exact, subnormals too */
  return bits<float>(sign | bits<unsigned>(magnitude));
}

inline float float_of_bfloat16(unsigned short h) { return bits<float>(unsigned(h) << 16); }

} // namespace pagedkern_host
