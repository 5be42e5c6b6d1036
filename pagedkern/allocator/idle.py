"""The queue of blocks that nobody owns but whose contents a later prompt may still use."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator


class IdleQueue:
    """Block ids, least recently released first. Every operation is O(1) for each block, whatever the length.

    A block in the middle is taken out by remembering that its oldest entry is stale; the entry itself goes when it
    reaches the front. An entry of a block is stale as long as `stale` counts the block, because older entries come
    out first.
    """

    __slots__ = ("_entries", "_num_stale", "_stale")

    def __init__(self, blocks: Iterable[int] = ()) -> None:
        self._entries: deque[int] = deque(blocks)
        self._stale: dict[int, int] = {}  # block: how many of its entries, the oldest, count for nothing
        self._num_stale = 0

    def __len__(self) -> int:
        return len(self._entries) - self._num_stale

    def push(self, blocks: list[int]) -> None:
        """Add blocks as the most recently released, the last one the most recent."""
        self._entries.extend(blocks)

    def unpush(self, count: int) -> None:
        """Undo a `push` of `count` blocks."""
        for _ in range(count):
            self._entries.pop()

    def remove(self, block: int) -> None:
        """Take out a block, wherever it stands."""
        self._stale[block] = self._stale.get(block, 0) + 1
        self._num_stale += 1

    def unremove(self, block: int) -> None:
        """Undo a `remove`: the block stands where it stood."""
        if self._stale[block] == 1:
            del self._stale[block]
        else:
            self._stale[block] -= 1
        self._num_stale -= 1

    def pop(self, count: int) -> tuple[list[int], list[int]]:
        """The `count` least recently released blocks, taken out, and the raw entries that `unpop` needs.

        The caller has made sure that there are as many. Amortised O(count).
        """
        popleft = self._entries.popleft
        if not self._stale:
            blocks = [popleft() for _ in range(count)]
            return blocks, blocks
        blocks, raw, stale = [], [], self._stale
        while len(blocks) < count:
            block = popleft()
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
        return blocks, raw

    def unpop(self, raw: list[int]) -> None:
        """Undo a `pop`."""
        for entry in reversed(raw):
            if entry < 0:
                self.remove(~entry)
            self._entries.appendleft(entry if entry >= 0 else ~entry)

    def compact(self, limit: int) -> None:
        """Drop the stale entries once there are more than `limit` of them, so that memory stays bounded.

        Called between operations only: `unpush` and `unpop` count entries. Amortised O(1).
        """
        if self._num_stale > limit:
            self._entries = deque(self)
            self._stale.clear()
            self._num_stale = 0

    def __iter__(self) -> Iterator[int]:
        """The blocks, least recently released first. O(n)."""
        skip = dict(self._stale)
        for block in self._entries:
            if skip.get(block):
                skip[block] -= 1
            else:
                yield block
