"""The scheduler's bookkeeping: thousands of requests in one call, and a plain decode step.

Each row of a whole call stands beside the part of it that the allocator's own operations take, done without a
scheduler.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter

import pytest

from benchmarks.allocator import Case
from benchmarks.meter import Measure
from benchmarks.timer import Timer
from pagedkern.allocator import BlockAllocator
from pagedkern.scheduler import Request, Scheduler

SIZE = 16


def timed(prepare: Callable[[int], Callable[[], object]], count: int) -> Callable[[int], Timer]:
    """What `prepare` returns is timed, once each: what it does before is not."""

    def once() -> float:
        call = prepare(count)
        start = perf_counter()
        call()
        return perf_counter() - start

    return lambda _: once


def waiting(count: int, *, blocks: int = 4, host: int = 0, policy: str = "auto") -> tuple[Scheduler, list[Request]]:
    """So many requests with a prompt of one block each, no two alike, `blocks` for each in the pool."""
    allocator = BlockAllocator(blocks * count, SIZE, num_host_blocks=host)
    scheduler = Scheduler(allocator, token_budget=count * SIZE, max_num_seqs=count, policy=policy)
    prompts = (range(SIZE * i, SIZE * (i + 1)) for i in range(count))
    return scheduler, [scheduler.add(prompt, max_tokens=SIZE) for prompt in prompts]


def admit(count: int) -> Callable[[], object]:
    return waiting(count)[0].schedule


def admit_alone(count: int) -> Callable[[], object]:
    """The allocator's part of `admit`."""
    scheduler, requests = waiting(count)
    allocator, prompts = scheduler.allocator, [request.prompt for request in requests]

    def call() -> None:
        with allocator.transaction():
            allocator.prefill([allocator.create(prompt) for prompt in prompts], max_tokens=count * SIZE)

    return call


def cancel(count: int) -> Callable[[], object]:
    scheduler, requests = waiting(count, blocks=1)
    return lambda: [scheduler.cancel(request) for request in requests]


def abort(count: int) -> Callable[[], object]:
    scheduler, _ = waiting(count)
    return partial(scheduler.abort, scheduler.schedule())


def end(count: int) -> Callable[[], object]:
    scheduler, _ = waiting(count)
    batch = scheduler.schedule()
    return lambda: scheduler.complete(batch, [1] * count, stopped=range(count))


def end_alone(count: int) -> Callable[[], object]:
    """The allocator's part of `end`."""
    allocator = BlockAllocator(4 * count, SIZE)
    seqs = [allocator.create(range(SIZE * i, SIZE * (i + 1))) for i in range(count)]
    step = allocator.prefill(seqs)

    def call() -> None:
        with allocator.transaction():
            allocator.commit(step)
            for seq in seqs:
                allocator.free(seq)

    return call


def preempt(count: int, policy: str) -> Callable[[], object]:
    """All need a block and none is free: half of them make room."""
    scheduler, _ = waiting(2 * count, blocks=1, host=2 * count, policy=policy)
    batch = scheduler.schedule()
    scheduler.complete(batch, [1] * len(batch.outputs))
    return scheduler.schedule


def spread(count: int) -> Callable[[], object]:
    """The prompt of one request with so many samples is computed."""
    scheduler = Scheduler(BlockAllocator(4 * count, SIZE), max_num_seqs=count)
    scheduler.add(range(SIZE + 1), max_tokens=SIZE, n=count)
    return partial(scheduler.complete, scheduler.schedule(), [1] * count)


def decode(_: int, count: int = 256) -> Timer:
    scheduler = Scheduler(BlockAllocator(100 * count, SIZE), token_budget=8192, max_num_seqs=count)
    for i in range(count):
        scheduler.add(range(i, i + SIZE + i % SIZE), max_tokens=80 * SIZE)

    def step() -> float:
        start = perf_counter()
        batch = scheduler.schedule()
        scheduler.complete(batch, [1] * len(batch.outputs))
        return perf_counter() - start

    step()
    return step


CASES = {
    "admit 4,000": Case(timed(admit, 4000), "request", 4000, 9),
    "admit 4,000, the allocator alone": Case(timed(admit_alone, 4000), "request", 4000, 9),
    "cancel 16,000 that wait": Case(timed(cancel, 16000), "request", 16000, 9),
    "abort 4,000 admitted": Case(timed(abort, 4000), "request", 4000, 9),
    "end 2,000": Case(timed(end, 2000), "request", 2000, 9),
    "end 2,000, the allocator alone": Case(timed(end_alone, 2000), "request", 2000, 9),
    "preempt 1,000 by swap": Case(timed(partial(preempt, policy="swap"), 1000), "request", 1000, 9),
    "preempt 1,000 by recomputation": Case(timed(partial(preempt, policy="recompute"), 1000), "request", 1000, 9),
    "fork 1,000 samples": Case(timed(spread, 1000), "sample", 1000, 9),
    "decode 256": Case(decode, "sequence", 256, 200),
}


@pytest.mark.parametrize("name", CASES)
def test_scheduler(name: str, measure: Measure) -> None:
    case = CASES[name]
    calls = 1 if measure.size == "tiny" else case.calls
    measure.benchmark.group = f"scheduler, {name}, for each {case.unit}"
    measure.benchmark.extra_info["row"] = "pagedkern"
    timer = case.make(calls + 2)
    measure(lambda: timer() / case.per, cold=False, rounds=calls)
