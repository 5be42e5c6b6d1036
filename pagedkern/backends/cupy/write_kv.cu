/* Stores the K and V of new tokens in their slots, converted or quantized to the cache's dtype.
 *
 * Grid: x: [T] tokens. */
#include "elements.cuh"

/* The token's G rows of K or of V. */
INLINE void write_rows(unsigned char *to, const unsigned char *from, const float *scale, long long heads, long long dim,
                       long long to_stride, long long from_stride, int kv_dtype, const WritePlan &plan) {
  const int size = size_of(kv_dtype);
  if (kv_dtype == plan.dtype) { /* the bits as they are */
    const long long pieces = dim * size / plan.unit;
    for (long long at = threadIdx.x; at < heads * pieces; at += blockDim.x) {
      const long long head = at / pieces, byte = at % pieces * plan.unit;
      copy_bytes(to + head * to_stride * size + byte, from + head * from_stride * size + byte, plan.unit, plan.unit);
    }
    return;
  }
  for (long long at = threadIdx.x; at < heads * dim; at += blockDim.x) {
    const long long head = at / dim, d = at % dim;
    const float x = load_element(from, head * from_stride + d, plan.dtype);
    store_element(to, head * to_stride + d, kv_dtype, scale ? x / scale[head] : x);
  }
}

extern "C" __global__ void write_kv(const pagedkern_batch batch, const WritePlan plan) {
  const long long token = blockIdx.x, slot = batch.slot_mapping[token];
  if (slot < 0) return;
  const long long block = slot / batch.block_size, offset = slot % batch.block_size;
  const int size = size_of(batch.kv_dtype), new_size = size_of(plan.dtype);
  write_rows((unsigned char *)batch.k_cache + (block * batch.k_stride_block + offset * batch.k_stride_token) * size,
             (const unsigned char *)plan.k + token * plan.k_stride_token * new_size, plan.k_scale, batch.num_kv_heads,
             batch.head_dim, batch.k_stride_head, plan.k_stride_head, batch.kv_dtype, plan);
  write_rows((unsigned char *)batch.v_cache + (block * batch.v_stride_block + offset * batch.v_stride_token) * size,
             (const unsigned char *)plan.v + token * plan.v_stride_token * new_size, plan.v_scale, batch.num_kv_heads,
             batch.head_dim_v, batch.v_stride_head, plan.v_stride_head, batch.kv_dtype, plan);
}
