/* Runs a grid block by block, and turns what goes wrong into a message. */
#include <errno.h>
#include <link.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <algorithm>
#include <mutex>

#include "block.h"

namespace pagedkern_host {
namespace {

struct Launch { /* mirrored in Python */
  void (*entry)(void **);
  void **arguments; /* address of each */
  unsigned grid[3], block[3];
  size_t shared_bytes; /* dynamic */
  unsigned long long order; /* see threads.cpp; of the blocks too */
  unsigned char poison;     /* what fresh shared memory is filled with */
  const Range *ranges;
  long num_ranges; /* -1: any address may be touched */
};

const Launch *launch;
Fiber launcher;
std::string message;
sigjmp_buf after_fault;
bool failed;

std::string where() {
  char text[160];
  int n = snprintf(text, sizeof text, "block (%u, %u, %u)", blockIdx.x, blockIdx.y, blockIdx.z);
  snprintf(text + n, sizeof text - size_t(n), " of (%u, %u, %u): ", gridDim.x, gridDim.y, gridDim.z);
  return text;
}

std::string thread_name() {
  char text[80];
  snprintf(text, sizeof text, "thread %u (%u, %u, %u) ", current->id, threadIdx.x, threadIdx.y, threadIdx.z);
  return text;
}

void body() {
  launch->entry(launch->arguments);
  finish();
}

void on_fault(int signal, siginfo_t *info, void *) {
  char text[120];
  bool stack = info->si_addr >= current->fiber.stack && info->si_addr < current->fiber.stack + 4096;
  if (signal == SIGFPE) snprintf(text, sizeof text, "divides an integer by zero");
  else if (stack) snprintf(text, sizeof text, "needs more than %zu bytes of stack", STACK_BYTES);
  else snprintf(text, sizeof text, "touches memory at %p that does not exist or is misaligned", info->si_addr);
  message = where() + thread_name() + text;
  failed = true;
  siglongjmp(after_fault, 1);
}

/* Faults of kernel code become messages, for as long as it lives. AddressSanitizer makes its own. */
class FaultHandler {
  static constexpr int SIGNALS[3] = {SIGSEGV, SIGBUS, SIGFPE};
  struct sigaction before_[3];
  stack_t stack_before_;
  std::vector<unsigned char> stack_ = std::vector<unsigned char>(64 << 10);

public:
  FaultHandler() {
    stack_t stack{};
    stack.ss_sp = stack_.data();
    stack.ss_size = stack_.size();
    sigaltstack(&stack, &stack_before_);
    struct sigaction action {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int i = 0; i < 3; ++i) sigaction(SIGNALS[i], &action, &before_[i]);
  }
  ~FaultHandler() {
    for (int i = 0; i < 3; ++i) sigaction(SIGNALS[i], &before_[i], nullptr);
    sigaltstack(&stack_before_, nullptr);
  }
};

/* The thread-local variables of the kernel's module, that is, its __shared__ ones. */
void find_fixed(const void *address) {
  struct Search {
    uintptr_t address;
  } search{uintptr_t(address)};
  block.fixed = nullptr;
  block.fixed_bytes = 0;
  dl_iterate_phdr(
      [](dl_phdr_info *info, size_t, void *data) {
        bool here = false;
        size_t bytes = 0;
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const auto &header = info->dlpi_phdr[i];
          uintptr_t begin = info->dlpi_addr + header.p_vaddr;
          if (header.p_type == PT_LOAD && static_cast<Search *>(data)->address - begin < header.p_memsz) here = true;
          if (header.p_type == PT_TLS) bytes = header.p_memsz;
        }
        if (!here) return 0;
        if (bytes) block.fixed = static_cast<unsigned char *>(info->dlpi_tls_data);
        if (block.fixed) block.fixed_bytes = bytes;
        return 1;
      },
      &search);
}

class DynamicMemory { /* canaries on both sides tell of stray writes; the end is where it was asked for */
  static constexpr size_t MARGIN = 1024;
  unsigned char *base_ = nullptr;
  size_t size_;

public:
  explicit DynamicMemory(size_t bytes) : size_(bytes) {
    base_ = static_cast<unsigned char *>(aligned_alloc(1024, (bytes + 1023) / 1024 * 1024 + 2 * MARGIN));
    memset(base_, 0xA5, MARGIN);
    memset(base_ + MARGIN + size_, 0xA5, MARGIN);
    block.dynamic = base_ + MARGIN;
    block.dynamic_bytes = bytes;
  }
  ~DynamicMemory() {
    free(base_);
    block.dynamic = nullptr;
    block.dynamic_bytes = 0;
  }
  bool overrun() const {
    auto stray = [](unsigned char c) { return c != 0xA5; };
    return std::any_of(base_, base_ + MARGIN, stray) ||
           std::any_of(base_ + MARGIN + size_, base_ + 2 * MARGIN + size_, stray);
  }
};

bool run_block(uint3 index) {
  blockIdx = index;
  memset(block.dynamic, block.poison, block.dynamic_bytes);
  if (block.fixed_bytes) memset(block.fixed, block.poison, block.fixed_bytes);
  reset_copies();
  start_block(launch->order, body);
  reset_checks();
  current = take_ready();
  threadIdx = current->index;
  switch_fiber(launcher, current->fiber);
  return !failed;
}

void run_grid(const DynamicMemory &memory) {
  std::vector<uint3> indices;
  for (unsigned z = 0; z < gridDim.z; ++z)
    for (unsigned y = 0; y < gridDim.y; ++y)
      for (unsigned x = 0; x < gridDim.x; ++x) indices.push_back({x, y, z});
  if (launch->order == 1) std::reverse(indices.begin(), indices.end());
  if (launch->order > 1)
    for (size_t i = indices.size(); i > 1; --i) std::swap(indices[i - 1], indices[(random_bits() >> 20) % i]);
  for (uint3 index : indices) {
    if (!run_block(index)) return;
    if (memory.overrun()) {
      message = where() + "bytes beside the " + std::to_string(block.dynamic_bytes) +
                " bytes of dynamic shared memory were written";
      failed = true;
      return;
    }
  }
}

} // namespace

void end_block() {
  switch_fiber(current->fiber, launcher);
  abort();
}

void fail_plainly(const std::string &text) {
  message = where() + text;
  failed = true;
  end_block();
}

void fail(const char *format, ...) {
  char text[1024];
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  fail_plainly(thread_name() + text);
}

unsigned char *dynamic_shared() { return block.dynamic; }

/* Null, or what went wrong: valid until the next launch of any thread. */
extern "C" const char *pagedkern_host_launch(const Launch *given) {
  static std::mutex one_at_a_time;
  std::lock_guard<std::mutex> lock(one_at_a_time);
  static thread_local std::string result;
  launch = given;
  gridDim = {given->grid[0], given->grid[1], given->grid[2]};
  blockDim = {given->block[0], given->block[1], given->block[2]};
  failed = false;
  unsigned long long threads = 1ull * blockDim.x * blockDim.y * blockDim.z;
  if (threads == 0 || threads > 1024) {
    result = "a block of " + std::to_string(threads) + " threads";
    return result.c_str();
  }
  block.poison = given->poison;
  find_fixed(reinterpret_cast<const void *>(given->entry));
  set_module(reinterpret_cast<const void *>(given->entry));
  set_ranges(given->ranges, given->num_ranges);
  DynamicMemory memory(given->shared_bytes);
#ifndef PAGEDKERN_ADDRESS
  FaultHandler handler;
  if (sigsetjmp(after_fault, 1) == 0)
#endif
    run_grid(memory);
  current = nullptr;
  result = message;
  return failed ? result.c_str() : nullptr;
}

} // namespace pagedkern_host
