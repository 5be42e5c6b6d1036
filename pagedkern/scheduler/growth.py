"""The rows of samples whose prompts are computed: what they compute next, and the blocks that it takes."""

from __future__ import annotations

from collections.abc import Iterable

from pagedkern.scheduler.batch import Row
from pagedkern.scheduler.request import Request, Sample
from pagedkern.scheduler.state import SchedulerState


def rows_of(requests: Iterable[Request], budget: int) -> list[Row]:
    """The rows of the samples whose prompts are computed, within a budget of tokens.

    One token each, more only where a preemption has thrown away what was generated before. O(samples), sorted within a
    request.
    """
    rows: list[Row] = []
    for request in requests:
        if request._prefilling:
            continue
        # Shortest first: the last to write into a block that all of them share need not copy it.
        samples = request._unfinished
        for sample in samples if len(samples) == 1 else sorted(samples, key=_computed):
            start = sample._computed
            count = min(sample._known - start, budget)
            if not count:
                return rows
            budget -= count
            rows.append(Row(sample, start, start + count))
    return rows


def blocks_needed(state: SchedulerState, rows: list[Row]) -> list[int]:
    """The blocks that each row takes: those that it begins, and the copy of a last block that it shares. O(samples).

    The rows of a request stand together, shortest first. A last block that sequences outside the scheduler share is not
    known here: the allocator then refuses what this allows.
    """
    size = state.allocator.block_size
    needed: list[int] = []
    copies: dict[Request, int] = {}  # that its samples make before the last of them writes in place
    for sample, start, end in rows:
        count = -(-end // size) - -(-start // size)
        request = sample.request
        if len(request.samples) > 1 and start == len(request.prompt) and start % size:
            if request not in copies:
                copies[request] = _sharers(request) - 1
            if copies[request]:
                copies[request] -= 1
                count += 1
        needed.append(count)
    return needed


def _sharers(request: Request) -> int:
    """The samples that still share the last block of the prompt: none of them has written into it. O(samples)."""
    prompt, ahead = len(request.prompt), request._ahead
    return sum(s._computed == prompt for s in request._unfinished) + (ahead is not None and ahead.finish_reason is None)


def _computed(sample: Sample) -> int:
    return sample._computed
