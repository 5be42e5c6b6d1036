"""The scheduler belongs to the thread of its allocator: a call from another one says so before anything changes."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from pagedkern.errors import OutOfBlocks, WrongThread
from pagedkern.scheduler import Batch, Scheduler
from tests.scheduler.engine import Engine, prompt_of
from tests.scheduler.test_calls import state_of


def elsewhere(call: Callable[[], object]) -> object:
    """What a call returns or raises in another thread."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


CALLS: dict[str, Callable[[Scheduler, Batch], object]] = {
    "schedule": lambda s, b: s.schedule(),
    "complete": lambda s, b: s.complete(b, [1] * len(b.outputs)),
    "abort": lambda s, b: s.abort(b),
    "add": lambda s, b: s.add([1, 2], max_tokens=1),
    "add, wrongly": lambda s, b: s.add([], max_tokens=1),
    "can_add": lambda s, b: s.can_add(2, max_tokens=1),
    "cancel, running": lambda s, b: s.cancel(s.running[0]),
    "cancel, preempted": lambda s, b: s.cancel(s.preempted[0]),
    "cancel, waiting": lambda s, b: s.cancel(s.waiting[0]),
    "cancel, set aside": lambda s, b: s.cancel(s.stuck[0]),
    "check": lambda s, b: s.check(),
}


def busy(aside: bool) -> tuple[Scheduler, Batch]:
    """One request runs, one is preempted, one waits, a batch is in flight; another may be set aside."""
    engine = Engine(10, 4, num_host_blocks=10, policy="swap")
    assert engine.hold(4)
    if aside:
        engine.scheduler.add(prompt_of(30), max_tokens=2)
        with pytest.raises(OutOfBlocks):
            engine.scheduler.schedule()
    for i in range(3):
        engine.scheduler.add(prompt_of(10, i), max_tokens=12)
    while not engine.scheduler.preempted:
        engine.step()
    return engine.scheduler, engine.scheduler.schedule()


@pytest.mark.parametrize("name", CALLS)
def test_a_second_thread_is_refused(name: str) -> None:
    scheduler, batch = busy(aside="aside" in name)
    before = state_of(scheduler)
    error = elsewhere(lambda: CALLS[name](scheduler, batch))
    assert isinstance(error, WrongThread)
    assert "adopt()" in str(error)
    assert state_of(scheduler) == before
    scheduler.check()


def test_handing_over() -> None:
    engine = Engine(8, 4)
    request = engine.scheduler.add(prompt_of(5), max_tokens=3)
    engine.step()

    def rest() -> str:
        engine.allocator.adopt()
        engine.run()
        return request.state

    assert elsewhere(rest) == "finished"
    with pytest.raises(WrongThread):
        engine.scheduler.schedule()


def test_it_may_be_built_in_one_thread_and_used_in_another() -> None:
    engine = Engine(8, 4)
    assert not engine.scheduler.has_work

    def use() -> bool:
        request = engine.scheduler.add(prompt_of(5), max_tokens=3)
        engine.run()
        return request.ended

    assert elsewhere(use) is True
