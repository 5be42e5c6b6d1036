/*
 * An engine in C: memory, blocks and block table are its own. For each step it fills the ABI's structs and calls an
 * attention kernel through a pointer; who implements that it does not know. engine_in_c.py hands it pagedkern's.
 *
 * The "model" gives random queries, keys and values. What the kernel wrote is compared with attention in double over
 * the tokens in order, which the engine keeps apart for that.
 */
#include <math.h>
#include <pagedkern_abi.h>
#include <stdio.h>
#include <string.h>

enum { SEQS = 3, WIDTH = 8, BLOCKS = 16, BLOCK = 4, HEADS = 6, KV_HEADS = 2, DIM = 16, CONTEXT = WIDTH * BLOCK };

typedef int attention(const pagedkern_batch *, const pagedkern_attention_params *); /* 0 if it has been computed */

/* The cache, in a layout that suits this engine: of each block and KV head the keys, then the values. */
static float cache[BLOCKS][KV_HEADS][2][BLOCK][DIM];

static pagedkern_i32 free_blocks[BLOCKS], num_free;
static pagedkern_i32 table[SEQS][WIDTH], seq_lens[SEQS], cu[SEQS + 1];
static float history[SEQS][CONTEXT][KV_HEADS][2][DIM]; /* the same keys and values, in order: for the check only */
static float q[SEQS * CONTEXT][HEADS][DIM], out[SEQS * CONTEXT][HEADS][DIM];

static float uniform(void) { /* in -1 .. 1, the same in every run */
  static pagedkern_u32 state = 1;
  state = state * 1664525u + 1013904223u;
  return (float)(state >> 8) / (1 << 23) - 1;
}

/* A sequence gets `count` tokens: a block where one begins, keys and values into their slots, a query for each. */
static int grow(int s, int count) {
  cu[s + 1] = cu[s];
  for (; count > 0; count--) {
    const pagedkern_i32 position = seq_lens[s]++;
    float *query = &q[cu[s + 1]++][0][0];
    int g, kv, d;
    if (position % BLOCK == 0) {
      if (num_free == 0 || position == CONTEXT) return -1;
      table[s][position / BLOCK] = free_blocks[--num_free];
    }
    for (d = 0; d < HEADS * DIM; d++) query[d] = uniform();
    for (g = 0; g < KV_HEADS; g++)
      for (kv = 0; kv < 2; kv++)
        for (d = 0; d < DIM; d++)
          cache[table[s][position / BLOCK]][g][kv][position % BLOCK][d] = history[s][position][g][kv][d] = uniform();
  }
  return 0;
}

/* A sequence ends: its blocks can be used by others, and what its row holds means nothing from now on. */
static void end(int s) {
  while (seq_lens[s] > 0) {
    free_blocks[num_free++] = table[s][(seq_lens[s] - 1) / BLOCK];
    seq_lens[s] = (seq_lens[s] - 1) / BLOCK * BLOCK;
  }
}

static void describe(pagedkern_batch *b, pagedkern_attention_params *p) {
  memset(b, 0, sizeof *b);
  b->version = PAGEDKERN_ABI_VERSION;
  b->struct_size = sizeof *b;
  b->num_seqs = SEQS;
  b->num_tokens = cu[SEQS];
  b->table_width = WIDTH;
  b->num_blocks = BLOCKS;
  b->block_size = BLOCK;
  b->num_heads = HEADS;
  b->num_kv_heads = KV_HEADS;
  b->head_dim = b->head_dim_v = DIM;
  b->q_dtype = b->kv_dtype = PAGEDKERN_DTYPE_FLOAT32;
  b->device_type = PAGEDKERN_DEVICE_CPU;
  b->block_table = &table[0][0];
  b->seq_lens = seq_lens;
  b->cu_seqlens_q = cu;
  b->k_cache = &cache[0][0][0][0][0];
  b->v_cache = &cache[0][0][1][0][0];
  b->q = q;
  b->out = out;
  b->block_table_stride = WIDTH;
  b->k_stride_block = b->v_stride_block = KV_HEADS * 2 * BLOCK * DIM;
  b->k_stride_head = b->v_stride_head = 2 * BLOCK * DIM;
  b->k_stride_token = b->v_stride_token = DIM;
  b->q_stride_token = b->out_stride_token = HEADS * DIM;
  b->q_stride_head = b->out_stride_head = DIM;

  memset(p, 0, sizeof *p);
  p->version = PAGEDKERN_ABI_VERSION;
  p->struct_size = sizeof *p;
  p->scale = 0.25f; /* 1 / sqrt(DIM) */
  p->causal = 1;
}

/* The largest difference between a row of `out` and attention over the history up to that position. */
static double error_of(int s, int row, int position) {
  double largest = 0;
  int h, j, d;
  for (h = 0; h < HEADS; h++) {
    double sum[DIM] = {0}, total = 0;
    for (j = 0; j <= position; j++) {
      float(*kv)[DIM] = history[s][j][h / (HEADS / KV_HEADS)];
      double score = 0;
      for (d = 0; d < DIM; d++) score += (double)q[row][h][d] * kv[0][d];
      score = exp(0.25 * score);
      total += score;
      for (d = 0; d < DIM; d++) sum[d] += score * kv[1][d];
    }
    for (d = 0; d < DIM; d++) {
      const double error = fabs(out[row][h][d] - sum[d] / total);
      if (!(error <= largest)) largest = error; /* NaN, too */
    }
  }
  return largest;
}

/* Prompts and single tokens side by side, for eight steps. Returns the largest error, or -1 if a step failed. */
double engine_run(attention *attend) {
  double largest = 0;
  int step, s, i;
  for (i = 0; i < BLOCKS; i++) free_blocks[i] = i * 7 % BLOCKS; /* in no order */
  num_free = BLOCKS;
  memset(table, -1, sizeof table);
  memset(cache, -1, sizeof cache); /* NaN, wherever nothing has been written */
  for (step = 0; step < 8; step++) {
    pagedkern_batch batch;
    pagedkern_attention_params params;
    if (step == 4) end(1); /* and another prompt in its place, in its blocks */
    for (s = 0; s < SEQS; s++)
      if (grow(s, seq_lens[s] > 0 ? 1 : 5 + 4 * s)) return -1;
    describe(&batch, &params);
    memset(out, -1, sizeof out);
    if (attend(&batch, &params)) return -1;
    printf("step %d: %d tokens |", step + 1, (int)cu[SEQS]);
    for (s = 0; s < SEQS; s++) {
      for (i = 0; i < (seq_lens[s] + BLOCK - 1) / BLOCK; i++) printf(" %d", (int)table[s][i]);
      printf(s + 1 < SEQS ? " |" : "\n");
      for (i = cu[s]; i < cu[s + 1]; i++) {
        const double error = error_of(s, i, seq_lens[s] - (cu[s + 1] - i));
        if (!(error <= largest)) largest = error;
      }
    }
  }
  fflush(stdout);
  return largest;
}
