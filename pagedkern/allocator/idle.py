"""The queue of blocks that nobody owns but whose contents a later prompt may still use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class IdleQueue:
    """Block ids, least recently released first. Every operation is amortised O(1) for each block, whatever the length.

    A list whose first `_head` entries are gone. A block in the middle is taken out by remembering that its oldest
    entry is stale; the entry itself goes when it reaches the front. An entry of a block is stale as long as `_stale`
    counts the block, because older entries come out first.
    """

    __slots__ = ("_entries", "_head", "_num_stale", "_stale")

    def __init__(self, blocks: Iterable[int] = ()) -> None:
        self._entries: list[int] = list(blocks)
        self._head = 0
        self._stale: dict[int, int] = {}  # block: how many of its entries, the oldest, count for nothing
        self._num_stale = 0

    def __len__(self) -> int:
        return len(self._entries) - self._head - self._num_stale

    def push(self, blocks: list[int]) -> None:
        """Add blocks as the most recently released, the last one the most recent."""
        self._entries += blocks

    def unpush(self, count: int) -> None:
        """Undo a `push` of `count` blocks."""
        del self._entries[len(self._entries) - count :]

    def remove(self, blocks: list[int]) -> None:
        """Take out blocks, wherever they stand."""
        stale = self._stale
        for block in blocks:
            stale[block] = stale.get(block, 0) + 1
        self._num_stale += len(blocks)

    def unremove(self, blocks: list[int]) -> None:
        """Undo a `remove`: the blocks stand where they stood."""
        for block in blocks:
            self._freshen(block)

    def _freshen(self, block: int) -> None:
        if self._stale[block] == 1:
            del self._stale[block]
        else:
            self._stale[block] -= 1
        self._num_stale -= 1

    def pop(self, count: int) -> tuple[list[int], list[int]]:
        """The `count` least recently released blocks, taken out, and the raw entries that `unpop` needs.

        The caller has made sure that there are as many.
        """
        entries, stale = self._entries, self._stale
        if not stale:
            blocks = entries[self._head : self._head + count]
            self._head += count
            return blocks, blocks
        blocks, raw = [], []
        head = self._head
        while len(blocks) < count:
            block = entries[head]
            head += 1
            if block not in stale:
                blocks.append(block)
                raw.append(block)
                continue
            raw.append(~block)  # the complement marks a stale entry
            if stale[block] == 1:
                del stale[block]
            else:
                stale[block] -= 1
            self._num_stale -= 1
        self._head = head
        return blocks, raw

    def unpop(self, raw: list[int]) -> None:
        """Undo a `pop`."""
        self.remove([~entry for entry in raw if entry < 0])
        start = max(0, self._head - len(raw))
        self._entries[start : self._head] = [entry if entry >= 0 else ~entry for entry in raw]
        self._head = start

    def compact(self, limit: int) -> None:
        """Drop what is gone once it is as much as what is there, and stale entries once they are more than `limit`.

        So memory stays bounded. Called between operations only: undoing counts entries.
        """
        if self._num_stale > limit:
            self._entries = list(self)
            self._stale.clear()
            self._num_stale = self._head = 0
        elif self._head > 1024 and 2 * self._head > len(self._entries):
            del self._entries[: self._head]
            self._head = 0

    def __iter__(self) -> Iterator[int]:
        """The blocks, least recently released first. O(n)."""
        skip = dict(self._stale)
        for block in self._entries[self._head :]:
            if skip.get(block):
                skip[block] -= 1
            else:
                yield block
