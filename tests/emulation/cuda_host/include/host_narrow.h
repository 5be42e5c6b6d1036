/* What __half and __nv_bfloat16 have in common: included once for each, with PAGEDKERN_SCALAR_ and PAGEDKERN_PAIR_. */

#define PAGEDKERN_OPERATOR_(op, name)                                                                                  \
  inline PAGEDKERN_SCALAR_ operator op(PAGEDKERN_SCALAR_ a, PAGEDKERN_SCALAR_ b) { return float(a) op float(b); }      \
  inline PAGEDKERN_SCALAR_ &operator op##=(PAGEDKERN_SCALAR_ &a, PAGEDKERN_SCALAR_ b) { return a = a op b; }           \
  inline PAGEDKERN_SCALAR_ name(PAGEDKERN_SCALAR_ a, PAGEDKERN_SCALAR_ b) { return a op b; }                           \
  inline PAGEDKERN_PAIR_ operator op(PAGEDKERN_PAIR_ a, PAGEDKERN_PAIR_ b) { return {a.x op b.x, a.y op b.y}; }        \
  inline PAGEDKERN_PAIR_ name##2(PAGEDKERN_PAIR_ a, PAGEDKERN_PAIR_ b) { return a op b; }
PAGEDKERN_OPERATOR_(+, __hadd)
PAGEDKERN_OPERATOR_(-, __hsub)
PAGEDKERN_OPERATOR_(*, __hmul)
#undef PAGEDKERN_OPERATOR_
inline PAGEDKERN_SCALAR_ operator/(PAGEDKERN_SCALAR_ a, PAGEDKERN_SCALAR_ b) { return float(a) / float(b); }
inline PAGEDKERN_SCALAR_ __hdiv(PAGEDKERN_SCALAR_ a, PAGEDKERN_SCALAR_ b) { return a / b; }
inline PAGEDKERN_PAIR_ __h2div(PAGEDKERN_PAIR_ a, PAGEDKERN_PAIR_ b) { return {a.x / b.x, a.y / b.y}; }
inline PAGEDKERN_SCALAR_ operator-(PAGEDKERN_SCALAR_ a) { return a.bits_ ^= 0x8000, a; }
inline PAGEDKERN_SCALAR_ __hneg(PAGEDKERN_SCALAR_ a) { return -a; }
inline PAGEDKERN_PAIR_ __hneg2(PAGEDKERN_PAIR_ a) { return {-a.x, -a.y}; }
inline PAGEDKERN_SCALAR_ __habs(PAGEDKERN_SCALAR_ a) { return a.bits_ &= 0x7fff, a; }
inline PAGEDKERN_PAIR_ __habs2(PAGEDKERN_PAIR_ a) { return {__habs(a.x), __habs(a.y)}; }
inline bool __hisnan(PAGEDKERN_SCALAR_ a) { return isnan(float(a)); }
inline int __hisinf(PAGEDKERN_SCALAR_ a) { return isinf(float(a)) ? (a.bits_ >> 15 ? -1 : 1) : 0; }

inline PAGEDKERN_SCALAR_ __hfma(PAGEDKERN_SCALAR_ a, PAGEDKERN_SCALAR_ b, PAGEDKERN_SCALAR_ c) {
  return pagedkern_host::add_to_odd(float(a) * float(b), float(c)); /* the product is exact */
}
inline PAGEDKERN_PAIR_ __hfma2(PAGEDKERN_PAIR_ a, PAGEDKERN_PAIR_ b, PAGEDKERN_PAIR_ c) {
  return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
inline PAGEDKERN_SCALAR_ __hmax(PAGEDKERN_SCALAR_ a, PAGEDKERN_SCALAR_ b) { return fmaxf(a, b); }
inline PAGEDKERN_SCALAR_ __hmin(PAGEDKERN_SCALAR_ a, PAGEDKERN_SCALAR_ b) { return fminf(a, b); }
inline PAGEDKERN_PAIR_ __hmax2(PAGEDKERN_PAIR_ a, PAGEDKERN_PAIR_ b) { return {__hmax(a.x, b.x), __hmax(a.y, b.y)}; }
inline PAGEDKERN_PAIR_ __hmin2(PAGEDKERN_PAIR_ a, PAGEDKERN_PAIR_ b) { return {__hmin(a.x, b.x), __hmin(a.y, b.y)}; }

#define PAGEDKERN_COMPARE_(op, name)                                                                             \
  inline bool operator op(PAGEDKERN_SCALAR_ a, PAGEDKERN_SCALAR_ b) { return float(a) op float(b); }             \
  inline bool name(PAGEDKERN_SCALAR_ a, PAGEDKERN_SCALAR_ b) { return a op b; }
PAGEDKERN_COMPARE_(==, __heq)
PAGEDKERN_COMPARE_(!=, __hneu)
PAGEDKERN_COMPARE_(<, __hlt)
PAGEDKERN_COMPARE_(<=, __hle)
PAGEDKERN_COMPARE_(>, __hgt)
PAGEDKERN_COMPARE_(>=, __hge)
#undef PAGEDKERN_COMPARE_

inline float __low2float(PAGEDKERN_PAIR_ v) { return v.x; }
inline float __high2float(PAGEDKERN_PAIR_ v) { return v.y; }
