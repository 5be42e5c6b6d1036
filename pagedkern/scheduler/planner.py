"""Making a batch: who decodes, who makes room, who is resumed or admitted, whose prompt goes on."""

from __future__ import annotations

from typing import NoReturn

from pagedkern.allocator import Step
from pagedkern.errors import OutOfBlocks
from pagedkern.scheduler.batch import Batch, Row
from pagedkern.scheduler.request import Request, Sample, Stage
from pagedkern.scheduler.room import can_start, preempt, start, swap_in
from pagedkern.scheduler.state import State


def plain(state: State, ident: int) -> Batch | None:
    """The common case: all that run decode, nobody can be admitted. One call of the allocator, on its fast path.

    None if it is not so, or if blocks are lacking.
    """
    if not state.running or any(request._prefilling for request in state.running):
        return None
    rows = _growing(state)
    first = state.preempted[0] if state.preempted else state.waiting[0] if state.waiting else None
    if first is not None and len(rows) < state.token_budget and can_start(state, first):
        return None
    try:
        step = _append(state, rows)
    except OutOfBlocks:
        return None
    batch = Batch(ident)
    _add(batch, step, rows)
    return batch


def general(state: State, ident: int) -> Batch:
    """Any other case. To be called in `state.atomic`."""
    batch = Batch(ident)
    settled = _grow(state, batch)
    budget = state.token_budget - batch.num_tokens
    prefills = [request for request in state.running if request._prefilling]
    if settled:
        _start_more(state, batch, prefills, budget)
    if prefills and budget:
        _prefill(state, batch, prefills, budget)
    if not batch.plans and not batch.dropped and (state.running or state.preempted or state.waiting):
        _explain_standstill(state)
    return batch


def _growing(state: State) -> list[Row]:
    """The rows of the samples whose prompts are computed, in the order of arrival, within the token budget.

    One token each, more only where a preemption has thrown away what was generated before.
    """
    rows: list[Row] = []
    budget = state.token_budget
    for request in state.running:
        if request._prefilling:
            continue
        # Shortest first: the last to write into a block that all of them share need not copy it.
        alone = len(request.samples) == 1
        for sample in request.samples if alone else sorted(request._unfinished, key=_computed):
            start = sample._computed
            count = min(sample._known - start, budget)
            if not count:
                return rows
            budget -= count
            rows.append(Row(sample, start, start + count))
    return rows


def _computed(sample: Sample) -> int:
    return sample._computed


def _append(state: State, rows: list[Row]) -> Step:
    if sum(row.end - row.start for row in rows) == len(rows):
        ids = [sample.tokens[start - len(sample.request.prompt)] for sample, start, _ in rows]
        return state.allocator.append([sample.seq for sample, _, _ in rows], ids)  # type: ignore[misc]
    texts = [sample._text(start, end) for sample, start, end in rows]
    return state.allocator.append([sample.seq for sample, _, _ in rows], texts)  # type: ignore[misc]


def _add(batch: Batch, step: Step, rows: list[Row]) -> None:
    batch.plans += (step,)
    batch.rows += rows
    batch.outputs += [sample for sample, _, end in rows if end == sample._known]


def _grow(state: State, batch: Batch) -> bool:
    """Let the samples that decode grow; while blocks are lacking, the last that runs is preempted.

    Blocks on their way to the host can be used from the next batch on. If they are enough, nobody else is preempted:
    the latest rows sit this batch out. False if anybody was preempted: then nobody is to be started.
    """
    coming = 0
    while rows := _growing(state):
        if _append_if_room(state, batch, rows):
            break
        free = state.allocator.num_free_blocks
        if coming and (_growth(state, rows) <= free + coming or len(state.running) == 1):
            while rows and _growth(state, rows) > free:
                rows.pop()
            while rows and not _append_if_room(state, batch, rows):  # copies on write need blocks too
                rows.pop()
            break
        if len(state.running) == 1:
            _explain_standstill(state)
        coming += preempt(state, batch)
    return not (batch.swapped_out or batch.dropped)


def _append_if_room(state: State, batch: Batch, rows: list[Row]) -> bool:
    if _growth(state, rows) > state.allocator.num_free_blocks:
        return False
    try:
        _add(batch, _append(state, rows), rows)
    except OutOfBlocks:
        return False
    return True


def _growth(state: State, rows: list[Row]) -> int:
    """Blocks that the rows begin, copies on write not counted."""
    return sum(state.blocks_for(end) - state.blocks_for(start) for _, start, end in rows)


def _start_more(state: State, batch: Batch, prefills: list[Request], budget: int) -> None:
    """Resume and admit, in the order of arrival, as long as there is room and the token budget reaches.

    What comes back from the host can be computed by this very batch if it is a prompt, and decodes from the next on.
    """
    budget -= sum(_left(request) for request in prefills)
    while budget > 0:
        request = state.preempted[0] if state.preempted else state.waiting[0] if state.waiting else None
        if request is None or not can_start(state, request):
            return
        try:
            (swap_in if request._stage is Stage.SWAPPED else start)(state, batch, request)
        except OutOfBlocks:
            return
        if request._prefilling:
            prefills.append(request)
            budget -= _left(request)


def _left(request: Request) -> int:
    """Tokens of a prompt that are still to be computed."""
    leader = request._unfinished[0]
    return leader._known - leader._computed


def _prefill(state: State, batch: Batch, prefills: list[Request], budget: int) -> None:
    """Compute the next tokens of the prompts, in the order of arrival. Takes no block: they have theirs already."""
    leaders = [request._unfinished[0] for request in prefills]
    step = state.allocator.prefill([leader.seq for leader in leaders], max_tokens=budget)  # type: ignore[misc]
    rows = [Row(leader, leader._computed, end) for leader, end in zip(leaders, step.seq_lens, strict=False)]
    batch.plans += (step,)
    batch.rows += rows
    for leader, _, end in rows:
        if end == leader._known:
            batch.outputs += [leader] if leader.tokens else leader.request._unfinished


def _explain_standstill(state: State) -> NoReturn:
    """Nothing of the scheduler's own is in the way, so somebody else's sequences are."""
    allocator = state.allocator
    raise OutOfBlocks(
        f"schedule: {allocator.num_free_blocks} of {allocator.num_blocks} blocks are free and nothing can go on; "
        f"sequences that are not the scheduler's hold the others, free some of them"
    )
