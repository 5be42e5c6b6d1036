"""What every benchmark here hands out: something that runs once and says how long it took. Standard library only."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

Timer = Callable[[], float]  # runs once, returns the seconds that it took


def clocked(call: Callable[[], object]) -> Timer:
    """The call timed by the wall clock."""

    def once() -> float:
        start = perf_counter()
        call()
        return perf_counter() - start

    return once
