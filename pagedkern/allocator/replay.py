"""Do the operations of a log again: `python -m pagedkern.allocator.replay FILE`.

Prints the first operation whose outcome differs from the log, or after which an invariant is broken; exit status 1
then.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from pagedkern.allocator.allocator import BlockAllocator
from pagedkern.allocator.operation import outcome
from pagedkern.allocator.sequence import Sequence
from pagedkern.allocator.step import Plan
from pagedkern.errors import AuditError, InvalidArgument, PagedKernError


class _Rollback(Exception):
    """Leaves a transaction that failed when the log was written."""


class Replay:
    """An allocator that follows a log."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.allocator = BlockAllocator.restore(state)
        self._seqs = {seq.id: seq for seq in self.allocator.sequences}
        self._plans: dict[int, Plan] = {}
        self._transactions: list[ExitStack] = []

    def follow(self, entry: dict[str, Any]) -> str | None:
        """Do one operation and audit. None, or how the outcome differs."""
        name = entry["op"]
        if name == "begin":
            stack = ExitStack()
            stack.enter_context(self.allocator.transaction())
            self._transactions.append(stack)
        elif name == "end":
            self._transactions.pop().close()
        elif name == "rollback":
            self._transactions.pop().__exit__(_Rollback, _Rollback(), None)
        else:
            given = self._call(name, entry)
            expected = {key: entry[key] for key in ("raises", "gives") if key in entry}
            if given != expected:
                return f"gives {given}, the log has {expected}"
        try:
            self.allocator.check()
        except AuditError as error:
            return f"check: {error}"
        return None

    def _call(self, name: str, entry: dict[str, Any]) -> dict[str, Any]:
        args, kwargs = self._decode(entry["args"]), self._decode(entry["kwargs"])
        try:
            result = getattr(self.allocator, name)(*args, **kwargs)
        except (PagedKernError, AssertionError) as error:
            return {"raises": type(error).__name__}
        for item in result if isinstance(result, list) else [result]:
            if isinstance(item, Plan):
                self._plans[item.id] = item
            elif isinstance(item, Sequence):
                self._seqs[item.id] = item
        return {"gives": outcome(result)}

    def _decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        for key, make in (
            ("seq", self._seqs.__getitem__),
            ("plan", self._plans.__getitem__),
            ("bytes", bytes.fromhex),
            ("repr", _Foreign),
        ):
            if value.keys() == {key}:
                return make(value[key])
        return {key: self._decode(item) for key, item in value.items()}


class _Foreign:
    """Stands for an argument of a type that the log cannot hold."""

    def __init__(self, text: str) -> None:
        self.text = text


def replay(lines: Iterable[str]) -> str | None:
    """None, or the first operation that does not do what it did, and how."""
    it = iter(lines)
    first = json.loads(next(it, "null"))
    if not isinstance(first, dict) or first.get("op") != "start":
        raise InvalidArgument("file: the first line is not the start of a log of operations")
    follower = Replay(first["state"])
    for number, line in enumerate(it, 2):
        entry = json.loads(line)
        difference = follower.follow(entry)
        if difference is not None:
            return f"line {number}, {entry['op']}: {difference}"
    return None


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m pagedkern.allocator.replay", description=__doc__)
    parser.add_argument("file", help="written by BlockAllocator.log_to")
    with open(parser.parse_args(argv).file) as file:
        difference = replay(file)
    sys.stdout.write(f"{difference or 'every operation gave what the log has, and every audit passed'}\n")
    return int(difference is not None)


if __name__ == "__main__":
    sys.exit(main())
