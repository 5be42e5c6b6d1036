/* One warp's arithmetic in float32, exact to its rounding: up to 8 query rows.
 *
 * Scores: 32 / keys lanes share a key and take its elements by turns, 4 at a time, for all rows. Values: each lane owns
 * 4 elements of V out of every 128 and walks the warp's keys, whose weights lie in shared memory. */
#ifndef PAGEDKERN_FMA_CUH
#define PAGEDKERN_FMA_CUH

#include "tiles.cuh"

struct FmaCore {
  static constexpr int ROWS = MAX_ROWS; /* of a lane: all of the warp's */
  static constexpr int FEW = 64;        /* elements of a key; a lane that takes less adds them up plainly */
  static constexpr int TURNS = 2;       /* of a lane at a key, 4 elements each, whose products make one sum */

  const Constants &i;
  const int lane;
  const float *q;                           /* [rows, dim_k] in shared memory */
  float s[ROWS];                            /* [rows] score, then weight, of the lane's key */
  float acc[ROWS][MAX_DIM / 128][4];        /* [rows][ceil(dim_v / 128)] weighted sums of values */

  INLINE FmaCore(const Constants &i_) : i(i_), lane(threadIdx.x % 32), q(nullptr) {
#pragma unroll
    for (int r = 0; r < i.rows; r++) {
#pragma unroll
      for (int n = 0; n < (i.dim_v + 127) / 128; n++) acc[r][n][0] = acc[r][n][1] = acc[r][n][2] = acc[r][n][3] = 0.0f;
    }
  }

  INLINE int keys() const { return i.tile / i.key_warps; } /* of this warp in a tile: 8, 16 or 32 */
  INLINE int rows() const { return i.rows; }
  INLINE int scores() const { return 1; }
  INLINE float &at(int r, int e) { return s[r]; }
  INLINE int row(int r) const { return r; }
  INLINE int key(int e) const { return lane % keys(); }
  INLINE bool counts() const { return lane < keys(); } /* the other lanes of a key repeat its score */
  INLINE bool first_of_row() const { return lane == 0; }
  INLINE float over_row_max(float x) const {
#pragma unroll
    for (int step = 16; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
  }
  INLINE float over_row_sum(float x) const {
#pragma unroll
    for (int step = 16; step; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
  }

  INLINE static int q_pitch(const Constants &i) { return i.dim_k * 4; } /* bytes */

  /* Put 8 elements of a row of q into shared memory as float32; `from` null: zeros. */
  INLINE static void stage_q(const Constants &i, unsigned char *to, const unsigned char *from) {
    for (int e = 0; e < 8; e++) ((float *)to)[e] = from ? load_element(from, e, i.q_dtype) : 0.0f;
  }
  INLINE static int q_chunk(const Constants &i) { return 32; } /* bytes of 8 elements in shared memory */

  INLINE void load_q(const unsigned char *tile) { q = (const float *)tile; }

  INLINE void score(const unsigned char *tile, int pitch) {
    const unsigned char *row = tile + lane % keys() * pitch; /* [dim_k] the lane's key */
#pragma unroll
    for (int r = 0; r < i.rows; r++) s[r] = 0.0f;
    if (i.dim_k * keys() < 32 * FEW) add_few(row);
    else add_many(row);
#pragma unroll
    for (int r = 0; r < i.rows; r++) {
      for (int step = keys(); step < 32; step *= 2) s[r] += __shfl_xor_sync(ALL_LANES, s[r], step);
    }
  }

  INLINE void decay(int r, float factor) {
#pragma unroll
    for (int n = 0; n < (i.dim_v + 127) / 128; n++) {
#pragma unroll
      for (int c = 0; c < 4; c++) acc[r][n][c] *= factor;
    }
  }

  /* acc += p v, as in MmaCore. scratch: float32 [keys, rows] of the warp. A weight that a row must not use is -0. */
  template <class Sees>
  INLINE void gather(const unsigned char *tile, int pitch, bool masked, const Sees &sees, float *scratch) {
    if (lane < keys()) {
#pragma unroll
      for (int r = 0; r < i.rows; r++) scratch[lane * i.rows + r] = masked && !sees(r, lane) ? -0.0f : s[r];
    }
    __syncwarp();
    for (int k = 0; k < keys(); k++) {
      float p[ROWS];
      load_weights(p, scratch + k * i.rows);
#pragma unroll
      for (int n = 0; n < (i.dim_v + 127) / 128; n++) {
        const int e = n * 128 + lane * 4;
        if (e >= i.dim_v) continue;
        const float4 v = load_4(tile + k * pitch + e * size_of(i.kv_dtype), i.kv_dtype);
#pragma unroll
        for (int r = 0; r < i.rows; r++) {
          if (masked && __float_as_uint(p[r]) == 0x80000000u) continue; /* 0 * NaN is NaN */
          acc[r][n][0] = fmaf(p[r], v.x, acc[r][n][0]);
          acc[r][n][1] = fmaf(p[r], v.y, acc[r][n][1]);
          acc[r][n][2] = fmaf(p[r], v.z, acc[r][n][2]);
          acc[r][n][3] = fmaf(p[r], v.w, acc[r][n][3]);
        }
      }
    }
    __syncwarp();
  }

  /* Put the sums into memory, row r of the warp at to + r * pitch. */
  INLINE void store(float *to, int pitch) const {
#pragma unroll
    for (int r = 0; r < i.rows; r++) {
#pragma unroll
      for (int n = 0; n < (i.dim_v + 127) / 128; n++) {
        const int e = n * 128 + lane * 4;
        if (e < i.dim_v)
          *(float4 *)(to + r * pitch + e) = make_float4(acc[r][n][0], acc[r][n][1], acc[r][n][2], acc[r][n][3]);
      }
    }
  }

private:
  /* s += the products of q and the lane's elements of a key, in sums of 4. */
  INLINE void add_few(const unsigned char *row) {
#pragma unroll 4
    for (int d = lane / keys() * 4; d < i.dim_k; d += 128 / keys()) {
      const float4 k = load_4(row + d * size_of(i.kv_dtype), i.kv_dtype);
#pragma unroll
      for (int r = 0; r < i.rows; r++) {
        const float4 x = *(const float4 *)(q + r * i.dim_k + d);
        s[r] += fmaf(x.w, k.w, x.z * k.z) + fmaf(x.y, k.y, x.x * k.x);
      }
    }
  }

  /* The same in sums of 8, and what s loses by rounding is added up beside it, to be made good at the end (Neumaier,
   * ZAMM 54, 1974): the error hardly grows with the number of elements, and the instructions are as many. */
  INLINE void add_many(const unsigned char *row) {
    const int step = 128 / keys(); /* elements from one turn of the lane to its next */
    const bool even = i.dim_k % (TURNS * step) == 0;
    float lost[ROWS];
#pragma unroll
    for (int r = 0; r < i.rows; r++) lost[r] = 0.0f;
#pragma unroll 1
    for (int first = 0; first < i.dim_k; first += TURNS * step) {
      const int d = first + lane / keys() * 4;
      float4 k[TURNS];
#pragma unroll
      for (int n = 0; n < TURNS; n++) {
        if (even || first + n * step < i.dim_k) k[n] = load_4(row + (d + n * step) * size_of(i.kv_dtype), i.kv_dtype);
      }
#pragma unroll
      for (int r = 0; r < i.rows; r++) {
        float part = 0.0f;
#pragma unroll
        for (int n = 0; n < TURNS; n++) {
          if (!even && first + n * step >= i.dim_k) continue;
          const float4 x = *(const float4 *)(q + r * i.dim_k + d + n * step);
          part = fmaf(x.w, k[n].w, fmaf(x.z, k[n].z, fmaf(x.y, k[n].y, fmaf(x.x, k[n].x, part))));
        }
        const float sum = s[r] + part;
        lost[r] += part - (sum - s[r]);
        s[r] = sum;
      }
    }
#pragma unroll
    for (int r = 0; r < i.rows; r++) {
      if (fabsf(lost[r]) < infinity()) s[r] += lost[r]; /* not the NaN beside an infinite sum */
    }
  }

  INLINE void load_weights(float p[ROWS], const float *from) const {
    if (i.rows % 4) {
#pragma unroll
      for (int r = 0; r < i.rows; r++) p[r] = from[r];
      return;
    }
#pragma unroll
    for (int r = 0; r < i.rows; r += 4) {
      const float4 x = *(const float4 *)(from + r);
      p[r] = x.x, p[r + 1] = x.y, p[r + 2] = x.z, p[r + 3] = x.w;
    }
  }
};

#endif /* PAGEDKERN_FMA_CUH */
