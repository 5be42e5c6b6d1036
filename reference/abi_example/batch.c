/*
 * An engine of two pages: it keeps a block table of its own for a few sequences, describes one step as the ABI's
 * structs, and prints them as JSON, with the layout that its compiler gave every field.
 *
 *     cc -std=c99 -I "$(python -c 'import pagedkern.abi as abi; print(abi.include_dir())')" batch.c -o batch && ./batch
 *
 * The step is mixed: sequence 0 decodes one token, sequence 1 computes its prompt of five, sequence 2 is padding.
 */
#include <pagedkern_abi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
  NUM_SEQS = 3,
  WIDTH = 4,
  NUM_BLOCKS = 8,
  BLOCK_SIZE = 4, /* tokens */
  NUM_HEADS = 6,
  NUM_KV_HEADS = 2,
  HEAD_DIM = 16,
  HEAD_DIM_V = 8
};

typedef struct engine {
  pagedkern_i32 next_block;                  /* blocks are handed out from the last one down */
  pagedkern_i32 table[NUM_SEQS][WIDTH];      /* [S, W] */
  pagedkern_i32 seq_lens[NUM_SEQS];          /* [S] tokens */
  pagedkern_i32 cu_seqlens_q[NUM_SEQS + 1];  /* [S+1] */
  pagedkern_i64 slots[WIDTH * BLOCK_SIZE];   /* [T] */
} engine;

/* Grow sequence s by n tokens; the last num_new of them are written in this step. */
static void grow(engine *e, int s, int n, int num_new) {
  int i;
  pagedkern_i32 first_token = e->cu_seqlens_q[s];
  for (i = 0; i < n; i++) {
    pagedkern_i32 position = e->seq_lens[s]++;
    pagedkern_i32 *block = &e->table[s][position / BLOCK_SIZE];
    if (position % BLOCK_SIZE == 0) *block = e->next_block--;
    if (i >= n - num_new) /* widened before it is multiplied */
      e->slots[first_token + i - (n - num_new)] = (pagedkern_i64)*block * BLOCK_SIZE + position % BLOCK_SIZE;
  }
  e->cu_seqlens_q[s + 1] = first_token + num_new;
}

static void print_ids(const char *name, const pagedkern_i32 *ids, int n) {
  int i;
  printf("\"%s\": [", name);
  for (i = 0; i < n; i++) printf("%s%ld", i ? ", " : "", (long)ids[i]);
  printf("], ");
}

/* One field. Every number here fits a double; a pointer counts as 1, null as 0. */
static void print_field(const char *name, size_t offset, size_t size, double value) {
  printf("%s\"%s\": {\"value\": %.9g, \"offset\": %lu, \"size\": %lu}", offset ? ", " : "", name, value,
         (unsigned long)offset, (unsigned long)size);
}

#define NUMBER(type, name) print_field(#name, offsetof(type, name), sizeof r->name, (double)r->name)
#define POINTER(type, name) print_field(#name, offsetof(type, name), sizeof r->name, r->name != NULL)

static void print_batch(const pagedkern_batch *r) {
  printf("\"batch\": {\"size\": %lu, \"fields\": {", (unsigned long)sizeof *r);
  NUMBER(pagedkern_batch, version);
  NUMBER(pagedkern_batch, struct_size);
  NUMBER(pagedkern_batch, num_seqs);
  NUMBER(pagedkern_batch, num_tokens);
  NUMBER(pagedkern_batch, max_seqlen_q);
  NUMBER(pagedkern_batch, table_width);
  NUMBER(pagedkern_batch, num_blocks);
  NUMBER(pagedkern_batch, block_size);
  NUMBER(pagedkern_batch, num_heads);
  NUMBER(pagedkern_batch, num_kv_heads);
  NUMBER(pagedkern_batch, head_dim);
  NUMBER(pagedkern_batch, head_dim_v);
  NUMBER(pagedkern_batch, q_dtype);
  NUMBER(pagedkern_batch, kv_dtype);
  NUMBER(pagedkern_batch, device_type);
  NUMBER(pagedkern_batch, device_id);
  POINTER(pagedkern_batch, block_table);
  POINTER(pagedkern_batch, seq_lens);
  POINTER(pagedkern_batch, cu_seqlens_q);
  POINTER(pagedkern_batch, slot_mapping);
  POINTER(pagedkern_batch, k_cache);
  POINTER(pagedkern_batch, v_cache);
  POINTER(pagedkern_batch, q);
  POINTER(pagedkern_batch, out);
  POINTER(pagedkern_batch, lse);
  NUMBER(pagedkern_batch, block_table_stride);
  NUMBER(pagedkern_batch, k_stride_block);
  NUMBER(pagedkern_batch, k_stride_token);
  NUMBER(pagedkern_batch, k_stride_head);
  NUMBER(pagedkern_batch, v_stride_block);
  NUMBER(pagedkern_batch, v_stride_token);
  NUMBER(pagedkern_batch, v_stride_head);
  NUMBER(pagedkern_batch, q_stride_token);
  NUMBER(pagedkern_batch, q_stride_head);
  NUMBER(pagedkern_batch, out_stride_token);
  NUMBER(pagedkern_batch, out_stride_head);
  NUMBER(pagedkern_batch, lse_stride_token);
  printf("}}, ");
}

static void print_params(const pagedkern_attention_params *r) {
  printf("\"params\": {\"size\": %lu, \"fields\": {", (unsigned long)sizeof *r);
  NUMBER(pagedkern_attention_params, version);
  NUMBER(pagedkern_attention_params, struct_size);
  NUMBER(pagedkern_attention_params, scale);
  NUMBER(pagedkern_attention_params, softcap);
  NUMBER(pagedkern_attention_params, sliding_window);
  NUMBER(pagedkern_attention_params, causal);
  NUMBER(pagedkern_attention_params, reserved);
  POINTER(pagedkern_attention_params, alibi_slopes);
  POINTER(pagedkern_attention_params, sinks);
  POINTER(pagedkern_attention_params, k_scale);
  POINTER(pagedkern_attention_params, v_scale);
  printf("}}, ");
}

static void print_codes(void) {
  printf("\"codes\": {\"float32\": %d, \"float16\": %d, \"bfloat16\": %d, \"float8_e4m3fn\": %d, \"float8_e5m2\": %d, "
         "\"int8\": %d, \"cpu\": %d, \"cuda\": %d, \"cuda_host\": %d, \"rocm\": %d, \"rocm_host\": %d, "
         "\"cuda_managed\": %d}}\n",
         PAGEDKERN_DTYPE_FLOAT32, PAGEDKERN_DTYPE_FLOAT16, PAGEDKERN_DTYPE_BFLOAT16, PAGEDKERN_DTYPE_FLOAT8_E4M3FN,
         PAGEDKERN_DTYPE_FLOAT8_E5M2, PAGEDKERN_DTYPE_INT8, PAGEDKERN_DEVICE_CPU, PAGEDKERN_DEVICE_CUDA,
         PAGEDKERN_DEVICE_CUDA_HOST, PAGEDKERN_DEVICE_ROCM, PAGEDKERN_DEVICE_ROCM_HOST, PAGEDKERN_DEVICE_CUDA_MANAGED);
}

int main(void) {
  engine e;
  pagedkern_batch b;
  pagedkern_attention_params p;
  float sinks[NUM_HEADS] = {0};
  float *kv, *q, *out;
  pagedkern_i64 num_tokens;
  int i;

  memset(&e, 0, sizeof e);
  memset(e.table, -1, sizeof e.table); /* unused entries may hold anything */
  e.next_block = NUM_BLOCKS - 1;
  grow(&e, 0, 9, 1);
  grow(&e, 1, 5, 5);
  grow(&e, 2, 0, 0);
  num_tokens = e.cu_seqlens_q[NUM_SEQS];

  /* K and V of a block lie side by side, heads before tokens: block [G, B, D + E]. The ABI sees two strided views. */
  kv = calloc((size_t)NUM_BLOCKS * NUM_KV_HEADS * BLOCK_SIZE * (HEAD_DIM + HEAD_DIM_V), sizeof *kv);
  q = calloc((size_t)num_tokens * NUM_HEADS * HEAD_DIM, sizeof *q);
  out = calloc((size_t)num_tokens * NUM_HEADS * HEAD_DIM_V, sizeof *out);
  if (!kv || !q || !out) return EXIT_FAILURE;

  memset(&b, 0, sizeof b);
  b.version = PAGEDKERN_ABI_VERSION;
  b.struct_size = sizeof b;
  b.num_seqs = NUM_SEQS;
  b.num_tokens = num_tokens;
  b.max_seqlen_q = 5;
  b.table_width = WIDTH;
  b.num_blocks = NUM_BLOCKS;
  b.block_size = BLOCK_SIZE;
  b.num_heads = NUM_HEADS;
  b.num_kv_heads = NUM_KV_HEADS;
  b.head_dim = HEAD_DIM;
  b.head_dim_v = HEAD_DIM_V;
  b.q_dtype = b.kv_dtype = PAGEDKERN_DTYPE_FLOAT32;
  b.device_type = PAGEDKERN_DEVICE_CPU;
  b.block_table = &e.table[0][0];
  b.seq_lens = e.seq_lens;
  b.cu_seqlens_q = e.cu_seqlens_q;
  b.slot_mapping = e.slots;
  b.k_cache = kv;
  b.v_cache = kv + HEAD_DIM;
  b.q = q;
  b.out = out;
  b.block_table_stride = WIDTH;
  b.k_stride_token = b.v_stride_token = HEAD_DIM + HEAD_DIM_V;
  b.k_stride_head = b.v_stride_head = BLOCK_SIZE * (HEAD_DIM + HEAD_DIM_V);
  b.k_stride_block = b.v_stride_block = (pagedkern_i64)NUM_KV_HEADS * BLOCK_SIZE * (HEAD_DIM + HEAD_DIM_V);
  b.q_stride_token = NUM_HEADS * HEAD_DIM;
  b.q_stride_head = HEAD_DIM;
  b.out_stride_token = NUM_HEADS * HEAD_DIM_V;
  b.out_stride_head = HEAD_DIM_V;

  memset(&p, 0, sizeof p);
  p.version = PAGEDKERN_ABI_VERSION;
  p.struct_size = sizeof p;
  p.scale = 0.25f; /* 1 / sqrt(HEAD_DIM) */
  p.softcap = 30.0f;
  p.sliding_window = 6;
  p.causal = 1;
  p.sinks = sinks;

  printf("{");
  print_ids("block_table", &e.table[0][0], NUM_SEQS * WIDTH);
  print_ids("seq_lens", e.seq_lens, NUM_SEQS);
  print_ids("cu_seqlens_q", e.cu_seqlens_q, NUM_SEQS + 1);
  printf("\"slot_mapping\": [");
  for (i = 0; i < num_tokens; i++) printf("%s%lld", i ? ", " : "", (long long)e.slots[i]);
  printf("], ");
  print_batch(&b);
  print_params(&p);
  print_codes();
  free(kv);
  free(q);
  free(out);
  return EXIT_SUCCESS;
}
