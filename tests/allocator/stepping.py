"""Steps, and what becomes of them: part of the `actions`, each of which takes three numbers."""

from __future__ import annotations

from typing import Any

from pagedkern.allocator import Step
from pagedkern.errors import InvalidArgument
from tests.allocator.oracle import Engine
from tests.allocator.shadow import Row, Shadow

PROMPTS = [[(t * i * i + i // 3) % 3 for i in range(64)] for t in range(3)]
"""With common beginnings and different ends."""
GROWING = ("append", "append_known", "append_block", "append_again", "append_unknown", "append_ahead", "mixed")


class Stepping(Engine):
    """An engine and the actions that make, commit and abort steps."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.last_batch: list[Shadow] = []
        self.unknown = -1  # ids that the allocator does not know

    # Choosing.

    def some(self, shadows: list[Shadow], a: int) -> list[Shadow]:
        """Some of them, in some order; seldom none."""
        chosen = [s for i, s in enumerate(shadows) if a >> i & 1]
        if not chosen and a & 15:
            chosen = shadows[a % len(shadows) :][:1] if shadows else []
        return chosen[::-1] if a & 1 else chosen

    def ready(self, a: int) -> list[Shadow]:
        """Some that may be appended to."""
        return self.some([s for s in self.those() if s.scheduled == len(s.tokens)], a if a & 96 else -1)

    def waiting(self, a: int) -> list[Shadow]:
        """Some whose prompts are not computed and not in flight."""
        return self.some([s for s in self.those() if s.scheduled < len(s.tokens)], a)

    def unknown_ids(self, count: int) -> list[int]:
        self.unknown -= count
        return list(range(self.unknown, self.unknown + count))

    # Steps.

    def prefill(self, a: int, b: int, c: int) -> None:
        self.step([], None, self.waiting(a), b % 20 + 1 if c & 1 else None, c)

    def prefill_all(self, a: int, b: int, c: int) -> None:
        self.step([], None, self.waiting(-1), None, c)

    def append(self, a: int, b: int, c: int) -> None:
        chosen = self.ready(a)
        self.step(chosen, [[(b + i) % 3] for i in range(len(chosen))], None, None, c)

    def append_known(self, a: int, b: int, c: int) -> None:
        """Continue as one of the prompts does, so that what is generated can be found later."""
        chosen = self.ready(a)
        self.step(chosen, [[PROMPTS[b % 3][len(s.tokens) % 64]] for s in chosen], None, None, c)

    def append_block(self, a: int, b: int, c: int) -> None:
        """Several tokens, up to the end of a block or beyond."""
        chosen = self.ready(a)
        counts = [-len(s.tokens) % self.size + (b >> i & 1) or self.size for i, s in enumerate(chosen)]
        tokens = [
            [PROMPTS[b % 3][(len(s.tokens) + j) % 64] for j in range(n)] for s, n in zip(chosen, counts, strict=True)
        ]
        self.step(chosen, tokens, None, None, c)

    def append_again(self, a: int, b: int, c: int) -> None:
        """The same batch as before, several times: the fast path."""
        for i in range(a % (2 * self.size + 3)):
            batch = self.last_batch
            if not all(s.state == "live" and s.scheduled == len(s.tokens) for s in batch):
                return
            if not self.step(batch, [[(b + i + j) % 3] for j in range(len(batch))], None, None, c):
                return
            if c >> i & 1:
                self.drain(0, b, 0)
            self.compare()

    def append_unknown(self, a: int, b: int, c: int) -> None:
        chosen, count = self.ready(a), b % 3 + 1
        self.step(chosen, [self.unknown_ids(count) for _ in chosen], None, None, c, told=False)

    def append_ahead(self, a: int, b: int, c: int) -> None:
        chosen = self.ready(a)
        self.step(chosen, [[c % 3] * (1 + b % 2)] * len(chosen), None, None, c, lookahead=b // 2 % (2 * self.size + 1))

    def mixed(self, a: int, b: int, c: int) -> None:
        chosen = self.ready(a)
        tokens = [[(c + i) % 3] * (1 + (c >> i) % 2) for i in range(len(chosen))]
        budget = max(1, sum(map(len, tokens))) + c // 2 % 9 if c & 1 else None
        self.step(chosen, tokens, self.waiting(b), budget, c, lookahead=b % 4 if c % 8 == 0 else 0)

    def step(
        self,
        growing: list[Shadow],
        tokens: list[list[int]] | None,
        prompts: list[Shadow] | None,
        budget: int | None,
        c: int,
        told: bool = True,
        lookahead: int = 0,
    ) -> bool:
        """`append` without prompts, `prefill` without tokens, else `mixed`. Returns whether there was room."""
        new = tokens or []
        batch, ends = self.reach(growing, new, prompts or [], budget)
        ahead = dict.fromkeys(growing, lookahead)
        blocks = [
            self.blocks_for(end + ahead.get(s, 0)) - s.scheduled // self.size
            for s, end in zip(batch, ends, strict=True)
        ]  # most that each can need
        handles, others = [s.handle for s in growing], [s.handle for s in prompts or []]
        given: Any = [t[0] for t in new] if c & 64 and all(len(t) == 1 for t in new) else new

        def call() -> Step:
            if prompts is None and told:
                return self.real.append(handles, given, lookahead=lookahead)
            if prompts is None:
                return self.real.append(handles, None, num_tokens=len(new[0]) if new else 1)
            if tokens is None:
                return self.real.prefill(others, budget)
            return self.real.mixed(handles, given, others, budget, lookahead=lookahead)

        before = {b for s in batch for b in s.handle.block_ids}
        step = self.attempt(call, sum(blocks), self.real.num_free_blocks)
        if step is None:
            return False
        self.check_fences({f"device{b}" for s in batch for b in s.handle.block_ids if b not in before})
        if prompts is None:
            self.last_batch = growing
        rows = [Row(s, s.scheduled, end, len(s.tokens)) for s, end in zip(batch, ends, strict=True)]
        for shadow, ids in zip(growing, new, strict=True):
            shadow.extend(ids, told)
        for row in rows:
            row.shadow.scheduled = row.end
        self.launch(step, rows, ahead, peek=bool(c & 32))
        return True

    def reach(
        self, growing: list[Shadow], new: list[list[int]], prompts: list[Shadow], budget: int | None
    ) -> tuple[list[Shadow], list[int]]:
        """The rows of a step, and up to where each is computed: prompts get what the budget leaves, the first first."""
        ends = [len(s.tokens) + len(t) for s, t in zip(growing, new, strict=True)]
        left = None if budget is None else budget - sum(map(len, new))
        for shadow in prompts:
            count = len(shadow.tokens) - shadow.scheduled
            if left is not None:
                count = min(count, left)
                left -= count
            if count:
                ends.append(shadow.scheduled + count)
        return [*growing, *prompts][: len(ends)], ends

    # What is in flight.

    def commit(self, a: int, b: int, c: int) -> None:
        flights = [f for f in self.flights if not f.inside]
        if not flights:
            return
        flight = flights[a % len(flights) if b % 4 == 0 else 0]
        if self.may_commit(flight):
            self.do_commit(flight)
        else:
            self.refused(InvalidArgument, lambda: self.real.commit(flight.plan))

    def drain(self, a: int, b: int, c: int) -> None:
        """Commit all that is in flight, or all but the last, oldest first."""
        for flight in list(self.flights[: len(self.flights) - b % 2]):
            if not flight.inside and self.may_commit(flight):
                self.do_commit(flight)

    def abort(self, a: int, b: int, c: int) -> None:
        if not self.flights:
            return
        flight = self.flights[a % len(self.flights) if b % 3 == 0 else -1]
        if not self.may_abort(flight):
            self.refused(InvalidArgument, lambda: self.real.abort(flight.plan))
            return
        if c % 4 == 0 and self.mode == "mixed":
            self.execute(flight)  # it has run, and its results are thrown away
        self.do_abort(flight)

    def abort_all(self, a: int, b: int, c: int) -> None:
        for flight in list(self.flights[::-1]):
            self.do_abort(flight)

    def work_off(self, a: int, b: int, c: int) -> None:
        """The device does some of what is in flight."""
        if self.mode == "mixed" and self.flights:
            self.execute(self.flights[a % len(self.flights)])
