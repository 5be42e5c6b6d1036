"""The clock of GPUs, on stand-ins for the driver: what is captured, replayed and counted. No GPU takes part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from pagedkern.autotune import clock
from pagedkern.autotune.clock import GpuClock


class Driver:
    """Counts milliseconds: each call takes one, also when it is replayed; while capturing nothing runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.captured, self.capturing, self.graphs = 0.0, 0, False, 0
        driver = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = driver.now

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, other: Event) -> float:
                return other.at - self.at

        class Graph:
            def replay(self) -> None:
                driver.now += self.calls  # type: ignore[attr-defined]

        @contextmanager
        def graph(made: Graph) -> Iterator[None]:
            driver.captured, driver.capturing = 0, True
            driver.graphs += 1
            try:
                yield
            finally:
                driver.capturing = False
                made.calls = driver.captured  # type: ignore[attr-defined]

        for name, value in (("Event", Event), ("CUDAGraph", Graph), ("graph", graph), ("synchronize", lambda: None)):
            monkeypatch.setattr(torch.cuda, name, value)

    def call(self) -> None:
        if self.capturing:
            self.captured += 1
        else:
            self.now += 1


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


def test_calls_are_captured_once_and_replayed(driver: Driver) -> None:
    made = GpuClock()
    for _ in range(3):
        assert made.seconds(driver.call, 5, "a") == pytest.approx(1e-3)
    assert (driver.graphs, driver.captured) == (1, 5)
    assert driver.now == 1 + 5 + 3 * 5  # made ready, replayed once untimed, and three times
    made.seconds(driver.call, 7, "a")
    made.seconds(driver.call, 5, "b")
    assert driver.graphs == 3


def test_without_a_key_calls_are_launched(driver: Driver) -> None:
    assert GpuClock().seconds(driver.call, 4) == pytest.approx(1e-3)
    assert (driver.graphs, driver.now) == (0, 4)


def test_what_cannot_be_captured_is_launched(driver: Driver) -> None:
    def call() -> None:
        if driver.capturing:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        driver.call()

    made = GpuClock()
    for _ in range(2):
        assert made.seconds(call, 3, "a") == pytest.approx(1e-3)
    assert driver.graphs == 1  # it is not tried again
    assert made.refused == {"a": "RuntimeError: operation not permitted when stream is capturing"}


def test_only_so_many_graphs_are_kept(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "MOST_GRAPHS", 2)
    made = GpuClock()
    for key in ("a", "b", "c", "a"):
        made.seconds(driver.call, 1, key)
    assert driver.graphs == 4
