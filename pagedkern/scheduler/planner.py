"""Making a batch: who decodes, who makes room, whose prompt goes on."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate, islice
from operator import sub

from pagedkern.allocator import Step
from pagedkern.errors import OutOfBlocks
from pagedkern.scheduler.admission import can_start, fits_again, start_more
from pagedkern.scheduler.batch import Batch, Row
from pagedkern.scheduler.draft import Draft
from pagedkern.scheduler.growth import blocks_needed, rows_of
from pagedkern.scheduler.request import RUNNING, Request
from pagedkern.scheduler.room import free_all, preempt
from pagedkern.scheduler.standstill import Standstill, recall, resolve
from pagedkern.scheduler.state import SchedulerState


def make(state: SchedulerState, ident: int) -> Batch:
    """The next batch. Raises `OutOfBlocks` if a request has no room even alone."""
    if state.aside:
        recall(state)
    draft = Draft(state, ident)
    if not _plain(draft):
        try:
            with state.allocator.transaction():
                _general(draft)
        except Standstill as found:
            draft = Draft(state, ident)
            if not _gives_up(draft, found.request):
                raise resolve(state, found) from None
    return draft.settle()


def _plain(draft: Draft) -> bool:
    """The common case: all that run decode, nobody can be admitted. One call of the allocator, on its fast path.

    False, and nothing has happened, if it is not so, or if blocks are lacking.
    """
    state = draft.state
    if state.num_prefilling or not state.running:
        return False
    rows = rows_of(state.running, state.token_budget)
    num_tokens = sum(end - start for _, start, end in rows)
    first = state.line.first
    if first is not None and num_tokens < state.token_budget and can_start(draft, first):
        return False
    free = state.allocator.num_free_blocks
    if num_tokens > free and sum(blocks_needed(state, rows)) > free:
        return False
    return _append_if_room(draft, rows)


def _general(draft: Draft) -> None:
    """Any other case. To be called in a transaction of the allocator."""
    state = draft.state
    _grow(draft)
    budget = state.token_budget - draft.batch.num_tokens
    if state.num_prefilling:
        for request in islice(state.running, draft.num_running):
            leader = request._unfinished[0]
            if request._prefilling and leader.seq is not None:
                draft.prompt(request, leader.seq)
    if not draft.batch.swapped_out and not draft.batch.dropped:
        start_more(draft, budget)
    if budget and (draft.prompts or draft.started):
        _prefill(draft, budget)


def _grow(draft: Draft) -> None:
    """Let the samples that decode grow; while blocks are lacking, the last that runs is preempted.

    Blocks on their way to the host can be used from the next batch on. If they are enough, nobody else is preempted:
    the latest rows sit this batch out.
    """
    state = draft.state
    rows = rows_of(state.running, state.token_budget)
    needed = blocks_needed(state, rows)
    total, coming = sum(needed), 0
    latest = reversed(state.running)
    while rows:
        free = state.allocator.num_free_blocks
        if total <= free and _append_if_room(draft, rows):
            return
        alone = draft.num_running == 1
        if coming and (alone or total <= free + coming):
            del rows[bisect_right(list(accumulate(needed)), free) :]
            while rows and not _append_if_room(draft, rows):  # sequences outside share their last blocks
                del rows[len(rows) // 2 :]
            return
        request = next(latest)
        if alone:
            raise Standstill(request, free)
        while rows and rows[-1].sample.request is request:
            rows.pop()
            total -= needed.pop()
        coming += preempt(draft, request)


def _gives_up(draft: Draft, request: Request) -> bool:
    """If a request that cannot go on would fit when computed again, it is preempted for that, and the batch has no
    rows: foreign sequences may hold the same contents in other blocks, which it shares then.
    """
    if request._stage is not RUNNING or not fits_again(draft.state, request):
        return False
    with draft.state.allocator.transaction():
        free_all(draft.state, request)
    draft.stops(request)
    draft.batch.dropped.append(request)
    return True


def _append_if_room(draft: Draft, rows: list[Row]) -> bool:
    try:
        step = _append(draft.state, rows)
    except OutOfBlocks:
        return False
    batch = draft.batch
    batch._add(step)
    batch.rows += rows
    batch.outputs += [sample for sample, _, end in rows if end == sample._known]
    return True


def _append(state: SchedulerState, rows: list[Row]) -> Step:
    if sum(row.end - row.start for row in rows) == len(rows):
        ids = [sample.tokens[start - len(sample.request.prompt)] for sample, start, _ in rows]
        return state.allocator.append([sample.seq for sample, _, _ in rows], ids)  # type: ignore[misc]
    texts = [sample._text(start, end) for sample, start, end in rows]
    return state.allocator.append([sample.seq for sample, _, _ in rows], texts)  # type: ignore[misc]


def _prefill(draft: Draft, budget: int) -> None:
    """Compute the next tokens of the prompts, in the order of arrival. Takes no block: they have theirs already."""
    batch, prompts = draft.batch, draft.started
    if draft.prompts:
        prompts = sorted(draft.prompts + draft.started, key=lambda prompt: prompt[0].id)
    try:
        step = draft.state.allocator.prefill([seq for _, seq in prompts], max_tokens=budget)
    except OutOfBlocks:  # foreign forks share blocks that are not full
        raise Standstill((draft.prompts or prompts)[0][0], draft.state.allocator.num_free_blocks) from None
    batch._add(step)
    cu, ends = step.cu_seqlens_q, step.seq_lens
    requests = [request for request, _ in prompts[: len(ends)]]
    starts = map(sub, ends, map(sub, cu[1:], cu))
    batch.rows += map(Row._make, zip([request._unfinished[0] for request in requests], starts, ends, strict=True))
    for request, end in zip(requests, ends, strict=True):
        samples = request._unfinished
        generated = samples[0].tokens
        if end == len(request.prompt) + len(generated):
            batch.outputs += samples[:1] if generated else samples
