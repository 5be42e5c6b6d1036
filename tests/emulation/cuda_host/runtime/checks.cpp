/* The checked mode: every access of the kernel, seen through the calls that g++ -fsanitize=thread puts before each one
 * (no library of the compiler is linked; the functions are these).
 *
 * Shared memory: reads of bytes that nobody wrote, and data races: two accesses of different threads, one a write, with
 * no barrier between them. Each thread has a clock; thread t knows what u did up to clocks[t][u]. A byte remembers its
 * last writer and two of its readers (the first and the last since that write), which finds every race with a writer, and
 * a race with a reader unless both of those are ordered and a third is not.
 * Global memory: accesses outside the arrays of the launch.
 * What g++ -fsanitize=alignment,bounds,signed-integer-overflow,shift finds is reported likewise. */
#include "block.h"

#include <algorithm>

#include <link.h>

namespace pagedkern_host {

#ifndef PAGEDKERN_CHECKED

void reset_checks() {}
void set_ranges(const Range *, long) {}
void set_module(const void *) {}
void touch(const void *, size_t, Access, const void *) {}
void touch_as(unsigned, const void *, size_t, Access) {}
void touch_atomic(const void *, int) {}
void mark(const void *, size_t, bool) {}
void order_threads(Thread *const *, size_t) {}
void release(Clock &) {}
void acquire(const Clock &) {}

#else

namespace {

struct Event {
  unsigned thread, time; /* time 0: none */
};
struct Byte {
  Event writer, first_reader, last_reader;
  bool initialised, atomic; /* atomic: the last write was */
};
std::vector<Byte> bytes_of_dynamic, bytes_of_fixed;
std::vector<Clock> clocks; /* [thread][thread] */
std::vector<Range> ranges;
bool bounded;
Range module_, runtime;

bool ordered(Event e, unsigned thread) {
  return e.time == 0 || e.thread == thread || clocks[thread][e.thread] >= e.time;
}

std::string at(const void *pc) { /* the launcher makes a source line of it */
  const unsigned char *p = static_cast<const unsigned char *>(pc);
  if (p < module_.begin || p >= module_.end) return "";
  char text[40];
  snprintf(text, sizeof text, " @{%zx}", size_t(p - module_.begin));
  return text;
}

[[noreturn]] void report_race(unsigned thread, const char *does, Event other, const char *did, const std::string &where,
                              const void *pc) {
  fail_plainly("data race: thread " + std::to_string(thread) + " " + does + " " + where + at(pc) + ", thread " +
               std::to_string(other.thread) + " " + did + " it, and no barrier lies between");
}

void check_shared(unsigned thread, std::vector<Byte> &shadow, size_t offset, size_t count, Access access, const void *pc) {
  Event now{thread, clocks[thread][thread]};
  for (size_t i = offset; i < offset + count; ++i) {
    Byte &b = shadow[i];
    auto where = [&] {
      return "byte " + std::to_string(i) + (&shadow == &bytes_of_dynamic ? " of dynamic" : " of static") + " shared memory";
    };
    if (!(access == Access::ATOMIC && b.atomic) && !ordered(b.writer, thread))
      report_race(thread, access == Access::READ ? "reads" : "writes", b.writer, "wrote", where(), pc);
    if (access == Access::READ) {
      if (!b.initialised)
        fail_plainly("thread " + std::to_string(thread) + " reads " + where() + at(pc) +
                     ", which is not initialised, or a copy to it is in flight");
      if (!b.first_reader.time) b.first_reader = now;
      b.last_reader = now;
      continue;
    }
    for (Event reader : {b.first_reader, b.last_reader})
      if (!ordered(reader, thread)) report_race(thread, "writes", reader, "read", where(), pc);
    b = Byte{now, {}, {}, true, access == Access::ATOMIC};
  }
}

bool inside(const unsigned char *p, size_t size, const unsigned char *begin, size_t bytes) {
  return p >= begin && p + size <= begin + bytes;
}

bool in_ranges(const unsigned char *p, size_t size) {
  static size_t last; /* most accesses go where the one before went */
  if (last < ranges.size() && p >= ranges[last].begin && p + size <= ranges[last].end) return true;
  for (size_t i = 0; i < ranges.size(); ++i)
    if (p >= ranges[i].begin && p + size <= ranges[i].end) return last = i, true;
  return false;
}

} // namespace

void set_ranges(const Range *given, long count) {
  bounded = count >= 0;
  ranges.clear();
  if (bounded) ranges.assign(given, given + count);
}

static Range module_of(const void *address) {
  struct Search {
    uintptr_t address;
    Range found;
  } search{uintptr_t(address), {nullptr, nullptr}};
  dl_iterate_phdr(
      [](dl_phdr_info *info, size_t, void *data) {
        Search &s = *static_cast<Search *>(data);
        uintptr_t end = 0;
        for (int i = 0; i < info->dlpi_phnum; ++i)
          if (info->dlpi_phdr[i].p_type == PT_LOAD)
            end = std::max(end, uintptr_t(info->dlpi_phdr[i].p_vaddr + info->dlpi_phdr[i].p_memsz));
        if (s.address < info->dlpi_addr || s.address >= info->dlpi_addr + end) return 0;
        s.found = Range{(const unsigned char *)info->dlpi_addr, (const unsigned char *)info->dlpi_addr + end};
        return 1;
      },
      &search);
  return search.found;
}

void set_module(const void *address) {
  module_ = module_of(address);
  if (!runtime.begin) runtime = module_of(&threadIdx);
}

void reset_checks() {
  bytes_of_dynamic.assign(block.dynamic_bytes, Byte{});
  bytes_of_fixed.assign(block.fixed_bytes, Byte{});
  clocks.assign(block.size, Clock(block.size, 0));
  for (unsigned t = 0; t < block.size; ++t) clocks[t][t] = 1;
}

void touch_as(unsigned thread, const void *address, size_t size, Access access) {
  const unsigned char *p = static_cast<const unsigned char *>(address);
  if (inside(p, size, block.dynamic, block.dynamic_bytes))
    check_shared(thread, bytes_of_dynamic, size_t(p - block.dynamic), size, access, nullptr);
  else if (inside(p, size, block.fixed, block.fixed_bytes))
    check_shared(thread, bytes_of_fixed, size_t(p - block.fixed), size, access, nullptr);
  else
    touch(address, size, access);
}

void touch(const void *address, size_t size, Access access, const void *pc) {
  if (!current || !size) return;
  const unsigned char *p = static_cast<const unsigned char *>(address);
  if (inside(p, size, current->fiber.stack, STACK_BYTES)) return;
  if (inside(p, size, block.dynamic, block.dynamic_bytes))
    return check_shared(current->id, bytes_of_dynamic, size_t(p - block.dynamic), size, access, pc);
  if (inside(p, size, block.fixed, block.fixed_bytes))
    return check_shared(current->id, bytes_of_fixed, size_t(p - block.fixed), size, access, pc);
  if (!bounded || in_ranges(p, size)) return;
  for (const Range &module : {runtime, module_}) /* threadIdx and its like; constants */
    if (p >= module.begin && p + size <= module.end) return;
  std::string nearest;
  size_t best = size_t(-1);
  for (size_t i = 0; i < ranges.size(); ++i) {
    size_t off = p < ranges[i].begin ? size_t(ranges[i].begin - p) : size_t(p - ranges[i].end);
    if (off >= best) continue;
    best = off;
    nearest = ", " + std::to_string(off) + (p < ranges[i].begin ? " bytes before array " : " bytes after array ") +
              std::to_string(i) + " of " + std::to_string(ranges[i].end - ranges[i].begin) + " bytes";
  }
  fail("%s %zu bytes at %p%s, outside of the arrays of the launch%s", access == Access::READ ? "reads" : "writes", size,
       address, at(pc).c_str(), nearest.c_str());
}

void touch_atomic(const void *address, int bytes) {
  touch(address, size_t(bytes), Access::ATOMIC, __builtin_return_address(0));
}

void mark(const void *shared, size_t size, bool arrived) {
  const unsigned char *p = static_cast<const unsigned char *>(shared);
  bool dynamic = inside(p, size, block.dynamic, block.dynamic_bytes);
  std::vector<Byte> &shadow = dynamic ? bytes_of_dynamic : bytes_of_fixed;
  size_t offset = size_t(p - (dynamic ? block.dynamic : block.fixed));
  for (size_t i = offset; i < offset + size; ++i) shadow[i].initialised = arrived;
}

void order_threads(Thread *const *threads, size_t count) {
  Clock all(block.size, 0);
  for (size_t i = 0; i < count; ++i)
    for (unsigned u = 0; u < block.size; ++u) all[u] = std::max(all[u], clocks[threads[i]->id][u]);
  for (size_t i = 0; i < count; ++i) {
    Clock &clock = clocks[threads[i]->id];
    clock = all;
    ++clock[threads[i]->id];
  }
}

void release(Clock &clock) {
  Clock &mine = clocks[current->id];
  clock.resize(block.size, 0);
  for (unsigned u = 0; u < block.size; ++u) clock[u] = std::max(clock[u], mine[u]);
  ++mine[current->id];
}

void acquire(const Clock &clock) {
  Clock &mine = clocks[current->id];
  for (unsigned u = 0; u < clock.size(); ++u) mine[u] = std::max(mine[u], clock[u]);
}

#define PAGEDKERN_HOOK_(name, size, access) \
  extern "C" void __tsan_##name##size(void *p) { touch(p, size, access, __builtin_return_address(0)); }
#define PAGEDKERN_HOOKS_(size)                         \
  PAGEDKERN_HOOK_(read, size, Access::READ)            \
  PAGEDKERN_HOOK_(write, size, Access::WRITE)          \
  PAGEDKERN_HOOK_(unaligned_read, size, Access::READ)  \
  PAGEDKERN_HOOK_(unaligned_write, size, Access::WRITE)
PAGEDKERN_HOOKS_(1)
PAGEDKERN_HOOKS_(2)
PAGEDKERN_HOOKS_(4)
PAGEDKERN_HOOKS_(8)
PAGEDKERN_HOOKS_(16)
extern "C" void __tsan_read_range(void *p, size_t size) { touch(p, size, Access::READ, __builtin_return_address(0)); }
extern "C" void __tsan_write_range(void *p, size_t size) { touch(p, size, Access::WRITE, __builtin_return_address(0)); }
extern "C" void __tsan_func_entry(void *) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_init() {}

/* Each gets a record that begins with a place in the source. */
struct Place {
  const char *file;
  unsigned line, column;
};
#define PAGEDKERN_UNDEFINED_(name, what)                                            \
  extern "C" void __ubsan_handle_##name(const Place *place, ...) {                  \
    const char *slash = strrchr(place->file, '/');                                  \
    fail(what " at %s:%u", slash ? slash + 1 : place->file, place->line);           \
  }
PAGEDKERN_UNDEFINED_(type_mismatch_v1, "accesses an address that is not aligned to its type")
PAGEDKERN_UNDEFINED_(out_of_bounds, "indexes an array out of its bounds")
PAGEDKERN_UNDEFINED_(add_overflow, "overflows a signed integer by addition")
PAGEDKERN_UNDEFINED_(sub_overflow, "overflows a signed integer by subtraction")
PAGEDKERN_UNDEFINED_(mul_overflow, "overflows a signed integer by multiplication")
PAGEDKERN_UNDEFINED_(divrem_overflow, "overflows a signed integer by division")
PAGEDKERN_UNDEFINED_(negate_overflow, "overflows a signed integer by negation")
PAGEDKERN_UNDEFINED_(shift_out_of_bounds, "shifts by too many bits, or a negative number,")

#endif

} // namespace pagedkern_host
