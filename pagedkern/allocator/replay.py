"""Do the operations of a log again: `python -m pagedkern.allocator.replay FILE`.

Prints the first operation whose outcome differs from the log, or after which an invariant is broken; exit status 1
then, 2 if the file cannot be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from array import array
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from pagedkern.allocator.allocator import BlockAllocator
from pagedkern.allocator.handles import Plan, Sequence
from pagedkern.allocator.log import outcome
from pagedkern.errors import AuditError, InvalidArgument


class _Rollback(Exception):
    """Leaves a transaction that failed when the log was written."""


class Replay:
    """An allocator that follows a log."""

    def __init__(self, state: dict[str, Any], clock: float | None = None) -> None:
        self._clock = clock or 0.0
        self.allocator = BlockAllocator.restore(state, clock=lambda: self._clock)
        self._seqs = {seq.id: seq for seq in self.allocator.sequences}
        self._plans: dict[int, Plan] = {}
        self._transactions: list[ExitStack] = []

    def follow(self, entry: dict[str, Any]) -> str | None:
        """Do one operation and audit. None, or how the outcome differs."""
        name = entry["op"]
        if entry.get("clock") is not None:
            self._clock = entry["clock"]
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
        except Exception as error:
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
            ("seq", self._seq),
            ("plan", self._plan),
            ("bytes", bytes.fromhex),
            ("repr", _Foreign),
        ):
            if value.keys() == {key}:
                return make(value[key])
        return {key: self._decode(item) for key, item in value.items()}

    def _seq(self, ident: int) -> Sequence:
        """The sequence; for one freed before the log began, or of another allocator, one that is stale as well."""
        return self._seqs.get(ident) or Sequence(None, ident, [], array("q"), 0)

    def _plan(self, ident: int) -> Plan:
        """The plan; for one that landed before the log began, or of another allocator, one that is refused as well."""
        return self._plans.get(ident) or Plan(None, ident, ())


class _Foreign:
    """Stands for an argument of a type that the log cannot hold."""

    def __init__(self, text: str) -> None:
        self.text = text


def replay(lines: Iterable[str]) -> str | None:
    """None, or the first operation that does not do what it did, and how."""
    entries = map(_entry, lines)
    first = next(entries, {})
    if first.get("op") != "start":
        raise InvalidArgument("file: the first line is not the start of a log of operations")
    follower = Replay(first.get("state", {}), first.get("clock"))
    for number, entry in enumerate(entries, 2):
        if "op" not in entry:
            raise InvalidArgument(
                f"file: line {number} is no operation, or was cut off; all before it are as in the log"
            )
        difference = follower.follow(entry)
        if difference is not None:
            return f"line {number}, {entry['op']}: {difference}"
    return None


def _entry(line: str) -> dict[str, Any]:
    """Empty if the line is not whole."""
    try:
        entry = json.loads(line)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m pagedkern.allocator.replay", description=__doc__)
    parser.add_argument("file", help="written by BlockAllocator.log_to")
    try:
        with open(parser.parse_args(argv).file) as file:
            difference = replay(file)
    except (OSError, UnicodeDecodeError, InvalidArgument) as error:
        parser.error(str(error))
    sys.stdout.write(f"{difference or 'every operation gave what the log has, and every audit passed'}\n")
    return int(difference is not None)


if __name__ == "__main__":
    sys.exit(main())
