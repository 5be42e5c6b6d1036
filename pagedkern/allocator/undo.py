"""The undo log: what makes every operation all or nothing, whatever it calls raises in the middle of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class UndoLog(list[tuple[Callable[..., object], tuple[Any, ...]]]):
    """The inverses of the changes made since the log was last cleared, in the order of the changes.

    Whoever changes state appends `(function, arguments)` that takes the change back. Rolling back runs them newest
    first, so each finds the state exactly as its change left it: order of queues included. An entry that puts an old
    value back goes in before its change, one that counts or moves something after it, for it must not run without.
    No entry protects from an exception that arrives between the two steps, as from a signal: see `operation`.
    """

    __slots__ = ()

    def rollback(self, mark: int) -> None:
        """Take back every change recorded after the log had `mark` entries. O(changes)."""
        while len(self) > mark:
            function, args = self.pop()
            function(*args)
