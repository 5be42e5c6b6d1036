/* One warp's arithmetic with tensor cores: 16 query rows, operands of 16 bits, sums in float32.
 *
 * s = q k^T and acc += p v are made of m16n8k16 products. Lane l holds rows l/4 and l/4 + 8; of every 8 columns (keys
 * of s, elements of acc) it holds 2*(l%4) and the next. The p that comes out of s is already spread over the lanes as
 * the left operand of the second product must be.
 *
 * 16-bit caches are read by ldmatrix. 8-bit ones are read as 32-bit words, four elements of a row, and widened in
 * registers; which of the 16 elements of a product is which does not matter as long as q (or acc) agrees, so a word's
 * four elements go to the places where its lane needs them. */
#ifndef PAGEDKERN_MMA_CUH
#define PAGEDKERN_MMA_CUH

#include "tiles.cuh"

struct MmaCore {
  static constexpr int ROWS = 2; /* of a lane */

  const Constants &i;
  const int lane;
  const unsigned char *queries; /* the warp's rows of q in shared memory, [16, pitch] bytes */
  unsigned q[MAX_DIM / 16][4];  /* [dim_k / 16] the same as left operands, if registers hold them */
  float s[MAX_KEYS / 8][4];     /* [keys / 8] scores, then weights: 16 rows x 8 keys */
  float acc[MAX_DIM / 8][4];    /* [dim_v / 8] 16 rows x 8 elements of the weighted sum of values */

  INLINE MmaCore(const Constants &i_)
      : i(i_), lane(threadIdx.x % 32) {
#pragma unroll
    for (int n = 0; n < i.dim_v / 8; n++) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.0f;
  }

  INLINE bool bf16() const { return i.q_dtype == PAGEDKERN_DTYPE_BFLOAT16; } /* the operands */
  INLINE bool narrow() const { return size_of(i.kv_dtype) == 1; }            /* the cache has 8 bits an element */
  INLINE int keys() const { return i.tile / i.key_warps; }                   /* of this warp in a tile: 16, 32 or 64 */
  INLINE int rows() const { return 2; }
  INLINE int scores() const { return keys() / 4; }
  INLINE float &at(int r, int e) { return s[e / 2][2 * r + e % 2]; }
  INLINE int row(int r) const { return lane / 4 + 8 * r; }                       /* of the warp's 16 */
  INLINE int key(int e) const { return e / 2 * 8 + lane % 4 * 2 + e % 2; }       /* of the warp's keys */
  INLINE bool counts() const { return true; }                                    /* no key is in two lanes */
  INLINE bool first_of_row() const { return lane % 4 == 0; }
  INLINE float over_row_max(float x) const {
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
  }
  INLINE float over_row_sum(float x) const {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
  }

  INLINE static int q_pitch(const Constants &i) { return pitch_of(i.dim_k, i.q_dtype); } /* bytes */

  /* Put 8 elements of a row of q into shared memory; `from` null: zeros. */
  INLINE static void stage_q(const Constants &i, unsigned char *to, const unsigned char *from) {
    if (!from) *(uint4 *)to = make_uint4(0, 0, 0, 0);
    else copy_bytes(to, from, 16, (size_t)from % 16 ? 2 : 16);
  }
  INLINE static int q_chunk(const Constants &i) { return 16; } /* bytes of 8 elements in shared memory */

  /* q is kept in registers where they have room for it beside scores, sums and the widening of 8 bits. */
  INLINE bool resident() const { return i.dim_k + i.dim_v + (narrow() ? 3 * keys() : 0) <= 384; }

  /* tile: the warp's rows of q, [16, pitch] bytes. */
  INLINE void load_q(const unsigned char *tile) {
    queries = tile;
    if (!resident()) return;
#pragma unroll
    for (int k = 0; k < i.dim_k / 16; k++) left(q[k], k);
  }

  /* s = q k^T. tile: the warp's keys, [keys, pitch] bytes. */
  INLINE void score(const unsigned char *tile, int pitch) {
#pragma unroll
    for (int n = 0; n < keys() / 8; n++) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
#pragma unroll
    for (int k = 0; k < i.dim_k / 16; k++) {
      unsigned a[4] = {q[k][0], q[k][1], q[k][2], q[k][3]};
      if (!resident()) left(a, k);
#pragma unroll
      for (int n = 0; n < keys() / 16; n++) { /* 16 keys */
        unsigned b[4];
        if (!narrow()) {
          ldmatrix(b, tile + (n * 16 + lane / 16 * 8 + lane % 8) * pitch + k * 32 + lane / 8 % 2 * 16);
        } else {
          const unsigned char *from = tile + (n * 16 + lane / 4) * pitch + k * 16 + lane % 4 * 4;
          widen(b, *(const unsigned *)from);
          widen(b + 2, *(const unsigned *)(from + 8 * pitch));
        }
        mma(s[2 * n], a, b[0], b[1], bf16());
        mma(s[2 * n + 1], a, b[2], b[3], bf16());
      }
    }
  }

  INLINE void decay(int r, float factor) {
#pragma unroll
    for (int n = 0; n < i.dim_v / 8; n++) acc[n][2 * r] *= factor, acc[n][2 * r + 1] *= factor;
  }

  /* acc += p v. tile: the warp's keys, [keys, pitch] bytes; masked: some row does not see some key; sees(r, key):
   * whether the lane's row r sees that key of the warp. `scratch` is not needed. */
  template <class Sees>
  INLINE void gather(const unsigned char *tile, int pitch, bool masked, const Sees &sees, float *scratch) {
    const bool apart = masked && any_infinite(tile, pitch); /* 0 * NaN is NaN: such elements are added one by one */
#pragma unroll
    for (int k = 0; k < keys() / 16; k++) {
      unsigned a[4];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        a[2 * half] = pack(s[2 * k + half][0], s[2 * k + half][1], bf16());
        a[2 * half + 1] = pack(s[2 * k + half][2], s[2 * k + half][3], bf16());
      }
      if (!narrow()) {
#pragma unroll
        for (int n = 0; n < i.dim_v / 16; n++) {
          unsigned b[4];
          ldmatrix_transposed(b, tile + (k * 16 + lane % 16) * pitch + n * 32 + lane / 16 * 16);
          if (apart) finite_only(b), finite_only(b + 2);
          mma(acc[2 * n], a, b[0], b[1], bf16());
          mma(acc[2 * n + 1], a, b[2], b[3], bf16());
        }
      } else {
#pragma unroll
        for (int n = 0; n < i.dim_v / 32; n++) {
          const unsigned char *at = tile + (k * 16 + lane % 4 * 2) * pitch + n * 32 + lane / 4 * 4;
          const unsigned w[4] = {*(const unsigned *)at, *(const unsigned *)(at + pitch),
                                 *(const unsigned *)(at + 8 * pitch), *(const unsigned *)(at + 9 * pitch)};
          unsigned b[4][2]; /* [element][upper and lower keys] */
          cross(b, w);
#pragma unroll
          for (int j = 0; j < 4; j++) {
            if (apart) finite_only(b[j]);
            mma(acc[4 * n + j], a, b[j][0], b[j][1], bf16());
          }
        }
      }
    }
    if (apart) add_infinite(tile, pitch, sees);
  }

  /* Put the sums into memory, row r of the warp at to + r * pitch. */
  INLINE void store(float *to, int pitch) const {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float *at = to + row(r) * pitch;
      if (narrow()) { /* the four products of a word hold neighbours */
#pragma unroll
        for (int n = 0; n < i.dim_v / 8; n += 4) {
#pragma unroll
          for (int c = 2 * r; c < 2 * r + 2; c++)
            *(float4 *)(at + column(n, c % 2)) = make_float4(acc[n][c], acc[n + 1][c], acc[n + 2][c], acc[n + 3][c]);
        }
      } else {
#pragma unroll
        for (int n = 0; n < i.dim_v / 8; n++)
          *(float2 *)(at + column(n, 0)) = make_float2(acc[n][2 * r], acc[n][2 * r + 1]);
      }
    }
  }

private:
  /* The k-th 16 elements of the warp's rows of q as a left operand. */
  INLINE void left(unsigned a[4], int k) const {
    const int pitch = q_pitch(i);
    if (!narrow()) {
      ldmatrix(a, queries + lane % 16 * pitch + k * 32 + lane / 16 * 16);
    } else { /* the lane's word of K holds elements 4*(l%4) .. +3 */
      const unsigned char *from = queries + lane / 4 * pitch + k * 32 + lane % 4 * 8;
      const uint2 upper = *(const uint2 *)from, lower = *(const uint2 *)(from + 8 * pitch);
      a[0] = upper.x, a[1] = lower.x, a[2] = upper.y, a[3] = lower.y;
    }
  }

  /* Which element of V acc[n][c] is of, c = 0 or 1. */
  INLINE int column(int n, int c) const {
    const int place = lane % 4 * 2 + c;
    return narrow() ? n / 4 * 32 + 4 * place + n % 4 : n * 8 + place;
  }

  /* Four elements of 8 bits as two pairs of 16 bits. */
  INLINE void widen(unsigned to[2], unsigned word) const {
    to[0] = pair_from_bytes(__byte_perm(word, 0, 0x1404), i.kv_dtype, bf16());
    to[1] = pair_from_bytes(__byte_perm(word, 0, 0x3424), i.kv_dtype, bf16());
  }

  /* w: the words of four keys; b[j]: element j of the first two and of the last two keys, in 16 bits. */
  INLINE void cross(unsigned b[4][2], const unsigned w[4]) const {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const unsigned low = __byte_perm(w[2 * half], w[2 * half + 1], 0x5140);  /* elements 0 and 1, keys side by side */
      const unsigned high = __byte_perm(w[2 * half], w[2 * half + 1], 0x7362); /* elements 2 and 3 */
#pragma unroll
      for (int j = 0; j < 4; j++)
        b[j][half] = pair_from_bytes(__byte_perm(j < 2 ? low : high, 0, j % 2 ? 0x3424 : 0x1404), i.kv_dtype, bf16());
    }
  }

  /* Replace NaN and infinities among the pairs by 0. */
  INLINE void finite_only(unsigned pair[2]) const {
    const unsigned exponent = bf16() ? 0x7f80u : 0x7c00u;
#pragma unroll
    for (int n = 0; n < 2; n++) {
      if ((pair[n] & exponent) == exponent) pair[n] &= 0xffff0000u;
      if ((pair[n] >> 16 & exponent) == exponent) pair[n] &= 0xffffu;
    }
  }

  INLINE float value(const unsigned char *tile, int pitch, int key, int e) const {
    return load_element(tile + key * pitch, e, i.kv_dtype);
  }

  INLINE static bool infinite(float x) { return !(fabsf(x) < infinity()); } /* or NaN */

  INLINE bool any_infinite(const unsigned char *tile, int pitch) const {
    bool found = false;
    for (int at = lane; at < keys() * (i.dim_v / 4); at += 32) {
      const float4 v = load_4(tile + at / (i.dim_v / 4) * pitch + at % (i.dim_v / 4) * 4 * size_of(i.kv_dtype),
                              i.kv_dtype);
      found |= infinite(v.x) || infinite(v.y) || infinite(v.z) || infinite(v.w);
    }
    return __any_sync(ALL_LANES, found);
  }

  /* acc += p * v for the elements of V that are not finite, only where the row sees the key. */
  template <class Sees> INLINE void add_infinite(const unsigned char *tile, int pitch, const Sees &sees) {
#pragma unroll
    for (int e = 0; e < keys() / 4; e++) {
      for (int other = 0; other < 4; other++) { /* the lanes that hold this row */
        const int k = e / 2 * 8 + other * 2 + e % 2;
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const float p = __shfl_sync(ALL_LANES, at(r, e), lane / 4 * 4 + other);
          if (!sees(r, k)) continue;
#pragma unroll
          for (int n = 0; n < i.dim_v / 8; n++) {
#pragma unroll
            for (int c = 0; c < 2; c++) {
              const float v = value(tile, pitch, k, column(n, c));
              if (infinite(v)) acc[n][2 * r + c] += p * v;
            }
          }
        }
      }
    }
  }
};

#endif /* PAGEDKERN_MMA_CUH */
