"""What the allocator hands out: steps and plans, with everything in buffers that torch, ctypes or C take without a
copy.
"""

from __future__ import annotations

import enum
import sys
from array import array
from collections.abc import Iterator
from collections.abc import Sequence as List
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from pagedkern.allocator.sequence import Sequence, State

if TYPE_CHECKING:
    from pagedkern.allocator.allocator import BlockAllocator
    from pagedkern.allocator.cohort import Cohort
    from pagedkern.allocator.prefix import Fill

Move: TypeAlias = "tuple[str, array[int], array[int]]"
"""(kind, src, dst): kind "copy", "swap_out" (device to host) or "swap_in"; src and dst are int64 block ids."""


class Verdict(enum.Enum):
    """Whether a prompt can be admitted."""

    OK = "ok"  # now
    LATER = "later"  # when enough blocks have been freed
    NEVER = "never"  # it is larger than the pool


class Phase(enum.Enum):
    IN_FLIGHT = "in flight"
    COMMITTED = "committed"
    ABORTED = "aborted"


class Copies:
    """Block copies on the device: all sources are read before any destination is written, no destination occurs
    twice.
    """

    __slots__ = ("dst", "src")

    def __init__(self, src: array[int], dst: array[int]) -> None:
        self.src = src  # int64 [n], block ids
        self.dst = dst  # int64 [n], block ids

    def __len__(self) -> int:
        return len(self.src)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.src, self.dst, strict=True)

    def __repr__(self) -> str:
        return f"Copies({list(self)})"


MOST_LANES = 1024
"""Slots of larger blocks are made one by one: most of them would be thrown away."""


class Row:
    """What one step in flight does for one sequence: it computes tokens `start .. end-1`."""

    __slots__ = ("base", "before", "cows", "end", "moved", "num_blocks", "reach", "rides", "seq", "start")

    def __init__(self, seq: Sequence, start: int, end: int, base: int, num_blocks: int) -> None:
        self.seq = seq
        self.start = start
        self.end = end
        self.reach = end  # blocks are to be there for so many tokens
        self.base = base  # the sequence's length if the step is aborted
        self.num_blocks = num_blocks  # its table's length then
        # Blocks copied on write, if any are: (index in the table, block before, block now).
        self.cows: list[tuple[int, int, int]] | None = None
        self.before: tuple[State, tuple[int, ...]] | None = None  # of a swap: what `abort` restores
        self.moved: list[int] | None = None  # of a swap: the table that the sequence got, as long as it has that one
        self.rides = False  # the sequence only depends on the plan: nothing of its own is done or undone

    def copy(self, seq: Sequence) -> Row:
        """The same for a fork of the sequence, which has a table of its own."""
        row = Row(seq, self.start, self.end, self.base, self.num_blocks)
        row.cows, row.before, row.rides = self.cows and self.cows[:], self.before, self.rides
        return row

    def restore(self, start: int, end: int, base: int) -> None:
        """Undo a `clamp`."""
        self.start, self.end, self.base = start, end, base

    def clamp(self, length: int) -> None:
        """The sequence is cut to `length` tokens while the step is in flight."""
        self.start, self.end, self.base = min(self.start, length), min(self.end, length), min(self.base, length)


class Origin(NamedTuple):
    """The blocks that a copied plan was made for. It stands in place of the allocator, which a copy does not have."""

    block_size: int
    num_blocks: int


class Plan:
    """Block moves to carry out, in the order of `moves`, before `commit`.

    Within one move all sources are read before any destination is written, and no destination occurs twice. Until the
    commit (or `abort`), blocks that the plan reads or writes are not handed out to anybody else.

    Plans and steps can be pickled, as for the other ranks of a tensor-parallel model. The copy has all that can be read
    here, its sequences as handles without token ids, and belongs to no allocator: it cannot be committed.
    """

    __slots__ = (
        "_arrivals",
        "_brings",
        "_held",
        "_held_host",
        "_owner",
        "_phase",
        "_rows",
        "_seals",
        "id",
        "moves",
        "seqs",
    )

    def __init__(
        self, owner: BlockAllocator | Origin | None, ident: int, seqs: List[Sequence], moves: tuple[Move, ...] = ()
    ) -> None:
        self._owner = owner
        self._phase = Phase.IN_FLIGHT
        self._rows: list[Row] | None = []  # None: the cohort that made the step accounts for it
        self._held: list[int] = []  # device blocks fenced for it
        self._held_host: list[int] = []
        self._seals: list[tuple[int, int]] = []  # (device block, leading tokens that must stay)
        self._brings = False  # it moves contents to the device
        self._arrivals: list[tuple[int, int]] = []  # (device block, host block) of prefixes found on the host
        self.id = ident  # counts steps and plans of one allocator
        self.seqs = seqs  # the sequences, in the order of the rows
        self.moves = moves  # (kind, src, dst): "copy", "swap_out", "swap_in"; src and dst are int64 block ids

    @property
    def state(self) -> str:
        """ "in flight", "committed" or "aborted"."""
        return self._phase.value

    @property
    def block_size(self) -> int | None:
        """Tokens a block, as the allocator counts them: the cache that carries the plan out must have the same. None of
        a plan that no allocator made.
        """
        return None if self._owner is None else self._owner.block_size

    @property
    def num_blocks(self) -> int | None:
        """Blocks of the allocator's pool, not of this plan: the cache must have as many at the least. None of a plan
        that no allocator made.
        """
        return None if self._owner is None else self._owner.num_blocks

    def __reduce__(self) -> tuple[Any, ...]:
        return _copied, (type(self), self._contents())

    def _contents(self) -> dict[str, Any]:
        """The fields of a copy."""
        origin = None if self._owner is None else Origin(self._owner.block_size, self._owner.num_blocks)
        return {"_owner": origin, "_phase": self._phase, "id": self.id, "seqs": self.seqs, "moves": self.moves}

    def _saved(self) -> tuple[Phase, int, int, int]:
        return self._phase, len(self._held), len(self._held_host), len(self._seals)

    def _restore(self, phase: Phase, num_held: int, num_held_host: int, num_seals: int) -> None:
        self._phase = phase
        del self._held[num_held:]
        del self._held_host[num_held_host:]
        del self._seals[num_seals:]


class Step(Plan):
    """One forward pass over a batch. S sequences (rows), T new tokens, W columns of the block table.

    Buffers stay valid as long as the step is referenced, and what the step reads in them never changes: when the next
    step of the same batch writes into the same block table, it fills entries behind this step's `seq_lens` only.
    So do not write into `block_table`; the other buffers are the caller's own.
    """

    __slots__ = (
        "_cohort",
        "_copies",
        "_fills",
        "_slots",
        "_source",
        "_table",
        "base",
        "changed_rows",
        "cu_seqlens_q",
        "max_seqlen_q",
        "num_tokens",
        "seq_lens",
    )

    seq_lens: array[int]  # int32 [S]: tokens in the cache once the step has run
    cu_seqlens_q: array[int]  # int32 [S+1]: row i computes tokens cu[i] .. cu[i+1]-1 of this step
    max_seqlen_q: int  # most tokens that one row computes
    num_tokens: int  # T, the new tokens of all rows
    changed_rows: List[int]  # rows of block_table that differ from that of step number `base`
    base: int | None  # None: no earlier table to compare with, all rows are listed

    def __init__(self, owner: BlockAllocator | Origin | None, ident: int, seqs: List[Sequence]) -> None:
        self._owner = owner
        self._phase = Phase.IN_FLIGHT
        self._held = []
        self._held_host = []
        self._seals = []
        self._brings = False
        self._arrivals = []
        self._rows = None
        self._cohort: Cohort | None = None
        self._fills: list[Fill] | None = None
        self._slots: array[int] | None = None
        self._table: memoryview | None = None
        # Of each row: a copy of its blocks, of which those from one index up to another are written, and the positions.
        self._source: list[tuple[list[int], int, int, int, int]] = []
        self.id = ident
        self.seqs = seqs
        self.moves = ()
        self._copies: Copies | None = None

    @property
    def copies(self) -> Copies:
        """Blocks to copy before the step runs; also in `moves`."""
        if self._copies is None:
            self._copies = Copies(array("q"), array("q"))
        return self._copies

    @property
    def block_table(self) -> memoryview:
        """int32 [S, W], rows contiguous; -1 where a row has no block. Made on first use for prompts. O(S*W)."""
        if self._table is None:
            width = max([1, *(len(blocks) for blocks, *_ in self._source)])
            entries = array("i", [-1]) * (len(self._source) * width)
            for i, (blocks, *_) in enumerate(self._source):
                entries[i * width : i * width + len(blocks)] = array("i", blocks)
            self._table = Table(entries, self.seqs, width).view
        return self._table

    @property
    def slot_mapping(self) -> array[int]:
        """int64 [T]: where each new token's K and V go, `block*B + offset`.

        -1 = write nothing: the last token of a prompt that was cached whole; its K and V are in the cache already,
        only its query is to be computed. Made on first use for prompts. O(T).
        """
        if self._slots is None:
            slots = array("q")
            size = self._owner.block_size if self._owner is not None else 1
            for blocks, first, last, start, end in self._source:
                append_slots(slots, blocks[first:last], size, start, end)
            self._slots = slots
        return self._slots

    @property
    def num_seqs(self) -> int:
        """S, the rows of the block table."""
        return len(self.seqs)

    @property
    def row_stride(self) -> int:
        """Elements from one row of `block_table` to the next: W."""
        return self.block_table.shape[1] if self.seqs else 0  # type: ignore[index]

    def _contents(self) -> dict[str, Any]:
        table = array("i", self.block_table.tobytes())  # an array can be pickled, a memoryview cannot
        names = ("seq_lens", "cu_seqlens_q", "max_seqlen_q", "num_tokens", "changed_rows", "base")
        buffers = {name: getattr(self, name) for name in names}
        return {**super()._contents(), **buffers, "_copies": self.copies, "_slots": self.slot_mapping, "_table": table}

    def __repr__(self) -> str:
        return f"<Step {self.id} {self.state}: {self.num_seqs} sequences, {self.num_tokens} tokens, {self.copies}>"


def _copied(kind: type[Plan], contents: dict[str, Any]) -> Plan:
    """The plan or step that a pickle gives."""
    plan = kind(contents["_owner"], contents["id"], contents["seqs"])
    for name, value in contents.items():
        setattr(plan, name, value)
    if isinstance(plan, Step):
        entries, rows = contents["_table"], contents["seqs"]
        plan._table = Table(entries, rows, len(entries) // max(1, len(rows))).view
    return plan


def append_slots(slots: array[int], blocks: list[int], size: int, start: int, end: int) -> None:
    """Append the slots of positions `start .. end-1` of a table; positions before the first of its blocks give -1.

    `blocks` are the table's entries from the one of position `end-1` back to the first written. O(end - start), in C
    within each block.
    """
    first = -(-end // size) - len(blocks)  # index in the table of blocks[0]
    skipped = min(end, max(start, first * size)) - start
    slots.extend([-1] * skipped)
    position = start + skipped
    if position == end:
        return
    blocks, offset = blocks[position // size - first :], position % size
    if size > MOST_LANES:
        for b in blocks:
            count = min(size - offset, end - position)
            slots.extend(range(b * size + offset, b * size + offset + count))
            position, offset = position + count, 0
        return
    zero, step = _slot_lanes(size)
    data = b"".join([(zero + b * step).to_bytes(8 * size, sys.byteorder) for b in blocks])
    slots.frombytes(data[8 * offset : 8 * (offset + end - position)])


@lru_cache(16)
def _slot_lanes(size: int) -> tuple[int, int]:
    """The slots of block 0 as one integer with a lane of 64 bits each, and what every next block adds to it."""
    lanes = (array("q", range(size)), array("q", [size]) * size)
    return int.from_bytes(lanes[0].tobytes(), sys.byteorder), int.from_bytes(lanes[1].tobytes(), sys.byteorder)


class Table:
    """A block table under construction. Its buffer is shared by the steps of one batch."""

    __slots__ = ("entries", "seqs", "step", "view", "width")

    def __init__(self, entries: array[int], seqs: List[Sequence], width: int) -> None:
        self.entries = entries  # int32 [S * W]
        self.seqs = seqs
        self.width = width
        self.step = 0  # number of the last step that used it
        flat = memoryview(entries)
        # A memoryview has no shape with a zero in it: an empty batch keeps a flat, empty buffer.
        self.view = flat.cast("B").cast("i", (len(seqs), width)) if seqs else flat


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
