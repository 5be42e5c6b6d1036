/* Joins the partial results of a sequence's splits, in the order of the splits.
 *
 * Grid: x: [sequences of the launch * partial_tokens] query tokens of sequences that decode; y: [ceil(H / 4)] heads, one
 * warp each. */
#include "softmax.cuh"

extern "C" __global__ void merge(const pagedkern_batch batch, const pagedkern_attention_params params,
                                 const AttentionPlan plan) {
  const int sequence = plan.first_sequence + blockIdx.x / plan.partial_tokens;
  const int token = blockIdx.x % plan.partial_tokens;
  const int head = blockIdx.y * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = batch.cu_seqlens_q ? batch.cu_seqlens_q[sequence] : sequence;
  const int q_len = batch.cu_seqlens_q ? batch.cu_seqlens_q[sequence + 1] - row : 1;
  if (token >= q_len || q_len > plan.decode_tokens || head >= batch.num_heads) return;

  const long long spans = ((long long)batch.seq_lens[sequence] + plan.instance.span - 1) / plan.instance.span;
  const int splits = spans < plan.splits ? (int)spans : plan.splits; /* the others hold nothing, not even zeros */
  const long long first = ((long long)blockIdx.x * batch.num_heads + head) * plan.splits;
  const float *state = plan.partial_state + first * 2;              /* [splits, 2] */
  const float *part = plan.partial_out + first * batch.head_dim_v;  /* [splits, E] */

  float top = -infinity(), total = 0.0f;
  for (int p = 0; p < splits; p++) top = fmaxf(top, state[2 * p]);
  for (int p = 0; p < splits; p++) total += weight_of(state[2 * p], top) * state[2 * p + 1];
  const int kv_head = head / (int)(batch.num_heads / batch.num_kv_heads);
  const Final final = finish(top, total, params, head, kv_head);
  if (batch.lse && lane == 0) batch.lse[(long long)(row + token) * batch.lse_stride_token + head] = final.lse;
  const long long at = (long long)(row + token) * batch.out_stride_token + head * batch.out_stride_head;
  for (int e = lane; e < batch.head_dim_v; e += 32) {
    float x = 0.0f;
    for (int p = 0; p < splits; p++) x += weight_of(state[2 * p], top) * part[p * batch.head_dim_v + e];
    store_element(batch.out, at + e, batch.q_dtype, x * final.factor);
  }
}
