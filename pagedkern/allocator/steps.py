"""Making, committing and aborting steps: the general path, for any batch."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import accumulate

from pagedkern.allocator import caching
from pagedkern.allocator.arguments import MAX_TOKENS
from pagedkern.allocator.buffers import Copies
from pagedkern.allocator.handles import Phase, Plan, PlanRow, Sequence, State, Step
from pagedkern.allocator.ledger import Ledger
from pagedkern.allocator.lockstep import LockstepBatch, make_table
from pagedkern.allocator.swap import unswap
from pagedkern.errors import InvalidArgument

HEADROOM = 8
"""The table of a batch that grows is a multiple of this many columns wide, with room to grow."""


def make_step(ledger: Ledger, seqs: list[Sequence], ends: list[int], growing: int, lookahead: int = 0) -> Step:
    """The step that computes, for each sequence, the tokens from where it has been scheduled to up to `ends`.

    All sequences have been checked. The first `growing` ones are `own`ed, and grow by these tokens and by blocks for
    `lookahead` more; for the others they are the prompt's. Blocks are taken first, all at once; if that fails nothing
    has changed. O(tokens + blocks touched).
    """
    if sum(ends) > MAX_TOKENS and (total := sum(ends) - sum(s._scheduled for s in seqs)) > MAX_TOKENS:
        raise InvalidArgument(f"seqs: a step of {total} tokens, expected at most 2^31-1 tokens")
    rows = [PlanRow(s, s._scheduled, end, s._length, len(s._blocks)) for s, end in zip(seqs, ends, strict=True)]
    if lookahead:
        for row in rows[:growing]:
            row.reach += lookahead
    replaced, rewritten, num_new = _plan(ledger, rows)
    fresh = iter(ledger.pool.take(len(replaced) + num_new) if replaced or num_new else ())
    step = Step(ledger.origin, ledger.next_plan(), tuple(seqs))
    step._rows = rows
    if growing < len(seqs):
        ledger.undo.append((_unschedule, ([(s, s._scheduled, s._private, s._pending) for s in seqs[growing:]],)))

    if ledger.pool.incoming:
        _move_in(ledger, step)
    if rewritten:
        ledger.rewrite(rewritten)
    if replaced:
        _copy_on_write(ledger, step, replaced, fresh)
    size, alone = ledger.block_size, (step,)
    for row in rows:
        seq = row.seq
        if row.rides:
            continue
        missing = -(-row.reach // size) - len(seq._blocks)
        if missing > 0:
            seq._blocks.extend([next(fresh) for _ in range(missing)])
            seq._dirty = True
        if seq._private and -(-row.end // size) >= seq._private:
            first = max(row.start, seq._present) // size
            # What is written is the writer's own; but the source of a copy in flight is shared again by `abort`.
            while seq._private > first and seq._blocks[seq._private - 1] not in ledger.pool.holds:
                seq._private -= 1
        seq._scheduled = row.end
        if row.end > seq._length:
            seq._length = row.end
        seq._pending = seq._pending + alone if seq._pending else alone
    ledger.launch(step)
    if replaced:
        ledger.counts.moves(step, swap=False)
    _describe(ledger, step, growing > 0)
    if growing == len(seqs) and step.max_seqlen_q == 1 and not ledger.in_transaction and ledger.table is not None:
        LockstepBatch.start(ledger, step, ledger.table)
    return step


def _unschedule(saved: list[tuple[Sequence, int, int, tuple[Plan, ...]]]) -> None:
    """Undo what a step does to sequences that do not grow, but for blocks copied on write."""
    for seq, scheduled, private, pending in saved:
        seq._scheduled, seq._private, seq._pending = scheduled, private, pending


def prompt_ends(batch: list[Sequence], budget: int | None, name: str = "seqs") -> list[int]:
    """Up to where prompts are computed, at most `budget` tokens in all: those that get none are left out."""
    left = [seq._length - seq._scheduled for seq in batch]
    if 0 in left:
        i = left.index(0)
        raise InvalidArgument(f"{name}[{i}]: sequence {batch[i].id} has no token left to compute")
    if budget is None or sum(left) <= budget:
        return [seq._length for seq in batch]
    ends: list[int] = []
    for seq, count in zip(batch, left, strict=True):
        if not budget:
            break
        ends.append(seq._scheduled + min(count, budget))
        budget -= min(count, budget)
    return ends


def grow(batch: list[Sequence], counts: list[int], ids: list[Iterable[int] | None], name: str = "seqs") -> list[int]:
    """Note the ids of new tokens. Returns up to where each sequence is computed then."""
    for i, seq in enumerate(batch):
        if seq._scheduled != seq._length:
            left = seq._length - seq._scheduled
            raise InvalidArgument(
                f"{name}[{i}]: {left} tokens of sequence {seq.id} are not computed, prefill them first"
            )
    ends = []
    for seq, count, new in zip(batch, counts, ids, strict=True):
        if seq._length + count > MAX_TOKENS:
            raise InvalidArgument(
                f"{name}: sequence {seq.id} would have {seq._length + count} tokens, expected at most 2^31-1 tokens"
            )
        ends.append(seq._length + count)
        if new is not None and seq._root and len(seq._tokens) == seq._length:
            seq._tokens.extend(new)
    return ends


def _plan(ledger: Ledger, rows: list[PlanRow]) -> tuple[list[tuple[PlanRow, int, int]], list[int], int]:
    """What has to happen before the rows can be written, without changing anything.

    Returns the blocks to replace because somebody else needs them too, as (row, index in its table, leading tokens to
    copy); the cached blocks that their only owner is going to overwrite; and how many blocks the tables grow by.
    """
    pool, size, keys = ledger.pool, ledger.block_size, ledger.prefix.keys
    # By this very step: for each owner that a block loses, how many tokens it had in the block.
    given_up: dict[int, list[int]] = {}
    replaced: list[tuple[PlanRow, int, int]] = []
    rewritten: list[int] = []
    num_new = 0
    for row in rows:
        seq, blocks = row.seq, row.seq._blocks
        if row.reach > len(blocks) * size:
            num_new += -(-row.reach // size) - len(blocks)
        if not seq._private:  # as of a new prompt: all is its own
            continue
        start = max(row.start, seq._present)
        for index in range(start // size, min(-(-row.end // size), seq._private)):
            b, kept = blocks[index], max(0, start - index * size)
            left = given_up.get(b, ())
            # The last owner need not copy, unless it were to overwrite what others still need.
            if pool.refs[b] - len(left) > 1 or kept < max((*left, *pool.seals.get(b, ())), default=0):
                given_up.setdefault(b, []).append(kept)
                replaced.append((row, index, kept))
            elif keys[b] is not None or b in pool.twins:
                rewritten.append(b)
    return replaced, rewritten, num_new


def _move_in(ledger: Ledger, step: Step) -> None:
    """Let the step move in, before all else, what the prefixes of its sequences have on the host only."""
    pool = ledger.pool
    blocks = dict.fromkeys(b for row in step._rows or () for b in row.seq._blocks if b in pool.incoming)
    if not blocks:
        return
    step._brings = True
    step._arrivals = [(b, pool.incoming[b]) for b in blocks]
    ledger.fence(step, [h for _, h in step._arrivals], ledger.host)
    for b, h in step._arrivals:
        pool.receive(b, h)
    step.moves = (("swap_in", array("q", [h for _, h in step._arrivals]), array("q", blocks)),)
    for seq in ledger.live.values():
        if seq._arriving and seq not in step.seqs and not blocks.keys().isdisjoint(seq._blocks):
            ledger.detach(seq)
            ledger.undo.append((seq._restore, seq._saved()))
            ledger.ride(step, seq)


def _copy_on_write(ledger: Ledger, step: Step, replaced: list[tuple[PlanRow, int, int]], fresh: Iterator[int]) -> None:
    """Give each writer its own block. The old one is fenced: the copy reads it when the step runs."""
    src, dst = array("q"), array("q")
    for row, index, kept in replaced:
        seq = row.seq
        old, new = seq._blocks[index], next(fresh)
        if row.cows is None:
            row.cows = []
            ledger.undo.append((seq._restore, seq._saved()))
            seq._blocks = seq._blocks[:]
        seq._blocks[index] = new
        seq._dirty = True
        row.cows.append((index, old, new))
        for plan in (*seq._pending, step):  # earlier steps may write it, also if this one is aborted before they end
            ledger.fence(plan, [old], ledger.pool)
        ledger.release(seq, [old])
        if kept:
            ledger.seal(step, old, kept)
            src.append(old)
            dst.append(new)
    if src:
        step._copies = Copies(src, dst)
        step.moves += (("copy", src, dst),)


def _describe(ledger: Ledger, step: Step, compares: bool) -> None:
    """Fill in the buffers of a step whose rows are done. `compares`: its table is one of those of `append`."""
    rows, size = step._rows or [], ledger.block_size
    if len(rows) > len(step.seqs):
        rows = [row for row in rows if not row.rides]
    counts = [row.end - row.start for row in rows]
    step.seq_lens = array("i", [row.end for row in rows])
    step.cu_seqlens_q = array("i", [0, *accumulate(counts)])
    step.num_tokens, step.max_seqlen_q = sum(counts), max(counts, default=0)
    if compares:
        table, step.changed_rows, step.base = make_table(step.seqs, ledger.table, HEADROOM)
        table.step = step.id
        step._table = table.view
        ledger.undo.append((setattr, (ledger, "table", ledger.table)))
        ledger.table = table
    else:
        step._source = [
            (r.seq._blocks[:], max(r.start, r.seq._present) // size, -(-r.end // size), r.start, r.end) for r in rows
        ]
        step.changed_rows, step.base = range(len(rows)), None
    if step.max_seqlen_q > 1:
        if compares:  # the table is there: only what is written is of interest
            spans = [(r, max(r.start, r.seq._present) // size, -(-r.end // size)) for r in rows]
            step._source = [(r.seq._blocks[i:j], 0, j - i, r.start, r.end) for r, i, j in spans]
        return
    lasts = [(row.seq, row.end - 1) for row in rows]
    slots = [s._blocks[n // size] * size + n % size if n >= s._present else -1 for s, n in lasts]
    step._slots = array("q", slots)


def commit(ledger: Ledger, plan: Plan) -> None:
    """The plan has run: what its rows computed counts from now on, and full blocks enter the prefix cache."""
    rows = live_rows(plan)
    for row in rows:
        if row.seq._pending[0] is not plan:
            raise InvalidArgument(
                f"plan: {plan.id} comes after {row.seq._pending[0].id} for sequence {row.seq.id}, commit that first"
            )
    _save(ledger, plan, rows)
    for row in rows:
        seq = row.seq
        seq._pending = seq._pending[1:]
        seq._computed = max(seq._computed, row.end)
        if seq._asked and row.end:
            seq._asked = seq._found = 0
            if seq._question:
                ledger.counts.answer(seq)
        if seq._arriving:
            seq._arriving = ledger.awaits(seq)
        if seq._state is State.LIVE:
            caching.enter_computed(ledger, seq)
        elif row.moved is seq._blocks:  # else the plan has moved it to blocks that it has left since
            caching.cache_on_host(ledger, seq)
    plan._phase = Phase.COMMITTED
    ledger.land(plan)


def abort(ledger: Ledger, plan: Plan) -> None:
    """The plan will not run: appended tokens are gone, what was copied on write is shared again, swaps are undone."""
    rows = live_rows(plan)
    for row in rows:
        ledger.detach(row.seq)
        if row.seq._pending[-1] is not plan:
            raise InvalidArgument(
                f"plan: {row.seq._pending[-1].id} comes after {plan.id} for sequence {row.seq.id}, abort that first"
            )
    if any(row.cows or row.before is not None for row in rows):
        ledger.settle_lockstep_batches()  # a block shared again may be the last of one of their sequences
    _save(ledger, plan, rows)
    for row in rows:
        row.seq._pending = row.seq._pending[:-1]
        if row.before is not None:
            unswap(ledger, plan, row)
        elif not row.rides:
            _take_back(ledger, row)
    if plan._brings:
        for b, h in plan._arrivals:
            if ledger.pool.refs[b] and b not in ledger.pool.incoming:
                ledger.pool.expect(b, h)
    plan._phase = Phase.ABORTED
    ledger.land(plan)
    ledger.counts.moves(plan, not isinstance(plan, Step), -1)


def _take_back(ledger: Ledger, row: PlanRow) -> None:
    """What a step was to do for one sequence is not done."""
    seq = row.seq
    blocks = seq._blocks[: row.num_blocks]
    surplus = seq._blocks[row.num_blocks :]
    for index, old, new in row.cows or ():
        if index < len(blocks) and blocks[index] == new:
            blocks[index] = old
            surplus.append(new)
            ledger.pool.retain([old])
            seq._private = max(seq._private, index + 1)
    seq._blocks, seq._dirty = blocks, True
    seq._length = min(seq._length, row.base)
    seq._scheduled = min(seq._scheduled, row.start)
    seq._tokens = seq._tokens[: seq._length]
    seq._private = min(seq._private, len(blocks))
    seq._passed = min(seq._passed, len(blocks))
    ledger.release(seq, surplus)
    if row.cows and seq._apart:
        caching.use(ledger, seq)


def live_rows(plan: Plan) -> list[PlanRow]:
    """The rows of the sequences that still exist."""
    return [row for row in plan._rows or () if row.seq._state is not State.FREED]


def _save(ledger: Ledger, plan: Plan, rows: list[PlanRow]) -> None:
    """Make the changes to come undoable. Sequences whose lockstep batch has ended leave it first; active ones go on."""
    ledger.undo.append((plan._restore, plan._saved()))
    for row in rows:
        seq = row.seq
        if seq._lockstep is not None and not seq._lockstep.active:
            seq._sync()
        ledger.undo.append((seq._restore, seq._saved()))
