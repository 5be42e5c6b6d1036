"""Seconds of a call on cold caches, and how fast memory is read at that moment; the link to pytest-benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

from benchmarks.timer import Timer, clocked
from pagedkern.autotune.measure import Reader
from pagedkern.gpucheck.clock import Clock

LEAST, MOST = 9, 100  # rounds of a row
SECONDS = {"tiny": 0.0, "small": 0.5, "full": 2.0}  # for the rounds of a row, about; slower rows have one round


class Meter:
    """Times calls on one device ("cpu" or "cuda"): the wall clock on a CPU, CUDA events on a GPU."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._reader: Reader | None = None
        self._clock = Clock() if device == "cuda" else None

    def timer(self, call: Callable[[], object]) -> Timer:
        """The seconds of a call; on a GPU those of the GPU, which is kept busy while the call is issued."""
        clock = self._clock
        if clock is None:
            return clocked(call)
        return lambda: clock.medians({"": call}, rounds=1, warm=0)[""]

    def read(self) -> float:
        """Bytes per second of the plainest thing that reads memory, several times the last-level cache: whatever was
        in the caches is not there afterwards."""
        self._reader = self._reader or Reader(self.device)
        return self._reader.sample()


class Reading:
    """A clock that moves only when told to. pytest-benchmark reads it, so a round lasts what a `Timer` measured,
    be it by CUDA events or in another process."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


READING = Reading()


class Measure:
    """Measures one row: the fixture `measure`."""

    def __init__(self, benchmark: Any, meter: Meter, size: str) -> None:
        """`size`: one of `shapes.SIZES`; it says how long a row may take."""
        self.benchmark, self.meter, self.size = benchmark, meter, size
        self._seconds = SECONDS[size]

    def __call__(
        self, timer: Timer, *, num_bytes: int = 0, flops: int = 0, cold: bool = True, rounds: int | None = None
    ) -> float:
        """Run a timer until its share of time is used up; the median of its seconds.

        num_bytes, flops: what a call must read (or read and write) and compute: the rates become extra_info.
        cold: empty the caches before each round by reading memory, and record how fast that was.
        """
        timer()  # compiles, and makes what is made on first use
        reads: list[float] = []

        def prepare() -> None:
            if cold:
                reads.append(self.meter.read())

        def run() -> None:
            READING.now += timer()

        if rounds is None:
            start = perf_counter()
            prepare()
            timer()
            rounds = self._rounds(perf_counter() - start)
        self.benchmark.pedantic(run, setup=prepare, rounds=rounds)
        seconds = float(self.benchmark.stats.stats.median) if self.benchmark.enabled else timer()
        self._record(seconds, num_bytes, flops, reads)
        return seconds

    def _rounds(self, seconds: float) -> int:
        """How many rounds of so many seconds there are; what is slower than a row may be is seen to be so at once."""
        if self._seconds < seconds:
            return 1
        return max(LEAST, min(MOST, int(self._seconds / seconds)))

    def _record(self, seconds: float, num_bytes: int, flops: int, reads: list[float]) -> None:
        info = self.benchmark.extra_info
        if num_bytes:
            info |= {"bytes": num_bytes, "gb_per_s": round(num_bytes / seconds / 1e9, 3)}
            if reads:
                read = statistics.median(reads)
                info |= {"read_gb_per_s": round(read / 1e9, 2), "of_read": round(num_bytes / seconds / read, 3)}
        if flops:
            info |= {"flops": flops, "gflop_per_s": round(flops / seconds / 1e9, 2)}
