"""The errors that pagedkern raises. Each says which argument is at fault, what was given and what was expected."""

from __future__ import annotations

import typing


class PagedKernError(Exception):
    """Base of every error raised on purpose by pagedkern."""


class InvalidArgument(PagedKernError, ValueError):
    """An argument has a value, shape, dtype, device or stride that the call does not accept."""


class InvalidType(InvalidArgument, TypeError):
    """An argument is of a Python type that the call does not accept (a list where a tensor belongs, a float index)."""


class BlockIndexError(InvalidArgument, IndexError):
    """A block id, slot or length read from a device array points outside the cache or the table."""


class Unsupported(PagedKernError, NotImplementedError):
    """The named backend cannot compute this problem; the message gives the reason that `supports()` returned."""


class BackendUnavailable(PagedKernError, RuntimeError):
    """The backend cannot run on this machine; the message gives the missing package or driver."""


class OutOfBlocks(PagedKernError, RuntimeError):
    """The pool has too few free blocks for the whole operation. Nothing was changed.

    Attributes:
        request: the `Request` that has no room, if `Scheduler.schedule` raised this; else None.
    """

    def __init__(self, *args: object, request: typing.Any = None) -> None:
        super().__init__(*args)
        self.request = request

    def __reduce__(self) -> tuple[typing.Any, ...]:
        return type(self), self.args  # the request belongs to its scheduler: it does not go to other processes


class StaleSequence(PagedKernError, RuntimeError):
    """A sequence handle was used after free or swap-out, freed twice, or given to an allocator that did not make it."""


class WrongThread(PagedKernError, RuntimeError):
    """An allocator or scheduler was used by a thread that does not own it. Nothing was changed."""


class AuditError(PagedKernError, AssertionError):
    """`check()` found an invariant broken. This is a bug in pagedkern or in code that wrote to its private state."""
