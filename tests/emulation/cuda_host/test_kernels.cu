/* Kernels of test_cuda_host.py: right ones, and wrong ones that must be reported. One block unless said otherwise. */

#define PLAIN extern "C" __global__ void

/* Sum of n numbers: in each warp by shuffles, then over the warps in shared memory. */
PLAIN block_sum(const float *x, int n, float *sum) {
  __shared__ float of_warp[32];
  float s = 0.0f;
  for (int i = threadIdx.x; i < n; i += blockDim.x) s += x[i];
  for (int offset = 16; offset; offset /= 2) s += __shfl_down_sync(0xffffffffu, s, offset);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = s;
  __syncthreads();
  if (threadIdx.x < 32) {
    s = threadIdx.x < blockDim.x / 32 ? of_warp[threadIdx.x] : 0.0f;
    for (int offset = 16; offset; offset /= 2) s += __shfl_xor_sync(0xffffffffu, s, offset);
    if (threadIdx.x == 0) *sum = s;
  }
}

/* Reverses 128 numbers; `faults` leaves out one barrier: 1 the block's, 2 the one against overwriting, 4 a warp's. */
PLAIN reverse(const int *x, int *y, int faults) {
  __shared__ int tile[128];
  int i = threadIdx.x;
  for (int round = 0; round < 2; ++round) {
    if (!(faults & 2) || round == 0) __syncthreads();
    tile[i] = x[i] + round;
    if (!(faults & 1)) __syncthreads();
    y[i] += tile[127 - i];
  }
  int lane = i % 32;
  __syncthreads();
  tile[i] = y[i];
  if (!(faults & 4)) __syncwarp();
  y[i] = tile[i - lane + (lane ^ 1)];
}

PLAIN votes(int *ballots, int *block) {
  int i = threadIdx.x;
  ballots[i] = __ballot_sync(0xffffffffu, i % 3 == 0);
  ballots[i] ^= i < 8 ? (int)__match_any_sync(0xffu, i % 2) : 0;
  block[0] = __syncthreads_or(i == 77);
  block[1] = __syncthreads_and(i != 77);
  block[2] = __syncthreads_count(i % 2);
  block[3] = __any_sync(0xffffffffu, i == 5) + 2 * __all_sync(0xffffffffu, i >= 0);
  if (i < 32) block[4] = __reduce_max_sync(0xffffffffu, i * 7 % 32) + 100 * __reduce_add_sync(0xffffffffu, 1u);
}

/* Every block adds to a counter; the last one writes the total. */
PLAIN last_block(int *counter, float *sums, float *total) {
  __shared__ int last;
  if (threadIdx.x == 0) {
    sums[blockIdx.x] = blockIdx.x + 1;
    __threadfence();
    last = atomicAdd(counter, 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (!last || threadIdx.x) return;
  float s = 0.0f;
  for (unsigned b = 0; b < gridDim.x; ++b) s += sums[b];
  *total = s;
}

PLAIN shared_atomics(int *out) {
  __shared__ int counter, greatest;
  if (threadIdx.x == 0) counter = 0, greatest = -1;
  __syncthreads();
  atomicAdd(&counter, 2);
  atomicMax(&greatest, (int)(threadIdx.x * 37 % 128));
  __syncthreads();
  if (threadIdx.x == 0) out[0] = counter, out[1] = greatest, out[2] = atomicCAS(&counter, 256, 9), out[3] = counter;
}

/* Doubles n tiles of 32 uint4, three in flight. faults: 1 no wait, 2 waits for one tile too few, 4 no barrier after the
 * wait (lanes read their neighbour's copy), 8 leaves with a copy on its way, 16 no barrier before the buffer is used again. */
PLAIN pipeline(const uint4 *x, uint4 *y, int n, int faults) {
  uint4 *tiles = reinterpret_cast<uint4 *>(pagedkern_host::dynamic_shared()); /* [3][32] */
  int lane = threadIdx.x, other = lane ^ 1;
  auto fetch = [&](int i) {
    if (i < n) pagedkern_host::cp_async(tiles + i % 3 * 32 + lane, x + i * 32 + lane, 16, lane == 31 ? 8 : 16);
    pagedkern_host::cp_async_commit();
  };
  fetch(0);
  fetch(1);
  for (int i = 0; i < n; ++i) {
    if (!(faults & 1)) pagedkern_host::cp_async_wait(faults & 2 ? 2 : 1);
    if (!(faults & 4)) __syncwarp();
    uint4 v = tiles[i % 3 * 32 + other];
    y[i * 32 + other] = {v.x * 2, v.y * 2, v.z * 2, v.w * 2};
    if (faults & 16) fetch(i + 3); /* into the buffer just read */
    else fetch(i + 2);
    if (!(faults & 16)) __syncwarp();
  }
  if (faults & 8) pagedkern_host::cp_async(tiles + lane, x, 16, 16);
  else pagedkern_host::cp_async_wait_all();
}

/* The same by bulk copies of 512 bytes, thread 0 in charge, 64 threads. faults: 1 no wait, 2 wrong parity, 4 too few
 * bytes expected, 8 too many, 16 the result of try_wait is not looked at, 32 used before the initialisation is seen. */
PLAIN bulk(const uint4 *x, uint4 *y, int n, int faults) {
  uint4 *tiles = reinterpret_cast<uint4 *>(pagedkern_host::dynamic_shared()); /* [2][32] */
  __shared__ __align__(8) unsigned long long barriers[2];
  if (threadIdx.x == 0)
    for (int s = 0; s < 2; ++s) pagedkern_host::mbarrier_init(&barriers[s], 1);
  if (!(faults & 32)) __syncthreads();
  auto fetch = [&](int i) {
    if (threadIdx.x || i >= n) return;
    unsigned bytes = 512;
    pagedkern_host::mbarrier_arrive_expect_tx(&barriers[i % 2], faults & 4 ? 0 : faults & 8 ? bytes + 16 : bytes);
    pagedkern_host::bulk_copy(tiles + i % 2 * 32, x + i * 32, bytes, &barriers[i % 2]);
  };
  fetch(0);
  fetch(1);
  for (int i = 0; i < n; ++i) {
    unsigned parity = (i / 2 & 1) ^ (faults & 2 ? 1 : 0);
    if (faults & 16) pagedkern_host::mbarrier_try_wait(&barriers[i % 2], parity);
    else if (!(faults & 1))
      while (!pagedkern_host::mbarrier_try_wait(&barriers[i % 2], parity)) {}
    if (threadIdx.x < 32) {
      uint4 v = tiles[i % 2 * 32 + threadIdx.x];
      y[i * 32 + threadIdx.x] = {v.x * 2, v.y * 2, v.z * 2, v.w * 2};
    }
    __syncthreads();
    fetch(i + 2);
  }
}

/* d[16][8] = a[16][k] b[k][8]: a row-major, b row-major and so transposed on its way; kind 0 f16, 1 bf16. One warp. */
PLAIN multiply(const unsigned short *a, const unsigned short *b, float *d, int k, int kind) {
  __shared__ __align__(16) unsigned short tile_a[16][16], tile_b[16][8];
  int lane = threadIdx.x;
  float c[4] = {0, 0, 0, 0};
  for (int k0 = 0; k0 < k; k0 += 16) {
    for (int i = lane; i < 256; i += 32) tile_a[i / 16][i % 16] = a[i / 16 * k + k0 + i % 16];
    for (int i = lane; i < 128; i += 32) tile_b[i / 8][i % 8] = b[(k0 + i / 8) * 8 + i % 8];
    __syncwarp();
    unsigned fa[4], fb[2];
    pagedkern_host::ldmatrix_x4(fa, &tile_a[lane % 16][lane / 16 * 8]);
    pagedkern_host::ldmatrix_x2_trans(fb, &tile_b[lane % 16][0]);
    __syncwarp();
    if (kind) pagedkern_host::mma_m16n8k16_bf16(c, fa, fb, c);
    else pagedkern_host::mma_m16n8k16_f16(c, fa, fb, c);
  }
  for (int i = 0; i < 4; ++i) d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = c[i];
}

/* d[16][8] = a[16][8] b[8][8], b given by columns: the fragments of k 8 straight from global memory. kind 0 f16, 1 bf16,
 * 2 tf32 (a and b are float then). */
PLAIN multiply8(const void *a, const void *b, float *d, int kind) {
  int g = threadIdx.x / 4, t = threadIdx.x % 4;
  float c[4] = {0, 0, 0, 0};
  const unsigned *wa = (const unsigned *)a, *wb = (const unsigned *)b;
  if (kind == 2) {
    unsigned fa[4] = {wa[g * 8 + t], wa[(g + 8) * 8 + t], wa[g * 8 + t + 4], wa[(g + 8) * 8 + t + 4]};
    unsigned fb[2] = {wb[g * 8 + t], wb[g * 8 + t + 4]};
    pagedkern_host::mma_m16n8k8_tf32(c, fa, fb, c);
  } else {
    unsigned fa[2] = {wa[g * 4 + t], wa[(g + 8) * 4 + t]}, fb[1] = {wb[g * 4 + t]};
    if (kind) pagedkern_host::mma_m16n8k8_bf16(c, fa, fb, c);
    else pagedkern_host::mma_m16n8k8_f16(c, fa, fb, c);
  }
  for (int i = 0; i < 4; ++i) d[(g + i / 2 * 8) * 8 + t * 2 + i % 2] = c[i];
}

/* What must be reported, each in its own way; `x` holds 64 numbers. */
PLAIN wrong(int *x, int fault) {
  __shared__ int tile[64];
  int i = threadIdx.x;
  int *dynamic = (int *)pagedkern_host::dynamic_shared(); /* [64] */
  switch (fault) {
  case 0:
    if (i < 40) __syncthreads();
    break;
  case 1:
    if (i < 32) __syncthreads();
    else __syncthreads();
    break;
  case 2:
    if (i % 32 < 16) x[i] = __shfl_sync(0xffffffffu, i, 0);
    else __syncwarp();
    break;
  case 3:
    if (i == 5) x[i] = __ballot_sync(0x0fu, 1);
    break;
  case 4:
    if (i == 33) return;
    __syncwarp();
    break;
  case 5:
    if (i < 16) x[i] = __shfl_sync(0xffffu, i, 20);
    break;
  case 6:
    if (i < 16) __syncwarp(i < 8 ? 0x1ffu : 0xffffu);
    break;
  case 7: x[i] = tile[i]; break;
  case 8:
    if (i) dynamic[i] = 1;
    __syncthreads();
    x[i] = dynamic[i];
    break;
  case 9: x[i + 1] = 0; break;
  case 10: x[0] = x[i - 1]; break;
  case 11: dynamic[i + 1] = 0; break;
  case 12: *(uint2 *)(x + 1) = {0, 0}; break;
  case 13: x[0] = 1 / (x[0] - x[0]); break;
  case 14: *(volatile int *)8 = 0; break;
  case 15: assert(i < 50); break;
  case 16: pagedkern_host::named_barrier_sync(1, 96); break;
  case 17: pagedkern_host::cp_async((char *)dynamic + 4 + i, x, 16, 16); break;
  case 20: x[0] = 0x7fffffff + (x[i] + i) % 2; break;
  case 21: {
    int local[4] = {i, x[0], x[1], x[2]};
    x[i] = local[i % 5];
    break;
  }
  case 24: {
    int local[4];
    if (x[i]) local[1] = 0;
    x[i] = local[i % 4];
    break;
  }
  case 22: x[i] = 1 << (x[i] + i); break;
  case 18: pagedkern_host::cp_async(x, x, 16, 16); break;
  case 19: {
    unsigned r[4];
    pagedkern_host::ldmatrix_x4(r, dynamic + i);
    break;
  }
  }
}

/* Producer and consumers with named barriers: warp 0 fills, warp 1 reads. fault: the consumer does not wait. */
PLAIN named(const int *x, int *y, int fault) {
  __shared__ int tile[32];
  int lane = threadIdx.x % 32;
  if (threadIdx.x < 32) {
    tile[lane] = x[lane];
    pagedkern_host::named_barrier_arrive(1, 64);
  } else {
    if (!fault) pagedkern_host::named_barrier_sync(1, 64);
    y[lane] = tile[31 - lane];
  }
}

/* Recursion deeper than a stack. */
PLAIN deep(int *x) {
  struct Down {
    static int walk(volatile int *x, int n) {
      volatile char room[4096];
      room[n % 4096] = (char)n;
      return n < 100000 ? walk(x, n + 1) + room[n % 4096] : *x;
    }
  };
  x[0] = Down::walk(x, x[0]);
}

template <typename T>
__global__ void scoped(T *x) {
  __shared__ T tile[32];
  tile[threadIdx.x] = T(blockIdx.x * 32 + threadIdx.x);
  __syncthreads();
  x[blockIdx.x * 32 + threadIdx.x] = tile[(threadIdx.x + 31) % 32];
}
