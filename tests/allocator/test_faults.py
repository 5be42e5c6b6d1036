"""An exception raised by any function inside any operation leaves the state as it was before.

The tracer raises when the k-th call inside the allocator is about to run, for every k. Where an asynchronous exception
may come, between any two bytecodes, damage can remain, but none that the next call does not find.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from inspect import CO_GENERATOR
from pathlib import Path
from types import FrameType

import pytest

import pagedkern.allocator
from pagedkern.allocator import BlockAllocator
from pagedkern.errors import AuditError
from tests.allocator.world import fingerprint

HOME = str(Path(pagedkern.allocator.__file__).parent)


class Fault(BaseException):
    """Raised by the tracer."""


class Scene:
    """A small engine in the middle of its work: prefixes cached on both memories, forks, steps and plans in flight."""

    def __init__(self) -> None:
        a = self.a = BlockAllocator(23, 4, num_host_blocks=12)
        self.prompt = list(range(11))
        self.gone = a.create(list(range(40, 52)), priority=1)
        self.host = a.create(self.prompt)
        self.busy = a.create([1, 2, 3, 4, 5, 6])
        a.commit(a.prefill([self.gone, self.host, self.busy]))
        a.commit(a.swap_out([self.host]))
        a.free(self.gone)
        self.seq = a.create(list(range(60, 69)))
        a.commit(a.prefill([self.seq]))
        self.fork = a.fork(self.seq)[0]
        self.fresh = a.create(self.prompt)
        self.first = a.append([self.busy], [7])
        self.second = a.append([self.busy], [8])
        self.late = a.prefill([a.create(list(range(80, 88)))])
        self.out = a.swap_out([a.create(5)])
        self.twins = [a.create([9])]
        self.twins += a.fork(self.twins[0])
        self.pair = [a.create(3), a.create(4)]
        a.commit(a.prefill(self.pair))
        for token in range(4):
            self.fast = a.append(self.pair, [token, token])
            if token < 3:
                a.commit(self.fast)
        a.check()

    def drain(self) -> None:
        for plan in list(self.a._ledger.in_flight.values()):
            self.a.commit(plan)


OPERATIONS: dict[str, Callable[[Scene], object]] = {
    "create": lambda s: s.a.create([5] * 20),
    "create a hit": lambda s: s.a.create([*range(40, 52), 0]),
    "create a hit on the host": lambda s: s.a.create([*s.prompt, 0, 0]),
    "create and evict": lambda s: s.a.create(s.a.num_free_blocks * 4),
    "create many": lambda s: s.a._create_many([[5] * 4, [*range(40, 45)], [6]], [None, None, "new"]),
    "create many and evict": lambda s: s.a._create_many([[5] * 4] * s.a.num_free_blocks, [None] * s.a.num_free_blocks),
    "prefill": lambda s: s.a.prefill([s.fresh]),
    "prefill what is shared": lambda s: s.a.prefill(s.twins),
    "append": lambda s: s.a.append([s.seq, s.fork, s.busy], [1, 2, 3]),
    "append many": lambda s: s.a.append([s.seq, s.fork], [[1] * 5, [2] * 9], lookahead=3),
    "append fast": lambda s: s.a.append(s.pair, [1, 2]),
    "mixed": lambda s: s.a.mixed([s.seq, s.fork], [1, [2, 3]], [s.fresh], 5),
    "append to part of a batch": lambda s: s.a.append(s.pair[:1], [1]),
    "fork": lambda s: s.a.fork(s.busy, 3),
    "fork what is expected": lambda s: s.a.fork(s.fresh),
    "truncate": lambda s: s.a.truncate(s.busy, 3),
    "free": lambda s: s.a.free(s.seq),
    "free in flight": lambda s: s.a.free(s.busy),
    "free what is expected": lambda s: s.a.free(s.fresh),
    "free swapped": lambda s: s.a.free(s.host),
    "release window": lambda s: s.a.release_window(s.seq, 8),
    "swap out": lambda s: s.a.swap_out([s.seq, s.fork, s.fresh]),
    "swap in": lambda s: s.a.swap_in([s.host]),
    "commit": lambda s: s.a.commit(s.first),
    "commit a prompt": lambda s: s.a.commit(s.late),
    "clear the cache": lambda s: s.a.clear_cache(),
    "pin": lambda s: s.a.pin(s.seq),
    "look for a prefix": lambda s: s.a.can_allocate([*range(40, 50)]) and s.a.truncate(s.seq, 1),
    "commit fast": lambda s: s.a.commit(s.fast),
    "commit a swap": lambda s: s.a.commit(s.out),
    "abort": lambda s: s.a.abort(s.second),
    "abort fast": lambda s: s.a.abort(s.fast),
    "abort a swap": lambda s: s.a.abort(s.out),
}


def run_with_fault(operation: Callable[[], object], number: int) -> bool:
    """Chain it, raising in place of the given call, counted from 1. Returns whether there were that many."""
    left = number

    def trace(frame: FrameType, event: str, arg: object) -> object:
        nonlocal left
        if not frame.f_code.co_filename.startswith(HOME) or frame.f_code.co_flags & CO_GENERATOR:
            return None
        if event == "call":
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise Fault
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        operation()
    except Fault:
        return True
    finally:
        sys.settrace(before)
    return False


def test_every_operation_is_among_them() -> None:
    wrapped = {name for name, method in vars(BlockAllocator).items() if hasattr(method, "__wrapped__")}
    assert len(wrapped) > 12
    assert wrapped - {"transaction", "restore"} <= {
        name for call in OPERATIONS.values() for name in call.__code__.co_names
    }


@pytest.mark.parametrize("name", OPERATIONS)
def test_fault(name: str) -> None:
    expected = fingerprint(Scene().a)
    number = 1
    while True:
        scene = Scene()
        if not run_with_fault(lambda: OPERATIONS[name](scene), number):  # noqa: B023
            break
        scene.a.check()
        assert fingerprint(scene.a) == expected, f"call {number}"
        scene.drain()
        scene.a.check()
        number += 1
    assert number > 3, "there were calls"
    scene.a.check()
    assert fingerprint(scene.a) != expected, "and without a fault it does something"


class Interrupt(BaseException):
    """Comes from outside, as KeyboardInterrupt does."""


def run_until(operation: Callable[[], object], number: int) -> int:
    """Chain it, interrupted before the bytecode of that number, counted from 1; 0: not. Returns how many there were."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> object:
        nonlocal count
        if not frame.f_code.co_filename.startswith(HOME):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            count += 1
            if count == number:
                sys.settrace(None)
                raise Interrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        operation()
    except Interrupt:
        pass
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("name", OPERATIONS)
def test_interrupt_at_any_bytecode(name: str) -> None:
    """The next call goes on from a state that is whole, before or after the operation, or says that it cannot."""
    scene = Scene()
    before = fingerprint(scene.a)
    total = run_until(lambda: OPERATIONS[name](scene), 0)
    after = fingerprint(scene.a)
    refused = 0
    for number in range(1 + len(name) % 5, total, max(1, total // 40)):
        scene = Scene()
        run_until(lambda: OPERATIONS[name](scene), number)  # noqa: B023
        try:
            assert scene.a.can_allocate(1) is not None
        except AuditError:
            refused += 1
            with pytest.raises(AuditError, match=r"append: .* broken off an earlier call and left damage; restore"):
                scene.a.append([scene.seq], [1])
            continue
        scene.a.check()
        whole = fingerprint(scene.a) in (before, after) or name == "clear the cache"  # a part of it may be forgotten
        assert whole, f"bytecode {number} of {total}"
    assert refused < 20, "most interrupts do no damage"
