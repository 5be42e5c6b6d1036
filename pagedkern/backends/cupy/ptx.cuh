/* What C++ has no words for: one small function for each instruction, with a fallback for the host emulation. */
#ifndef PAGEDKERN_PTX_CUH
#define PAGEDKERN_PTX_CUH

#ifdef PAGEDKERN_HOST
#define DYNAMIC_SHARED(name) unsigned char *name = pagedkern_host::dynamic_shared()
#define HAS_BULK 1
#else
#define DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]
#define HAS_BULK (__CUDA_ARCH__ >= 900)
#endif

#define INLINE __device__ __forceinline__
#define ALL_LANES 0xffffffffu

#ifndef PAGEDKERN_HOST
INLINE unsigned shared_address(const void *pointer) { return (unsigned)__cvta_generic_to_shared(pointer); }
#endif

/* Copy 16 bytes to shared memory in the background; what lies beyond `bytes` (0..16) of the source becomes 0. */
INLINE void cp_async(void *shared, const void *global, int bytes) {
#ifdef PAGEDKERN_HOST
  pagedkern_host::cp_async(shared, global, 16, bytes);
#else
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes)
               : "memory");
#endif
}

/* Close the group of copies that this thread issued since the last one. */
INLINE void cp_async_commit() {
#ifdef PAGEDKERN_HOST
  pagedkern_host::cp_async_commit();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/* Wait until at most `pending` (0..6) of this thread's groups are on their way. */
INLINE void cp_async_wait(int pending) {
#ifdef PAGEDKERN_HOST
  pagedkern_host::cp_async_wait(pending);
#else
  switch (pending) { /* the instruction wants a constant, which it is after inlining */
  case 0: asm volatile("cp.async.wait_group 0;" ::: "memory"); break;
  case 1: asm volatile("cp.async.wait_group 1;" ::: "memory"); break;
  case 2: asm volatile("cp.async.wait_group 2;" ::: "memory"); break;
  case 3: asm volatile("cp.async.wait_group 3;" ::: "memory"); break;
  case 4: asm volatile("cp.async.wait_group 4;" ::: "memory"); break;
  case 5: asm volatile("cp.async.wait_group 5;" ::: "memory"); break;
  default: asm volatile("cp.async.wait_group 6;" ::: "memory"); break;
  }
#endif
}

#if HAS_BULK
INLINE void mbarrier_init(void *barrier, int count) {
#ifdef PAGEDKERN_HOST
  pagedkern_host::mbarrier_init(barrier, count);
#else
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
#endif
}

/* Make initialised barriers visible to the copy engine. */
INLINE void mbarrier_init_fence() {
#ifndef PAGEDKERN_HOST
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

/* Arrive, and announce that this many bytes will come. */
INLINE void mbarrier_arrive(void *barrier, int bytes) {
#ifdef PAGEDKERN_HOST
  pagedkern_host::mbarrier_arrive_expect_tx(barrier, bytes);
#else
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
#endif
}

/* Wait for the end of the phase of that parity: everybody has arrived, and so have the bytes. */
INLINE void mbarrier_wait(void *barrier, int parity) {
#ifdef PAGEDKERN_HOST
  while (!pagedkern_host::mbarrier_try_wait(barrier, parity)) {}
#else
  asm volatile(
      "{\n .reg .pred done;\n"
      "again:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n @!done bra again;\n}" ::"r"(
          shared_address(barrier)),
      "r"(parity)
      : "memory");
#endif
}

/* Order what threads did to shared memory before the copies that the engine is told to make next. */
INLINE void bulk_fence() {
#ifndef PAGEDKERN_HOST
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/* Copy `bytes`, a multiple of 16, between addresses aligned to 16; they count towards the barrier's phase. */
INLINE void bulk_copy(void *shared, const void *global, int bytes, void *barrier) {
#ifdef PAGEDKERN_HOST
  pagedkern_host::bulk_copy(shared, global, bytes, barrier);
#else
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
#endif
}
#endif /* HAS_BULK */

/* Four 8x8 matrices of 16-bit elements; lane l names row l % 8 of matrix l / 8, and gets of matrix m in r[m] the
 * elements (l / 4, 2 * (l % 4)) and the one right of it. */
INLINE void ldmatrix(unsigned r[4], const void *row) {
#ifdef PAGEDKERN_HOST
  pagedkern_host::ldmatrix_x4(r, row);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
#endif
}

/* The same, each matrix transposed: lane l gets the elements (2 * (l % 4), l / 4) and the one below it. */
INLINE void ldmatrix_transposed(unsigned r[4], const void *row) {
#ifdef PAGEDKERN_HOST
  pagedkern_host::ldmatrix_x4_trans(r, row);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
#endif
}

/* d += a * b: a [16, 16], b [16, 8], d [16, 8] in float32, spread over the warp as PTX's m16n8k16 says: lane l holds
 * d[0], d[1] of row l / 4, d[2], d[3] of row l / 4 + 8, columns 2 * (l % 4) and the next. */
INLINE void mma(float d[4], const unsigned a[4], unsigned b0, unsigned b1, bool bf16) {
#ifdef PAGEDKERN_HOST
  const unsigned b[2] = {b0, b1};
  if (bf16) pagedkern_host::mma_m16n8k16_bf16(d, a, b, d);
  else pagedkern_host::mma_m16n8k16_f16(d, a, b, d);
#else
  if (bf16)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

/* float16 and bfloat16 are bits in an integer here; these convert them, to nearest even. */
INLINE float from_half(unsigned bits) {
#ifdef PAGEDKERN_HOST
  const unsigned magnitude = bits & 0x7fffu;
  const float scaled = __uint_as_float(magnitude << 13) * 0x1p112f; /* exact, also of subnormal numbers */
  const unsigned value = magnitude >= 0x7c00u ? 0x7f800000u | magnitude << 13 : __float_as_uint(scaled);
  return __uint_as_float(value | (bits & 0x8000u) << 16);
#else
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((unsigned short)bits));
  return x;
#endif
}

INLINE float from_bfloat16(unsigned bits) { return __uint_as_float(bits << 16); }

#ifdef PAGEDKERN_HOST
INLINE unsigned host_half(float x) {
  const unsigned bits = __float_as_uint(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7fffu;
  if (magnitude >= 0x47800000u) return sign | 0x7c00u; /* 65536 and more */
  if (magnitude < 0x38800000u) return sign | (unsigned)rintf(__uint_as_float(magnitude) * 0x1p24f); /* subnormal */
  const unsigned rounded = magnitude + 0xfffu + (magnitude >> 13 & 1);
  return sign | ((rounded >> 13) - (112u << 10));
}

INLINE unsigned host_bfloat16(float x) {
  const unsigned bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
  return (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}
#endif

/* Two numbers as a pair of 16-bit ones, the first in the low half. */
INLINE unsigned pack(float low, float high, bool bf16) {
#ifdef PAGEDKERN_HOST
  return bf16 ? host_bfloat16(low) | host_bfloat16(high) << 16 : host_half(low) | host_half(high) << 16;
#else
  unsigned bits;
  if (bf16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
#endif
}

/* Arithmetic on two float16 numbers at once. */
INLINE unsigned sub_half2(unsigned a, unsigned b) {
#ifdef PAGEDKERN_HOST
  return pack(from_half(a & 0xffffu) - from_half(b & 0xffffu), from_half(a >> 16) - from_half(b >> 16), false);
#else
  unsigned d;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
#endif
}

INLINE unsigned mul_half2(unsigned a, unsigned b) {
#ifdef PAGEDKERN_HOST
  return pack(from_half(a & 0xffffu) * from_half(b & 0xffffu), from_half(a >> 16) * from_half(b >> 16), false);
#else
  unsigned d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
#endif
}

#endif /* PAGEDKERN_PTX_CUH */
