"""The queue of blocks that nobody owns but whose contents a later prompt may still use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from pagedkern.allocator.undo import UndoLog


class Trail:
    """Idle blocks of one prompt, heads first, that are one entry of a queue: evicted tails first, moved all together.

    What is idle before a block that is used counts as used with it, again and again: behind a sliding window, say.
    """

    __slots__ = ("blocks", "place")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.place = -1  # in the queue, counted from its beginning; -1: nowhere yet


Piece: TypeAlias = int | Trail
Raw: TypeAlias = "int | tuple[Trail, list[int], bool] | None"
"""An entry that was passed: a block, the complement of a stale one, (trail, blocks from its end, whether all), none."""
Popped: TypeAlias = "list[int] | tuple[list[Raw], int]"
Removed: TypeAlias = "tuple[list[int], list[tuple[Trail, list[int]]]]"
_GONE = -1
"""An entry where a trail was that has been moved."""


class IdleQueue:
    """Block ids, least recently used first. Every operation is amortised O(1) for each block, whatever the length.

    A list whose first `_head` entries are gone. A block in the middle is taken out by remembering that its oldest
    entry is stale; the entry itself goes when it reaches the front. An entry of a block is stale as long as `_stale`
    counts the block, because older entries come out first. Blocks of a `Trail` have no entries of their own.
    """

    __slots__ = (
        "_base",
        "_entries",
        "_head",
        "_num_gone",
        "_num_odd",
        "_num_stale",
        "_size",
        "_stale",
        "_undo",
        "trails",
    )

    def __init__(self, undo: UndoLog, blocks: Iterable[int] = ()) -> None:
        self._entries: list[Piece] = list(blocks)
        self._base = 0  # place of the first entry
        self._head = 0
        self._stale: dict[int, int] = {}  # block: how many of its entries, the oldest, count for nothing
        self._num_stale = 0
        self._num_gone = 0
        self._num_odd = 0  # entries from the head on that are no blocks: trails, and where one was
        self._size = len(self._entries)
        self._undo = undo
        self.trails: dict[int, Trail] = {}  # of each block that is in one

    def __len__(self) -> int:
        return self._size

    def push(self, blocks: list[int]) -> None:
        """Add blocks as the most recently used, the last one the most recent."""
        self._entries += blocks
        self._size += len(blocks)

    def unpush(self, count: int) -> None:
        """Undo a `push` of `count` blocks."""
        del self._entries[len(self._entries) - count :]
        self._size -= count

    def remove(self, blocks: list[int]) -> Removed:
        """Take out blocks, wherever they stand. Returns what `unremove` needs."""
        before: list[tuple[Trail, list[int]]] = []
        left: list[list[int]] = []
        num_blocks = len(blocks)
        if self.trails:
            cut = dict.fromkeys(self.trails[b] for b in blocks if b in self.trails)
            gone = set(blocks)
            before = [(trail, trail.blocks) for trail in cut]
            left = [[b for b in trail.blocks if b not in gone] for trail in cut]
            blocks = [b for b in blocks if b not in self.trails]
        # Nothing below raises.
        self._size -= num_blocks
        self._num_stale += len(blocks)
        stale = self._stale
        for b in blocks:
            stale[b] = stale.get(b, 0) + 1
        for (trail, old), new in zip(before, left, strict=True):
            trail.blocks = new
            for b in old:
                del self.trails[b]
            self.trails.update(dict.fromkeys(new, trail))
            if not new:
                self._entries[trail.place - self._base] = _GONE
                self._num_gone += 1
        return blocks, before

    def unremove(self, removed: Removed) -> None:
        """Undo a `remove`: the blocks stand where they stood."""
        blocks, trails = removed
        for b in blocks:
            self._freshen(b)
        self._size += len(blocks)
        for trail, before in trails:
            if not trail.blocks:
                self._entries[trail.place - self._base] = trail
                self._num_gone -= 1
            self._size += len(before) - len(trail.blocks)
            trail.blocks = before
            self.trails.update(dict.fromkeys(before, trail))

    def _freshen(self, block: int) -> None:
        if self._stale[block] == 1:
            del self._stale[block]
        else:
            self._stale[block] -= 1
        self._num_stale -= 1

    def pop(self, count: int) -> tuple[list[int], Popped]:
        """The `count` least recently used blocks, taken out, and what `unpop` needs.

        The caller has made sure that there are as many.
        """
        self._size -= count
        if not self._stale and not self._num_odd:
            blocks: list[int] = self._entries[self._head : self._head + count]  # type: ignore[assignment]
            self._head += count
            return blocks, blocks
        blocks = []
        raw: list[Raw] = []
        while len(blocks) < count:
            entry = self._entries[self._head]
            if isinstance(entry, Trail):
                part = min(count - len(blocks), len(entry.blocks))
                taken = entry.blocks[-part:]
                del entry.blocks[-part:]
                for b in taken:
                    del self.trails[b]
                blocks += reversed(taken)
                raw.append((entry, taken, not entry.blocks))
                if entry.blocks:
                    break
                self._num_odd -= 1
            elif entry == _GONE:
                raw.append(None)
                self._num_odd -= 1
                self._num_gone -= 1
            elif entry in self._stale:
                raw.append(~entry)  # the complement marks a stale entry
                if self._stale[entry] == 1:
                    del self._stale[entry]
                else:
                    self._stale[entry] -= 1
                self._num_stale -= 1
            else:
                blocks.append(entry)
                raw.append(entry)
            self._head += 1
        return blocks, (raw, count)

    def unpop(self, popped: Popped) -> None:
        """Undo a `pop`."""
        if isinstance(popped, list):
            self._head -= len(popped)
            self._size += len(popped)
            return
        raw, count = popped
        self._size += count
        for entry in reversed(raw):
            if isinstance(entry, tuple):
                trail, taken, whole = entry
                trail.blocks += taken
                self.trails.update(dict.fromkeys(taken, trail))
                self._num_odd += whole
                self._head -= whole
                continue
            self._head -= 1
            if entry is None:
                self._num_odd += 1
                self._num_gone += 1
            elif entry < 0:
                self._stale[~entry] = self._stale.get(~entry, 0) + 1
                self._num_stale += 1

    # Trails.

    def piece(self, block: int) -> Piece:
        """A block that is in the queue, or the trail that ends with it. One that goes on behind it is cut in two."""
        trail = self.trails.get(block)
        if trail is None or trail.blocks[-1] == block:
            return block if trail is None else trail
        upper, before = Trail(), trail.blocks
        count = before.index(block) + 1
        self._undo.append((self._join, (trail, before)))
        upper.blocks, trail.blocks = before[:count], before[count:]
        self.trails.update(dict.fromkeys(upper.blocks, upper))
        return upper

    def _join(self, trail: Trail, before: list[int]) -> None:
        trail.blocks = before
        self.trails.update(dict.fromkeys(before, trail))

    def gather(self, pieces: list[Piece]) -> None:
        """Pieces of one prompt, tails first, become the most recently used, the last one the most recent.

        Single blocks are put at the end of the trail that is next before them: the next time all go together.
        """
        trails: list[Trail] = []
        for piece in reversed(pieces):
            if isinstance(piece, Trail):
                trails.append(piece)
                continue
            if not trails:
                trails.append(Trail())
            self._undo.append((self._detach, (trails[-1], piece)))
            self._stale[piece] = self._stale.get(piece, 0) + 1
            self._num_stale += 1
            trails[-1].blocks.append(piece)
            self.trails[piece] = trails[-1]
        for trail in reversed(trails):
            self._move(trail)

    def _detach(self, trail: Trail, block: int) -> None:
        if self.trails.get(block) is trail:
            trail.blocks.pop()
            del self.trails[block]
            self._freshen(block)

    def _move(self, trail: Trail) -> None:
        """A trail becomes the most recently used."""
        old = trail.place
        if old >= 0:
            if old == self._base + len(self._entries) - 1:
                return
            self._entries[old - self._base] = _GONE
            self._num_gone += 1
        trail.place = self._base + len(self._entries)
        self._entries.append(trail)
        self._num_odd += 1
        self._undo.append((self._unmove, (trail, old)))

    def _unmove(self, trail: Trail, old: int) -> None:
        self._entries.pop()
        self._num_odd -= 1
        trail.place = old
        if old >= 0:
            self._entries[old - self._base] = trail
            self._num_gone -= 1

    # The whole.

    def compact(self, limit: int) -> None:
        """Drop what is gone once it is as much as what is there, and stale entries once they are more than `limit`.

        So memory stays bounded. Called between operations only: undoing counts entries.
        """
        if self._num_stale + self._num_gone > limit:
            self._entries = list(self._fresh())
            self._stale.clear()
            self._num_stale = self._num_gone = self._head = self._base = 0
            if self._num_odd:
                places = [(place, entry) for place, entry in enumerate(self._entries) if isinstance(entry, Trail)]
                self._num_odd = len(places)
                for place, trail in places:
                    trail.place = place
        elif self._head > 1024 and 2 * self._head > len(self._entries):
            del self._entries[: self._head]
            self._base += self._head
            self._head = 0

    def _fresh(self) -> Iterator[Piece]:
        """The entries that count. O(n)."""
        gone, skip = _GONE, dict(self._stale)
        if self._num_gone:
            skip[gone] = self._num_gone
        for entry in self._entries[self._head :]:
            if entry in skip:
                left = skip[entry] - 1
                if left:
                    skip[entry] = left
                else:
                    del skip[entry]
            else:
                yield entry

    def __iter__(self) -> Iterator[int]:
        """The blocks, least recently used first. O(n)."""
        for entry in self._fresh():
            if isinstance(entry, Trail):
                yield from reversed(entry.blocks)
            else:
                yield entry
