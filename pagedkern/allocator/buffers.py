"""The buffers that callers get: block moves, slots, block tables."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator
from collections.abc import Sequence as List
from functools import lru_cache
from typing import TypeAlias

Move: TypeAlias = "tuple[str, array[int], array[int]]"
"""(kind, src, dst): kind "copy", "swap_out" (device to host) or "swap_in"; src and dst are int64 block ids."""


class Copies:
    """Block copies on the device: all sources are read before any destination is written, no destination occurs
    twice.
    """

    __slots__ = ("dst", "src")

    def __init__(self, src: array[int], dst: array[int]) -> None:
        self.src = src  # int64 [n], block ids
        self.dst = dst  # int64 [n], block ids

    def __len__(self) -> int:
        return len(self.src)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.src, self.dst, strict=True)

    def __repr__(self) -> str:
        return f"Copies({list(self)})"


MOST_LANES = 1024
"""Slots of larger blocks are made one by one: most of them would be thrown away."""


def append_slots(slots: array[int], blocks: list[int], size: int, start: int, end: int) -> None:
    """Append the slots of positions `start .. end-1` of a table; positions before the first of its blocks give -1.

    `blocks` are the table's entries from the one of position `end-1` back to the first written. O(end - start), in C
    within each block.
    """
    first = -(-end // size) - len(blocks)  # index in the table of blocks[0]
    skipped = min(end, max(start, first * size)) - start
    slots.extend([-1] * skipped)
    position = start + skipped
    if position == end:
        return
    blocks, offset = blocks[position // size - first :], position % size
    if size > MOST_LANES:
        for b in blocks:
            count = min(size - offset, end - position)
            slots.extend(range(b * size + offset, b * size + offset + count))
            position, offset = position + count, 0
        return
    zero, step = _slot_lanes(size)
    data = b"".join([(zero + b * step).to_bytes(8 * size, sys.byteorder) for b in blocks])
    slots.frombytes(data[8 * offset : 8 * (offset + end - position)])


@lru_cache(16)
def _slot_lanes(size: int) -> tuple[int, int]:
    """The slots of block 0 as one integer with a lane of 64 bits each, and what every next block adds to it."""
    lanes = (array("q", range(size)), array("q", [size]) * size)
    return int.from_bytes(lanes[0].tobytes(), sys.byteorder), int.from_bytes(lanes[1].tobytes(), sys.byteorder)


class Table:
    """A block table under construction. Its buffer is shared by the steps of one batch."""

    __slots__ = ("entries", "seqs", "step", "view", "width")

    def __init__(self, entries: array[int], seqs: List[object], width: int) -> None:
        self.entries = entries  # int32 [S * W]
        self.seqs = seqs
        self.width = width
        self.step = 0  # number of the last step that used it
        flat = memoryview(entries)
        # A memoryview has no shape with a zero in it: an empty batch keeps a flat, empty buffer.
        self.view = flat.cast("B").cast("i", (len(seqs), width)) if seqs else flat
