#include "fibers.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

extern "C" void __asan_unpoison_memory_region(const volatile void *, size_t) __attribute__((weak));

namespace pagedkern_host {

unsigned char *map_stacks(size_t count) {
  void *p = mmap(nullptr, count * STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    perror("stacks of the emulated threads");
    abort();
  }
  for (size_t i = 0; i < count; ++i) mprotect(static_cast<unsigned char *>(p) + i * STACK_BYTES, 4096, PROT_NONE);
  return static_cast<unsigned char *>(p);
}

/* A stack left in mid-function (the launch failed) still has the red zones of AddressSanitizer on it. */
static void clean(unsigned char *stack) {
  if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(stack + 4096, STACK_BYTES - 4096);
}

#ifdef PAGEDKERN_UCONTEXT

void Fiber::prepare(void (*body)()) {
  clean(stack);
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = STACK_BYTES;
  context.uc_link = nullptr;
  makecontext(&context, body, 0);
}
void switch_fiber(Fiber &from, Fiber &to) { swapcontext(&from.context, &to.context); }

#else

/* Saves what the ABI lets a callee rely on, exchanges stacks, and returns to where `to` was left. */
extern "C" void pagedkern_switch_stack(void **from, void *to);
asm(R"(
  .text
  .globl pagedkern_switch_stack
  .hidden pagedkern_switch_stack
  .type pagedkern_switch_stack, @function
pagedkern_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size pagedkern_switch_stack, .-pagedkern_switch_stack
)");

void Fiber::prepare(void (*body)()) {
  clean(stack);
  void **top = reinterpret_cast<void **>(stack + STACK_BYTES) - 8; /* 6 registers, entry, no return address */
  for (int i = 0; i < 8; ++i) top[i] = nullptr;
  top[6] = reinterpret_cast<void *>(body);
  stack_pointer = top;
}
void switch_fiber(Fiber &from, Fiber &to) { pagedkern_switch_stack(&from.stack_pointer, to.stack_pointer); }

#endif

} // namespace pagedkern_host
