"""An engine that is simulated to the token: what it writes, copies and reads, and what each sequence must find.

The memory of the device and that of the host are lists of slots. A slot holds the value of the token that was written
there; the value of a position depends on the sequence's salt, on all tokens up to there and on their keys, so it tells
whose it is. Steps and plans are carried out from their public buffers, in the order in which they were made: when they
are committed ("late"), as soon as they are made, as engines do that run ahead ("eager"), or at any time in between
("mixed"). After each operation every sequence's positions are read through its block table.

Nothing here knows how the allocator works: it keeps the lengths that callers know, and which operations are legal.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from pagedkern.allocator import BlockAllocator, Plan, Step
from pagedkern.allocator import Sequence as Handle
from pagedkern.errors import InvalidArgument, OutOfBlocks, PagedKernError
from tests.allocator.shadow import Flight, Row, Salt, Shadow, Undo, Work

MEMORY = {"copy": ("device", "device"), "swap_out": ("device", "host"), "swap_in": ("host", "device")}
"""From where to where the blocks of a move go."""


class Engine:
    """An allocator, the memory that it manages, and the shadows of its sequences."""

    def __init__(self, mode: str, num_blocks: int, block_size: int, num_host_blocks: int, **options: Any) -> None:
        self.mode = mode
        self.size = block_size
        self.real = BlockAllocator(num_blocks, block_size, num_host_blocks=num_host_blocks, **options)
        self.device: list[int | None] = [None] * (num_blocks * block_size)
        self.host: list[int | None] = [None] * (num_host_blocks * block_size)
        self.shadows: list[Shadow] = []
        self.flights: list[Flight] = []
        self.dead: list[Handle] = []
        self.origins: dict[tuple[type, Salt], int] = {}  # of each salt
        self.tables: dict[int, list[list[int]]] = {}  # block tables of steps that grow, as a device has them
        self.open: list[tuple[Any, Saved]] = []  # transactions, outermost first
        self.copied = self.moved_out = self.moved_in = self.arrived = 0  # blocks, of committed plans
        self.created = self.forked = self.pinned = 0
        self.asked: dict[int, tuple[int, int, bool]] = {}  # by sequence: tokens asked and found, whether that is sure
        self.lacking = False  # the last action found no room

    # Helpers.

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.size)

    def those(self, state: str = "live") -> list[Shadow]:
        return [s for s in self.shadows if s.state == state]

    def memory_of(self, shadow: Shadow) -> list[int | None]:
        return self.device if shadow.state == "live" else self.host

    def visible(self) -> object:
        """All that a caller can see and that a refused or undone call leaves as it was."""
        real = self.real
        passing = ("out_of_blocks", "plans", "peak_blocks_used", "peak_host_blocks_used")
        return (
            {name: count for name, count in real.stats.items() if name not in passing},
            [
                (s.id, s.state, s.num_tokens, s.num_computed_tokens, s.num_cached_tokens, s.block_ids)
                for s in real.sequences
            ],
            [flight.plan.state for flight in self.flights],
        )

    def attempt(self, call: Callable[[], Any], most_blocks: int, free: int) -> Any:
        """Do it, unless there is no room: then nothing may change, and there must have been too little."""
        before = self.visible()
        try:
            return call()
        except OutOfBlocks:
            assert self.visible() == before, "OutOfBlocks has changed something"
            assert most_blocks > free, f"OutOfBlocks: at most {most_blocks} blocks were needed, {free} were free"
            self.lacking = True
            return None

    def refused(self, error: type[PagedKernError], call: Callable[[], object]) -> None:
        before = self.visible()
        with pytest.raises(error):
            call()
        assert self.visible() == before, "a refused call has changed something"

    # Steps and plans.

    def launch(self, plan: Plan, rows: list[Row], ahead: dict[Shadow, int] | None = None, peek: bool = True) -> None:
        """A plan has been made: check what it says, and carry it out if this engine runs ahead."""
        work = []
        if isinstance(plan, Step):
            work = [Work(r, list(r.shadow.values), r.start, r.end, (ahead or {}).get(r.shadow, 0)) for r in rows]
            self.check_step(plan, rows, ahead)
        flight = Flight(plan, rows, work, bool(self.open))
        if not isinstance(plan, Step):
            self.check_fences({MEMORY[kind][1] + str(b) for kind, _, dst in plan.moves for b in dst})
        flight.touched = {MEMORY[kind][i] + str(b) for kind, *ends in plan.moves for i in (0, 1) for b in ends[i]}
        flight.touched |= {"device" + str(b) for w in work for b in w.row.shadow.handle.block_ids}
        if isinstance(plan, Step) and peek:  # else the buffers are made when it runs
            flight.seen = self.buffers(plan)
            self.check_exclusive(plan, flight.seen[0])
        for row in rows:
            row.shadow.pending.append(flight)
        self.flights.append(flight)
        if self.mode == "eager":
            self.execute(flight)

    def check_step(self, step: Step, rows: list[Row], ahead: dict[Shadow, int] | None) -> None:
        counts = [row.end - row.start for row in rows]
        assert list(step.seqs) == [row.shadow.handle for row in rows]
        assert list(step.seq_lens) == [row.end for row in rows]
        assert list(step.cu_seqlens_q) == [sum(counts[:i]) for i in range(len(counts) + 1)]
        assert (step.num_tokens, step.max_seqlen_q) == (sum(counts), max(counts, default=0))
        assert len(step.copies) == sum(len(src) for kind, src, _ in step.moves if kind == "copy")
        if not ahead:  # only steps that grow are compared with earlier ones
            return
        table = [list(entries) for entries in step.block_table.tolist()]
        if step.base is not None:
            changed = [list(entries) for entries in self.tables[step.base]]
            for row in step.changed_rows:
                changed[row] = table[row]
            used = [self.blocks_for(row.end) for row in rows]
            assert [r[:n] for r, n in zip(changed, used, strict=True)] == [
                r[:n] for r, n in zip(table, used, strict=True)
            ]
        self.tables = {step.id: table, **dict(list(self.tables.items())[:20])}

    def buffers(self, step: Step) -> tuple[list[list[int]], ...]:
        """What a step reads, in plain lists: this must not change any more."""
        table = step.block_table.tolist() if step.seqs else []
        used = [list(entries[: self.blocks_for(n)]) for entries, n in zip(table, step.seq_lens, strict=True)]
        moves = [(kind, list(src), list(dst)) for kind, src, dst in step.moves]
        return used, [list(step.slot_mapping), list(step.seq_lens), list(step.cu_seqlens_q)], moves

    def check_fences(self, fresh: set[str]) -> None:
        """What is handed out is neither read nor written by a plan in flight."""
        for flight in self.flights:
            assert not fresh & flight.touched, f"handed out while {flight.plan} needs it: {fresh & flight.touched}"

    def check_exclusive(self, step: Step, table: list[list[int]]) -> None:
        """A block that is written belongs to its writer alone."""
        owners = Counter(b for shadow in self.those() for b in shadow.handle.block_ids)
        slots, starts = iter(step.slot_mapping), step.cu_seqlens_q
        for i, (row, end) in enumerate(zip(table, step.seq_lens, strict=True)):
            for position in range(end - starts[i + 1] + starts[i], end):
                slot = next(slots)
                if slot >= 0:
                    b = row[position // self.size]
                    assert slot == b * self.size + position % self.size, f"row {i}, position {position}: slot {slot}"
                    assert owners[b] == 1, f"row {i} writes block {b}, which {owners[b]} sequences own"

    def execute(self, flight: Flight) -> None:
        """Carry out the plans up to this one, in the order in which they were made."""
        for other in self.flights:
            if other.inside:
                return
            if not other.executed:
                other.executed = True
                self.run(other)
            if other is flight:
                return

    def run(self, flight: Flight) -> None:
        plan, size = flight.plan, self.size
        if flight.seen is not None:
            assert self.buffers(plan) == flight.seen, f"{plan}: its buffers have changed"  # type: ignore[arg-type]
        if self.pickles and plan.id % 3 == 0:
            plan = pickle.loads(pickle.dumps(plan))
            self.refused(InvalidArgument, lambda: self.real.commit(plan))
        for kind, src, dst in plan.moves:
            source, target = (getattr(self, memory) for memory in MEMORY[kind])
            assert len(set(dst)) == len(dst), f"{plan}: a block is moved to twice"
            contents = [source[b * size : (b + 1) * size] for b in src]
            for b, values in zip(dst, contents, strict=True):
                target[b * size : (b + 1) * size] = values
        if isinstance(plan, Step) and plan.seqs is not None:
            self.compute(flight, plan)

    pickles = True

    def compute(self, flight: Flight, step: Step) -> None:
        """The forward pass: write what is new, then read everything, then let a draft model write ahead."""
        size, device = self.size, self.device
        table = step.block_table.tolist() if flight.work else []
        slots = iter(step.slot_mapping)
        for work in flight.work:
            for position in range(work.start, work.end):
                slot = next(slots)
                if slot >= 0:
                    device[slot] = work.values[position]
        assert next(slots, None) is None
        for i, work in enumerate(flight.work):
            for position in range(0 if not flight.broken else work.end, work.end):
                b = table[i][position // size]
                assert b < 0 or device[b * size + position % size] == work.values[position], (
                    f"step {step.id}, row {i}, position {position}, block {b}: it reads what is not its own"
                )
        for i, work in enumerate(flight.work):
            for position in range(work.end, work.end + work.ahead):
                b = table[i][position // size]
                assert b >= 0, f"step {step.id}, row {i}: no block for position {position}, which is reserved"
                device[b * size + position % size] = -7
        for buffer in (
            step.slot_mapping,
            step.seq_lens,
            step.cu_seqlens_q,
            *(b for _, *two in step.moves for b in two),
        ):
            for i in range(len(buffer)):  # they are the caller's own
                buffer[i] = 10**6

    def may_commit(self, flight: Flight) -> bool:
        return all(row.shadow.state == "freed" or row.shadow.pending[0] is flight for row in flight.rows)

    def may_abort(self, flight: Flight) -> bool:
        return all(row.shadow.state == "freed" or row.shadow.pending[-1] is flight for row in flight.rows)

    def hidden(self, call: Callable[[], None], expected: bool) -> bool:
        """Whether the call was done. Unless `expected`, one that depends on sharing that callers do not see may be
        refused.
        """
        if expected:
            call()
            return True
        before, message = self.visible(), ""
        try:
            call()
        except InvalidArgument as error:
            message = str(error)
        if message:
            assert "first" in message
            assert self.visible() == before
        return not message

    def do_commit(self, flight: Flight) -> None:
        self.execute(flight)
        assert flight.executed
        if not self.hidden(lambda: self.real.commit(flight.plan), flight is self.flights[0]):
            return
        for row in flight.rows:
            shadow = row.shadow
            if shadow.state != "freed":
                assert shadow.pending.pop(0) is flight
                shadow.computed = max(shadow.computed, row.end)
                shadow.arriving = False
                shadow.begun |= isinstance(flight.plan, Step)
                shadow.moved |= not isinstance(flight.plan, Step)
                shadow.asked |= row.end > row.start
        for kind, src, _ in flight.plan.moves:
            self.copied += len(src) * (kind == "copy")
            self.moved_out += len(src) * (kind == "swap_out")
            if kind == "swap_in":
                self.arrived += len(src)
                self.moved_in += len(src) * (not isinstance(flight.plan, Step))
        self.land(flight)

    def do_abort(self, flight: Flight) -> None:
        if not self.hidden(lambda: self.real.abort(flight.plan), flight is self.flights[-1]):
            return
        freed = [row.shadow for row in flight.rows if row.shadow.state == "freed"]
        for row in flight.rows:
            shadow = row.shadow
            if shadow in freed:
                continue
            assert shadow.pending.pop() is flight
            if row.before is not None:
                shadow.state, shadow.arriving = row.before
            else:
                shadow.cut(min(row.base, len(shadow.tokens)))
                shadow.scheduled = min(shadow.scheduled, row.start)
        brought = {"device" + str(b) for kind, _, dst in flight.plan.moves if kind == "swap_in" for b in dst}
        for other in self.flights[self.flights.index(flight) + 1 :]:
            other.broken |= any(row.shadow in freed for row in other.rows)
            if not brought.isdisjoint(other.touched):  # live sequences that wait for the move would have kept it
                other.broken |= any(row.shadow.state == "freed" for row in other.rows)
        self.land(flight)

    def land(self, flight: Flight) -> None:
        self.flights.remove(flight)
        self.refused(
            InvalidArgument, lambda: (self.real.abort if flight.plan.id % 2 else self.real.commit)(flight.plan)
        )

    # Transactions.

    def begin(self) -> None:
        context = self.real.transaction()
        saved = Saved(self)
        context.__enter__()
        self.open.append((context, saved))

    def end(self) -> None:
        context, _ = self.open.pop()
        context.__exit__(None, None, None)
        self.outside()

    def roll_back(self) -> None:
        context, saved = self.open.pop()
        undo = Undo()
        assert not context.__exit__(Undo, undo, None), "the exception is swallowed"
        saved.restore(self)
        self.outside()

    def leave_outer_first(self) -> None:
        """As tasks of an event loop do that each open one: all are taken back."""
        contexts, saved = [context for context, _ in self.open], self.open[0][1]
        with pytest.raises(InvalidArgument, match="inside it"):
            contexts[0].__exit__(None, None, None)
        for context in contexts[1:-1]:
            assert not context.__exit__(Undo, Undo(), None)
        with pytest.raises(InvalidArgument, match="taken back already"):
            contexts[-1].__exit__(None, None, None)
        self.open = []
        saved.restore(self)

    def outside(self) -> None:
        """Steps made in a transaction that has ended may be carried out."""
        if not self.open:
            for flight in self.flights:
                flight.inside = False
            if self.mode == "eager" and self.flights:
                self.execute(self.flights[-1])

    # Comparing.

    def compare(self) -> None:
        """Everything that a caller can see and read is right."""
        real = self.real
        real.check()
        assert [s.id for s in real.sequences] == [s.handle.id for s in self.shadows]
        owned: dict[str, set[int]] = {"live": set(), "swapped out": set()}
        for shadow in self.shadows:
            handle, table = shadow.handle, shadow.handle.block_ids
            assert handle.state == shadow.state
            seen = handle.num_tokens, handle.num_computed_tokens, handle.num_cached_tokens
            assert seen == (len(shadow.tokens), shadow.computed, shadow.cached), f"{handle}"
            owned[shadow.state].update(b for b in table if b >= 0)
            self.read_back(shadow, table)
        if not self.flights:
            assert real.num_free_blocks == real.num_blocks - len(owned["live"])
            if all(shadow.begun or not shadow.tokens for shadow in self.shadows):  # else host blocks may wait for it
                assert real.num_free_host_blocks == real.num_host_blocks - len(owned["swapped out"])
            self.compare_counts()

    counts_are_final = True

    def compare_counts(self) -> None:
        """With nothing in flight, exactly what was carried out has been counted."""
        stats = self.real.stats
        if not self.counts_are_final:
            return
        assert (stats["blocks_copied"], stats["blocks_swapped_out"]) == (self.copied, self.moved_out)
        assert self.moved_in <= stats["blocks_swapped_in"] <= self.arrived
        assert stats["sequences_created"] == self.created
        assert self.forked <= stats["forks"] <= self.forked + self.pinned
        for index, name in enumerate(("prefix_tokens_asked", "prefix_tokens_found")):
            least = sum(counts[index] for counts in self.asked.values() if counts[2])
            most = sum(counts[index] for counts in self.asked.values())
            assert least <= stats[name] <= most, f"{name}: {stats[name]}, expected {least} to {most}"

    def read_back(self, shadow: Shadow, table: list[int]) -> None:
        if shadow.arriving or not all(flight.executed for flight in shadow.pending):
            return
        memory, size = self.memory_of(shadow), self.size
        for position in range(shadow.scheduled):
            b = table[position // size]
            assert b < 0 or memory[b * size + position % size] == shadow.values[position], (
                f"{shadow.handle}: position {position} in {shadow.state} block {b} is not its own"
            )


class Saved:
    """The shadows and flights when a transaction began."""

    LISTS = ("shadows", "flights", "dead")
    COUNTS = ("copied", "moved_out", "moved_in", "arrived", "created", "forked", "pinned")
    DICTS = ("tables", "origins", "asked")

    def __init__(self, engine: Engine) -> None:
        rows = [row for flight in engine.flights for row in flight.rows]
        self.records = [(item, self.copy(item)) for item in (*engine.shadows, *engine.flights, *rows)]
        self.lists = {name: list(getattr(engine, name)) for name in self.LISTS}
        self.counts = {name: getattr(engine, name) for name in self.COUNTS}
        self.dicts = {name: dict(getattr(engine, name)) for name in self.DICTS}
        self.visible = engine.visible()

    @staticmethod
    def copy(item: object) -> dict[str, Any]:
        kept = ("executed", "seen", "work", "plan")
        return {n: list(v) if isinstance(v, list) else v for n, v in vars(item).items() if n not in kept}

    def restore(self, engine: Engine) -> None:
        made = [shadow for shadow in engine.shadows if shadow not in self.lists["shadows"]]
        for item, fields in self.records:
            vars(item).update({n: list(v) if isinstance(v, list) else v for n, v in fields.items()})
        for name, items in self.lists.items():
            setattr(engine, name, list(items))
        for name, count in self.counts.items():
            setattr(engine, name, count)
        for name, entries in self.dicts.items():
            setattr(engine, name, dict(entries))
        for shadow in made:
            shadow.state = "freed"
            assert shadow.handle.state == "freed"
            engine.dead.append(shadow.handle)
        assert engine.visible() == self.visible, "a transaction has left a trace"
