/* Copies blocks inside each of many caches as if every source were read before any destination is written.
 *
 * A block of threads owns one column of bytes: it reads that column of all sources into shared memory and then writes
 * it to all destinations. No other block touches these bytes, so chains and cycles of ids need no further order.
 *
 * Grid: x: [runs * columns of a run]; y: caches. Shared memory: [pairs, column] bytes. */
#include "elements.cuh"

extern "C" __global__ void copy_blocks(const CopyPlan plan) {
  DYNAMIC_SHARED(shared);
  const long long columns = (plan.run_bytes + plan.column - 1) / plan.column;
  const long long start = blockIdx.x % columns * plan.column; /* of the column in its run */
  long long run = blockIdx.x / columns, place = start;        /* of the column in a block: bytes */
  for (int d = 0; d < COPY_DIMS; d++) {
    place += run % plan.sizes[d] * plan.strides[d];
    run /= plan.sizes[d];
  }
  unsigned char *column = plan.caches[blockIdx.y] + place;
  const long long left = plan.run_bytes - start;
  const int pieces = (int)(left < plan.column ? left : plan.column) / plan.unit;
  for (int step = 0; step < 2; step++) {
    for (long long at = threadIdx.x; at < plan.pairs * pieces; at += blockDim.x) {
      const long long pair = at / pieces, byte = at % pieces * plan.unit;
      unsigned char *kept = shared + pair * plan.column + byte;
      if (!step) copy_bytes(kept, column + plan.src_blocks[pair] * plan.stride_block + byte, plan.unit, plan.unit);
      else copy_bytes(column + plan.dst_blocks[pair] * plan.stride_block + byte, kept, plan.unit, plan.unit);
    }
    __syncthreads();
  }
}
