"""What one step of the model computes: decode and prefill rows in the same buffers."""

from __future__ import annotations

from array import array
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from pagedkern.allocator import Plan, Step
from pagedkern.scheduler.request import Request, Sample, Stage

if TYPE_CHECKING:
    from pagedkern.allocator import Sequence
    from pagedkern.allocator.buffers import Move


class Row(NamedTuple):
    """One row of a batch: the tokens of a sample at positions `start .. end-1` are computed."""

    sample: Sample
    start: int
    end: int


class Batch:
    """One forward pass. S rows, T tokens to compute, W columns of the block table.

    To `KVCache.apply` and to the kernels it looks like one `Step` of the allocator: the same names, dtypes and shapes.
    It is made of up to two, since the allocator has one call for tokens that sequences grow by (`append`: decoding, and
    what was generated before a preemption) and one for prompts (`prefill`), and of the plans of swaps. Buffers of a
    batch with one step are that step's own; those of two are joined on first use: O(S*W + T).

    `moves` are carried out first, all of them in order, then the kernels run. A batch may have moves and no tokens: the
    blocks that everybody waits for are then on their way to the host.
    """

    __slots__ = (
        "_admitted",
        "_joined",
        "_plans",
        "_steps",
        "_table",
        "dropped",
        "id",
        "outputs",
        "resumed",
        "rows",
        "swapped_out",
    )

    def __init__(self, ident: int) -> None:
        self.id = ident  # counts the batches of one scheduler
        self._plans: list[Plan] = []
        self._steps: list[Step] = []  # those of the plans that are steps
        self.rows: list[Row] = []  # decode rows first, then prefill rows, each in the order of arrival
        self.outputs: list[Sample] = []  # those for which a token is to be sampled
        self.swapped_out: list[Request] = []  # preempted: their blocks go to the host
        self.dropped: list[Request] = []  # preempted: their blocks are given up
        self.resumed: list[Request] = []  # their blocks come back from the host
        self._admitted: list[tuple[Request, Stage]] = []  # who got a new sequence, and what it was before
        self._joined: tuple[array[int], array[int], array[int]] | None = None
        self._table: memoryview | None = None

    # What the engine carries out.

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The allocator's plans, in the order of their making: steps, and one for each request that is swapped."""
        return tuple(self._plans)

    @property
    def moves(self) -> tuple[Move, ...]:
        """(kind, src, dst) in order, as in `Step`: copies and swaps, to be done before the kernels run."""
        return tuple(move for plan in self._plans for move in plan.moves)

    @property
    def block_size(self) -> int | None:
        """Tokens a block, as the allocator counts them; None of a batch without plans."""
        return self._plans[0].block_size if self._plans else None

    @property
    def num_blocks(self) -> int | None:
        """Blocks of the allocator's pool; None of a batch without plans."""
        return self._plans[0].num_blocks if self._plans else None

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps that the rows come from: rows that grow, then rows of prompts. None, one or two."""
        return tuple(self._steps)

    @property
    def num_seqs(self) -> int:
        """S, the rows of the block table."""
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """T, never more than the token budget."""
        return sum(step.num_tokens for step in self._steps)

    @property
    def max_seqlen_q(self) -> int:
        """Most tokens that one row computes; 1 when all rows decode."""
        return max((step.max_seqlen_q for step in self._steps), default=0)

    @property
    def seqs(self) -> list[Sequence]:
        """The allocator's sequences, row by row. None of them for an empty batch."""
        return [seq for step in self._steps for seq in step.seqs]

    @property
    def block_table(self) -> memoryview:
        """int32 [S, W], rows contiguous. Entries behind a row's blocks mean nothing."""
        steps = self._steps
        if len(steps) == 1:
            return steps[0].block_table
        if self._table is None:
            self._table = _join_tables(steps)
        return self._table

    @property
    def seq_lens(self) -> array[int]:
        """int32 [S]: tokens in the cache once the batch has run."""
        return self._arrays()[0]

    @property
    def cu_seqlens_q(self) -> array[int]:
        """int32 [S+1]: row i computes tokens `cu[i] .. cu[i+1]-1` of the batch."""
        return self._arrays()[1]

    @property
    def slot_mapping(self) -> array[int]:
        """int64 [T]: where each token's K and V go, `block*B + offset`; -1 = write nothing."""
        return self._arrays()[2]

    @property
    def token_ids(self) -> array[int]:
        """int64 [T]: the model's input. A new array. O(T)."""
        ids = array("q")
        for sample, start, end in self.rows:
            ids.extend(sample._text(start, end))
        return ids

    @property
    def positions(self) -> array[int]:
        """int64 [T]: the position of each token in its sequence. A new array. O(T)."""
        places = array("q")
        for _, start, end in self.rows:
            places.extend(range(start, end))
        return places

    @property
    def logits_rows(self) -> array[int]:
        """int64 [len(outputs)]: for each output the token of the batch, in 0 .. T-1, whose logits give its next token.

        The samples of one prompt are drawn from the same row. A new array. O(S).
        """
        ends = list(accumulate(end - start for _, start, end in self.rows))
        place = {id(row.sample): end - 1 for row, end in zip(self.rows, ends, strict=True)}
        result, last = array("q"), -1
        for sample in self.outputs:
            last = place.get(id(sample), last)  # samples without a row of their own follow the one that has it
            result.append(last)
        return result

    # How it is put together.

    def _add(self, plan: Plan) -> None:
        self._plans.append(plan)
        if isinstance(plan, Step):
            self._steps.append(plan)

    def _arrays(self) -> tuple[array[int], array[int], array[int]]:
        steps = self._steps
        if len(steps) == 1:
            return steps[0].seq_lens, steps[0].cu_seqlens_q, steps[0].slot_mapping
        if self._joined is None:
            lens, cu, slots = array("i"), array("i", [0]), array("q")
            for step in steps:
                base = cu[-1]
                cu.extend([base + end for end in step.cu_seqlens_q[1:]])
                lens.extend(step.seq_lens)
                slots.extend(step.slot_mapping)
            self._joined = lens, cu, slots
        return self._joined

    def __reduce__(self) -> tuple[Any, ...]:
        table, rows = self.block_table, [(start, end) for _, start, end in self.rows]
        shape = table.shape
        moves = tuple((kind, array("q", src), array("q", dst)) for kind, src, dst in self.moves)
        numbers = self.id, self.block_size, self.num_blocks, self.num_tokens, self.max_seqlen_q
        arrays = self.seq_lens, self.cu_seqlens_q, self.slot_mapping, self.token_ids, self.positions, self.logits_rows
        return BatchCopy, (numbers, rows, moves, table.tobytes(), shape, tuple(buffer[:] for buffer in arrays))

    def __repr__(self) -> str:
        return (
            f"<Batch {self.id}: {self.num_seqs} rows, {self.num_tokens} tokens, {len(self.moves)} moves, "
            f"{len(self.outputs)} outputs>"
        )


class BatchCopy(Batch):
    """What a pickled batch comes back as, for example in the other processes of a tensor-parallel engine: plain data.

    It has every buffer and count of the batch, and its moves. It belongs to no scheduler and no allocator: nobody can
    complete or abort it, its rows have positions but no samples, the lists of plans, sequences, outputs and requests
    are empty. `logits_rows` has a row for each output of the batch.
    """

    __slots__ = (
        "block_size",
        "block_table",
        "cu_seqlens_q",
        "logits_rows",
        "max_seqlen_q",
        "moves",
        "num_blocks",
        "num_tokens",
        "positions",
        "seq_lens",
        "slot_mapping",
        "token_ids",
    )

    block_size: int | None
    num_blocks: int | None
    num_tokens: int
    max_seqlen_q: int
    moves: tuple[Move, ...]
    block_table: memoryview
    seq_lens: array[int]
    cu_seqlens_q: array[int]
    slot_mapping: array[int]
    token_ids: array[int]
    positions: array[int]
    logits_rows: array[int]

    def __init__(
        self,
        numbers: tuple[int, int | None, int | None, int, int],
        rows: list[tuple[int, int]],
        moves: tuple[Move, ...],
        table: bytes,
        shape: tuple[int, ...],
        arrays: tuple[array[int], ...],
    ) -> None:
        super().__init__(numbers[0])
        _, self.block_size, self.num_blocks, self.num_tokens, self.max_seqlen_q = numbers
        self.rows = [Row(None, start, end) for start, end in rows]  # type: ignore[arg-type]
        self.moves = moves
        self.block_table = _shaped(array("i", table), shape)
        self.seq_lens, self.cu_seqlens_q, self.slot_mapping, self.token_ids, self.positions, self.logits_rows = arrays

    def __repr__(self) -> str:
        return (
            f"<BatchCopy {self.id}: {self.num_seqs} rows, {self.num_tokens} tokens, {len(self.moves)} moves, "
            f"{len(self.logits_rows)} outputs>"
        )


def _shaped(entries: array[int], shape: tuple[int, ...]) -> memoryview:
    """A memoryview has no shape with a zero in it: an empty batch keeps a flat, empty buffer."""
    view = memoryview(entries)
    return view.cast("B").cast("i", shape) if entries else view


def _join_tables(steps: list[Step]) -> memoryview:
    """The rows of several block tables in one that is as wide as the widest, with -1 behind them."""
    width = max((step.row_stride for step in steps), default=0)
    entries = array("i")
    for step in steps:
        flat, stride = array("i", step.block_table.tobytes()), step.row_stride
        if stride == width:
            entries.extend(flat)
            continue
        padding = array("i", [-1]) * (width - stride)
        for row in range(0, len(flat), stride):
            entries.extend(flat[row : row + stride])
            entries.extend(padding)
    return _shaped(entries, (len(entries) // width, width) if width else (0,))
