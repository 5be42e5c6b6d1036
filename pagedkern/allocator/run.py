"""A chain of blocks that entered the prefix cache together and that nobody has looked into yet."""

from __future__ import annotations

from typing import TypeAlias

Key: TypeAlias = tuple[int, bytes]
"""The node of the parent block, and the block's token ids as packed 64-bit integers."""


class Run:
    """Consecutive blocks of one prompt, of which the index lists the first only.

    Most prompts are never asked for again: as one run they enter the cache and leave it, tail first, at the cost of a
    list operation. A prompt that is asked for again in full is compared as a whole. Only when a part of it is needed
    by itself does the index take the run apart. The nodes of its blocks are `base`, `base + 1`, and so on.
    """

    __slots__ = ("base", "blocks", "chunks", "key")

    def __init__(self, key: Key, base: int, blocks: list[int], chunks: list[bytes]) -> None:
        self.key = key  # of the first block
        self.base = base
        self.blocks = blocks
        self.chunks = chunks  # packed tokens of each block

    def keys(self) -> list[Key]:
        """The key of each block. O(its length)."""
        behind = range(self.base, self.base + len(self.blocks) - 1)
        return [self.key, *zip(behind, self.chunks[1:], strict=True)]

    def common(self, chunks: tuple[bytes, ...], start: int) -> int:
        """How many of its blocks hold `chunks[start:]`, from its first on. O(their number), in C when it is all of
        them.
        """
        theirs = list(chunks[start : start + len(self.chunks)])
        if theirs == self.chunks:
            return len(theirs)
        pairs = zip(theirs, self.chunks, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), len(theirs))

    def tail(self, blocks: list[int], start: int) -> int:
        """How many of `blocks[start:]` are its last blocks, the last one first."""
        most = min(len(self.blocks), len(blocks) - start)
        if self.blocks[: -most - 1 : -1] == blocks[start : start + most]:
            return most
        pairs = zip(reversed(self.blocks), blocks[start : start + most], strict=False)
        return next(i for i, (a, b) in enumerate(pairs) if a != b)
