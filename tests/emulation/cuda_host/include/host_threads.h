/* What threads of a block do together: barriers, warp collectives, atomics. */
#pragma once

namespace pagedkern_host {

/* Where in the source a call stands: `here()` as a default argument is evaluated at the call. */
struct Site {
  const char *file;
  int line;
  static constexpr Site here(const char *file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
};

enum class Vote { NONE, OR, AND, COUNT };
int block_barrier(Vote vote, int predicate, Site site); /* blocks until every thread of the block is here */

enum class Collective { SYNC, SHUFFLE, SHUFFLE_UP, SHUFFLE_DOWN, SHUFFLE_XOR, BALLOT, MATCH, LDMATRIX, MMA };

/* One lane's part in a collective. The last lane of the mask to arrive carries the whole thing out. */
struct Request {
  Collective kind;
  unsigned mask;
  Site site;
  const void *in = nullptr; /* what this lane gives */
  void *out = nullptr;      /* what it gets */
  int bytes = 0;            /* size of both, for shuffles and matches */
  int argument = 0;         /* source lane, delta or lane mask; variant of LDMATRIX and MMA */
  int width = 32;
};
void collective(Request &request); /* blocks until every lane of the mask is here */

void yield();
int lane();

template <typename T>
inline T shuffle(Collective kind, unsigned mask, T value, int argument, int width, Site site) {
  static_assert(sizeof(T) <= 16, "a shuffle moves at most 16 bytes");
  T result = value;
  Request request{kind, mask, site, &value, &result, int(sizeof(T)), argument, width};
  collective(request);
  return result;
}

} // namespace pagedkern_host

inline void __syncthreads(pagedkern_host::Site site = pagedkern_host::Site::here()) {
  pagedkern_host::block_barrier(pagedkern_host::Vote::NONE, 0, site);
}
inline int __syncthreads_or(int predicate, pagedkern_host::Site site = pagedkern_host::Site::here()) {
  return pagedkern_host::block_barrier(pagedkern_host::Vote::OR, predicate, site);
}
inline int __syncthreads_and(int predicate, pagedkern_host::Site site = pagedkern_host::Site::here()) {
  return pagedkern_host::block_barrier(pagedkern_host::Vote::AND, predicate, site);
}
inline int __syncthreads_count(int predicate, pagedkern_host::Site site = pagedkern_host::Site::here()) {
  return pagedkern_host::block_barrier(pagedkern_host::Vote::COUNT, predicate, site);
}

inline void __syncwarp(unsigned mask = 0xffffffffu, pagedkern_host::Site site = pagedkern_host::Site::here()) {
  pagedkern_host::Request request{pagedkern_host::Collective::SYNC, mask, site};
  pagedkern_host::collective(request);
}

#define PAGEDKERN_SHUFFLE_(name, kind, argument_type)                                               \
  template <typename T>                                                                             \
  inline T name(unsigned mask, T value, argument_type argument, int width = 32,                     \
                pagedkern_host::Site site = pagedkern_host::Site::here()) {                                      \
    return pagedkern_host::shuffle(pagedkern_host::Collective::kind, mask, value, int(argument), width, site); \
  }
PAGEDKERN_SHUFFLE_(__shfl_sync, SHUFFLE, int)
PAGEDKERN_SHUFFLE_(__shfl_up_sync, SHUFFLE_UP, unsigned)
PAGEDKERN_SHUFFLE_(__shfl_down_sync, SHUFFLE_DOWN, unsigned)
PAGEDKERN_SHUFFLE_(__shfl_xor_sync, SHUFFLE_XOR, int)
#undef PAGEDKERN_SHUFFLE_

inline unsigned __ballot_sync(unsigned mask, int predicate, pagedkern_host::Site site = pagedkern_host::Site::here()) {
  unsigned result = 0;
  pagedkern_host::Request request{pagedkern_host::Collective::BALLOT, mask, site, &predicate, &result, 4};
  pagedkern_host::collective(request);
  return result;
}
inline int __any_sync(unsigned mask, int predicate, pagedkern_host::Site site = pagedkern_host::Site::here()) {
  return __ballot_sync(mask, predicate, site) != 0;
}
inline int __all_sync(unsigned mask, int predicate, pagedkern_host::Site site = pagedkern_host::Site::here()) {
  return __ballot_sync(mask, predicate, site) == mask;
}
template <typename T>
inline unsigned __match_any_sync(unsigned mask, T value, pagedkern_host::Site site = pagedkern_host::Site::here()) {
  unsigned result = 0;
  pagedkern_host::Request request{pagedkern_host::Collective::MATCH, mask, site, &value, &result, int(sizeof(T))};
  pagedkern_host::collective(request);
  return result;
}
/* The least that hardware promises: no other lane need have converged with this one. */
inline unsigned __activemask() { return 1u << pagedkern_host::lane(); }

#define PAGEDKERN_REDUCE_(name, type, expression)                                            \
  inline type name(unsigned mask, type value, pagedkern_host::Site site = pagedkern_host::Site::here()) { \
    bool first = true;                                                                       \
    type a = value;                                                                          \
    for (int lane = 0; lane < 32; ++lane)                                                    \
      if (mask >> lane & 1) {                                                                \
        type b = __shfl_sync(mask, value, lane, 32, site);                                   \
        a = first ? b : (expression);                                                        \
        first = false;                                                                       \
      }                                                                                      \
    return a;                                                                                \
  }
PAGEDKERN_REDUCE_(__reduce_add_sync, unsigned, a + b)
PAGEDKERN_REDUCE_(__reduce_add_sync, int, int(unsigned(a) + unsigned(b)))
PAGEDKERN_REDUCE_(__reduce_min_sync, unsigned, b < a ? b : a)
PAGEDKERN_REDUCE_(__reduce_min_sync, int, b < a ? b : a)
PAGEDKERN_REDUCE_(__reduce_max_sync, unsigned, b > a ? b : a)
PAGEDKERN_REDUCE_(__reduce_max_sync, int, b > a ? b : a)
PAGEDKERN_REDUCE_(__reduce_and_sync, unsigned, a & b)
PAGEDKERN_REDUCE_(__reduce_or_sync, unsigned, a | b)
PAGEDKERN_REDUCE_(__reduce_xor_sync, unsigned, a ^ b)
#undef PAGEDKERN_REDUCE_

/* Atomics: a thread runs undisturbed until it blocks, so a plain read and write is one. `touch_atomic` tells the checks
 * that this access races with no other atomic one. */
namespace pagedkern_host {
void touch_atomic(const void *address, int bytes);
template <typename T, typename F>
inline __attribute__((no_sanitize("thread"))) T atomically(T *address, F change) {
  touch_atomic(address, sizeof(T));
  T old = *address;
  *address = change(old);
  return old;
}
} // namespace pagedkern_host
#define PAGEDKERN_ATOMIC_(name, expression)                                                   \
  template <typename T>                                                                       \
  inline T name(T *address, decltype(T()) value) {                                            \
    return pagedkern_host::atomically(address, [=](T old) { return T(expression); });         \
  }
PAGEDKERN_ATOMIC_(atomicAdd, old + value)
PAGEDKERN_ATOMIC_(atomicSub, old - value)
PAGEDKERN_ATOMIC_(atomicMax, value > old ? value : old)
PAGEDKERN_ATOMIC_(atomicMin, value < old ? value : old)
PAGEDKERN_ATOMIC_(atomicExch, value)
PAGEDKERN_ATOMIC_(atomicAnd, old & value)
PAGEDKERN_ATOMIC_(atomicOr, old | value)
PAGEDKERN_ATOMIC_(atomicXor, old ^ value)
PAGEDKERN_ATOMIC_(atomicInc, old >= value ? 0 : old + 1)
PAGEDKERN_ATOMIC_(atomicDec, old == 0 || old > value ? value : old - 1)
#undef PAGEDKERN_ATOMIC_
template <typename T>
inline T atomicCAS(T *address, decltype(T()) expected, decltype(T()) value) {
  return pagedkern_host::atomically(address, [=](T old) { return old == expected ? value : old; });
}

inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) { pagedkern_host::yield(); }
