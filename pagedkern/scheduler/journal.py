"""Taking back what a call has changed in the scheduler, if it raises in the middle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Journal(list[tuple[Callable[..., object], tuple[Any, ...]]]):
    """The inverses of the changes made by the call that runs, in the order of the changes."""

    __slots__ = ()

    def set(self, target: object, name: str, value: object) -> None:
        """Change an attribute. Lists and dicts are replaced by changed copies, never changed in place."""
        self.append((setattr, (target, name, getattr(target, name))))
        setattr(target, name, value)

    def rollback(self) -> None:
        """Take everything back, newest first."""
        while self:
            function, args = self.pop()
            function(*args)
