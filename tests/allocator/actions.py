"""What a caller may do with an allocator, in any legal order: each action takes three numbers, so that hypothesis or a
seeded generator can drive it. See `oracle.Engine` for how it is judged.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pagedkern.allocator import BlockAllocator, Retention, Verdict
from pagedkern.errors import InvalidArgument, StaleSequence
from tests.allocator.shadow import KEYS, Kept, Row, Salt, Shadow, Span
from tests.allocator.stepping import GROWING, PROMPTS, Stepping

SALTS: tuple[Salt, ...] = (None, None, None, None, "tenant", b"tenant", 7)


class World(Stepping):
    """The engine with its actions."""

    def __init__(self, *args: Any, alike: bool = False, most: int = 8, **options: Any) -> None:
        options.setdefault("clock", float)  # it is always 0.0
        super().__init__(*args, **options)
        self.alike = alike  # whether all prompts begin in the same way, under the same salt
        self.most = most  # sequences
        self.options = options
        self.num_origins = 0
        self.action = ""  # the last one
        self.doomed: Shadow | None = None  # is freed before the next

    # Choosing.

    def origin(self, salt: Salt) -> int:
        place = type(salt), salt
        if place not in self.origins:
            self.num_origins += 1
            self.origins[place] = self.num_origins
        return self.origins[place]

    def prompt(self, a: int, b: int) -> list[int]:
        length = self.size * (b % 4 + 1) if a & 8 else b % (4 * self.size) + bool(a & 6)
        if self.alike:
            return PROMPTS[0][:length]
        tail = [] if a % 5 else [b % 7, a % 7]
        return PROMPTS[a // 16 % 3][:length] + tail

    def salt(self, c: int) -> Salt:
        return None if self.alike else SALTS[c % len(SALTS)]

    def spans(self, length: int, c: int) -> list[Span]:
        """No keys for most prompts, else one or two."""
        if c % 4 or length < 2 or not self.keyed:
            return []
        start = c // 4 % (length - 1)
        end = min(length, start + 1 + c // 16 % (2 * self.size))
        spans: list[Span] = [(start, end, KEYS[c // 64 % len(KEYS)])]
        if c % 8 and end < length:
            spans.append((end, length, KEYS[c // 32 % len(KEYS)]))
        return spans

    keyed = True

    def retention(self, length: int, c: int) -> list[Kept]:
        """How long blocks of a prompt are to be kept."""
        if c % 5 or not length or not self.retains:
            return []
        start = c // 5 % length
        return [(start, min(length, start + self.size), 1 + c % 3, (None, 2.0, 5.0)[c // 3 % 3])]

    retains = True

    def pick(self, a: int, state: str = "live") -> Shadow | None:
        those = self.those(state)
        return those[a % len(those)] if those else None

    def perform(self, name: str, a: int, b: int, c: int) -> None:
        """The action, or another one if there is nothing that it could be done to; then look at everything."""
        if self.doomed in self.shadows:
            self.action = "free"
            self.drop(self.doomed)
            self.compare()
        self.doomed = None
        instead = self.instead(name) if a & 15 else name
        if instead == "drain" != name and c & 1:
            instead = "abort_all"
        self.action = instead
        getattr(self, instead)(a, b, c)
        self.compare()

    def instead(self, name: str) -> str:
        """What makes the action possible later."""
        live = self.those()
        if self.lacking:
            self.lacking = False
            return "free_all" if self.shadows and not self.flights else "end_transaction" if self.open else "drain"
        if name in (*GROWING, "branch") and not any(s.scheduled == len(s.tokens) for s in live):
            name = "prefill_all"
        if name in ("prefill", "prefill_all") and all(s.scheduled == len(s.tokens) for s in live):
            return "append_known" if len(live) > self.most // 2 else "create"
        if (
            name in ("free", "free_all", "truncate", "fork", "pin", "release_window", "swap_out", "come_back")
            and not live
        ):
            return "create"
        if name in ("create", "create_count", "fork", "branch", "pin") and len(self.shadows) >= self.most:
            return "free"
        if name == "swap_in" and len(live) == len(self.shadows):
            return "swap_out"
        if name in ("commit", "drain", "abort", "abort_all", "work_off") and not self.flights:
            return "append_known" if live else "create"
        return name

    # Sequences.

    def create(self, a: int, b: int, c: int) -> None:
        tokens, salt, priority = self.prompt(a, b), self.salt(c // 7), b // 64 % 4
        keys, kept = self.spans(len(tokens), c), self.retention(len(tokens), a // 5)
        self.admit(tokens, salt, priority, keys, kept, again=bool(a // 64 % 2))

    def create_long(self, a: int, b: int, c: int) -> None:
        """More than is free, or just as much."""
        length = (self.real.num_free_blocks + (0, 0, 1, 0)[b % 4]) * self.size - c % self.size
        base = PROMPTS[a % 3]
        tokens = (base * (length // 64 + 1))[: max(0, length)]
        shadow = self.admit(tokens, self.salt(c // 7), 0)
        if c & 3:
            self.doomed = shadow

    def admit(
        self,
        tokens: list[int],
        salt: Salt,
        priority: int,
        keys: Sequence[Span] = (),
        retention: Sequence[Kept] = (),
        again: bool = False,
    ) -> Shadow | None:
        free = self.real.num_free_blocks
        more: dict[str, Any] = {"keys": keys} if keys else {}
        verdict = self.real.can_allocate(tokens, salt=salt, **more)
        if again:
            more["again"] = True
        if retention:
            more["retention"] = [Retention(*kept) for kept in retention]
        handle = self.attempt(
            lambda: self.real.create(tokens, salt=salt, priority=priority, **more), self.blocks_for(len(tokens)), free
        )
        self.check_verdict(verdict, self.blocks_for(len(tokens)), handle is not None)
        if handle is None:
            return None
        self.created += 1
        if not again and self.options.get("prefix_caching", True):
            self.asked[handle.id] = len(tokens), handle.num_cached_tokens, True
        shadow = Shadow(handle, salt, self.origin(salt), priority, keys=list(keys), retention=list(retention))
        shadow.extend(tokens)
        shadow.cached = shadow.computed = shadow.scheduled = handle.num_cached_tokens
        self.shadows.append(shadow)
        self.find(shadow)
        return shadow

    def check_verdict(self, verdict: Verdict, need: int, done: bool) -> None:
        reserve = int(self.options.get("watermark", 0) * self.real.num_blocks)
        assert (verdict is Verdict.NEVER) == (need > self.real.num_blocks - reserve)
        assert done or verdict is not Verdict.OK
        assert reserve or done == (verdict is Verdict.OK)

    def find(self, shadow: Shadow) -> None:
        """What `num_cached_tokens` claims is there, or will come from the host."""
        size, table = self.size, shadow.handle.block_ids
        assert 0 <= shadow.cached < max(1, len(shadow.tokens))
        assert shadow.cached % size == 0 or shadow.cached == len(shadow.tokens) - 1
        self.check_fences({f"device{b}" for b in table[self.blocks_for(shadow.cached + 1) :]})
        there = self.blocks_for(shadow.cached) * size
        for start in range(0, there, size):
            values, b = shadow.values[start : start + size], table[start // size]
            if self.device[b * size : (b + 1) * size] != values:
                blocks = [self.host[i : i + size] for i in range(0, len(self.host), size)]
                assert values in blocks, f"{shadow.handle}: positions {start} to {start + size - 1} are nowhere"
                shadow.arriving = True

    def create_count(self, a: int, b: int, c: int) -> None:
        self.admit_count(a % (4 * self.size) + bool(b & 3))

    def admit_count(self, count: int) -> Shadow | None:
        """A prompt of which only the length is known."""
        free = self.real.num_free_blocks
        verdict = self.real.can_allocate(count)
        handle = self.attempt(lambda: self.real.create(count), self.blocks_for(count), free)
        self.check_verdict(verdict, self.blocks_for(count), handle is not None)
        if handle is None:
            return None
        self.created += 1
        shadow = Shadow(handle, None, 0, 0)
        shadow.extend(self.unknown_ids(count), told=False)
        self.shadows.append(shadow)
        return shadow

    def fork(self, a: int, b: int, c: int) -> None:
        shadow = self.pick(a)
        if c & 7:  # one that can be written to soon
            ready = [s for s in self.those() if s.tokens and s.scheduled == len(s.tokens)]
            ready = [s for s in ready if c & 24 == 8 and len(s.tokens) % self.size] or ready
            shadow = ready[a % len(ready)] if ready else shadow
        if shadow:
            for handle in self.real.fork(shadow.handle, (1, 1, 2, 0)[b % 4]):
                self.add_fork(shadow, handle)
                self.forked += 1

    def pin(self, a: int, b: int, c: int) -> None:
        able = [s for s in self.those() if s.computed >= self.size]
        shadow = able[a % len(able)] if able and c & 15 else self.pick(a)
        if shadow:
            pinned = self.add_fork(shadow, self.real.pin(shadow.handle))
            length = pinned.handle.num_tokens
            assert length % self.size == 0
            assert length <= max(shadow.computed, self.blocks_for(shadow.cached + 1) * self.size)
            self.cut(pinned, length)
            self.pinned += 1

    def add_fork(self, shadow: Shadow, handle: Any) -> Shadow:
        """It takes part in what is in flight."""
        fields = {n: list(v) if isinstance(v, list) else v for n, v in vars(shadow).items()}
        fork = Shadow(**{**fields, "handle": handle})
        shadow.shared = fork.shared = True
        for flight in fork.pending:
            row = next(row for row in flight.rows if row.shadow is shadow)
            flight.rows.append(Row(fork, row.start, row.end, row.base, row.before))
        self.shadows.append(fork)
        return fork

    def cut(self, shadow: Shadow, length: int) -> None:
        shadow.cut(length)
        for name in ("cached", "computed", "scheduled"):
            setattr(shadow, name, min(getattr(shadow, name), length))
        for row in (row for flight in shadow.pending for row in flight.rows if row.shadow is shadow):
            row.start, row.end, row.base = min(row.start, length), min(row.end, length), min(row.base, length)

    def truncate(self, a: int, b: int, c: int) -> None:
        shadow = self.pick(a)
        if shadow is None:
            return
        most = len(shadow.tokens)
        length = b % (most + 1) if c % 4 == 0 else max(0, most - (b % 2 + 1 if c % 4 > 1 else b % 7))
        if c % 4 == 1:
            length -= length % self.size
        self.shorten(shadow, length)

    def shorten(self, shadow: Shadow, length: int) -> None:
        table = shadow.handle.block_ids
        if length % self.size and table[length // self.size] < 0:
            self.refused(InvalidArgument, lambda: self.real.truncate(shadow.handle, length))
            return
        self.real.truncate(shadow.handle, length)
        self.cut(shadow, length)

    def free(self, a: int, b: int, c: int) -> None:
        if self.shadows:
            self.drop(self.shadows[a % len(self.shadows)])

    def drop(self, shadow: Shadow) -> None:
        self.real.free(shadow.handle)
        self.shadows.remove(shadow)
        shadow.state = "freed"
        if not shadow.asked and shadow.handle.id in self.asked:  # then its question does not count, if that is all
            asked, found, _ = self.asked.pop(shadow.handle.id)
            if shadow.shared or shadow.begun or shadow.moved or shadow.pending:
                self.asked[shadow.handle.id] = asked, found, False
        self.dead = [shadow.handle, *self.dead[:5]]

    def free_all(self, a: int, b: int, c: int) -> None:
        for shadow in self.some(list(self.shadows), a):
            self.drop(shadow)

    def release_window(self, a: int, b: int, c: int) -> None:
        shadow = self.pick(a)
        if shadow:
            self.real.release_window(shadow.handle, b % (shadow.computed + 1))
            shadow.windowed |= -1 in shadow.handle.block_ids

    def clear_cache(self, a: int, b: int, c: int) -> None:
        """As after a change of the model's weights: what is cached later has other values."""
        salts = {place[1] for place in self.origins}
        if a % 2 == 0 or not salts:
            self.real.clear_cache()
            self.origins.clear()
        elif self.clears_salts:
            place = sorted(self.origins, key=repr)[b % len(self.origins)]
            self.real.clear_cache(salt=place[1])
            del self.origins[place]

    clears_salts = True

    # Swapping.

    def swap_out(self, a: int, b: int, c: int) -> None:
        self.swap("swap_out", self.some(self.those(), a), "swapped out", self.real.num_free_host_blocks)

    def swap_in(self, a: int, b: int, c: int) -> None:
        self.swap("swap_in", self.some(self.those("swapped out"), a), "live", self.real.num_free_blocks)

    def swap(self, name: str, chosen: list[Shadow], state: str, free: int) -> None:
        handles = [s.handle for s in chosen]
        blocks = {b for h in handles for b in h.block_ids if b >= 0}
        rest = sum(self.blocks_for(len(s.tokens)) - len(s.handle.block_ids) for s in chosen) if state == "live" else 0
        plan = self.attempt(lambda: getattr(self.real, name)(handles), len(blocks) + rest, free)
        if plan is None:
            return
        rows = []
        for shadow in chosen:
            length = len(shadow.tokens)
            rows.append(Row(shadow, 0, 0, length, (shadow.state, shadow.arriving)))
            shadow.state = state
            shadow.arriving = False
        assert {kind for kind, _, _ in plan.moves} <= {name}
        self.launch(plan, rows)

    # What belongs together.

    def branch(self, a: int, b: int, c: int) -> None:
        """As a beam or a draft does: a fork; tokens for one of the two, and fewer and others for the other."""
        shadow = self.pick(a)
        if shadow is None or shadow.scheduled < len(shadow.tokens):
            return
        fork = self.add_fork(shadow, self.real.fork(shadow.handle)[0])
        self.forked += 1
        self.compare()
        first, second = (shadow, fork) if a & 16 else (fork, shadow)
        self.step([first], [[b % 3] * (1 + a // 32 % 2)], None, None, c)
        self.compare()
        self.shorten(second, max(0, len(second.tokens) - b % 4))
        self.compare()
        self.step([second], [[c % 3]], None, None, b)

    def come_back(self, a: int, b: int, c: int) -> None:
        """A prompt that only the host still has is asked for again, and changed."""
        shadow = self.pick(a)
        if shadow is None or self.open:
            return
        self.swap("swap_out", [shadow], "swapped out", self.real.num_free_host_blocks)
        for flight in list(self.flights):
            self.do_commit(flight)
        self.compare()
        self.drop(shadow)
        self.compare()
        filler = self.admit_count(self.real.num_free_blocks * self.size)
        self.compare()
        if filler:
            self.drop(filler)
        back = self.admit(shadow.tokens, shadow.salt, b % 4, shadow.keys)
        if back is None:
            return
        self.compare()
        fork = self.add_fork(back, self.real.fork(back.handle)[0]) if b & 4 else back
        self.forked += fork is not back
        self.shorten(back, max(0, len(back.tokens) - 1 - a // 4 % (self.size + 1)))
        self.compare()
        if back.scheduled == len(back.tokens):
            self.step([back], [[c % 3]], None, None, b)

    # The whole.

    def begin_transaction(self, a: int, b: int, c: int) -> None:
        if len(self.open) < 3:
            self.begin()

    def end_transaction(self, a: int, b: int, c: int) -> None:
        if self.open:
            self.end()

    def undo_transaction(self, a: int, b: int, c: int) -> None:
        if len(self.open) > 1 and a % 8 == 0:
            self.leave_outer_first()
        elif self.open:
            self.roll_back()

    def snapshot(self, a: int, b: int, c: int) -> None:
        """Go on with an allocator made from the state of this one."""
        if self.flights or self.open:
            self.refused(InvalidArgument, self.real.snapshot)
            return
        restored = self.restored(json.loads(json.dumps(self.real.snapshot())))
        assert restored.stats == self.real.stats
        handles = {seq.id: seq for seq in restored.sequences}
        for shadow in self.shadows:
            self.dead.append(shadow.handle)  # a handle of another allocator now
            shadow.handle = handles[shadow.handle.id]
        self.real = restored
        self.last_batch, self.tables = [], {}

    def restored(self, state: dict[str, Any]) -> BlockAllocator:
        return BlockAllocator.restore(state, clock=self.options["clock"])

    def stale(self, a: int, b: int, c: int) -> None:
        dead = [*self.dead, *(s.handle for s in self.those("swapped out"))]
        if not dead:
            return
        old, real = dead[a % len(dead)], self.real
        calls: list[Any] = [
            lambda: real.swap_out([old]),
            lambda: real.release_window(old, 0),
            lambda: real.fork(old),
            lambda: real.pin(old),
            lambda: real.truncate(old, 0),
            lambda: real.append([*(s.handle for s in self.ready(c)), old]),
            lambda: real.prefill([old]),
            lambda: real.mixed([old], [[1]], []),
        ]
        if old in self.dead:
            calls += [lambda: real.free(old), lambda: real.swap_in([old])]
        self.refused(StaleSequence, calls[b % len(calls)])


ACTIONS = tuple(
    name
    for name, value in (*vars(World).items(), *vars(Stepping).items())
    if getattr(value, "__code__", None) and value.__code__.co_varnames[:4] == ("self", "a", "b", "c")
)
"""The names of all actions."""
