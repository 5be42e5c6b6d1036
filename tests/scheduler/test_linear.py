"""Twice as much is twice as much work, whatever is done to thousands of requests in one call."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest

from pagedkern.allocator import BlockAllocator
from pagedkern.scheduler import Batch, Scheduler
from tests.scheduler.operations import bytecodes, calls, count_searches

SIZE = 4
SMALL, LARGE = 150, 600


def engine(n: int, blocks: int, *, host: int = 0, policy: str = "auto") -> Scheduler:
    allocator = BlockAllocator(blocks, SIZE, num_host_blocks=host)
    return Scheduler(allocator, token_budget=n * SIZE, max_num_seqs=n, policy=policy)


def waiting(n: int, blocks: int = 0, **options: object) -> Scheduler:
    """n requests with prompts of one block each, no two alike, that want one block more."""
    scheduler = engine(n, blocks or 2 * n, **options)  # type: ignore[arg-type]
    for i in range(n):
        scheduler.add(range(SIZE * i, SIZE * i + SIZE), max_tokens=SIZE)
    return scheduler


def done(scheduler: Scheduler, **options: object) -> Scheduler:
    """One batch is made and completed."""
    batch = scheduler.schedule()
    scheduler.complete(batch, [1] * len(batch.outputs), **options)  # type: ignore[arg-type]
    return scheduler


def group(n: int) -> Scheduler:
    """One request of n samples, whose last block is not full."""
    scheduler = engine(n, 4 * n)
    scheduler.add(range(SIZE + 1), max_tokens=SIZE, n=n)
    return scheduler


def admitted(n: int) -> Callable[[], object]:
    scheduler = waiting(n)
    return lambda: count(scheduler.schedule().rows, n)


def admitted_on_a_cached_prefix(n: int) -> Callable[[], object]:
    """Each alone would not fit, but the beginning of all of them is cached."""
    scheduler = engine(n, 8 + 2 * n)
    done(scheduler) if scheduler.add(range(8 * SIZE), max_tokens=1) else None
    for i in range(n):
        scheduler.add([*range(8 * SIZE), i, i + 1], max_tokens=2)
    return lambda: count(scheduler.schedule().rows, n)


def aborted(n: int) -> Callable[[], object]:
    scheduler = waiting(n)
    batch = scheduler.schedule()
    return lambda: count([scheduler.abort(batch)] * len(scheduler.waiting), n)


def cancelled_waiting(n: int) -> Callable[[], object]:
    scheduler = waiting(n)
    latest = scheduler.waiting[::-1]
    return lambda: count([r for r in latest if scheduler.cancel(r)], n)


def cancelled_running(n: int) -> Callable[[], object]:
    scheduler = done(waiting(n))
    latest = scheduler.running[::-1]
    return lambda: count([r for r in latest if scheduler.cancel(r)], n)


def cancelled_swapped(n: int) -> Callable[[], object]:
    scheduler = done(done(waiting(2 * n, blocks=2 * n, host=2 * n, policy="swap")))
    preempted = scheduler.preempted
    return lambda: count([r for r in preempted if scheduler.cancel(r)], n)


def ended(n: int) -> Callable[[], object]:
    scheduler = waiting(n)
    batch = scheduler.schedule()
    return lambda: count(scheduler.complete(batch, [1] * n, stopped=range(n)), n)


def forked(n: int) -> Callable[[], object]:
    scheduler = group(n)
    batch = scheduler.schedule()
    return lambda: count(batch.outputs, n + len(scheduler.complete(batch, [1] * n)))


def samples_grow(n: int) -> Callable[[], object]:
    """Each copies the last block of the prompt, but for one."""
    scheduler = done(group(n))
    return lambda: count(scheduler.schedule().rows, n)


def samples_end(n: int) -> Callable[[], object]:
    scheduler = done(group(n))
    batch = scheduler.schedule()
    return lambda: count(scheduler.complete(batch, [1] * n, stopped=range(n)), n)


def dropped(n: int) -> Callable[[], object]:
    """All need a block at once and none is free: half of them go."""
    scheduler = done(waiting(2 * n, blocks=2 * n, policy="recompute"))
    return lambda: count(scheduler.schedule().dropped, n)


def swapped(n: int) -> Callable[[], object]:
    scheduler = done(waiting(2 * n, blocks=2 * n, host=2 * n, policy="swap"))
    return lambda: count(scheduler.schedule().swapped_out, n)


def compared(n: int) -> Callable[[], object]:
    """By cost, which depends on what the others hold."""
    scheduler = done(waiting(2 * n, blocks=2 * n, host=2 * n, policy="auto"))
    return lambda: count(scheduler.schedule().swapped_out, n)


def half_swapped(n: int) -> Callable[[], object]:
    """The host has room for half of them."""
    scheduler = done(waiting(2 * n, blocks=2 * n, host=n // 2, policy="swap"))
    return lambda: count(scheduler.schedule().dropped, n - n // 2)


def resumed(n: int) -> Callable[[], object]:
    """Those preempted come back once the others have ended."""
    scheduler = done(waiting(2 * n, blocks=2 * n, host=2 * n, policy="swap"))
    done(scheduler)
    done(scheduler, stopped=range(n))
    return lambda: count(scheduler.schedule().resumed, n)


def sat_out(n: int) -> Callable[[], object]:
    """Blocks are on their way to the host: the latest rows wait for the next batch."""
    allocator = BlockAllocator(3 * n, SIZE, num_host_blocks=3 * n)
    scheduler = Scheduler(allocator, token_budget=4 * n * SIZE, max_num_seqs=2 * n, policy="swap")
    for i in range(n):
        scheduler.add(range(SIZE * i, SIZE * i + SIZE), max_tokens=SIZE)
    scheduler.add(range(-2 * n * SIZE, 0), max_tokens=SIZE)
    done(scheduler)

    def call() -> None:
        batch = scheduler.schedule()
        assert (len(batch.swapped_out), len(batch.rows)) == (1, 0)

    return call


def asked(n: int) -> Callable[[], object]:
    scheduler = done(waiting(n))
    return lambda: [scheduler.can_add(1, max_tokens=1) for _ in range(n)]


def described(n: int) -> Callable[[], object]:
    """The model's input, and the rows of the outputs."""
    batch = group(n).schedule()
    return lambda: count(batch.logits_rows, n + 0 * len(batch.token_ids) + 0 * len(batch.positions))


def sent(n: int) -> Callable[[], object]:
    batch = waiting(n).schedule()
    return lambda: count(pickle.loads(pickle.dumps(batch)).rows, n)


def set_aside(n: int) -> Callable[[], object]:
    """None of them has room beside a foreign sequence, then it is freed."""
    scheduler = engine(n, 4 * n)
    hoard = scheduler.allocator.create((4 * n - 1) * SIZE)
    for i in range(n):
        scheduler.add(range(2 * i, 2 * i + 2 * SIZE), max_tokens=1)

    def call() -> Batch:
        for _ in range(n):
            with pytest.raises(Exception, match="not the scheduler's"):
                scheduler.schedule()
        scheduler.allocator.free(hoard)
        batch = scheduler.schedule()
        assert len(batch.rows) == n // 2, "as far as the token budget reaches"
        return batch

    return call


def count(found: object, expected: int) -> None:
    assert len(found) == expected  # type: ignore[arg-type]


CASES = [
    admitted,
    admitted_on_a_cached_prefix,
    aborted,
    cancelled_waiting,
    cancelled_running,
    cancelled_swapped,
    ended,
    forked,
    samples_grow,
    samples_end,
    dropped,
    swapped,
    compared,
    half_swapped,
    resumed,
    sat_out,
    asked,
    described,
    sent,
    set_aside,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_work_is_linear(case: Callable[[int], Callable[[], object]], monkeypatch: pytest.MonkeyPatch) -> None:
    count_searches(monkeypatch)
    small, large = bytecodes(case(SMALL)), bytecodes(case(LARGE))
    assert large < 1.25 * LARGE / SMALL * small, f"{small / SMALL:.0f} bytecodes each, then {large / LARGE:.0f}"


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_starting_together_takes_few_calls_for_each(warm: bool) -> None:
    """Also when the cache has something: of other tokens, and of another tenant."""
    scheduler = engine(LARGE, 2 * LARGE)
    for salt in (None, "tenant") if warm else ():
        done(scheduler) if scheduler.add([-1] * SIZE, max_tokens=1, salt=salt) else None
    for i in range(LARGE):
        scheduler.add(range(SIZE * i, SIZE * i + SIZE), max_tokens=SIZE)
    number = calls(lambda: count(scheduler.schedule().rows, LARGE))
    assert number < (14 if warm else 10) * LARGE, f"{number / LARGE:.1f} calls each"
