"""The fast path: a batch that decodes one token a sequence, step after step, is moved as one thing.

What changes from step to step is the same for all rows: each length and each slot grows by one. So lengths and slots
are one big integer each, with a lane for each row, and adding a constant advances them all. A row needs attention
only when its sequence enters a new block (take one, write it into the table) or fills one (hand it to the prefix
cache): a calendar says which rows do so at which step. The fields of each sequence are derived when somebody looks.

A lockstep batch is active from the `append` that made it until one of its sequences is used in any other way.
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Sequence as List
from functools import lru_cache

from pagedkern.allocator import caching
from pagedkern.allocator.arguments import MAX_TOKENS
from pagedkern.allocator.buffers import Table
from pagedkern.allocator.handles import Expect, Fill, Lockstep, Phase, Plan, PlanRow, Sequence, Step
from pagedkern.allocator.ledger import Ledger
from pagedkern.errors import InvalidArgument


class LockstepBatch(Lockstep):
    """A batch whose sequences all grow by one token a step, each with a last block of its own."""

    __slots__ = (
        "_base",
        "_calendar",
        "_committed",
        "_cu_seqlens_q",
        "_first",
        "_issued",
        "_ledger",
        "_lengths",
        "_log",
        "_longest",
        "_pending",
        "_slots",
        "_table",
        "active",
        "logs",
        "members",
        "seqs",
    )

    @classmethod
    def start(cls, ledger: Ledger, step: Step, table: Table) -> None:
        """Make one of the sequences of a step that has just appended a token to each, if they can be one."""
        seqs, size = step.seqs, ledger.block_size
        known = [bool(s._root) and len(s._tokens) == s._length for s in seqs]
        if not seqs or any(known) != all(known):
            return
        for s in seqs:
            behind = s._blocks[max(0, s._registered - 1) :]  # what the cache does not know yet, and the block before
            if len(s._blocks) != -(-s._length // size) or (known[0] and min(behind) < 0):
                return
        lockstep = cls(ledger, step, table, logs=known[0])
        for row, s in enumerate(seqs):
            s._lockstep, s._row = lockstep, row
        ledger.lockstep_batches[id(lockstep)] = lockstep

    def __init__(self, ledger: Ledger, step: Step, table: Table, logs: bool) -> None:
        self._ledger = ledger
        self._first = step  # its commit comes before those of the steps made here
        self.active = True
        self.members = step.seqs
        self.seqs = list(step.seqs)  # compared with what `append` is given
        self.logs = logs  # whether token ids are known, and kept for the prefix cache
        self._log = array("q")  # ids of the last steps, S each; those of full blocks have gone to the sequences
        self._base = step.seq_lens[:]
        self._longest = max(self._base)
        self._lengths = int.from_bytes(self._base.tobytes(), sys.byteorder)  # lanes of 32 bits
        self._slots = step.slot_mapping[:]  # of the last step; callers may do with theirs what they like
        self._cu_seqlens_q = array("i", range(len(self.seqs) + 1))
        self._table = table
        self._issued = 0  # steps made here
        self._committed = 0
        self._pending: deque[Step] = deque()
        size = ledger.block_size
        calendar: dict[int, list[int]] = {}
        for row, length in enumerate(self._base):
            calendar.setdefault(-length % size, []).append(row)
        # [k % B], if there are any: the rows that enter a new block at the k-th step, and filled one the step before
        self._calendar = {phase: tuple(rows) for phase, rows in calendar.items()}

    def belongs_to(self, ledger: Ledger) -> bool:
        return self._ledger is ledger

    def length(self, row: int) -> int:
        """`num_tokens` of a row."""
        return self._base[row] + self._issued

    def computed(self, row: int, before: int) -> int:
        """`num_computed_tokens` of a row, `before` being the number that its own record has."""
        return self._base[row] + self._committed if self._committed else before

    def advance(self, ids: array[int] | None) -> Step:
        """The step that appends one token to each sequence. O(S) in C, O(rows that enter or fill a block) in Python."""
        ledger, number, seqs = self._ledger, self._issued, self.seqs
        size, rows = ledger.block_size, len(seqs)
        if self._longest + number >= MAX_TOKENS:
            raise InvalidArgument(f"seqs: {_too_long(self)}, expected at most 2^31-1 tokens")
        entering = self._calendar.get(number % size, ())
        fresh = ledger.pool.take(len(entering)) if entering else ()
        step = Step(ledger.origin, ledger.last_plan + 1, self.members)
        table = self._table
        if self._longest + number + 1 > table.width * size:
            table, _, _ = make_table(self.members, None, 2 * table.width)
            table.step = 0
        slots = array("q", _add_one(self._slots, 8 * rows, _ones(64, rows)))

        # Nothing below raises.
        ledger.last_plan += 1
        self._issued = number + 1
        if ledger.table is self._table:
            ledger.table = table
        self._table = table
        entries, width = table.entries, table.width
        for row, b in zip(entering, fresh, strict=True):
            blocks = seqs[row]._blocks
            entries[row * width + len(blocks)] = b
            blocks.append(b)
            slots[row] = b * size
        self._slots, step._slots = slots, slots[:]
        self._lengths += _ones(32, rows)
        step.seq_lens = array("i", self._lengths.to_bytes(4 * rows, sys.byteorder))
        step.cu_seqlens_q = self._cu_seqlens_q[:]
        step.num_tokens = rows
        step.max_seqlen_q = 1
        step._table = table.view
        step.base = table.step or None
        step.changed_rows = entering if table.step else range(rows)
        table.step = step.id
        step._lockstep = self
        if ids is not None:
            step._fills = self._record(ids)
        self._pending.append(step)
        ledger.in_flight[step.id] = step
        return step

    def _record(self, ids: array[int]) -> list[Fill]:
        """Keep the ids of a step. Returns the blocks that are full now."""
        size, rows, log, number = self._ledger.block_size, len(self.seqs), self._log, self._issued
        log.extend(ids)
        start = len(log) - min(size, number) * rows
        fills = []
        for row in self._calendar.get(number % size, ()):
            seq = self.seqs[row]
            tokens, blocks = seq._tokens, seq._blocks
            new = log[start + row :: rows]
            tokens.extend(new)
            chunk = new if len(new) == size else tokens[-size:]
            fills.append((seq, blocks[-2] if len(blocks) > 1 else -1, chunk.tobytes(), blocks[-1]))
        if len(log) >= 2 * size * rows:
            del log[: len(log) - size * rows]
        return fills

    def commit(self, step: Step) -> None:
        """The oldest step in flight has run. O(blocks it filled)."""
        first = self._pending[0] if self._first._phase is Phase.COMMITTED else self._first
        if first is not step:
            raise InvalidArgument(f"plan: {step.id} comes after {first.id} for the same sequences, commit that first")
        if step._fills:
            caching.fill(self._ledger, step._fills)
        self._pending.popleft()
        self._committed += 1
        step._phase = Phase.COMMITTED
        del self._ledger.in_flight[step.id]

    def stop(self) -> None:
        """Its sequences go their own ways: steps in flight become steps like any other, records are settled on
        demand.
        """
        size = self._ledger.block_size
        flights: list[tuple[Step, list[PlanRow]]] = []
        for number, step in enumerate(self._pending, self._committed + 1):
            ends = [(seq, base + number) for seq, base in zip(self.seqs, self._base, strict=True)]
            flights.append((step, [PlanRow(seq, n - 1, n, n - 1, -(-(n - 1) // size)) for seq, n in ends]))

        # Nothing below raises.
        self.active = False
        del self._ledger.lockstep_batches[id(self)]
        for step, rows in flights:
            step._rows, step._lockstep, step._fills = rows, None, None
            for seq in self.seqs:
                seq._pending += (step,)

    def settle(self, seq: Sequence, row: int) -> None:
        """Bring a sequence's own record up to date, after `stop`."""
        seq._length = seq._scheduled = self._base[row] + self._issued
        seq._computed = self.computed(row, seq._computed)
        if self.logs:
            missing = seq._length - len(seq._tokens)
            if missing:
                seq._tokens.extend(self._log[len(self._log) - missing * len(self.seqs) + row :: len(self.seqs)])
            if self._committed:
                seq._registered = seq._computed // self._ledger.block_size
                seq._private = max(seq._private, seq._registered)

    def has(self, step: Plan) -> bool:
        return step in self._pending

    def check(self, expect: Expect) -> None:
        """Raise if its records, the table and the slots do not fit its sequences. O(their blocks)."""
        expect(self.active, "a lockstep that has ended is listed as active")
        expect(self._committed + len(self._pending) == self._issued, "a lockstep has lost a step")
        table, slots = self._table, self._slots
        size = self._ledger.block_size
        for row, seq in enumerate(self.seqs):
            name = f"row {row} of a lockstep, sequence {seq.id}"
            length = self.length(row)
            expect(seq._lockstep is self and seq._row == row, f"{name}: is not in this lockstep")
            expect(len(seq._blocks) == -(-length // size), f"{name}: {len(seq._blocks)} blocks for {length} tokens")
            entries = table.entries[row * table.width : (row + 1) * table.width]
            expect(entries[: len(seq._blocks)].tolist() == seq._blocks, f"{name}: the block table is not up to date")
            expect(set(entries[len(seq._blocks) :]) <= {-1}, f"{name}: garbage in the block table")
            last = seq._blocks[-1]
            expect(slots[row] == last * size + (length - 1) % size, f"{name}: slot {slots[row]} is not in block {last}")
            expect(not length % size or self._ledger.pool.refs[last] == 1, f"{name}: its last block {last} is shared")


def _too_long(lockstep: LockstepBatch) -> str:
    seq = next(s for row, s in enumerate(lockstep.seqs) if lockstep.length(row) >= MAX_TOKENS)
    return f"sequence {seq.id} would have {seq.num_tokens + 1} tokens"


def _add_one(lanes: array[int], nbytes: int, ones: int) -> bytes:
    """Each element plus one. No element is near the end of its range, so no lane overflows into the next."""
    return (int.from_bytes(lanes, sys.byteorder) + ones).to_bytes(nbytes, sys.byteorder)


@lru_cache(256)
def _ones(bits: int, lanes: int) -> int:
    """A 1 in each lane."""
    return ((1 << bits * lanes) - 1) // ((1 << bits) - 1)


def make_table(seqs: List[Sequence], last: Table | None, headroom: int) -> tuple[Table, list[int], int | None]:
    """The table of a batch that grows, the rows that differ from the last one, and the step that used that.

    `headroom`, a power of two, rounds the width up. O(rows) when the batch keeps its size, plus O(blocks) for each
    row that changed.
    """
    need = max([len(s._blocks) for s in seqs], default=0)
    if last is not None and seqs and len(last.seqs) == len(seqs) and need <= last.width:
        width, entries, base = last.width, last.entries[:], last.step
        changed = [i for i, (s, old) in enumerate(zip(seqs, last.seqs, strict=True)) if s is not old or s._dirty]
    else:
        width, base = max(1, (need + headroom) & -headroom), None
        entries = array("i", [-1]) * (len(seqs) * width)
        changed = list(range(len(seqs)))
    for i in changed:
        blocks = array("i", seqs[i]._blocks)
        if base is None:
            entries[i * width : i * width + len(blocks)] = blocks
        else:
            entries[i * width : (i + 1) * width] = blocks + array("i", [-1]) * (width - len(blocks))
    for i in changed:
        seqs[i]._dirty = False
    return Table(entries, seqs, width), changed, base
