"""What surrounds every operation: the owner's thread, all or nothing, and the optional log of operations."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import get_ident
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TextIO, TypeVar

from pagedkern.allocator.arguments import unpacked
from pagedkern.allocator.sequence import Sequence
from pagedkern.allocator.step import Plan, Step, Verdict
from pagedkern.errors import OutOfBlocks

if TYPE_CHECKING:
    from pagedkern.allocator.allocator import BlockAllocator

P = ParamSpec("P")
R = TypeVar("R")
WRONG_THREAD = "a BlockAllocator belongs to one thread; call adopt() in the thread that takes it over"


def operation(
    method: Callable[Concatenate[BlockAllocator, P], R],
) -> Callable[Concatenate[BlockAllocator, P], R]:
    """An operation is all or nothing: whatever it raises, the state is as it was before."""

    @wraps(method)
    def run(self: BlockAllocator, *args: P.args, **kwargs: P.kwargs) -> R:
        assert self._thread == get_ident() or self._claim(), WRONG_THREAD
        log = self._log
        if log is not None:  # the log calls this again, with itself out of the way
            return log.run(run, self, args, kwargs)
        core = self._core
        undo = core.undo
        mark = len(undo)
        try:
            result = method(self, *args, **kwargs)
        except BaseException as error:
            undo.rollback(mark)
            core.counts["out_of_blocks"] += isinstance(error, OutOfBlocks)
            raise
        if not core.in_transaction:
            undo.clear()
        return result

    return run  # type: ignore[return-value]


@contextmanager
def transaction(self: BlockAllocator) -> Iterator[None]:
    """What `BlockAllocator.transaction` does."""
    assert self._thread == get_ident() or self._claim(), WRONG_THREAD
    core, log = self._core, self._log
    outer, mark, counts = core.in_transaction, len(core.undo), dict(core.counts)
    core.settle_cohorts()
    core.in_transaction = True
    if log is not None:
        log.write({"op": "begin"})
    try:
        yield
    except BaseException:
        core.undo.rollback(mark)
        core.counts.update(counts)
        if log is not None:
            log.write({"op": "rollback"})
        raise
    else:
        if log is not None:
            log.write({"op": "end"})
    finally:
        core.in_transaction = outer
        if not outer:
            core.undo.clear()


class OperationLog:
    """One JSON object a line: first the state at the start, then each operation with its arguments and its outcome.

    Sequences and plans are written as `{"seq": id}` and `{"plan": id}`: ids are the same when the operations are done
    again.
    """

    def __init__(self, file: TextIO, state: dict[str, Any]) -> None:
        self._file = file
        self.write({"op": "start", "state": state})

    def write(self, entry: dict[str, Any]) -> None:
        """One line."""
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()

    def run(self, method: Callable[..., R], allocator: BlockAllocator, args: Any, kwargs: Any) -> R:
        """Do the operation and write it down, also if it raises."""
        args = [
            list(a) if isinstance(a, Iterable) and not isinstance(a, (str, bytes)) else a for a in map(unpacked, args)
        ]
        entry = {"op": method.__name__, "args": encode(args), "kwargs": encode(kwargs)}
        allocator._log = None
        try:
            result = method(allocator, *args, **kwargs)
        except BaseException as error:
            self.write({**entry, "raises": type(error).__name__})
            raise
        finally:
            allocator._log = self
        self.write({**entry, "gives": outcome(result)})
        return result


def encode(value: Any) -> Any:
    """Arguments as JSON."""
    value = unpacked(value)
    if isinstance(value, Verdict):
        return value.value
    if isinstance(value, Sequence):
        return {"seq": value.id}
    if isinstance(value, Plan):
        return {"plan": value.id}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, dict):
        return {key: encode(item) for key, item in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Iterable):
        return [encode(item) for item in value]
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
