/* Which thread runs, and the places where threads wait for each other: block barriers and warp collectives. */
#include <algorithm>

#include "block.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace pagedkern_host {

Block block;
Thread *current;

/* 0: lowest thread first, 1: highest first, more: the seed of a random order. Under the first two the threads that were
 * woken last run as far as they can before any other, which pulls warps as far apart as barriers let them. */
static unsigned long long order_, random_;

unsigned long long random_bits() {
  random_ ^= random_ << 13;
  random_ ^= random_ >> 7;
  random_ ^= random_ << 17;
  return random_;
}

static void arrange(Thread **threads, size_t count) { /* given lowest first, or in any order */
  if (order_ > 1) {
    for (size_t i = count; i > 1; --i) std::swap(threads[i - 1], threads[(random_bits() >> 20) % i]);
    return;
  }
  auto by_id = [](Thread *a, Thread *b) { return a->id < b->id; };
  if (!std::is_sorted(threads, threads + count, by_id)) std::sort(threads, threads + count, by_id);
  if (order_ == 1) std::reverse(threads, threads + count);
}

void wake(Thread **threads, size_t count) {
  if (!count) return;
  arrange(threads, count);
  for (size_t i = 0; i < count; ++i) {
    threads[i]->waits_at = nullptr;
    threads[i]->next = i + 1 < count ? threads[i + 1] : nullptr;
  }
  Thread *first = threads[0], *last = threads[count - 1];
  if (!block.first_ready) {
    block.first_ready = first;
    block.last_ready = last;
  } else if (order_ <= 1 || random_bits() >> 20 & 1) {
    last->next = block.first_ready;
    block.first_ready = first;
  } else {
    block.last_ready->next = first;
    block.last_ready = last;
  }
}

Thread *take_ready() {
  Thread *t = block.first_ready;
  if (t) block.first_ready = t->next;
  return t;
}

std::string names(const std::vector<const Thread *> &threads) {
  std::vector<unsigned> ids;
  for (const Thread *t : threads) ids.push_back(t->id);
  std::sort(ids.begin(), ids.end());
  std::string text = ids.size() == 1 ? "thread " : "threads ";
  for (size_t i = 0, j; i < ids.size(); i = j) {
    for (j = i + 1; j < ids.size() && ids[j] == ids[j - 1] + 1;) ++j;
    text += (i ? ", " : "") + std::to_string(ids[i]) + (j - i > 1 ? "-" + std::to_string(ids[j - 1]) : "");
  }
  return text;
}

template <typename F>
static std::vector<const Thread *> those(F condition) {
  std::vector<const Thread *> found;
  for (const Thread &t : block.threads)
    if (t.id < block.size && condition(t)) found.push_back(&t);
  return found;
}

static bool same(Site a, Site b) { return a.line == b.line && strcmp(a.file, b.file) == 0; }
static std::string text(Site site) {
  const char *slash = strrchr(site.file, '/');
  return std::string(slash ? slash + 1 : site.file) + ":" + std::to_string(site.line);
}

[[noreturn]] static void report_deadlock() {
  std::string message = "deadlock:";
  std::vector<const Thread *> left = those([](const Thread &t) { return !t.finished; });
  while (!left.empty()) {
    const Thread &first = *left[0];
    auto alike = [&](const Thread *t) { return t->waits_at == first.waits_at && same(t->site, first.site); };
    std::vector<const Thread *> group;
    std::copy_if(left.begin(), left.end(), std::back_inserter(group), alike);
    left.erase(std::remove_if(left.begin(), left.end(), alike), left.end());
    message += " " + names(group) + (group.size() > 1 ? " wait at " : " waits at ") + first.waits_at;
    message += " (" + text(first.site) + ");";
  }
  if (block.num_finished) message += " " + names(those([](const Thread &t) { return t.finished; })) + " returned";
  fail_plainly(message);
}

static void run_next() {
  Thread *from = current, *to = take_ready();
  if (!to) report_deadlock();
  if (to == from) return;
  current = to;
  threadIdx = current->index;
  switch_fiber(from->fiber, current->fiber);
}

void wait(const char *what, Site site) {
  current->waits_at = what;
  current->site = site;
  run_next();
}

void yield() {
  current->next = nullptr;
  if (block.first_ready) block.last_ready->next = current;
  else block.first_ready = current;
  block.last_ready = current;
  run_next();
}

void start_block(unsigned long long order, void (*body)()) {
  order_ = order;
  random_ = order * 0x9e3779b97f4a7c15ull | 1;
  block.size = blockDim.x * blockDim.y * blockDim.z;
  if (block.threads.size() < block.size) {
    size_t old = block.threads.size();
    block.threads.resize(block.size);
    unsigned char *stacks = map_stacks(block.size - old);
    for (size_t i = old; i < block.size; ++i) block.threads[i].fiber.stack = stacks + (i - old) * STACK_BYTES;
  }
  block.first_ready = nullptr;
  block.at_barrier.clear();
  block.warps.assign((block.size + 31) / 32, {});
  block.present.assign((block.size + 31) / 32, ~0u);
  if (block.size % 32) block.present.back() = (1u << block.size % 32) - 1;
  block.num_finished = 0;
  std::vector<Thread *> all;
  for (unsigned i = 0; i < block.size; ++i) {
    Thread &t = block.threads[i];
    t.fiber.prepare(body);
    t.id = i;
    t.index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / (blockDim.x * blockDim.y)};
    t.finished = t.refused = false;
    t.copies.clear();
    t.groups.clear();
    all.push_back(&t);
  }
  wake(all.data(), all.size());
}

int lane() { return int(current->id & 31); }
static std::vector<Group> &warp() { return block.warps[current->id / 32]; }

static std::vector<const Thread *> lanes(unsigned mask) {
  unsigned first = current->id & ~31u;
  return those([=](const Thread &t) { return t.id >= first && t.id - first < 32 && mask >> (t.id - first) & 1; });
}

void finish() {
  check_no_copy_in_flight();
  if (!block.at_barrier.empty()) {
    std::vector<const Thread *> waiting(block.at_barrier.begin(), block.at_barrier.end());
    fail("returns, but %s wait at the barrier at %s", names(waiting).c_str(), text(waiting[0]->site).c_str());
  }
  for (Group &group : warp())
    if (group.mask >> lane() & 1)
      fail("returns, but %s wait for it with mask %08x", names(lanes(group.arrived)).c_str(), group.mask);
  current->finished = true;
  block.present[current->id / 32] &= ~(1u << lane());
  if (++block.num_finished == block.size) end_block();
  run_next();
}

int block_barrier(Vote vote, int predicate, Site site) {
  std::vector<Thread *> &here = block.at_barrier;
  if (block.num_finished) {
    std::string gone = names(those([](const Thread &t) { return t.finished; }));
    fail("is at the barrier at %s, but %s returned without reaching it", text(site).c_str(), gone.c_str());
  }
  if (!here.empty() && !same(here[0]->site, site)) {
    std::string others = names({here.begin(), here.end()}), there = text(here[0]->site);
    fail("is at the barrier at %s, but %s at that at %s", text(site).c_str(), others.c_str(), there.c_str());
  }
  if (here.empty()) block.votes = vote == Vote::AND;
  if (vote == Vote::OR) block.votes |= predicate != 0;
  if (vote == Vote::AND) block.votes &= predicate != 0;
  if (vote == Vote::COUNT) block.votes += predicate != 0;
  here.push_back(current);
  if (here.size() == block.size) {
    for (Thread *t : here) t->vote = block.votes;
    order_threads(here.data(), here.size());
    std::vector<Thread *> all;
    all.swap(here);
    wake(all.data(), all.size());
  }
  wait("a barrier", site);
  return current->vote;
}

static void shuffle(Request *const requests[32], int to) {
  Request &r = *requests[to];
  int begin = to & ~(r.width - 1), end = begin + r.width, from = to;
  switch (r.kind) {
  case Collective::SHUFFLE: from = begin + (r.argument & (r.width - 1)); break;
  case Collective::SHUFFLE_UP: from = to - r.argument < begin ? to : to - r.argument; break;
  case Collective::SHUFFLE_DOWN: from = to + r.argument >= end ? to : to + r.argument; break;
  default: from = (to ^ r.argument) >= end ? to : to ^ r.argument;
  }
  if (!(r.mask >> from & 1)) fail("shuffle at %s: lane %d reads lane %d, not in its mask", text(r.site).c_str(), to, from);
  if (requests[from]->bytes != r.bytes) fail("shuffle at %s: lanes exchange values of different size", text(r.site).c_str());
  memcpy(r.out, requests[from]->in, r.bytes);
}

static void perform(Group &group) {
  Request *const *requests = group.requests;
  Collective kind = requests[lane()]->kind;
  if (kind == Collective::LDMATRIX) return perform_ldmatrix(requests);
  if (kind == Collective::MMA) return perform_mma(requests);
  unsigned ballot = 0;
  for (int i = 0; i < 32; ++i) {
    if (!(group.mask >> i & 1)) continue;
    if (kind == Collective::BALLOT) ballot |= unsigned(*static_cast<const int *>(requests[i]->in) != 0) << i;
    if (kind >= Collective::SHUFFLE && kind <= Collective::SHUFFLE_XOR) shuffle(requests, i);
    if (kind == Collective::MATCH)
      for (int j = 0; j < 32; ++j)
        if (group.mask >> j & 1 && memcmp(requests[i]->in, requests[j]->in, requests[i]->bytes) == 0)
          *static_cast<unsigned *>(requests[i]->out) |= 1u << j;
  }
  if (kind != Collective::BALLOT) return;
  for (int i = 0; i < 32; ++i)
    if (group.mask >> i & 1) *static_cast<unsigned *>(requests[i]->out) = ballot;
}

void collective(Request &request) {
  unsigned mask = request.mask, self = 1u << lane(), first = current->id & ~31u;
  unsigned present = block.present[first / 32];
  if (!(mask & self)) fail("warp collective at %s with mask %08x, which leaves it out", text(request.site).c_str(), mask);
  if (mask & ~present)
    fail("warp collective at %s with mask %08x, but lanes %08x do not exist or returned", text(request.site).c_str(), mask,
         mask & ~present);

  std::vector<Group> &groups = warp();
  auto group = std::find_if(groups.begin(), groups.end(), [=](const Group &g) { return g.mask == mask; });
  if (group == groups.end()) group = groups.insert(group, Group{mask, 0, {}});
  if (group->arrived) {
    const Request &other = *group->requests[__builtin_ctz(group->arrived)];
    if (other.kind != request.kind)
      fail("warp collective at %s, but %s of its mask %08x at a different one at %s", text(request.site).c_str(),
           names(lanes(group->arrived)).c_str(), mask, text(other.site).c_str());
  }
  group->arrived |= self;
  group->requests[lane()] = &request;
  if (group->arrived == mask) {
    perform(*group);
    Thread *all[32];
    size_t count = 0;
    for (unsigned i = 0; i < 32; ++i)
      if (mask >> i & 1) all[count++] = &block.threads[first + i];
    if (request.kind == Collective::SYNC) order_threads(all, count);
    groups.erase(group);
    wake(all, count);
  }
  wait("a warp collective", request.site);
}

} // namespace pagedkern_host
