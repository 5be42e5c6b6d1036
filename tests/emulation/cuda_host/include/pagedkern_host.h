/*
 * What the kernels see when g++ compiles them for the host: everything that a CUDA compiler builds in, and, in namespace
 * pagedkern_host, the functions that stand for inline PTX. The compiler is told to include it before the source.
 *
 * Each thread of a block is a fiber (see runtime/). A function here that says "blocks" lets other threads of the block
 * run; nothing else does. Registers and fragments are laid out as the PTX manual says, so that the same packing works.
 */
#ifndef PAGEDKERN_HOST
#define PAGEDKERN_HOST 1

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "host_builtins.h"
#include "host_math.h"
#include "host_threads.h"

namespace pagedkern_host {

/* Start of the dynamic shared memory of the block, aligned to 1024 bytes. */
unsigned char *dynamic_shared();

/* cp.async: `bytes` (4, 8 or 16) at `shared`, the first `source_bytes` of them from `global`, the rest zero. From now
 * on the destination holds poison; the bytes arrive when this thread waits for the group. Both pointers are aligned to
 * `bytes`. */
void cp_async(void *shared, const void *global, int bytes, int source_bytes);
void cp_async_commit();           /* cp.async.commit_group */
void cp_async_wait(int groups);   /* cp.async.wait_group: all but the latest `groups` groups have arrived */
void cp_async_wait_all();         /* cp.async.wait_all */

/* mbarrier: an object of 8 bytes in shared memory. */
void mbarrier_init(void *barrier, unsigned count);
void mbarrier_invalidate(void *barrier);
void mbarrier_arrive(void *barrier);
void mbarrier_expect_tx(void *barrier, unsigned bytes);        /* no arrival */
void mbarrier_arrive_expect_tx(void *barrier, unsigned bytes); /* expects first, then arrives */
/* Whether the phase of this parity is over. May be false before it is; the second call in a row blocks until it is. */
bool mbarrier_try_wait(void *barrier, unsigned parity);

/* cp.async.bulk from global to shared memory, which completes `bytes` of the barrier's transaction. Pointers aligned to
 * 16, bytes a multiple of 16. Poison and arrival as in cp_async: the bytes arrive when somebody waits at the barrier. */
void bulk_copy(void *shared, const void *global, unsigned bytes, void *barrier);

void named_barrier_sync(int id, int threads);   /* bar.sync id, threads: blocks */
void named_barrier_arrive(int id, int threads); /* bar.arrive id, threads */

/* ldmatrix.sync.aligned.m8n8.xN.shared.b16: lane l names row l % 8 of matrix l / 8, 16 bytes, aligned to 16. Lane l gets
 * elements 2 * (l % 4) and the next of row l / 4; transposed, rows 2 * (l % 4) and the next of column l / 4. */
void ldmatrix_x1(unsigned *r, const void *row);
void ldmatrix_x2(unsigned *r, const void *row);
void ldmatrix_x4(unsigned *r, const void *row);
void ldmatrix_x1_trans(unsigned *r, const void *row);
void ldmatrix_x2_trans(unsigned *r, const void *row);
void ldmatrix_x4_trans(unsigned *r, const void *row);

/* mma.sync.aligned.mMnNkK.row.col.f32.T.T.f32, d = a b + c. Each sum is taken in float32 from c on, k ascending. TF32
 * drops the last 13 bits of its operands. d may be c. */
void mma_m16n8k16_f16(float d[4], const unsigned a[4], const unsigned b[2], const float c[4]);
void mma_m16n8k16_bf16(float d[4], const unsigned a[4], const unsigned b[2], const float c[4]);
void mma_m16n8k8_f16(float d[4], const unsigned a[2], const unsigned b[1], const float c[4]);
void mma_m16n8k8_bf16(float d[4], const unsigned a[2], const unsigned b[1], const float c[4]);
void mma_m16n8k8_tf32(float d[4], const unsigned a[4], const unsigned b[2], const float c[4]);

/* Calls a kernel with arguments given by address, as cuLaunchKernel takes them. */
template <typename... A, size_t... I>
inline void invoke_(void (*kernel)(A...), void **args, index_sequence<I...>) {
  kernel(*static_cast<A *>(args[I])...);
}
template <typename... A>
inline void invoke(void (*kernel)(A...), void **args) {
  invoke_(kernel, args, typename make_index_sequence<sizeof...(A)>::type());
}

} // namespace pagedkern_host
#endif
