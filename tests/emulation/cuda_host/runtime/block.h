/* The block that runs: its threads as fibers, who may run next, and what the parts of the runtime ask of each other. */
#pragma once

#include <string>
#include <vector>

#include "../include/pagedkern_host.h"
#include "fibers.h"

namespace pagedkern_host {

struct AsyncCopy { /* issued, not arrived */
  unsigned char *to;
  const unsigned char *from;
  unsigned bytes, source_bytes;
};

struct Thread {
  Fiber fiber;
  Thread *next; /* in the queue of those that can run */
  unsigned id; /* in the block, x fastest */
  uint3 index;
  bool finished;
  bool refused; /* the last mbarrier_try_wait was false */
  int vote;     /* result of the last barrier */
  const char *waits_at; /* what kind of thing it waits at; null if it can run */
  Site site;            /* where */
  std::vector<AsyncCopy> copies;
  std::vector<size_t> groups; /* end of each committed group in `copies` */
};

struct Group { /* lanes of a warp on their way into one collective */
  unsigned mask, arrived;
  Request *requests[32];
};

struct Block {
  unsigned size; /* threads */
  std::vector<Thread> threads;
  Thread *first_ready, *last_ready; /* null if there is none */
  std::vector<std::vector<Group>> warps;
  std::vector<unsigned> present; /* lanes of each warp that exist and have not returned */
  std::vector<Thread *> at_barrier;
  int votes; /* of those at the barrier */
  unsigned num_finished;
  unsigned char *dynamic;
  size_t dynamic_bytes;
  unsigned char *fixed; /* the __shared__ variables */
  size_t fixed_bytes;
  unsigned char poison;
};

extern Block block;
extern Thread *current; /* null outside a launch */

/* threads.cpp */
void start_block(unsigned long long order, void (*body)());
void wait(const char *what, Site site);  /* until woken */
void wake(Thread **threads, size_t count); /* in the order of this launch; rearranges them */
Thread *take_ready();
void finish();                           /* the current thread leaves the kernel; does not return */
unsigned long long random_bits();
std::string names(const std::vector<const Thread *> &threads); /* "threads 0-31, 40" */

/* matrices.cpp */
void perform_ldmatrix(Request *const lanes[32]);
void perform_mma(Request *const lanes[32]);

/* copies.cpp */
void reset_copies();
void check_no_copy_in_flight();

/* checks.cpp: nothing happens in them unless the runtime is compiled with PAGEDKERN_CHECKED. */
enum class Access { READ, WRITE, ATOMIC };
struct Range { /* what the launch may touch */
  const unsigned char *begin, *end;
};
using Clock = std::vector<unsigned>;
void reset_checks();
void set_ranges(const Range *ranges, long count); /* count < 0: anything goes */
void set_module(const void *address);             /* its data may be touched, and its code gets source lines */
void touch(const void *address, size_t bytes, Access access, const void *pc = nullptr);
void touch_as(unsigned thread, const void *address, size_t bytes, Access access);
void mark(const void *shared, size_t bytes, bool arrived); /* a copy into it is in flight, or is no longer */
void order_threads(Thread *const *threads, size_t count); /* all before is seen by all after */
void release(Clock &clock); /* what the current thread did until now is known to whoever acquires */
void acquire(const Clock &clock);

/* launch.cpp */
[[noreturn]] void fail_plainly(const std::string &message); /* without naming the current thread */
[[noreturn]] void end_block();                              /* back to the launcher */

} // namespace pagedkern_host
