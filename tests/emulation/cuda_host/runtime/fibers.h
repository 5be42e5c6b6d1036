/* Contexts that run on stacks of their own. On x86-64 a switch is a dozen instructions; elsewhere ucontext does it, which
 * also saves the signal mask and so costs a system call. */
#pragma once

#include <stddef.h>

#if !defined(__x86_64__) || defined(PAGEDKERN_UCONTEXT)
#undef PAGEDKERN_UCONTEXT
#define PAGEDKERN_UCONTEXT 1
#include <ucontext.h>
#endif

namespace pagedkern_host {

constexpr size_t STACK_BYTES = 256 << 10; /* of a thread; the lowest page is not accessible */

struct Fiber {
#ifdef PAGEDKERN_UCONTEXT
  ucontext_t context;
#else
  void *stack_pointer;
#endif
  unsigned char *stack; /* lowest address */

  void prepare(void (*body)()); /* the next switch to it calls body, which never returns */
};

void switch_fiber(Fiber &from, Fiber &to);
unsigned char *map_stacks(size_t count);

} // namespace pagedkern_host
