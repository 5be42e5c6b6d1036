/* Paged attention. A block of threads serves one KV head of one sequence: a tile of query rows (its query tokens times
 * the query heads of the group, packed) against the keys of one split. Tiles of K and V stream through shared memory,
 * `stages` deep; each warp keeps a running softmax (arXiv:1805.02867) of its rows over its keys, and the warps that
 * share rows join theirs at the end. What a row's result depends on is its sequence and the instance, nothing else.
 *
 * Grid: x: decode [sequences of the launch * row_tiles], prefill [a bound of the row tiles of all sequences]; y: KV heads;
 * z: splits.
 * Shared memory: mbarriers, q, stages, weights; at the end the warps' sums take the place of all but the
 * barriers. See instance.py. */
#include "fma.cuh"
#include "mma.cuh"
#include "softmax.cuh"

/* What one block of threads computes. */
struct Work {
  int sequence;
  int seq_len;   /* tokens in the cache */
  int q_start;   /* row of q of the sequence's first query token */
  int q_len;     /* query tokens */
  int group;     /* query heads of a KV head */
  int kv_head;
  int first_row; /* packed row: query token * group + head of the group */
  int num_rows;  /* of the sequence */
  int begin;     /* tokens that some of the block's rows sees: begin .. end-1 */
  int end;

  INLINE int token(int row) const { return row / group; }
  INLINE int head(int row) const { return kv_head * group + row % group; }
  INLINE int position(int row) const { return seq_len - q_len + token(row); }
  /* Tokens that a row sees: from .. to-1, none if to <= from. */
  INLINE int from(int row, const pagedkern_attention_params &params) const {
    const long long first = params.sliding_window ? position(row) - params.sliding_window + 1 : 0;
    return first > 0 ? (int)first : 0;
  }
  INLINE int to(int row, const pagedkern_attention_params &params) const {
    const int next = position(row) + 1;
    return params.causal && next < seq_len ? next : seq_len;
  }
};

/* The sequence that owns a row tile when sequence s has its tiles from cu[s] * group / rows + s on. */
INLINE int find_sequence(const pagedkern_batch &batch, long long tile, long long group, int rows) {
  int low = 0, high = (int)batch.num_seqs; /* the last s whose first tile is at most `tile` */
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (batch.cu_seqlens_q[middle] * group / rows + middle <= tile) low = middle;
    else high = middle;
  }
  return low;
}

/* Find this block's work; false if there is none. */
INLINE bool find_work(const pagedkern_batch &batch, const pagedkern_attention_params &params, const AttentionPlan &plan,
                      const Constants &i, Work &work) {
  const int rows = i.rows * i.row_warps;
  work.kv_head = blockIdx.y;
  work.group = (int)(batch.num_heads / batch.num_kv_heads);
  work.sequence = i.prefill ? find_sequence(batch, blockIdx.x, work.group, rows)
                            : plan.first_sequence + blockIdx.x / plan.row_tiles;
  if (work.sequence >= batch.num_seqs) return false;
  work.seq_len = batch.seq_lens[work.sequence];
  work.q_start = batch.cu_seqlens_q ? batch.cu_seqlens_q[work.sequence] : work.sequence;
  work.q_len = batch.cu_seqlens_q ? batch.cu_seqlens_q[work.sequence + 1] - work.q_start : 1;
  work.num_rows = work.q_len * work.group;
  if ((work.q_len > plan.decode_tokens) != (i.prefill != 0)) return false;
  const long long tile = i.prefill ? blockIdx.x - ((long long)work.q_start * work.group / rows + work.sequence)
                                   : blockIdx.x % plan.row_tiles;
  if (tile * rows >= work.num_rows) return false;
  work.first_row = (int)tile * rows;
  if (plan.splits > 1 && blockIdx.z && (long long)blockIdx.z * i.span >= work.seq_len) return false;
  const int last_row = min(work.first_row + rows, work.num_rows) - 1;
  work.begin = work.from(work.first_row, params);
  work.end = max(work.to(last_row, params), work.begin);
  return true;
}

/* Rows of q that belong to no sequence see nothing, but the sink. */
INLINE void write_padding(const pagedkern_batch &batch, const pagedkern_attention_params &params, const Constants &i) {
  const int group = (int)(batch.num_heads / batch.num_kv_heads);
  for (long long row = batch.cu_seqlens_q[batch.num_seqs]; row < batch.num_tokens; row++) {
    for (int head = blockIdx.y * group; head < (blockIdx.y + 1) * group; head++) {
      const long long at = row * batch.out_stride_token + head * batch.out_stride_head;
      const Final final = finish(-infinity(), 0.0f, params, head, blockIdx.y);
      for (int e = threadIdx.x; e < batch.head_dim_v; e += blockDim.x)
        store_element(batch.out, at + e, i.q_dtype, 0.0f * final.factor);
      if (batch.lse && threadIdx.x == 0) batch.lse[row * batch.lse_stride_token + head] = final.lse;
    }
  }
}

/* Put the block's rows of q into shared memory, [rows, pitch] in the core's form, zeros past the end. */
template <class Core>
INLINE void stage_queries(const pagedkern_batch &batch, const Constants &i, const Work &work, unsigned char *to) {
  const int rows = i.rows * i.row_warps, chunks = i.dim_k / 8, size = size_of(i.q_dtype);
  for (int at = threadIdx.x; at < rows * chunks; at += blockDim.x) {
    const int row = at / chunks, chunk = at % chunks, packed = work.first_row + row;
    const unsigned char *from = nullptr;
    if (packed < work.num_rows && chunk * 8 < batch.head_dim)
      from = (const unsigned char *)batch.q + ((work.q_start + work.token(packed)) * batch.q_stride_token +
                                               work.head(packed) * batch.q_stride_head + chunk * 8) * size;
    Core::stage_q(i, to + row * Core::q_pitch(i) + chunk * Core::q_chunk(i), from);
  }
}

/* One warp's rows: what they see, and their running softmax. */
template <class Core> struct WarpRows {
  int first;                /* packed row of the warp's first; past the sequence's last: the warp has none */
  int all_from, all_to;     /* tokens that every row sees */
  int any_from, any_to;     /* tokens that some row sees */
  int from[Core::ROWS];     /* of the lane's rows, as Work::from */
  int to[Core::ROWS];
  int position[Core::ROWS];
  float slope[Core::ROWS];  /* ALiBi */
  float top[Core::ROWS];    /* largest score so far */
  float total[Core::ROWS];  /* of the weights in this lane */
  float scale;              /* of the scores, that of K included */

  INLINE WarpRows(const Work &work, const pagedkern_attention_params &params, const Constants &i, const Core &core) {
    first = work.first_row + (int)(threadIdx.x / 32) / i.key_warps * i.rows;
    const int last = min(first + i.rows, work.num_rows) - 1;
    all_from = work.from(last, params), any_to = work.to(last, params);
    any_from = work.from(first, params), all_to = work.to(first, params);
    scale = params.scale * (params.k_scale ? params.k_scale[work.kv_head] : 1.0f);
#pragma unroll
    for (int r = 0; r < core.rows(); r++) {
      const int row = first + core.row(r);
      const bool real = row < work.num_rows;
      from[r] = real ? work.from(row, params) : 0;
      to[r] = real ? work.to(row, params) : 0;
      position[r] = work.position(row);
      slope[r] = i.features & FEATURE_ALIBI && real ? params.alibi_slopes[work.head(row)] : 0.0f;
      top[r] = -infinity();
      total[r] = 0.0f;
    }
  }
};

/* Scores become weights, the running sums decay. keys: token of the warp's first key. */
template <class Core>
INLINE void soften(Core &core, WarpRows<Core> &rows, const pagedkern_attention_params &params, const Constants &i,
                   int keys, bool masked) {
#pragma unroll
  for (int r = 0; r < core.rows(); r++) {
    const float product = core.at(r, 0);
    float best = -infinity();
#pragma unroll
    for (int e = 0; e < core.scores(); e++) {
      const int key = keys + core.key(e);
      float x = core.at(r, e) * rows.scale;
      if (i.features & FEATURE_SOFTCAP) x = params.softcap * tanhf(x / params.softcap);
      if (i.features & FEATURE_ALIBI) x += rows.slope[r] * (float)(key - rows.position[r]);
      if (!core.counts() || (masked && (key < rows.from[r] || key >= rows.to[r]))) x = -infinity();
      core.at(r, e) = x;
      best = fmaxf(best, x);
    }
    const float top = fmaxf(rows.top[r], core.over_row_max(best)), base = base_of(top);
    const float decay = exponential(rows.top[r] - base);
    float total = 0.0f;
#pragma unroll
    for (int e = 0; e < core.scores(); e++) {
      float above = core.at(r, e) - base;
      if (!i.tensor_cores && !i.features && fabsf(core.at(r, e)) < infinity())
        above = fmaf(product, rows.scale, -base); /* the only score of the lane, not rounded in between */
      core.at(r, e) = exponential(above);
      total += core.at(r, e);
    }
    rows.total[r] = rows.total[r] * decay + total;
    rows.top[r] = top;
    core.decay(r, decay);
  }
}

/* The sums of all warps in shared memory, in which those that share rows are joined. */
struct Sums {
  float *acc;     /* [key_warps, rows, pitch] */
  float *state;   /* [key_warps, rows, 2] largest score, total weight */
  float *weight;  /* [key_warps, rows] */
  float *factor;  /* [rows] */
  int pitch;      /* floats from row to row: dim_v, and what keeps a warp's rows in banks of their own */

  INLINE Sums(const Constants &i, unsigned char *memory) {
    const int rows = i.rows * i.row_warps;
    pitch = i.dim_v + (size_of(i.kv_dtype) == 1 ? 4 : 8);
    acc = (float *)memory;
    state = acc + i.key_warps * rows * pitch;
    weight = state + i.key_warps * rows * 2;
    factor = weight + i.key_warps * rows;
  }
};

/* Join a row's parts, one thread for each row, and write its lse, or the state of a part of a split row. */
INLINE void join_row(const pagedkern_batch &batch, const pagedkern_attention_params &params, const AttentionPlan &plan,
                     const Constants &i, const Work &work, const Sums &sums, int row, long long partial) {
  const int rows = i.rows * i.row_warps, packed = work.first_row + row;
  float top = -infinity(), total = 0.0f;
  for (int w = 0; w < i.key_warps; w++) top = fmaxf(top, sums.state[(w * rows + row) * 2]);
  for (int w = 0; w < i.key_warps; w++) {
    const float weight = weight_of(sums.state[(w * rows + row) * 2], top);
    sums.weight[w * rows + row] = weight;
    total += weight * sums.state[(w * rows + row) * 2 + 1];
  }
  if (plan.splits > 1) {
    plan.partial_state[partial * 2] = top;
    plan.partial_state[partial * 2 + 1] = total;
    sums.factor[row] = 1.0f;
  } else {
    const Final final = finish(top, total, params, work.head(packed), work.kv_head);
    sums.factor[row] = final.factor;
    if (batch.lse)
      batch.lse[(work.q_start + work.token(packed)) * batch.lse_stride_token + work.head(packed)] = final.lse;
  }
}

template <class Core>
INLINE void write_results(const pagedkern_batch &batch, const pagedkern_attention_params &params,
                          const AttentionPlan &plan, const Constants &i, const Work &work, const Core &core,
                          const WarpRows<Core> &warp_rows, unsigned char *memory) {
  const Sums sums(i, memory);
  const int rows = i.rows * i.row_warps, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row_warp = warp / i.key_warps, key_warp = warp % i.key_warps;
  __syncthreads(); /* nobody reads a tile any more */
  core.store(sums.acc + (key_warp * rows + row_warp * i.rows) * sums.pitch, sums.pitch);
#pragma unroll
  for (int r = 0; r < core.rows(); r++) {
    const float total = core.over_row_sum(warp_rows.total[r]);
    float *state = sums.state + (key_warp * rows + row_warp * i.rows + core.row(r)) * 2;
    if (core.first_of_row()) state[0] = warp_rows.top[r], state[1] = total;
  }
  __syncthreads();
  for (int step = 0; step < 2; step++) { /* first what each row is divided by, then its elements */
    for (int row = step ? warp : threadIdx.x; row < rows; row += step ? blockDim.x / 32 : blockDim.x) {
      const int packed = work.first_row + row;
      if (packed >= work.num_rows) break;
      const int token = work.token(packed), head = work.head(packed);
      const long long query = (long long)(work.sequence - plan.first_sequence) * plan.partial_tokens + token;
      const long long partial = (query * batch.num_heads + head) * plan.splits + blockIdx.z;
      if (!step) {
        join_row(batch, params, plan, i, work, sums, row, partial);
        continue;
      }
      const long long at = (work.q_start + token) * batch.out_stride_token + head * batch.out_stride_head;
      for (int e = lane; e < batch.head_dim_v; e += 32) {
        float x = 0.0f;
        for (int w = 0; w < i.key_warps; w++)
          x += sums.weight[w * rows + row] * sums.acc[(w * rows + row) * sums.pitch + e];
        if (plan.splits > 1) plan.partial_out[partial * batch.head_dim_v + e] = x;
        else store_element(batch.out, at + e, i.q_dtype, x * sums.factor[row]);
      }
    }
    __syncthreads();
  }
}

/* Stream the tiles of the block's split through shared memory and attend to them. */
template <class Core>
INLINE void attend(const pagedkern_batch &batch, const pagedkern_attention_params &params, const AttentionPlan &plan,
                   const Constants &i, const Work &work, unsigned char *shared) {
  const Source k(batch.k_cache, work.kv_head * batch.k_stride_head, batch.k_stride_block, batch.k_stride_token,
                 batch.head_dim, i.dim_k, i.kv_dtype, plan.k_unit);
  const Source v(batch.v_cache, work.kv_head * batch.v_stride_head, batch.v_stride_block, batch.v_stride_token,
                 batch.head_dim_v, i.dim_v, i.kv_dtype, plan.v_unit);
  const int warps = i.row_warps * i.key_warps, warp = threadIdx.x / 32, keys = i.tile / i.key_warps;
  unsigned char *queries = shared + (i.copy == COPY_BULK ? 8 * MAX_STAGES : 0);
  unsigned char *stages = queries + i.rows * i.row_warps * Core::q_pitch(i);
  Loader loader = {i, k, v, batch.block_table + work.sequence * batch.block_table_stride, (unsigned)batch.block_size,
                   work.begin, work.end, stages, shared, i.tile / warps, warp * (i.tile / warps), 0};
  float *scratch = (float *)(stages + i.stages * loader.stage_bytes()) + warp * keys * i.rows;

  Walk ahead(i, work.begin, work.end, blockIdx.z, plan.splits), walk = ahead;
  loader.prepare();
  if (!ahead.done()) loader.look_ahead(ahead.at);
  for (int stage = 0; stage < i.stages - 1; stage++) {
    load_next(loader, ahead, i, plan.splits, stage);
  }
  stage_queries<Core>(batch, i, work, queries);
  __syncthreads();
  Core core(i);
  core.load_q(queries + warp / i.key_warps * i.rows * Core::q_pitch(i));
  WarpRows<Core> rows(work, params, i, core);

  const int offset = warp % i.key_warps * keys; /* of the warp's keys in a tile */
  int stage = 0;
  for (int turn = 0; !walk.done(); turn++) {
    loader.wait(stage, turn);
    __syncthreads(); /* the tile is there for all, and nobody reads the stage that is filled next */
    load_next(loader, ahead, i, plan.splits, stage ? stage - 1 : i.stages - 1);
    const int first = (int)walk.at + offset, last = first + keys; /* tokens */
    if (rows.first < work.num_rows && first < rows.any_to && last > rows.any_from) {
      const bool masked = first < rows.all_from || last > rows.all_to;
      const auto sees = [&](int r, int key) { return first + key >= rows.from[r] && first + key < rows.to[r]; };
      core.score(loader.k_tile(stage) + offset * k.pitch, k.pitch);
      soften(core, rows, params, i, first, masked);
      core.gather(loader.v_tile(stage) + offset * v.pitch, v.pitch, masked, sees, scratch);
    }
    walk.next(i, plan.splits);
    stage = stage + 1 == i.stages ? 0 : stage + 1;
  }
  write_results(batch, params, plan, i, work, core, rows, queries);
}

#ifdef PAGEDKERN_INSTANCE
/* Decode lives on tiles in flight: at usual head dims registers leave room for 12 warps of a multiprocessor. So they do
 * for the float32 prefill whose shared memory does. */
constexpr int THREADS = 32 * Constants::row_warps * Constants::key_warps;
constexpr bool SMALL = Constants::tensor_cores ? Constants::dim_k + Constants::dim_v <= 256 &&
                                                     Constants::tile / Constants::key_warps == 16
                                               : Constants::dim_k + Constants::dim_v <= 128 && Constants::prefill &&
                                                     Constants::kv_dtype == PAGEDKERN_DTYPE_FLOAT32 &&
                                                     !Constants::features;
#define BOUNDS __launch_bounds__(THREADS, SMALL ? 384 / THREADS : 1)
#else
#define BOUNDS
#endif

extern "C" __global__ void BOUNDS attention(const pagedkern_batch batch, const pagedkern_attention_params params,
                                            const AttentionPlan plan) {
#ifdef PAGEDKERN_INSTANCE
  const Constants i = {};
#else
  const Constants &i = plan.instance;
#endif
  DYNAMIC_SHARED(shared);
  if (!i.prefill && batch.cu_seqlens_q && blockIdx.x == 0 && blockIdx.z == 0) write_padding(batch, params, i);
  Work work;
  if (!find_work(batch, params, plan, i, work)) return;
  if (i.tensor_cores) attend<MmaCore>(batch, params, plan, i, work, shared);
  else attend<FmaCore>(batch, params, plan, i, work, shared);
}
