"""A chain of blocks that entered the prefix cache together and that nobody has looked into yet."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import TypeAlias

Key: TypeAlias = tuple[int, bytes]
"""The node of the parent block, and the block's token ids as packed 64-bit integers."""

_CUTTERS: dict[tuple[int, int], struct.Struct] = {}


def cut(data: bytes, stride: int) -> tuple[bytes, ...]:
    """Pieces of `stride` bytes, cut in C; what is left at the end is left out."""
    num = len(data) // stride
    cutter = _CUTTERS.get((stride, num))
    if cutter is None:
        if len(_CUTTERS) >= 1024:
            _CUTTERS.clear()
        cutter = _CUTTERS[stride, num] = struct.Struct(f"{stride}s" * num)
    return cutter.unpack_from(data)


class Chain:
    """Consecutive blocks of one prompt, of which the index lists the first only.

    Most prompts are never asked for again: as one run they enter the cache and leave it, tail first, at the cost of a
    list operation. A prompt that is asked for again in full is compared as a whole. Only when a part of it is needed
    by itself does the index take the run apart. The nodes of its blocks are `base`, `base + 1`, and so on.
    """

    __slots__ = ("base", "blocks", "data", "key")

    def __init__(self, key: Key, base: int, blocks: list[int], data: bytes) -> None:
        self.key = key  # of the first block
        self.base = base
        self.blocks = blocks
        self.data = data  # packed tokens of all blocks, and of those that have left its tail

    def keys(self) -> list[Key]:
        """The key of each block. O(its length)."""
        behind = range(self.base, self.base + len(self.blocks) - 1)
        return [self.key, *zip(behind, cut(self.data, len(self.key[1]))[1:], strict=False)]

    def common(self, data: bytes, start: int, special: Mapping[int, bytes]) -> int:
        """How many of its blocks hold the packed tokens `data[start:]`, from its first on. O(their number), in C when
        it is all of them. `special`: blocks of the data that it cannot have, by their number.
        """
        stride = len(self.key[1])
        end = start + stride * len(self.blocks)
        if special:
            end = min([end, *(number * stride for number in special if number * stride >= start)])
        theirs, ours = data[start:end], self.data
        if theirs == ours:
            return len(self.blocks)
        pairs = zip(cut(theirs, stride), cut(ours, stride), strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.blocks), len(theirs) // stride))

    def tail(self, blocks: list[int], start: int) -> int:
        """How many of `blocks[start:]` are its last blocks, the last one first."""
        most = min(len(self.blocks), len(blocks) - start)
        if self.blocks[: -most - 1 : -1] == blocks[start : start + most]:
            return most
        pairs = zip(reversed(self.blocks), blocks[start : start + most], strict=False)
        return next(i for i, (a, b) in enumerate(pairs) if a != b)
