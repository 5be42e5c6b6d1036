"""The optional log of operations, which `replay` does again."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable
from typing import Any, TextIO, TypeVar

from pagedkern.allocator.arguments import materialised, unpacked
from pagedkern.allocator.handles import Origin, Plan, Sequence, Step, Verdict
from pagedkern.allocator.ledger import Ledger

R = TypeVar("R")


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

    def run(self, name: str, method: Callable[..., R], ledger: Ledger, args: Any, kwargs: Any) -> R:
        """Do the operation of that name and write it down, also if it raises."""
        args = [materialised(value) for value in args]  # encoding must not use up what iterates only once
        kwargs = {key: materialised(value) for key, value in kwargs.items()}
        entry = {"op": name, "args": encode(args, ledger.origin), "kwargs": encode(kwargs, ledger.origin)}
        deadlines = ledger.deadlines
        try:
            result = method(*args, **kwargs)
        except BaseException as error:
            self.write({**entry, "clock": deadlines.reading, "raises": type(error).__name__})
            raise
        self.write({**entry, "clock": deadlines.reading, "gives": outcome(result)})
        return result


def encode(value: Any, origin: Origin | None = None) -> Any:
    """Arguments as JSON. `origin`: of the allocator whose sequences and plans a replay knows."""
    value = unpacked(value)
    if isinstance(value, Verdict):
        return value.value
    if isinstance(value, (Sequence, Plan)):
        return {"seq" if isinstance(value, Sequence) else "plan": value.id if value._owner is origin else 0}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, dict):
        return {key: encode(item, origin) for key, item in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Iterable):
        return [encode(item, origin) for item in value]
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
