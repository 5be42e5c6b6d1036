"""Priorities of parts of a prompt, for good or for some time after its sequence has been freed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

from pagedkern.allocator.arguments import MAX_TOKENS, integer
from pagedkern.allocator.undo import UndoLog
from pagedkern.errors import InvalidArgument, InvalidType

if TYPE_CHECKING:
    from pagedkern.allocator.ranks import Ranks

PRIORITIES = 4
"""Levels of eviction: cached blocks of level 0 are evicted before those of level 1, and so on."""


class Retention(NamedTuple):
    """Cached blocks that hold any of the positions `start .. end-1` have at least this priority.

    For as long as the sequence lives and for so many seconds after it has been freed; None: for as long as they are
    cached. Positions may be those of tokens that are still to come.
    """

    start: int
    end: int
    priority: int
    seconds: float | None = None


def read(retention: object) -> tuple[Retention, ...]:
    """The argument `retention`."""
    if not isinstance(retention, (list, tuple)):
        raise InvalidType(f"retention: got {type(retention).__name__}, expected a list of Retention")
    return tuple(_one(f"retention[{i}]", value) for i, value in enumerate(retention))


def _one(name: str, value: object) -> Retention:
    if not isinstance(value, (list, tuple)) or not 3 <= len(value) <= 4:
        raise InvalidType(f"{name}: got {str(value)[:60]}, expected Retention(start, end, priority, seconds)")
    start = integer(f"{name}: start", value[0], 0, MAX_TOKENS - 1)
    end = integer(f"{name}: end", value[1], start + 1, MAX_TOKENS)
    priority = integer(f"{name}: priority", value[2], 0, PRIORITIES - 1)
    seconds = value[3] if len(value) == 4 else None
    if seconds is not None:
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
            raise InvalidType(f"{name}: seconds: got {seconds!r}, expected a number or None")
        if not 0 <= seconds < math.inf:
            raise InvalidArgument(f"{name}: seconds: got {seconds}, expected at least 0, or None for good")
        seconds = float(seconds)
    return Retention(start, end, priority, seconds)


class Lease:
    """What one sequence keeps up for a time: the priority of some blocks."""

    __slots__ = ("blocks", "end", "priority", "seconds", "start", "until")

    def __init__(self, kept: Retention) -> None:
        assert kept.seconds is not None
        self.start, self.end, self.priority, self.seconds = kept.start, kept.end, kept.priority, kept.seconds
        self.until: float | None = None  # None: its sequence lives
        self.blocks: set[tuple[Ranks, int]] = set()  # cached blocks that have it


def leases(retention: Iterable[Retention]) -> tuple[Lease, ...]:
    """The leases of a new sequence."""
    return tuple(Lease(kept) for kept in retention if kept.seconds is not None)


class Deadlines:
    """When leases end, and what tells the time."""

    def __init__(self, clock: Callable[[], float], undo: UndoLog) -> None:
        self.clock = clock
        self.readings: list[float] | None = None  # those of this operation, if somebody writes them down
        self.latest = -math.inf
        self._heap: list[tuple[float, int, Lease]] = []
        self._number = 0
        self._limit = 64
        self._undo = undo

    def __bool__(self) -> bool:
        """Whether any lease is going to end."""
        return bool(self._heap)

    def now(self) -> float:
        """Seconds. Never less than before."""
        value = self.clock()
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InvalidType(f"clock: got {value!r} of type {type(value).__name__}, expected a number of seconds")
        if not math.isfinite(value):
            raise InvalidArgument(f"clock: got {value}, expected a number of seconds")
        if self.readings is not None:
            self.readings.append(value)
        self.latest = max(self.latest, value)
        return self.latest

    def begin(self, ending: Iterable[Lease]) -> None:
        """The sequence of these leases has been freed: their time begins to run."""
        begun = [lease for lease in ending if lease.blocks]
        now = self.now() if begun else 0.0
        for lease in begun:
            self._undo.append((setattr, (lease, "until", None)))
            lease.until = now + lease.seconds
            self.add(lease)

    def add(self, lease: Lease) -> None:
        """A lease that ends at a known time."""
        assert lease.until is not None
        self._number += 1
        heappush(self._heap, (lease.until, self._number, lease))

    def expire(self) -> None:
        """Let the blocks go whose leases have ended."""
        now = self.now()
        while self._heap and self._heap[0][0] <= now:
            entry = heappop(self._heap)
            self._undo.append((heappush, (self._heap, entry)))
            until, _, lease = entry
            if lease.until == until:  # else it was taken back
                for ranks, b in sorted(lease.blocks, key=lambda pair: pair[1]):
                    ranks.end(b, lease)

    def compact(self) -> None:
        """Drop deadlines that nothing waits for. Called between operations."""
        if len(self._heap) > self._limit:
            self._heap = [entry for entry in self._heap if entry[2].until == entry[0] and entry[2].blocks]
            heapify(self._heap)
            self._limit = max(64, 2 * len(self._heap))

    def pending(self) -> list[Lease]:
        """The leases that are going to end, in this order."""
        ordered = sorted(self._heap, key=lambda entry: entry[:2])
        return list(dict.fromkeys(lease for until, _, lease in ordered if lease.until == until and lease.blocks))
