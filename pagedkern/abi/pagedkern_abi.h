/*
 * The pagedkern block-table ABI, version 1.0. This header is normative: the Python mirror follows it, not the reverse.
 *
 * It describes one batch of sequences whose keys and values lie in a paged cache: which physical blocks hold them, how
 * many tokens there are, where the tensors are. An engine fills the struct, a kernel reads it. Compiles as C99, C++11
 * and CUDA C++ (nvcc, and NVRTC, for which it includes no other header). 64-bit platforms, little-endian.
 *
 * Terms. S sequences (num_seqs), T query tokens (num_tokens), W entries in a row of the block table (table_width),
 * N physical blocks (num_blocks) of B tokens each (block_size), H query heads (num_heads), G KV heads (num_kv_heads,
 * divides H), D head_dim of Q and K, E head_dim of V. ceil(a/b) is a divided by b, rounded up.
 *
 * Offsets are 64-bit. Counts and strides are 64-bit here so that plain C arithmetic on them is; ids in the arrays are
 * 32-bit and must be widened BEFORE they are multiplied. Element d of head g of token t of sequence s is
 *
 *     block  = (pagedkern_i64) block_table[s * block_table_stride + t / B]
 *     offset = block * k_stride_block + (t % B) * k_stride_token + g * k_stride_head + d           (in elements)
 *
 * and 32 bits overflow in real deployments.
 *
 * Strides count elements of the array's own type, never bytes; they may be zero or negative. The last dimension of
 * every array is contiguous and has no stride field. Arrays without a stride field are contiguous.
 *
 * Device. All arrays of one struct live on the device that device_type and device_id name. The struct itself lives in
 * host memory, or is passed to a kernel by value.
 *
 * Ownership. The struct owns nothing. Whoever fills it keeps every array alive and in place until the work that reads
 * the struct is finished, on a GPU until the stream has passed it. Nothing is written through a pointer to const.
 *
 * Null. A pointer may be null where its comment says so, and always when its array has no elements. A count or a dtype
 * code that belongs only to null arrays is 0, except block_size, which is always at least 1.
 *
 * Alignment. Every pointer, and so every row, is aligned to its element's size. More (16 bytes for tensors) lets
 * kernels use wide loads; a kernel that needs it must test it and refuse, not assume.
 *
 * Versions. Set everything to zero first, then version = PAGEDKERN_ABI_VERSION and struct_size = sizeof the struct. A
 * change in the meaning of a field raises the major version; a minor version only appends fields, whose zero means what
 * their absence meant. A reader refuses another major version, and reads no field that ends past struct_size. A struct
 * passed to a kernel by value must come from the very header that the kernel was compiled with.
 */
#ifndef PAGEDKERN_ABI_H
#define PAGEDKERN_ABI_H

#define PAGEDKERN_ABI_VERSION_MAJOR 1
#define PAGEDKERN_ABI_VERSION_MINOR 0
#define PAGEDKERN_ABI_VERSION ((PAGEDKERN_ABI_VERSION_MAJOR << 16) | PAGEDKERN_ABI_VERSION_MINOR)

/* Own names for the integers: NVRTC has no <stdint.h>, and programs that define int64_t for it do not agree on how. */
#if defined(__CUDACC_RTC__)
typedef int pagedkern_i32;
typedef unsigned int pagedkern_u32;
typedef long long pagedkern_i64;
#else
#include <stddef.h>
#include <stdint.h>
typedef int32_t pagedkern_i32;
typedef uint32_t pagedkern_u32;
typedef int64_t pagedkern_i64;
#endif

/* Codes of element types, for q_dtype and kv_dtype. The index arrays have one type each and need no code. */
#define PAGEDKERN_DTYPE_NONE 0          /* the arrays are null */
#define PAGEDKERN_DTYPE_FLOAT32 1       /* IEEE binary32 */
#define PAGEDKERN_DTYPE_FLOAT16 2       /* IEEE binary16 */
#define PAGEDKERN_DTYPE_BFLOAT16 3      /* the upper half of binary32 */
#define PAGEDKERN_DTYPE_FLOAT8_E4M3FN 4 /* OCP FP8 E4M3: no infinity, largest finite value 448 */
#define PAGEDKERN_DTYPE_FLOAT8_E5M2 5   /* OCP FP8 E5M2: with infinity, largest finite value 57344 */
#define PAGEDKERN_DTYPE_INT8 6          /* two's complement */

/* Codes of devices: the numbers of DLDeviceType in DLPack. Its other numbers are legal where a backend takes them. */
#define PAGEDKERN_DEVICE_CPU 1
#define PAGEDKERN_DEVICE_CUDA 2
#define PAGEDKERN_DEVICE_CUDA_HOST 3 /* pinned host memory */
#define PAGEDKERN_DEVICE_ROCM 10
#define PAGEDKERN_DEVICE_ROCM_HOST 11 /* pinned host memory */
#define PAGEDKERN_DEVICE_CUDA_MANAGED 13

/* One batch: what attention reads and what write_kv needs to place new tokens. 272 bytes. */
typedef struct pagedkern_batch {
  pagedkern_u32 version;     /* PAGEDKERN_ABI_VERSION of the writer */
  pagedkern_u32 struct_size; /* bytes of this struct as the writer knows it */

  /* Counts. All at least 0. */
  pagedkern_i64 num_seqs;     /* S: sequences, padding rows included */
  pagedkern_i64 num_tokens;   /* T: rows of q, out, lse and slot_mapping; rows at or past cu_seqlens_q[S] are padding.
                                 0 = not known, only if those are null */
  pagedkern_i64 max_seqlen_q; /* an upper bound of the query tokens of one sequence; 0 = not known, T is the bound */
  pagedkern_i64 table_width;  /* W: entries in a row of block_table; W * B is the longest context it can hold */
  pagedkern_i64 num_blocks;   /* N: physical blocks of each cache, at most 2^31 - 1. 0 = not known, only if the caches
                                 are null */
  pagedkern_i64 block_size;   /* B: tokens of a block, at least 1; any integer, not only powers of two */
  pagedkern_i64 num_heads;    /* H: query heads; 0 if q is null */
  pagedkern_i64 num_kv_heads; /* G: KV heads, divides H; query head h reads KV head h / (H / G) */
  pagedkern_i64 head_dim;     /* D: elements of one head of q and K */
  pagedkern_i64 head_dim_v;   /* E: elements of one head of V and out */

  /* Types and place. */
  pagedkern_i32 q_dtype;     /* of q and out: FLOAT32, FLOAT16 or BFLOAT16; NONE if q is null */
  pagedkern_i32 kv_dtype;    /* of k_cache and v_cache: any code; NONE if they are null */
  pagedkern_i32 device_type; /* of every array below: PAGEDKERN_DEVICE_* */
  pagedkern_i32 device_id;   /* which of the devices of that type, from 0; -1 = not known, then it is the current one */

  /* Arrays, owned by whoever filled the struct. */
  const pagedkern_i32 *block_table;  /* [S, W] entry [s, j]: physical block, 0..N-1, of tokens j*B .. j*B+B-1 of
                                        sequence s. Entries at j >= ceil(seq_lens[s]/B), and those wholly behind a
                                        sliding window, may hold anything and are never followed. Null = the batch
                                        only writes; then seq_lens and cu_seqlens_q are null and S is 0 */
  const pagedkern_i32 *seq_lens;     /* [S] tokens of sequence s in the cache, those written in this step included,
                                        0..W*B; 0 = a padding row */
  const pagedkern_i32 *cu_seqlens_q; /* [S+1] prefix sums of query lengths, from 0, never falling, at most T: the
                                        queries of sequence s are rows cu[s] .. cu[s+1]-1 and stand at its last
                                        positions. Null = one query for each sequence (decode): T = S unless the
                                        batch only writes */
  const pagedkern_i64 *slot_mapping; /* [T] where the K/V of a new token go: block * B + offset in the block, 0..N*B-1;
                                        -1 = write nothing. Null = the batch writes nothing */
  void *k_cache;                     /* [N, B, G, D] of kv_dtype: read by attention, written by write_kv. Null = the
                                        struct carries bookkeeping only; then v_cache is null too */
  void *v_cache;                     /* [N, B, G, E] of kv_dtype: likewise; may be a view of the same memory */
  const void *q;                     /* [T, H, D] of q_dtype. Null = no attention is asked for; then out and lse are
                                        null */
  void *out;                         /* [T, H, E] of q_dtype: every element is written. Null = not allocated yet */
  float *lse;                        /* [T, H] every element is written: natural logarithm of the softmax denominator,
                                        the sink included if there is one; -inf for a row that sees nothing.
                                        Null = not wanted */

  /* Strides, in elements. 0 if the array is null. */
  pagedkern_i64 block_table_stride; /* from row to row */
  pagedkern_i64 k_stride_block;     /* k_cache: from block to block */
  pagedkern_i64 k_stride_token;     /* from token to token of a block */
  pagedkern_i64 k_stride_head;      /* from KV head to KV head */
  pagedkern_i64 v_stride_block;     /* v_cache: the same three; they may differ from those of k_cache */
  pagedkern_i64 v_stride_token;
  pagedkern_i64 v_stride_head;
  pagedkern_i64 q_stride_token;   /* q: from row to row, larger than H * D in a slice of a fused QKV tensor */
  pagedkern_i64 q_stride_head;    /* from query head to query head */
  pagedkern_i64 out_stride_token; /* out: likewise; no two elements of out share memory */
  pagedkern_i64 out_stride_head;
  pagedkern_i64 lse_stride_token; /* lse: from row to row; no two elements share memory */
} pagedkern_batch;

/* What attention computes over the batch, beside the arrays. 64 bytes. With p the position of a query in its sequence
 * and j that of a key,
 *
 *     s_j = scale * <q, k_j>
 *     s_j = softcap * tanh(s_j / softcap)           if softcap
 *     s_j += alibi_slopes[h] * (j - p)              if alibi_slopes
 *
 * and key j is seen if j < seq_len, and j <= p if causal, and j > p - sliding_window if sliding_window. */
typedef struct pagedkern_attention_params {
  pagedkern_u32 version;     /* as in pagedkern_batch */
  pagedkern_u32 struct_size; /* as in pagedkern_batch */

  float scale;                  /* factor of the scores, finite, usually 1 / sqrt(D). There is no default: 0 means 0 */
  float softcap;                /* greater than 0 and finite; 0 = none */
  pagedkern_i64 sliding_window; /* tokens that a query sees, its own included, at least 1; 0 = no window */
  pagedkern_i32 causal;         /* 1 = a query sees no key after its own position, 0 = it sees them all */
  pagedkern_i32 reserved;       /* 0 */

  /* Arrays on the batch's device, contiguous, owned by whoever filled the struct. */
  const float *alibi_slopes; /* [H] slope of each query head. Null = no ALiBi */
  const float *sinks;        /* [H] logit of each query head that joins the denominator alone. Null = no sinks */
  const float *k_scale;      /* [G] K = stored value * k_scale[g]. Null exactly if kv_dtype is FLOAT32, FLOAT16 or
                                BFLOAT16 */
  const float *v_scale;      /* [G] V = stored value * v_scale[g]. Null exactly when k_scale is */
} pagedkern_attention_params;

/* The layout, held by the compiler. C99 has no static assertion: an array of negative size stands in for it. */
#if defined(__cplusplus)
#define PAGEDKERN_ASSERT_(name, condition) static_assert(condition, "pagedkern ABI: " #name)
#elif defined(__STDC_VERSION__) && __STDC_VERSION__ >= 201112L
#define PAGEDKERN_ASSERT_(name, condition) _Static_assert(condition, "pagedkern ABI: " #name)
#else
#define PAGEDKERN_ASSERT_(name, condition) typedef char pagedkern_assert_##name[(condition) ? 1 : -1]
#endif
PAGEDKERN_ASSERT_(pointers_of_8_bytes, sizeof(void *) == 8);
PAGEDKERN_ASSERT_(i32_of_4_bytes, sizeof(pagedkern_i32) == 4 && sizeof(pagedkern_u32) == 4 && sizeof(float) == 4);
PAGEDKERN_ASSERT_(i64_of_8_bytes, sizeof(pagedkern_i64) == 8);
PAGEDKERN_ASSERT_(batch_size, sizeof(pagedkern_batch) == 272);
PAGEDKERN_ASSERT_(params_size, sizeof(pagedkern_attention_params) == 64);

/* The offsets, of fields that a shift before them would move. Not under NVRTC, whose versions agree on no offsetof. */
#if !defined(__CUDACC_RTC__)
#define PAGEDKERN_BATCH_AT_(field, bytes) \
  PAGEDKERN_ASSERT_(batch_##field, offsetof(pagedkern_batch, field) == (bytes))
#define PAGEDKERN_PARAMS_AT_(field, bytes) \
  PAGEDKERN_ASSERT_(params_##field, offsetof(pagedkern_attention_params, field) == (bytes))
PAGEDKERN_BATCH_AT_(version, 0);
PAGEDKERN_BATCH_AT_(struct_size, 4);
PAGEDKERN_BATCH_AT_(num_seqs, 8);
PAGEDKERN_BATCH_AT_(block_size, 48);
PAGEDKERN_BATCH_AT_(head_dim_v, 80);
PAGEDKERN_BATCH_AT_(q_dtype, 88);
PAGEDKERN_BATCH_AT_(device_id, 100);
PAGEDKERN_BATCH_AT_(block_table, 104);
PAGEDKERN_BATCH_AT_(slot_mapping, 128);
PAGEDKERN_BATCH_AT_(k_cache, 136);
PAGEDKERN_BATCH_AT_(q, 152);
PAGEDKERN_BATCH_AT_(lse, 168);
PAGEDKERN_BATCH_AT_(block_table_stride, 176);
PAGEDKERN_BATCH_AT_(v_stride_block, 208);
PAGEDKERN_BATCH_AT_(q_stride_token, 232);
PAGEDKERN_BATCH_AT_(lse_stride_token, 264);
PAGEDKERN_PARAMS_AT_(version, 0);
PAGEDKERN_PARAMS_AT_(scale, 8);
PAGEDKERN_PARAMS_AT_(sliding_window, 16);
PAGEDKERN_PARAMS_AT_(causal, 24);
PAGEDKERN_PARAMS_AT_(alibi_slopes, 32);
PAGEDKERN_PARAMS_AT_(v_scale, 56);
#endif

#endif /* PAGEDKERN_ABI_H */
