"""What callers hold: the handles of sequences, of plans that move blocks, and of steps that compute."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable
from collections.abc import Sequence as List
from typing import Any, NamedTuple, TypeAlias

from pagedkern.allocator.arguments import Salt
from pagedkern.allocator.buffers import Copies, Move, Table, append_slots
from pagedkern.allocator.retention import Lease, Retention
from pagedkern.allocator.spans import Span


class Verdict(enum.Enum):
    """Whether a prompt can be admitted."""

    OK = "ok"  # now
    LATER = "later"  # when enough blocks have been freed
    NEVER = "never"  # it is larger than the pool


class State(enum.Enum):
    """Where a sequence's blocks are."""

    LIVE = "live"  # on the device
    SWAPPED = "swapped out"  # in host memory
    FREED = "freed"


LIVE = State.LIVE  # looking into an enum takes longer

Expect: TypeAlias = Callable[[bool, str], None]
"""What an audit calls: raises `AuditError` with the message unless the condition holds."""


class Origin:
    """What handles know of the allocator that made them: which it is, and its shape."""

    __slots__ = ("block_size", "is_copy", "num_blocks")

    def __init__(self, block_size: int, num_blocks: int, is_copy: bool = False) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.is_copy = is_copy  # that of a pickled plan, which belongs to no allocator


class Lockstep:
    """A batch whose sequences all move together: what handles ask of it. The allocator's fast path is one."""

    __slots__ = ()

    active: bool  # its sequences still move together
    seqs: list[Sequence]

    def length(self, row: int) -> int:
        """`num_tokens` of a row."""
        raise NotImplementedError

    def computed(self, row: int, before: int) -> int:
        """`num_computed_tokens` of a row, `before` being the number that its own record has."""
        raise NotImplementedError

    def settle(self, seq: Sequence, row: int) -> None:
        """Bring a sequence's own record up to date, after `stop`."""
        raise NotImplementedError

    def commit(self, step: Step) -> None:
        """The oldest step in flight has run."""
        raise NotImplementedError

    def stop(self) -> None:
        """Let its sequences go their own ways from now on."""
        raise NotImplementedError

    def has(self, step: Plan) -> bool:
        """Whether a step in flight is one of its own."""
        raise NotImplementedError

    def check(self, expect: Expect) -> None:
        """Audit it. O(its sequences and their blocks)."""
        raise NotImplementedError


Fill: TypeAlias = "tuple[Sequence, int, bytes, int]"
"""A block that is full: (its sequence, the block before it or -1, its packed tokens, the block)."""


class Sequence:
    """A sequence of an allocator. Made by `create` and `fork`, of use until `free`; all attributes are read-only.

    The positions of its tokens are cut into three parts: `[0, num_computed_tokens)` have their K and V in the cache,
    those up to the end of the last step in flight will have once it has run, the others are still to be computed by
    `prefill`.
    """

    __slots__ = (
        "__weakref__",
        "_apart",
        "_arriving",
        "_asked",
        "_blocks",
        "_cached",
        "_computed",
        "_dear",
        "_dirty",
        "_found",
        "_keys",
        "_leases",
        "_length",
        "_lockstep",
        "_owner",
        "_passed",
        "_pending",
        "_present",
        "_priority",
        "_private",
        "_question",
        "_registered",
        "_retention",
        "_root",
        "_row",
        "_salt",
        "_scheduled",
        "_state",
        "_tokens",
        "_whole",
        "id",
    )

    def __init__(
        self,
        owner: Origin | None,
        ident: int,
        blocks: list[int],
        tokens: array[int],
        length: int,
        root: int = 0,
        salt: Salt = None,
        asked: int = 0,
    ) -> None:
        self.id = ident  # unique in its allocator, never used again
        self._owner = owner
        self._state = LIVE
        self._blocks = blocks  # -1 where a block behind the window was given back
        self._tokens = tokens  # int64; the ids that are known, a prefix of the sequence
        self._length = length
        self._cached = 0  # tokens that need no computing because the prefix cache had them
        self._present = 0  # tokens that the prefix cache had, one more if it had all of them
        self._computed = 0
        self._scheduled = 0  # computed, or computed by a step in flight
        self._private = 0  # from this block on, blocks have no other owner and are not cached; before, look
        self._registered = 0  # leading full blocks that the prefix cache has been told of
        self._root = root  # node of the empty prefix under the salt; 0: nothing of this sequence is cached
        self._salt = salt
        self._priority = 0
        self._keys: tuple[Span, ...] = ()  # what tokens of the prompt stand for beside their ids
        self._retention: tuple[Retention, ...] = ()
        self._leases: tuple[Lease | None, ...] = ()  # of each retention that is for some time only
        self._dear = False  # it has a priority or retention: its cached blocks have levels
        self._passed = 0  # leading blocks that were given back behind the window
        self._whole = True  # each registered block that it still has is cached itself, not another one in its place
        # Not whole, or with passed blocks, blocks to come, a priority, retention or keys: needs a closer look.
        self._apart = False
        self._asked = asked  # tokens that `create` has counted, until a step of this sequence is committed
        self._found = 0  # those of them that the prefix cache had
        self._question = 0  # shared with forks made since; see counts.py
        self._pending: tuple[Plan, ...] = ()  # steps and plans in flight that concern this sequence, oldest first
        self._arriving = False  # some blocks get their contents from the host, by a move that is not committed
        self._dirty = True  # the row in the last block table of `append` is not up to date
        self._lockstep: Lockstep | None = None  # the batch whose steps move this sequence
        self._row = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence: the prompt and everything appended."""
        lockstep = self._lockstep
        return self._length if lockstep is None else lockstep.length(self._row)

    @property
    def num_computed_tokens(self) -> int:
        """Leading tokens whose K and V are in the cache: found there by `create`, or computed by a committed step."""
        lockstep = self._lockstep
        return self._computed if lockstep is None else lockstep.computed(self._row, self._computed)

    @property
    def num_cached_tokens(self) -> int:
        """Leading tokens that `create` found in the prefix cache and that nobody computes again."""
        return self._cached

    @property
    def block_ids(self) -> list[int]:
        """The physical blocks, in order: block j holds the tokens `j*B .. j*B+B-1`. -1: given back behind the window.

        Blocks of the device, or of the host while the sequence is swapped out. A copy. O(blocks).
        """
        return self._blocks[:]

    @property
    def state(self) -> str:
        """ "live", "swapped out" or "freed"."""
        return self._state.value

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.id} {self.state}: {self.num_tokens} tokens, {self.num_computed_tokens} computed, "
            f"{len(self._blocks)} blocks>"
        )

    # What the allocator does with it.

    @property
    def _owns_all(self) -> bool:
        """Whether all that is before a cached block of this sequence is its own, too."""
        return self._whole and not self._passed and not self._arriving and self._root != 0

    def _sync(self) -> None:
        """Take over what happened to this sequence in its lockstep batch, and leave it. O(1) whatever the steps."""
        lockstep = self._lockstep
        if lockstep is not None:
            lockstep.settle(self, self._row)
            self._lockstep = None

    _saved: Callable[[], tuple[Any, ...]]
    """What `_restore` needs to undo changes made from now on.

    `_blocks` and `_tokens` may grow in place afterwards; any other change to them must be made to a copy.
    """

    def _restore(self, blocks: list[int], num_blocks: int, tokens: array[int], num_tokens: int, *values: Any) -> None:
        self._blocks, self._tokens = blocks, tokens
        for name, value in zip(UNDONE, values, strict=True):
            setattr(self, name, value)
        del blocks[num_blocks:]
        del tokens[num_tokens:]
        self._dirty = True

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled handle tells what the sequence was, and belongs to no allocator."""
        blocks = array("q", self._blocks)
        return _copied_sequence, (self.id, self._state, blocks, self.num_tokens, self.num_computed_tokens, self._cached)


def _copied_sequence(ident: int, state: State, blocks: array[int], length: int, computed: int, cached: int) -> Sequence:
    """The handle that a pickle gives."""
    seq = Sequence(None, ident, blocks.tolist(), array("q"), length)
    seq._state, seq._computed, seq._scheduled, seq._cached = state, computed, computed, cached
    return seq


class _Use(NamedTuple):
    """What happens to one field of a sequence, beside `_blocks` and `_tokens`."""

    undone: bool = True  # it may change, and the undo log puts it back
    forked: bool = True  # forks inherit it
    stored: bool = True  # snapshots have it as a number


_FIELDS = {
    "_state": _Use(forked=False, stored=False),
    "_length": _Use(forked=False),
    "_cached": _Use(),
    "_present": _Use(),
    "_computed": _Use(),
    "_scheduled": _Use(),
    "_private": _Use(forked=False),
    "_registered": _Use(),
    "_root": _Use(),
    "_passed": _Use(),
    "_whole": _Use(stored=False),
    "_apart": _Use(stored=False),
    "_arriving": _Use(stored=False),
    "_pending": _Use(forked=False, stored=False),
    "_asked": _Use(),
    "_found": _Use(),
    "_question": _Use(),
    "_salt": _Use(undone=False, stored=False),
    "_priority": _Use(undone=False),
    "_keys": _Use(stored=False),
    "_retention": _Use(undone=False, stored=False),
    "_dear": _Use(undone=False, stored=False),
}
UNDONE, INHERITED, STORED = (tuple(n for n, use in _FIELDS.items() if use[i]) for i in range(3))
_SAVED = ("_blocks", "_blocks.__len__()", "_tokens", "_tokens.__len__()", *UNDONE)
# As if it were written out: `operator.attrgetter` takes three times as long, and every operation saves its sequences.
Sequence._saved = eval(f"lambda self: ({', '.join(f'self.{name}' for name in _SAVED)})")


class Phase(enum.Enum):
    IN_FLIGHT = "in flight"
    COMMITTED = "committed"
    ABORTED = "aborted"


class PlanRow:
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

    def copy(self, seq: Sequence) -> PlanRow:
        """The same for a fork of the sequence, which has a table of its own."""
        row = PlanRow(seq, self.start, self.end, self.base, self.num_blocks)
        row.cows, row.before, row.rides = self.cows and self.cows[:], self.before, self.rides
        return row

    def restore(self, start: int, end: int, base: int) -> None:
        """Undo a `clamp`."""
        self.start, self.end, self.base = start, end, base

    def clamp(self, length: int) -> None:
        """The sequence is cut to `length` tokens while the step is in flight."""
        self.start, self.end, self.base = min(self.start, length), min(self.end, length), min(self.base, length)


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

    def __init__(self, owner: Origin | None, ident: int, seqs: List[Sequence], moves: tuple[Move, ...] = ()) -> None:
        self._owner = owner
        self._phase = Phase.IN_FLIGHT
        self._rows: list[PlanRow] | None = []  # None: the lockstep batch that made the step accounts for it
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
        return _copied_plan, (type(self), self._contents())

    def _contents(self) -> dict[str, Any]:
        """The fields of a copy."""
        owner = self._owner
        origin = None if owner is None else Origin(owner.block_size, owner.num_blocks, is_copy=True)
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
        "_copies",
        "_fills",
        "_lockstep",
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

    def __init__(self, owner: Origin | None, ident: int, seqs: List[Sequence]) -> None:
        self._owner = owner
        self._phase = Phase.IN_FLIGHT
        self._held = []
        self._held_host = []
        self._seals = []
        self._brings = False
        self._arrivals = []
        self._rows = None
        self._lockstep: Lockstep | None = None
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


def _copied_plan(kind: type[Plan], contents: dict[str, Any]) -> Plan:
    """The plan or step that a pickle gives."""
    plan = kind(contents["_owner"], contents["id"], contents["seqs"])
    for name, value in contents.items():
        setattr(plan, name, value)
    if isinstance(plan, Step):
        entries, rows = contents["_table"], contents["seqs"]
        plan._table = Table(entries, rows, len(entries) // max(1, len(rows))).view
    return plan
