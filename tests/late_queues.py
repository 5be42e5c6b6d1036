"""Queues that do their work late, in any order that the fences allow: what a GPU may do, without one."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from pagedkern.cache.queues import COMPUTE, IN, OUT


class Event:
    """Of a queue: passed once all that was put there before it is done."""

    def __init__(self, queue: str) -> None:
        self.queue = queue
        self.passed = False


class Fence(NamedTuple):
    """What is put into one queue waits for an event of another."""

    queue: str
    event_of: str


FENCES = [
    Fence(COMPUTE, OUT),
    Fence(COMPUTE, IN),
    Fence(OUT, COMPUTE),
    Fence(IN, COMPUTE),
    Fence(OUT, IN),
    Fence(IN, OUT),
]


class LateQueues:
    """Stands for `pagedkern.cache.queues.Streams`.

    Args:
        seed: of the order in which queues get on. One is a favourite for a while, so that others fall far behind.
        missing: fences that are left out, to see that the loss is noticed.
    """

    def __init__(self, seed: int, missing: Fence | None = None) -> None:
        self.generator = random.Random(seed)
        self.missing = missing
        self.fences: list[Fence] = []  # that have been put up
        self._queues: dict[str, list[Callable[[], object] | Event]] = {COMPUTE: [], OUT: [], IN: []}
        self._favourite = COMPUTE

    def run(self, queue: str, work: Callable[[], object]) -> None:
        self._queues[queue].append(work)

    def record(self, queue: str) -> Event:
        event = Event(queue)
        self._queues[queue].append(lambda: setattr(event, "passed", True))
        return event

    def wait(self, queue: str, event: Event) -> None:
        assert isinstance(event, Event)
        fence = Fence(queue, event.queue)
        self.fences.append(fence)
        if fence != self.missing:
            self._queues[queue].append(event)

    def get_on(self, count: int) -> None:
        """Do so many pieces of work, if there are."""
        for _ in range(count):
            ready = [name for name, items in self._queues.items() if items and _is_ready(items[0])]
            if not ready:
                assert not any(self._queues.values()), "every queue waits for another"
                return
            if self.generator.random() < 0.1:
                self._favourite = self.generator.choice(sorted(self._queues))
            name = self._favourite if self._favourite in ready else self.generator.choice(ready)
            item = self._queues[name].pop(0)
            if not isinstance(item, Event):
                item()

    def finish(self) -> None:
        """Do all of it."""
        while any(self._queues.values()):
            self.get_on(1)


def _is_ready(item: Callable[[], object] | Event) -> bool:
    return item.passed if isinstance(item, Event) else True
