/* Tiles of keys: which ones a block of threads reads, and how they come to shared memory.
 *
 * A tile is `tile` tokens of K and of V of one KV head, raw bytes as they lie in the cache. Token t of the tile is row
 * t of [tile, pitch] bytes; the pitch is an odd multiple of 16 bytes, so that eight rows start in eight different
 * groups of banks. What a row lacks of its padded head_dim is 0, and so are the tokens that no query of the block
 * sees. */
#ifndef PAGEDKERN_TILES_CUH
#define PAGEDKERN_TILES_CUH

#include "elements.cuh"

INLINE int pitch_of(int dim, int dtype) { return (dim * size_of(dtype) / 16 | 1) * 16; } /* bytes */

/* The tiles of one split: those of spans split, split + P, split + 2P ... of the tokens begin .. end-1. */
struct Walk {
  long long at;       /* first token of the tile, a multiple of `tile` from the sequence's start */
  long long span_end; /* first token past the span */
  long long end;      /* first token past the last */

  INLINE Walk(const Constants &i, long long begin, long long end_, int split, int splits) : end(end_) {
    const long long first = begin / i.span;
    const long long skipped = (split - first % splits + splits) % splits;
    at = skipped ? (first + skipped) * i.span : begin / i.tile * i.tile;
    span_end = (first + skipped + 1) * i.span;
  }
  INLINE bool done() const { return at >= end; }
  INLINE void next(const Constants &i, int splits) {
    at += i.tile;
    if (at < span_end) return;
    at += (long long)(splits - 1) * i.span;
    span_end = at + i.span;
  }
};

/* One KV head of a cache. */
struct Source {
  const unsigned char *head; /* element 0 of token 0 of block 0 */
  long long stride_block;    /* bytes */
  long long stride_token;    /* bytes */
  int row_bytes;             /* of one token */
  int padded;                /* bytes of the padded head_dim */
  int pitch;                 /* bytes from row to row in shared memory */
  int unit;                  /* COPY_PLAIN: alignment */

  INLINE Source(const void *cache, long long head_at, long long block, long long token, long long dim, int dim_padded,
                int dtype, int unit_)
      : unit(unit_) {
    const int size = size_of(dtype);
    head = (const unsigned char *)cache + head_at * size;
    stride_block = block * size;
    stride_token = token * size;
    row_bytes = (int)dim * size;
    padded = dim_padded * size;
    pitch = pitch_of(dim_padded, dtype);
  }
};

/* Brings tiles to shared memory, each warp its own rows; lane l finds the address of the warp's row l. */
struct Loader {
  const Constants &i;
  const Source &k;
  const Source &v;
  const int *table;      /* int32 [W] block table of the sequence */
  unsigned block_size;   /* B, tokens */
  long long begin, end;  /* tokens that some query of the block sees */
  unsigned char *stages; /* [stages][K rows, then V rows] */
  unsigned char *full;   /* [stages] mbarriers of 8 bytes: COPY_BULK only */
  int rows;              /* of this warp in each tile, at most 32 */
  int first;             /* the first of them */
  int block;             /* of this lane's token in the tile that is loaded next: fetched one tile ahead */

  INLINE int lane() const { return threadIdx.x % 32; }
  INLINE int stage_bytes() const { return i.tile * (k.pitch + v.pitch); }
  INLINE unsigned char *k_tile(int stage) const { return stages + stage * stage_bytes(); }
  INLINE unsigned char *v_tile(int stage) const { return k_tile(stage) + i.tile * k.pitch; }
  INLINE bool holds(long long token) const { return lane() < rows && token >= begin && token < end; }

  /* Look up the block of this lane's token in the tile at `at`. */
  INLINE void look_ahead(long long at) {
    const long long token = at + first + lane();
    if (holds(token)) block = table[(unsigned)token / block_size];
  }

  /* Start to load the tile at `at`, whose blocks were looked up before. */
  INLINE void load(long long at, int stage) {
    const long long token = at + first + lane();
    const bool live = holds(token);
    const long long offset = live ? (unsigned)token % block_size : 0;
    const long long k_at = live ? (long long)block * k.stride_block + offset * k.stride_token : 0;
    const long long v_at = live ? (long long)block * v.stride_block + offset * v.stride_token : 0;
    unsigned char *k_row = k_tile(stage) + first * k.pitch;
    unsigned char *v_row = v_tile(stage) + first * v.pitch;
#if HAS_BULK
    if (i.copy == COPY_BULK) {
      bulk_fence();
      if (lane() < rows && !live) {
        clear(k_row + lane() * k.pitch, k.row_bytes);
        clear(v_row + lane() * v.pitch, v.row_bytes);
      }
      mbarrier_arrive(full + 8 * stage, live ? k.row_bytes + v.row_bytes : 0);
      if (live) {
        bulk_copy(k_row + lane() * k.pitch, k.head + k_at, k.row_bytes, full + 8 * stage);
        bulk_copy(v_row + lane() * v.pitch, v.head + v_at, v.row_bytes, full + 8 * stage);
      }
      return;
    }
#endif
    const unsigned live_rows = __ballot_sync(ALL_LANES, live);
    load_rows(k, k_row, k_at, live_rows);
    load_rows(v, v_row, v_at, live_rows);
  }

  /* The warp's rows of K or V, 16 bytes a lane and turn; `at`: this lane's row in the cache. */
  INLINE void load_rows(const Source &from, unsigned char *to, long long at, unsigned live_rows) const {
    const int chunks = from.padded / 16;
#pragma unroll 4
    for (int start = 0; start < rows * chunks; start += 32) {
      const int row = (start + lane()) / chunks, column = (start + lane()) % chunks * 16;
      const unsigned char *source = from.head + __shfl_sync(ALL_LANES, at, row & 31) + column;
      if (row >= rows) continue;
      const int left = from.row_bytes - column;
      const int bytes = (live_rows >> row & 1) == 0 || left <= 0 ? 0 : left < 16 ? left : 16;
      unsigned char *chunk = to + row * from.pitch + column;
      if (i.copy == COPY_ASYNC) {
        cp_async(chunk, bytes ? source : from.head, bytes);
      } else {
        if (bytes < 16) *(uint4 *)chunk = make_uint4(0, 0, 0, 0);
        copy_bytes(chunk, source, bytes, from.unit < bytes ? from.unit : bytes ? bytes : 1);
      }
    }
  }

  /* COPY_BULK, once: the barriers, and the zeros past the end of every row, which no copy touches. */
  INLINE void prepare() {
#if HAS_BULK
    if (i.copy != COPY_BULK) return;
    if (threadIdx.x < i.stages) mbarrier_init(full + 8 * threadIdx.x, blockDim.x);
    mbarrier_init_fence();
    for (int row = threadIdx.x; row < i.stages * i.tile; row += blockDim.x) {
      const int stage = row / i.tile, r = row % i.tile;
      clear(k_tile(stage) + r * k.pitch + k.row_bytes, k.padded - k.row_bytes);
      clear(v_tile(stage) + r * v.pitch + v.row_bytes, v.padded - v.row_bytes);
    }
    __syncthreads();
#endif
  }

  /* Wait for this thread's share of a tile: the `turn`-th that was loaded. `__syncthreads` must follow. */
  INLINE void wait(int stage, int turn) const {
    if (i.copy == COPY_ASYNC) cp_async_wait(i.stages - 2);
#if HAS_BULK
    if (i.copy == COPY_BULK) mbarrier_wait(full + 8 * stage, turn / i.stages & 1);
#endif
  }

  INLINE static void clear(unsigned char *to, int bytes) {
    for (int at = 0; at < bytes; at += 16) *(uint4 *)(to + at) = make_uint4(0, 0, 0, 0);
  }
};

/* Start to load the tile that `ahead` stands at, if there is one, and move on; closes a group of copies in any case. */
INLINE void load_next(Loader &loader, Walk &ahead, const Constants &i, int splits, int stage) {
  if (!ahead.done()) {
    loader.load(ahead.at, stage);
    ahead.next(i, splits);
    if (!ahead.done()) loader.look_ahead(ahead.at);
  }
  if (i.copy == COPY_ASYNC) cp_async_commit();
}

#endif /* PAGEDKERN_TILES_CUH */
