"""What surrounds every operation: the owner's thread, one at a time, all or nothing, the optional log of operations.

All or nothing holds for every exception that an operation raises itself or that comes out of what it calls: arguments
that iterate, `__index__`, `__eq__`. It cannot be promised for an asynchronous exception between two
bytecodes, as `KeyboardInterrupt` from a signal does: a change and its entry in the undo log are two steps. What can be
taken back is; then the next operation audits the state before it does anything, and refuses if it is damaged.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial, wraps
from threading import get_ident
from typing import Concatenate, ParamSpec, TypeVar

from pagedkern.allocator import audit
from pagedkern.allocator.arguments import settled
from pagedkern.allocator.handles import Plan, Sequence, Step
from pagedkern.allocator.ledger import BROKEN_OFF, IDLE, RUNNING, Ledger, Mark
from pagedkern.allocator.log import OperationLog
from pagedkern.errors import AuditError, InvalidArgument, OutOfBlocks, WrongThread

BUSY = "another operation of this allocator is running; what it calls may not call the allocator"


class Atomic:
    """The part of `BlockAllocator` that its operations stand on: the state, the thread that owns it, the log."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._thread: int | None = None
        self._log: OperationLog | None = None

    def adopt(self) -> None:
        """Make the calling thread the owner. The thread that owned the allocator must not be using it."""
        self._thread = get_ident()

    def check_thread(self) -> None:
        """Raise `WrongThread` unless the calling thread owns the allocator. The first that asks becomes its owner."""
        thread = get_ident()
        if self._thread is None:
            self._thread = thread
        elif self._thread != thread:
            raise WrongThread(
                f"this allocator belongs to thread {self._thread}, thread {thread} called it: "
                "call adopt() in the thread that takes it over"
            )

    def _idle(self, name: str) -> None:
        """Refuse a call from another thread, or from within an operation."""
        self.check_thread()
        if self._ledger.busy:
            look_again(self._ledger, name)


A = TypeVar("A", bound=Atomic)
P = ParamSpec("P")
R = TypeVar("R")
_SETTLED = frozenset((list, tuple, array, int, bool, str, bytes, type(None), Sequence, Plan, Step))
"""Types of arguments that run no code of the caller's when they are iterated over, or that are not iterated over."""


def operation(
    method: Callable[Concatenate[A, P], R],
) -> Callable[Concatenate[A, P], R]:
    """An operation is all or nothing: whatever it raises, the state is as it was before.

    Arguments that iterate lazily are walked through first, so that they may call the allocator. Any other call from
    within an operation is refused.
    """

    @wraps(method)
    def run(self: A, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._thread != get_ident():
            self.check_thread()
        ledger = self._ledger
        if ledger.busy:
            look_again(ledger, method.__name__)
        for arg in args:
            if type(arg) not in _SETTLED:
                args = tuple(map(settled, args))  # type: ignore[assignment]
                break
        for value in kwargs.values():
            if type(value) not in _SETTLED:
                kwargs = {key: settled(value) for key, value in kwargs.items()}  # type: ignore[assignment]
                break
        log = self._log
        if log is not None:  # the log calls this again, with itself out of the way
            self._log = None
            try:
                return log.run(method.__name__, partial(run, self), ledger, args, kwargs)
            finally:
                self._log = log
        undo = ledger.undo
        mark = len(undo)
        try:
            ledger.busy = RUNNING
            ledger.age += 1
            if not ledger.age & 15 and not undo:
                ledger.compact()
            deadlines = ledger.deadlines
            deadlines.reading = None
            if deadlines:
                ledger.expire()
            result = method(self, *args, **kwargs)
            if not ledger.transactions:
                undo.clear()
            ledger.busy = IDLE
            return result
        except BaseException as error:
            ledger.busy = BROKEN_OFF
            if isinstance(error, Exception):
                undo.rollback(mark)
                ledger.counts.numbers["out_of_blocks"] += isinstance(error, OutOfBlocks)
                ledger.busy = IDLE
            else:  # it may have come between a change and its entry in the undo log
                with suppress(Exception):
                    undo.rollback(mark)
            raise

    return run  # type: ignore[return-value]


def look_again(ledger: Ledger, name: str) -> None:
    """The allocator is not idle: refuse, unless it was a call that was broken off and that has left the state whole."""
    if ledger.busy == RUNNING:
        raise InvalidArgument(f"{name}: {BUSY}")
    try:
        audit.check(ledger)
    except Exception as error:
        raise AuditError(
            f"{name}: an asynchronous exception, as KeyboardInterrupt, has broken off an earlier call and left damage; "
            f"restore a snapshot: {error!r}"
        ) from None
    ledger.busy = IDLE


@contextmanager
def transaction(self: Atomic) -> Iterator[None]:
    """What `BlockAllocator.transaction` does."""
    self.check_thread()
    ledger = self._ledger
    if ledger.busy:
        look_again(ledger, "transaction")
    ledger.settle_lockstep_batches()
    this = len(ledger.undo), dict(ledger.counts.numbers)
    ledger.transactions.append(this)
    if self._log is not None:
        self._log.write({"op": "begin"})
    try:
        yield
    except BaseException:
        _leave(ledger, self._log, this, "rollback")
        raise
    else:
        _leave(ledger, self._log, this, "end")


def _leave(ledger: Ledger, log: OperationLog | None, this: Mark, how: str) -> None:
    """End a transaction: "rollback" or "end". One that is left before those inside it takes them back with itself."""
    if ledger.busy == RUNNING or (ledger.busy and how == "end"):
        look_again(ledger, "transaction")
    number = next((i for i, other in enumerate(ledger.transactions) if other is this), None)
    if number is None:
        if how == "rollback":  # it is, as wanted
            return
        raise InvalidArgument("transaction: taken back already, when one around it was left first")
    inner = len(ledger.transactions) - number - 1
    if inner or how == "rollback":
        with suppress(*((Exception,) if ledger.busy == BROKEN_OFF else ())):  # entries may be missing then
            ledger.undo.rollback(this[0])
        ledger.counts.numbers.update(this[1])
        how = "rollback"
    del ledger.transactions[number:]
    if not number and not ledger.busy:
        ledger.undo.clear()
    for _ in range(inner + 1 if log is not None else 0):
        log.write({"op": how})  # type: ignore[union-attr]
    if inner:
        raise InvalidArgument(f"transaction: left before {inner} inside it; all of them are taken back")
