/* Copies that arrive late. A destination holds poison from the issue on, and the bytes come only when somebody waits in
 * the way that PTX asks for: a missing wait, a wait for too few groups and a buffer overwritten too early all show. */
#include <map>

#include "block.h"

namespace pagedkern_host {
namespace {

struct MBarrier {
  unsigned count, pending; /* arrivals of a phase, those still missing in this one */
  long transaction;        /* bytes still to arrive in this phase */
  unsigned phase;
  std::vector<AsyncCopy> copies; /* issued in this phase */
  std::vector<Thread *> waiting;
  Clock clock;
};
std::map<const void *, MBarrier> mbarriers;

struct NamedBarrier {
  int expected = 0, arrived = 0;
  std::vector<Thread *> waiting;
  Clock clock;
};
std::map<int, NamedBarrier> named_barriers;

bool in_shared(const void *p, size_t bytes) {
  const unsigned char *q = static_cast<const unsigned char *>(p);
  auto inside = [=](const unsigned char *begin, size_t size) { return q >= begin && q + bytes <= begin + size; };
  return inside(block.dynamic, block.dynamic_bytes) || inside(block.fixed, block.fixed_bytes);
}

void issue(const AsyncCopy &copy, unsigned alignment, const char *name) {
  if (!in_shared(copy.to, copy.bytes)) fail("%s: %p + %u is not in shared memory", name, (void *)copy.to, copy.bytes);
  if (uintptr_t(copy.to) % alignment) fail("%s: destination %p is not aligned to %u", name, (void *)copy.to, alignment);
  if (copy.source_bytes && uintptr_t(copy.from) % alignment)
    fail("%s: source %p is not aligned to %u", name, (const void *)copy.from, alignment);
  touch(copy.to, copy.bytes, Access::WRITE);
  touch(copy.from, copy.source_bytes, Access::READ);
  memset(copy.to, block.poison, copy.bytes);
  mark(copy.to, copy.bytes, false);
}

void arrive(const AsyncCopy &copy) {
  mark(copy.to, copy.bytes, true);
  memcpy(copy.to, copy.from, copy.source_bytes);
  memset(copy.to + copy.source_bytes, 0, copy.bytes - copy.source_bytes);
}

MBarrier &mbarrier(const void *barrier) {
  auto found = mbarriers.find(barrier);
  if (found == mbarriers.end()) fail("mbarrier at %p is used before mbarrier_init", barrier);
  return found->second;
}

void end_phase_if_over(MBarrier &b) {
  if (b.pending == 0 && !b.waiting.empty()) { /* late as they may be, they come now */
    for (const AsyncCopy &copy : b.copies) {
      arrive(copy);
      b.transaction -= copy.bytes;
    }
    b.copies.clear();
  }
  if (b.pending || b.transaction) return;
  ++b.phase;
  b.pending = b.count;
  std::vector<Thread *> waiting;
  waiting.swap(b.waiting);
  wake(waiting.data(), waiting.size());
}

} // namespace

void reset_copies() {
  mbarriers.clear();
  named_barriers.clear();
}

void check_no_copy_in_flight() {
  if (!current->copies.empty()) fail("returns with %zu of its cp.async not waited for", current->copies.size());
}

void cp_async(void *shared, const void *global, int bytes, int source_bytes) {
  if (bytes != 4 && bytes != 8 && bytes != 16) fail("cp.async of %d bytes", bytes);
  if (source_bytes < 0 || source_bytes > bytes) fail("cp.async of %d bytes from a source of %d", bytes, source_bytes);
  AsyncCopy copy{static_cast<unsigned char *>(shared), static_cast<const unsigned char *>(global), unsigned(bytes),
                 unsigned(source_bytes)};
  issue(copy, unsigned(bytes), "cp.async");
  current->copies.push_back(copy);
}

void cp_async_commit() { current->groups.push_back(current->copies.size()); }

void cp_async_wait(int groups) {
  std::vector<size_t> &ends = current->groups;
  if (ends.size() <= size_t(groups)) return;
  size_t over = ends.size() - size_t(groups), count = ends[over - 1];
  for (size_t i = 0; i < count; ++i) {
    touch(current->copies[i].to, current->copies[i].bytes, Access::WRITE);
    arrive(current->copies[i]);
  }
  current->copies.erase(current->copies.begin(), current->copies.begin() + long(count));
  ends.erase(ends.begin(), ends.begin() + long(over));
  for (size_t &end : ends) end -= count;
}

void cp_async_wait_all() {
  cp_async_commit();
  cp_async_wait(0);
}

void mbarrier_init(void *barrier, unsigned count) {
  if (!in_shared(barrier, 8) || uintptr_t(barrier) % 8) fail("mbarrier at %p: not 8 aligned bytes of shared memory", barrier);
  if (count == 0) fail("mbarrier_init with count 0");
  if (mbarriers.count(barrier)) fail("mbarrier at %p is initialised twice", barrier);
  touch(barrier, 8, Access::WRITE);
  memset(barrier, 0, 8);
  mbarriers[barrier] = MBarrier{count, count, 0, 0, {}, {}, {}};
}

void mbarrier_invalidate(void *barrier) {
  if (!mbarrier(barrier).copies.empty()) fail("mbarrier at %p is invalidated with copies in flight", barrier);
  mbarriers.erase(barrier);
}

void mbarrier_expect_tx(void *barrier, unsigned bytes) {
  touch(barrier, 8, Access::ATOMIC);
  mbarrier(barrier).transaction += bytes;
}

void mbarrier_arrive(void *barrier) {
  touch(barrier, 8, Access::ATOMIC);
  MBarrier &b = mbarrier(barrier);
  if (b.pending == 0) fail("mbarrier at %p gets more arrivals than its count of %u in a phase", barrier, b.count);
  release(b.clock);
  --b.pending;
  end_phase_if_over(b);
}

void mbarrier_arrive_expect_tx(void *barrier, unsigned bytes) {
  mbarrier_expect_tx(barrier, bytes);
  mbarrier_arrive(barrier);
}

bool mbarrier_try_wait(void *barrier, unsigned parity) {
  touch(barrier, 8, Access::ATOMIC);
  MBarrier &b = mbarrier(barrier);
  auto over = [&] { return (b.phase & 1) != (parity & 1); };
  if (!over() && !current->refused) { /* legal, and caught if nobody looks at the result */
    current->refused = true;
    yield();
    return false;
  }
  current->refused = false;
  if (!over()) {
    b.waiting.push_back(current);
    end_phase_if_over(b);
    wait("an mbarrier", {"mbarrier", int(static_cast<unsigned char *>(barrier) - block.dynamic)});
  }
  acquire(b.clock);
  return true;
}

void bulk_copy(void *shared, const void *global, unsigned bytes, void *barrier) {
  if (bytes % 16) fail("cp.async.bulk of %u bytes, not a multiple of 16", bytes);
  AsyncCopy copy{static_cast<unsigned char *>(shared), static_cast<const unsigned char *>(global), bytes, bytes};
  issue(copy, 16, "cp.async.bulk");
  MBarrier &b = mbarrier(barrier);
  b.copies.push_back(copy);
  release(b.clock); /* who waits for the bytes sees them */
  end_phase_if_over(b);
}

static NamedBarrier &named(int id, int threads) {
  if (id < 1 || id > 15) fail("named barrier %d: expected 1 to 15", id);
  if (threads % 32 || threads <= 0) fail("named barrier %d for %d threads, not a multiple of 32", id, threads);
  NamedBarrier &b = named_barriers[id];
  if (b.arrived && b.expected != threads) fail("named barrier %d for %d threads and for %d", id, b.expected, threads);
  b.expected = threads;
  release(b.clock);
  ++b.arrived;
  return b;
}

static void end_if_complete(NamedBarrier &b) {
  if (b.arrived < b.expected) return;
  b.arrived = 0;
  std::vector<Thread *> waiting;
  waiting.swap(b.waiting);
  wake(waiting.data(), waiting.size());
}

void named_barrier_arrive(int id, int threads) { end_if_complete(named(id, threads)); }

void named_barrier_sync(int id, int threads) {
  NamedBarrier &b = named(id, threads);
  b.waiting.push_back(current);
  end_if_complete(b);
  wait("a named barrier", {"barrier", id});
  acquire(b.clock);
}

} // namespace pagedkern_host
