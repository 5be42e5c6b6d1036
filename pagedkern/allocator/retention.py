"""Priorities of parts of a prompt, for good or for some time after its sequence has been freed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from pagedkern.allocator.arguments import MAX_TOKENS, PRIORITIES, integer
from pagedkern.allocator.undo import UndoLog
from pagedkern.errors import InvalidArgument, InvalidType


class Retention(NamedTuple):
    """Cached blocks that hold any of the positions `start .. end-1` have at least this priority, and with them what is
    before them in the prompt.

    As long as the sequence lives, and then for so many seconds; None: as long as they are cached. When the time is
    over, the blocks have the priority that they would have had without it, and count as used then. Positions may be
    those of tokens that are still to come.
    """

    start: int  # position of the first token
    end: int  # position behind the last token
    priority: int  # 0 to 3, as in `BlockAllocator.create`
    seconds: float | None = None  # from `free` on; None: for good


def read(retention: object) -> tuple[Retention, ...]:
    """The argument `retention`."""
    if not isinstance(retention, (list, tuple)) or isinstance(retention, Retention):
        raise InvalidType(f"retention: got {type(retention).__name__}, expected a list of Retention")
    return tuple(_one(f"retention[{i}]", value) for i, value in enumerate(retention))


def _one(name: str, value: object) -> Retention:
    if not isinstance(value, (list, tuple)) or not 3 <= len(value) <= 4:
        raise InvalidType(f"{name}: got {str(value)[:60]}, expected Retention(start, end, priority, seconds)")
    start = integer(f"{name}, start", value[0], 0, MAX_TOKENS - 1)
    end = integer(f"{name}, end", value[1], start + 1, MAX_TOKENS)
    priority = integer(f"{name}, priority", value[2], 0, PRIORITIES - 1)
    return Retention(start, end, priority, seconds(f"{name}, seconds", value[3] if len(value) == 4 else None))


def seconds(name: str, value: object) -> float | None:
    """A finite time of at least 0, or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidType(f"{name}: got {value!r}, expected a number or None")
    if not 0 <= value < math.inf:
        raise InvalidArgument(f"{name}: got {value}, expected at least 0, or None for good")
    return float(value)


class Lease:
    """What one sequence keeps up for a time: the priority of some blocks."""

    __slots__ = ("blocks", "priority", "seconds", "until")

    def __init__(self, priority: int, seconds: float) -> None:
        self.priority = priority
        self.seconds = seconds
        self.until: float | None = None  # None: its sequence lives
        self.blocks: set[tuple[object, int]] = set()  # cached blocks that have it, each with the ranks of its memory


def leases(retention: Iterable[Retention]) -> tuple[Lease | None, ...]:
    """The lease of each retention that is for some time only."""
    return tuple(None if kept.seconds is None else Lease(kept.priority, kept.seconds) for kept in retention)


class Deadlines:
    """When leases end, and what tells the time."""

    def __init__(self, clock: Callable[[], float], undo: UndoLog) -> None:
        self.clock = clock
        self.reading: float | None = None  # of this operation
        self.latest = -math.inf  # reading so far
        self._heap: list[tuple[float, int, Lease]] = []
        self._number = 0
        self._limit = 64
        self._undo = undo

    def __bool__(self) -> bool:
        """Whether any lease is going to end."""
        return bool(self._heap)

    def now(self) -> float:
        """Seconds, the same throughout an operation, and never less than before."""
        if self.reading is None:
            value = self.clock()
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise InvalidType(f"clock: got {value!r} of type {type(value).__name__}, expected a number of seconds")
            if not math.isfinite(value):
                raise InvalidArgument(f"clock: got {value}, expected a finite number of seconds")
            self.reading = self.latest = max(self.latest, float(value))
        return self.reading

    def begin(self, ending: Iterable[Lease | None]) -> None:
        """The sequence of these leases has been freed: their time begins to run."""
        for lease in ending:
            if lease is not None and lease.blocks:
                self._undo.append((setattr, (lease, "until", None)))
                lease.until = self.now() + lease.seconds
                self.add(lease)

    def add(self, lease: Lease) -> None:
        """A lease that ends at a known time."""
        assert lease.until is not None
        self._number += 1
        heappush(self._heap, (lease.until, self._number, lease))

    def expire(self) -> list[Lease]:
        """The leases that have ended, which are forgotten."""
        now = self.now()
        ended = []
        while self._heap and self._heap[0][0] <= now:
            entry = heappop(self._heap)
            self._undo.append((heappush, (self._heap, entry)))
            if entry[2].until == entry[0]:  # else its beginning was taken back
                ended.append(entry[2])
        return ended

    def compact(self) -> None:
        """Drop deadlines that nothing waits for. Called between operations, when there is nothing to be undone."""
        if len(self._heap) > self._limit:
            self._heap = [entry for entry in self._heap if entry[2].until == entry[0] and entry[2].blocks]
            heapify(self._heap)
            self._limit = max(64, 2 * len(self._heap))

    def pending(self) -> list[Lease]:
        """The leases that are going to end, in this order."""
        ordered = sorted(self._heap, key=lambda entry: entry[:2])
        return list(dict.fromkeys(lease for until, _, lease in ordered if lease.until == until and lease.blocks))
