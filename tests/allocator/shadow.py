"""What a caller knows of the sequences and plans of an allocator, and the value of each token: see `oracle`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pagedkern.allocator import Plan
from pagedkern.allocator import Sequence as Handle

Salt = str | bytes | int | None
Digest = str | bytes | int
Span = tuple[int, int, Digest]
Kept = tuple[int, int, int, float | None]
"""Retention: positions from, to, priority, seconds."""


class Undo(Exception):
    """Leaves a transaction."""


@dataclass(eq=False)
class Shadow:
    """What a caller knows of one sequence, and the value of each of its positions."""

    handle: Handle
    salt: Salt
    origin: int  # differs between sequences that may share nothing
    priority: int
    tokens: list[int] = field(default_factory=list)
    keys: list[Span] = field(default_factory=list)
    retention: list[Kept] = field(default_factory=list)
    freed_at: float | None = None
    values: list[int] = field(default_factory=list)
    known: int = 0  # so many leading ids have been told to the allocator
    cached: int = 0
    computed: int = 0
    scheduled: int = 0
    state: str = "live"
    arriving: bool = False  # some of its prefix is still to come from the host
    begun: bool = False  # a step of it has been committed
    asked: bool = False  # tokens of it have been computed: its question counts
    moved: bool = False  # a swap of it has been committed
    shared: bool = False  # it has been forked
    windowed: bool = False  # it has given up blocks behind a window
    pending: list[Flight] = field(default_factory=list)

    def extend(self, tokens: Sequence[int], told: bool = True) -> None:
        """More tokens, with the value of each. `told`: the allocator knows their ids."""
        if told and self.known == len(self.tokens):
            self.known += len(tokens)
        value = self.values[-1] if self.values else self.origin
        for token in tokens:
            position = len(self.tokens)
            key = next(((d, position - start) for start, end, d in self.keys if start <= position < end), None)
            value = hash((value, token, None if key is None else (NUMBER_OF_KEY[type(key[0]), key[0]], key[1])))
            self.tokens.append(token)
            self.values.append(value)

    def cut(self, length: int) -> None:
        """Only the first tokens remain."""
        del self.tokens[length:], self.values[length:]
        self.known = min(self.known, length)
        self.keys = [(start, min(end, length), digest) for start, end, digest in self.keys if start < length]


KEYS: tuple[Digest, ...] = ("1", b"1", 1, "2", b"\x01", -1)
"""Digests of images, some of them alike but for their type."""
NUMBER_OF_KEY = {(type(key), key): number for number, key in enumerate(KEYS)}


@dataclass(eq=False)
class Row:
    """What one plan does for one sequence."""

    shadow: Shadow
    start: int = 0
    end: int = 0
    base: int = 0  # length of the sequence if the step is aborted
    before: tuple[str, bool] | None = None  # of a swap: where the sequence was, and whether it was arriving


@dataclass(eq=False)
class Work:
    """What one row of a step writes and reads, whatever becomes of the sequence."""

    row: Row
    values: list[int]
    start: int
    end: int
    ahead: int  # slots behind the row that a draft model scribbles into


@dataclass(eq=False)
class Flight:
    """A step or plan in flight."""

    plan: Plan
    rows: list[Row]
    work: list[Work]
    inside: bool  # made in a transaction that is still open: it must not be carried out
    touched: set[str] = field(default_factory=set)  # blocks that it reads or writes
    seen: Any = None  # the step's buffers when it was made
    executed: bool = False
    broken: bool = False  # an earlier step of a sequence that is freed never ran: what it reads is garbage
