"""What surrounds every operation: the owner's thread, one at a time, all or nothing, the optional log of operations.

All or nothing holds for every exception that an operation raises itself or that comes out of what it calls: arguments
that iterate, `__index__`, `__eq__`. It cannot be promised for an exception that arrives from outside between two
bytecodes, as `KeyboardInterrupt` from a signal does: a change and its entry in the undo log are two steps. What can be
taken back is; then the next operation audits the state before it does anything, and refuses if it is damaged.
"""

from __future__ import annotations

import json
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from threading import get_ident
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TextIO, TypeVar

from pagedkern.allocator import audit
from pagedkern.allocator.arguments import materialised, settled, unpacked
from pagedkern.allocator.core import BROKEN_OFF, IDLE, RUNNING
from pagedkern.allocator.sequence import Sequence
from pagedkern.allocator.step import Plan, Step, Verdict
from pagedkern.errors import AuditError, InvalidArgument, OutOfBlocks

if TYPE_CHECKING:
    from pagedkern.allocator.allocator import BlockAllocator
    from pagedkern.allocator.core import Core, Mark

BUSY = "another operation of this allocator is running; what it calls may not call the allocator"

P = ParamSpec("P")
R = TypeVar("R")
_SETTLED = frozenset((list, tuple, array, int, bool, str, bytes, type(None), Sequence, Plan, Step))
"""Types of arguments that run no code of the caller's when they are iterated over, or that are not iterated over."""


def operation(
    method: Callable[Concatenate[BlockAllocator, P], R],
) -> Callable[Concatenate[BlockAllocator, P], R]:
    """An operation is all or nothing: whatever it raises, the state is as it was before.

    Arguments that iterate lazily are walked through first, so that they may call the allocator. Any other call from
    within an operation is refused.
    """

    @wraps(method)
    def run(self: BlockAllocator, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._thread != get_ident():
            self.check_thread()
        core = self._core
        if core.busy:
            look_again(core, method.__name__)
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
            return log.run(run, self, args, kwargs)
        undo = core.undo
        mark = len(undo)
        try:
            core.busy = RUNNING
            core.age += 1
            if not core.age & 15 and not undo:
                core.compact()
            deadlines = core.deadlines
            deadlines.reading = None
            if deadlines:
                core.expire()
            result = method(self, *args, **kwargs)
            if not core.transactions:
                undo.clear()
            core.busy = IDLE
            return result
        except BaseException as error:
            core.busy = BROKEN_OFF
            if isinstance(error, Exception):
                undo.rollback(mark)
                core.counts.numbers["out_of_blocks"] += isinstance(error, OutOfBlocks)
                core.busy = IDLE
            else:  # it may have come between a change and its entry in the undo log
                with suppress(Exception):
                    undo.rollback(mark)
            raise

    return run  # type: ignore[return-value]


def look_again(core: Core, name: str) -> None:
    """The allocator is not idle: refuse, unless it was a call that was broken off and that has left the state whole."""
    if core.busy == RUNNING:
        raise InvalidArgument(f"{name}: {BUSY}")
    try:
        audit.check(core)
    except Exception as error:
        raise AuditError(
            f"{name}: an exception from outside, as KeyboardInterrupt, has broken off an earlier call and left damage; "
            f"restore a snapshot: {error!r}"
        ) from None
    core.busy = IDLE


@contextmanager
def transaction(self: BlockAllocator) -> Iterator[None]:
    """What `BlockAllocator.transaction` does."""
    self.check_thread()
    core = self._core
    if core.busy:
        look_again(core, "transaction")
    core.settle_cohorts()
    this = len(core.undo), dict(core.counts.numbers)
    core.transactions.append(this)
    if self._log is not None:
        self._log.write({"op": "begin"})
    try:
        yield
    except BaseException:
        _leave(core, self._log, this, "rollback")
        raise
    else:
        _leave(core, self._log, this, "end")


def _leave(core: Core, log: OperationLog | None, this: Mark, how: str) -> None:
    """End a transaction: "rollback" or "end". One that is left before those inside it takes them back with itself."""
    if core.busy == RUNNING or (core.busy and how == "end"):
        look_again(core, "transaction")
    number = next((i for i, other in enumerate(core.transactions) if other is this), None)
    if number is None:
        if how == "rollback":  # it is, as wanted
            return
        raise InvalidArgument("transaction: taken back already, when one around it was left first")
    inner = len(core.transactions) - number - 1
    if inner or how == "rollback":
        with suppress(*((Exception,) if core.busy == BROKEN_OFF else ())):  # entries may be missing then
            core.undo.rollback(this[0])
        core.counts.numbers.update(this[1])
        how = "rollback"
    del core.transactions[number:]
    if not number and not core.busy:
        core.undo.clear()
    for _ in range(inner + 1 if log is not None else 0):
        log.write({"op": how})  # type: ignore[union-attr]
    if inner:
        raise InvalidArgument(f"transaction: left before {inner} inside it; all of them are taken back")


class OperationLog:
    """One JSON object a line: first the state at the start, then each operation with its arguments and its outcome.

    Sequences and plans are written as `{"seq": id}` and `{"plan": id}`: ids are the same when the operations are done
    again. Those of another allocator have id 0, which none has.
    """

    def __init__(self, file: TextIO, state: dict[str, Any], clock: float | None) -> None:
        self._file: TextIO | None = file
        self._put(file, {"op": "start", "clock": clock, "state": state})

    def write(self, entry: dict[str, Any]) -> None:
        """One line. If it cannot be written the log ends, with a warning: what the line tells of has been done."""
        if self._file is None:
            return
        try:
            self._put(self._file, entry)
        except (OSError, ValueError) as error:  # the disk is full, the file has been closed
            self._file = None
            warnings.warn(f"log_to: the log ends here, it cannot be written: {error}", RuntimeWarning, stacklevel=2)

    @staticmethod
    def _put(file: TextIO, entry: dict[str, Any]) -> None:
        file.write(json.dumps(entry) + "\n")
        file.flush()

    def run(self, method: Callable[..., R], allocator: BlockAllocator, args: Any, kwargs: Any) -> R:
        """Do the operation and write it down, also if it raises."""
        args = [materialised(value) for value in args]  # encoding must not use up what iterates only once
        kwargs = {key: materialised(value) for key, value in kwargs.items()}
        entry = {"op": method.__name__, "args": encode(args, allocator), "kwargs": encode(kwargs, allocator)}
        allocator._log = None
        deadlines = allocator._core.deadlines
        try:
            result = method(allocator, *args, **kwargs)
        except BaseException as error:
            self.write({**entry, "clock": deadlines.reading, "raises": type(error).__name__})
            raise
        finally:
            allocator._log = self
        self.write({**entry, "clock": deadlines.reading, "gives": outcome(result)})
        return result


def encode(value: Any, owner: BlockAllocator | None = None) -> Any:
    """Arguments as JSON. `owner`: of the sequences and plans that a replay knows."""
    value = unpacked(value)
    if isinstance(value, Verdict):
        return value.value
    if isinstance(value, (Sequence, Plan)):
        return {"seq" if isinstance(value, Sequence) else "plan": value.id if value._owner is owner else 0}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, dict):
        return {key: encode(item, owner) for key, item in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Iterable):
        return [encode(item, owner) for item in value]
    return {"repr": repr(value)}


def outcome(result: Any) -> Any:
    """What an operation gave, as JSON, in as much detail as a replay can compare."""
    if isinstance(result, Step):
        table = result.block_table.tolist() if result.seqs else []
        moves = [[kind, list(src), list(dst)] for kind, src, dst in result.moves]
        return {"plan": result.id, "table": table, "slots": list(result.slot_mapping), "moves": moves}
    if isinstance(result, Plan):
        return {"plan": result.id, "moves": [[kind, list(src), list(dst)] for kind, src, dst in result.moves]}
    if isinstance(result, Sequence):
        return {"seq": result.id, "blocks": result.block_ids, "cached": result.num_cached_tokens}
    if isinstance(result, list):
        return [outcome(item) for item in result]
    return encode(result)
