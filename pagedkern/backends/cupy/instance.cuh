/* What a kernel is compiled for, and what a launch hands to it beside the ABI's structs.
 *
 * Mirrored by instance.py, which fills these structs; both sides check their sizes. */
#ifndef PAGEDKERN_INSTANCE_CUH
#define PAGEDKERN_INSTANCE_CUH

#include "pagedkern_abi.h"

/* Features of an attention instance that cost time even when they are switched off at run time. */
#define FEATURE_SOFTCAP 1
#define FEATURE_ALIBI 2

/* How a tile of the cache reaches shared memory. */
#define COPY_PLAIN 0 /* loads of `unit` bytes through registers: any alignment */
#define COPY_ASYNC 1 /* cp.async of 16 bytes: rows aligned to 16 bytes */
#define COPY_BULK 2  /* cp.async.bulk of a row, sm_90: as COPY_ASYNC, and rows of a multiple of 16 bytes */

/* The constants of one attention kernel. With the macro PAGEDKERN_INSTANCE (a braced list of these numbers) the
 * compiler knows them, without it the same source reads them from the launch: the generic build. `Constants` is
 * either. */
struct Instance {
  pagedkern_i32 q_dtype;      /* PAGEDKERN_DTYPE_* of q and out */
  pagedkern_i32 kv_dtype;     /* PAGEDKERN_DTYPE_* of the caches */
  pagedkern_i32 dim_k;        /* D padded to a multiple of 16, at most MAX_DIM */
  pagedkern_i32 dim_v;        /* E padded to a multiple of 16, or of 32 for an 8-bit cache; at most MAX_DIM */
  pagedkern_i32 tensor_cores; /* 1: 16-bit operands and mma, 16 rows a warp; 0: float32 FMA */
  pagedkern_i32 rows;         /* query rows of a warp: 16 with tensor cores, else 1, 2, 4 or 8 */
  pagedkern_i32 row_warps;    /* warps that share a tile of keys, each with rows of its own */
  pagedkern_i32 key_warps;    /* warps that share rows, each with its part of every tile of keys */
  pagedkern_i32 tile;         /* keys of a tile: for each key warp 16, 32 or 64 with tensor cores, else 8, 16 or 32 */
  pagedkern_i32 stages;       /* tiles in shared memory: 1 in use, the others on their way */
  pagedkern_i32 span;         /* keys that one split reads in a row, a multiple of the tile */
  pagedkern_i32 copy;         /* COPY_* */
  pagedkern_i32 prefill;      /* 0: serves sequences of at most decode_tokens query tokens, 1: the others */
  pagedkern_i32 features;     /* FEATURE_*, or-ed */
};

#ifdef PAGEDKERN_INSTANCE
struct Constants {
  static constexpr Instance all = PAGEDKERN_INSTANCE;
  static constexpr int q_dtype = all.q_dtype, kv_dtype = all.kv_dtype, dim_k = all.dim_k, dim_v = all.dim_v;
  static constexpr int tensor_cores = all.tensor_cores, rows = all.rows, row_warps = all.row_warps;
  static constexpr int key_warps = all.key_warps, tile = all.tile, stages = all.stages, span = all.span;
  static constexpr int copy = all.copy, prefill = all.prefill, features = all.features;
};
#else
typedef Instance Constants;
#endif

#define MAX_DIM 256  /* of dim_k and dim_v */
#define MAX_KEYS 64  /* keys that a warp takes of one tile */
#define MAX_ROWS 8   /* of `rows` without tensor cores */
#define MAX_STAGES 8

/* What an attention launch needs beside the batch and its parameters. */
struct AttentionPlan {
  Instance instance;            /* read by the generic build only */
  pagedkern_i32 splits;         /* P: parts that the spans of a sequence are dealt to; 1 = results go straight to out */
  pagedkern_i32 row_tiles;      /* decode: tiles of rows for each sequence */
  pagedkern_i32 decode_tokens;  /* a sequence of at most this many query tokens is served by the decode kernel */
  pagedkern_i32 partial_tokens; /* query tokens of one sequence that the partial results have room for */
  pagedkern_i32 first_sequence; /* decode: the first that the launch serves; its partial results come first */
  pagedkern_i32 k_unit;         /* COPY_PLAIN: bytes to which every row of K is aligned: 1, 2, 4, 8 or 16 */
  pagedkern_i32 v_unit;         /* the same of V */
  float *partial_out;           /* [.., partial_tokens, H, P, E] sum of exp(s - m) * v over the keys of a split */
  float *partial_state;         /* [.., partial_tokens, H, P, 2] m (the largest score) and sum of exp(s - m) */
};

/* The new tokens that write_kv stores; where they go stands in the batch. */
struct WritePlan {
  const void *k;                /* [T, G, D] of dtype */
  const void *v;                /* [T, G, E] of dtype */
  const float *k_scale;         /* [G] stored value = k / k_scale[g]. Null = the cache is not quantized */
  const float *v_scale;         /* [G] */
  pagedkern_i64 k_stride_token; /* in elements */
  pagedkern_i64 k_stride_head;
  pagedkern_i64 v_stride_token;
  pagedkern_i64 v_stride_head;
  pagedkern_i32 dtype;          /* PAGEDKERN_DTYPE_* of k and v */
  pagedkern_i32 unit;           /* bytes to which every 8 elements are aligned, in k, v and the caches */
};

#define COPY_CACHES 256 /* caches of one copy_blocks launch */
#define COPY_DIMS 5     /* dimensions of a block that do not merge */

/* Caches of one layout whose blocks copy_blocks moves. A block is `runs` pieces of `run_bytes` contiguous bytes. */
struct CopyPlan {
  const pagedkern_i64 *src_blocks;        /* [n] */
  const pagedkern_i64 *dst_blocks;        /* [n] no id twice */
  pagedkern_i64 pairs;                    /* n */
  pagedkern_i64 stride_block;             /* bytes from block to block */
  pagedkern_i64 run_bytes;                /* contiguous bytes */
  pagedkern_i64 runs;                     /* product of sizes */
  pagedkern_i64 sizes[COPY_DIMS];         /* of the dimensions over the runs, the innermost first; 1 where unused */
  pagedkern_i64 strides[COPY_DIMS];       /* bytes */
  pagedkern_i32 column;                   /* bytes of a run that one block of threads moves, a multiple of unit */
  pagedkern_i32 unit;                     /* bytes of one load: 1, 2, 4, 8 or 16; divides every stride and address */
  unsigned char *caches[COPY_CACHES];     /* as many as the grid's second dimension */
};

#endif /* PAGEDKERN_INSTANCE_CUH */
