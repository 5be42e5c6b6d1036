"""The threads of a simulated CUDA block as fibers of one thread, their barriers, and what the lanes of a warp exchange.

What stands here knows of threads only; `numba_simulator` gives them memory, instructions and kernels to run.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, NamedTuple

import greenlet

WARP = 32


@dataclass(frozen=True, eq=False)
class Place:
    """An instruction of a kernel. There is one object for each, so that none is hashed by its code: that takes long."""

    code: CodeType
    at: int


_places: dict[tuple[int, int], Place] = {}


def place_of(frame: FrameType) -> Place:
    """Where a frame stands."""
    key = id(frame.f_code), frame.f_lasti
    found = _places.get(key)
    if found is None:
        found = _places[key] = Place(frame.f_code, frame.f_lasti)
    return found


class DivergentBarrier(Exception):
    """Threads that must meet at a barrier do not."""


@dataclass
class Options:
    """How kernels are run."""

    order: str = "forward"  # of threads and blocks: "forward", "backward", "random"
    single_precision: bool = False

    def arranged(self, things: Sequence[Any]) -> list[Any]:
        chosen = list(things)
        if self.order == "backward":
            chosen.reverse()
        elif self.order == "random":
            random.Random(len(chosen)).shuffle(chosen)
        return chosen


options = Options()


@contextmanager
def running(**changes: Any) -> Iterator[None]:
    """Set options for a while."""
    before = dict(vars(options))
    vars(options).update(changes)
    try:
        yield
    finally:
        vars(options).update(before)


class Index(NamedTuple):
    x: int
    y: int
    z: int


class Request(NamedTuple):
    """Why a thread waits: for its block (`warp` is None) or for the lanes of `mask`, which exchange `value`."""

    place: Place
    operation: str
    mask: int = 0
    value: Any = None
    operand: Any = None


class Thread(greenlet.greenlet):
    """A CUDA thread; the fiber is used again for the next block."""

    def __init__(self, number: int, index: Index) -> None:
        super().__init__(self._work)
        self.number, self.index = number, index
        self.warp, self.lane = divmod(number, WARP)
        self.block: Block | None = None
        self.request: Request | None = None
        self.copies: list[list[tuple[Any, ...]]] = [[]]  # groups of copies that have begun; the last is still open

    def _work(self, _: None = None) -> None:
        while True:
            assert self.block is not None
            self.block.kernel(*self.block.args)
            self.block = self.request = None
            self.parent.switch()

    def wait(self, request: Request) -> Any:
        self.request = request
        return self.parent.switch()


@dataclass
class Block:
    """A block that is running."""

    kernel: Callable[..., Any]
    args: tuple[Any, ...]
    index: Index
    size: Index
    grid: Index
    shared: dict[Place, Any]

    def run(self, threads: list[Thread]) -> None:
        """Run every thread to its end, from barrier to barrier."""
        for thread in threads:
            thread.block = self
        results: dict[Thread, Any] = {}
        ready = threads
        while ready:
            for thread in ready:
                state.thread = thread
                thread.switch(results.pop(thread, None))
            ready = self._released(threads, results)

    def _released(self, threads: list[Thread], results: dict[Thread, Any]) -> list[Thread]:
        """The threads whose barrier is complete, with what each gets from it."""
        waiting = [thread for thread in threads if thread.request is not None]
        if not waiting:
            return []
        for_block = [thread for thread in waiting if thread.request.operation in OF_BLOCK]  # type: ignore[union-attr]
        if len(for_block) == len(threads):
            if len({thread.request.place for thread in for_block}) > 1:  # type: ignore[union-attr]
                raise DivergentBarrier(self._report(for_block, "wait at different barriers"))
            exchange = OF_BLOCK[for_block[0].request.operation]  # type: ignore[union-attr]
            if exchange is not None:
                result = exchange([thread.request.value for thread in for_block])  # type: ignore[union-attr]
                results |= dict.fromkeys(for_block, result)
            return for_block
        if len(for_block) == len(waiting):
            raise DivergentBarrier(self._report(for_block, "wait for a barrier that others have left out"))
        released: list[Thread] = []
        lanes = [thread for thread in waiting if thread.request.operation not in OF_BLOCK]  # type: ignore[union-attr]
        for _, group in itertools.groupby(sorted(lanes, key=lambda t: t.number), key=lambda t: t.warp):
            released += self._meet({thread.lane: thread for thread in group}, results)
        if not released:
            raise DivergentBarrier(self._report(lanes, "wait for lanes of their warp that do not come"))
        arrived = set(released)
        return [thread for thread in threads if thread in arrived]

    def _meet(self, lanes: dict[int, Thread], results: dict[Thread, Any]) -> list[Thread]:
        """The lanes of a warp that are complete for what they ask, computed."""
        released: list[Thread] = []
        groups: dict[tuple[Any, ...], dict[int, Thread]] = {}
        for lane, thread in lanes.items():
            request = thread.request
            assert request is not None
            if not request.mask >> lane & 1:
                raise DivergentBarrier(self._report([thread], f"lane {lane} is not in its own mask {request.mask:#x}"))
            groups.setdefault((request.place, request.operation, request.mask), {})[lane] = thread
        last = (self.size.x * self.size.y * self.size.z - 1) % WARP
        whole = 0
        for (_, operation, mask), group in groups.items():
            if group[next(iter(group))].warp == (self.size.x * self.size.y * self.size.z - 1) // WARP:
                mask &= (1 << (last + 1)) - 1  # lanes that the block does not have
            if sum(1 << lane for lane in group) == mask:
                values = {lane: thread.request.value for lane, thread in group.items()}  # type: ignore[union-attr]
                for lane, thread in group.items():
                    assert thread.request is not None
                    results[thread] = EXCHANGES[operation](values, lane, thread.request.operand)
                released += group.values()
                whole += 1
        return released

    def _report(self, threads: list[Thread], what: str) -> str:
        lines = [
            f"block {tuple(self.index)}: {len(threads)} of {self.size.x * self.size.y * self.size.z} threads {what}"
        ]
        places: dict[tuple[str, str], list[int]] = {}
        for thread in threads:
            assert thread.request is not None
            code, at = thread.request.place.code, thread.request.place.at
            line = next((n for start, end, n in code.co_lines() if start <= at < end), 0)
            where = f"{code.co_filename}:{line} in {code.co_name}"
            places.setdefault((thread.request.operation, where), []).append(thread.number)
        return "; ".join(
            [*lines, *(f"threads {numbers} at {op} in {where}" for (op, where), numbers in places.items())]
        )


# ---- What lanes of a warp exchange: (value of each lane, own lane, operand) -> result --------------------------------


def _from(values: dict[int, Any], source: int, mine: int) -> Any:
    if source not in values:
        raise DivergentBarrier(f"lane {mine} reads lane {source}, which takes no part in the shuffle")
    return values[source]


EXCHANGES: dict[str, Callable[[dict[int, Any], int, Any], Any]] = {
    "syncwarp": lambda values, lane, _: None,
    "shfl_sync": lambda values, lane, source: _from(values, source % WARP, lane),
    "shfl_xor_sync": lambda values, lane, mask: _from(values, lane ^ mask, lane),
    "shfl_up_sync": lambda values, lane, delta: _from(values, lane - delta if lane >= delta else lane, lane),
    "shfl_down_sync": lambda values, lane, delta: _from(values, lane + delta if lane + delta < WARP else lane, lane),
    "ballot_sync": lambda values, lane, _: sum(1 << n for n, x in values.items() if x),
    "all_sync": lambda values, lane, _: all(values.values()),
    "any_sync": lambda values, lane, _: any(values.values()),
    "eq_sync": lambda values, lane, _: len(set(values.values())) == 1,
}


OF_BLOCK: dict[str, Callable[[list[Any]], int] | None] = {
    "syncthreads": None,
    "syncthreads_or": lambda values: int(any(values)),
    "syncthreads_and": lambda values: int(all(values)),
    "syncthreads_count": lambda values: sum(map(bool, values)),
}


class State:
    """What runs now. One launch at a time."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.thread: Thread | None = None
        self.unaligned = False  # whether a pointer of this launch is no multiple of 16 bytes
        self.pools: dict[tuple[int, Index], list[Thread]] = {}

    def threads(self, size: Index) -> list[Thread]:
        """Fibers for a block of this size; those of an OS thread stay with it."""
        key = (threading.get_ident(), size)
        pool = self.pools.pop(key, None)
        if pool is None or pool[0].parent is not greenlet.getcurrent():
            indices = itertools.product(range(size.z), range(size.y), range(size.x))
            pool = [Thread(n, Index(x, y, z)) for n, (z, y, x) in enumerate(indices)]
        return pool


state = State()
