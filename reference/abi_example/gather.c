/*
 * The other direction: a kernel in C that takes the struct from whoever filled it. It copies the keys of one sequence
 * out of a float32 cache, to [seq_len, G, D] contiguous, by nothing but the struct's fields, as any kernel finds them.
 *
 *     cc -std=c99 -shared -fPIC -I "$(python -c 'import pagedkern.abi as abi; print(abi.include_dir())')" gather.c \
 *        -o libgather.so
 */
#include <pagedkern_abi.h>

/* Tokens copied, or the reason why not: -1 another major version, -2 a struct too short, -3 not float32 on the host. */
pagedkern_i64 gather_keys(const pagedkern_batch *b, pagedkern_i64 seq, float *keys);

pagedkern_i64 gather_keys(const pagedkern_batch *b, pagedkern_i64 seq, float *keys) {
  pagedkern_i64 j, g, d;
  if (b->version >> 16 != PAGEDKERN_ABI_VERSION_MAJOR) return -1;
  if (b->struct_size < sizeof *b) return -2; /* every field is needed here; a reader of fewer would ask for less */
  if (b->kv_dtype != PAGEDKERN_DTYPE_FLOAT32 || b->device_type != PAGEDKERN_DEVICE_CPU) return -3;
  for (j = 0; j < b->seq_lens[seq]; j++) {
    pagedkern_i64 block = b->block_table[seq * b->block_table_stride + j / b->block_size]; /* 64 bits from here on */
    const float *token = (const float *)b->k_cache + block * b->k_stride_block + j % b->block_size * b->k_stride_token;
    for (g = 0; g < b->num_kv_heads; g++)
      for (d = 0; d < b->head_dim; d++) *keys++ = token[g * b->k_stride_head + d];
  }
  return b->seq_lens[seq];
}
