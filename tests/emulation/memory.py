"""Which addresses an emulated kernel may touch: those of the tensors that its launch was given.

Interpreters read and write raw addresses, so that a kernel which strays outside of its tensors would go unnoticed, or
crash the process. Every access is checked instead, to the storage (a view may be read up to the end of the storage that
it lies in: tests put NaN there).
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray


class OutOfBounds(Exception):
    """An emulated kernel touched memory outside of its tensors, or at an address that its element type forbids."""


class Region(NamedTuple):
    start: int  # address of the first byte
    end: int  # address behind the last byte
    name: str  # of the argument
    origin: int  # address of the tensor's first element, which offsets are told from


class Memory:
    """The storages of one launch's tensors."""

    def __init__(self, kernel: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self.kernel = kernel
        self.program: tuple[int, ...] = ()
        self.pointers_made = False  # the kernel turned integers into pointers: any live tensor may be meant
        self._regions: list[Region] = []
        self._starts: list[int] = []
        for name, tensor in tensors.items():
            self._add(region(name, tensor))

    def check(self, addresses: NDArray[np.uint64], itemsize: int, access: str) -> None:
        """Raise `OutOfBounds` unless every address [any shape] may be accessed by elements of `itemsize` bytes."""
        if addresses.size == 0:
            return
        first, last = int(addresses.min()), int(addresses.max())
        around = self._region(first)
        if around is None or last + itemsize > around.end:  # not all in one
            for address in dict.fromkeys(addresses.ravel().tolist()):
                self._check_one(address, itemsize, access)
        if itemsize > 1 and np.any(addresses & np.uint64(itemsize - 1)):
            raise OutOfBounds(f"{self._where()} {access} of {itemsize} bytes at an address that is no multiple of that")

    def _check_one(self, address: int, itemsize: int, access: str) -> None:
        around = self._region(address)
        if around is not None and address + itemsize <= around.end:
            return
        live = _live_region(address, itemsize) if self.pointers_made else None
        if live is None:
            where = self._nearest(address)
            raise OutOfBounds(f"{self._where()} {access} of {itemsize} bytes outside of its tensors: {where}")
        self._add(live)

    def _add(self, new: Region) -> None:
        index = bisect_right(self._starts, new.start)
        self._starts.insert(index, new.start)
        self._regions.insert(index, new)

    def _region(self, address: int) -> Region | None:
        """One that holds the address."""
        candidates = self._regions[: bisect_right(self._starts, address)]
        return next((each for each in reversed(candidates) if address < each.end), None)

    def _where(self) -> str:
        return f"Kernel {self.kernel}, program {self.program}:"

    def _nearest(self, address: int) -> str:
        if not self._regions:
            return f"address {address:#x}, without any tensor given"
        near = min(self._regions, key=lambda each: max(each.start - address, address - each.end + 1))
        return (
            f"byte {address - near.origin} from the first element of the nearest one, {near.name!r}, "
            f"whose storage is bytes {near.start - near.origin} to {near.end - near.origin - 1}"
        )


def region(name: str, tensor: torch.Tensor) -> Region:
    storage = tensor.untyped_storage()
    return Region(storage.data_ptr(), storage.data_ptr() + storage.nbytes(), name, tensor.data_ptr())


def _live_region(address: int, itemsize: int) -> Region | None:
    """The storage of any tensor of this process that holds the address. Slow."""
    for candidate in gc.get_objects():
        if issubclass(type(candidate), torch.Tensor) and candidate.device.type == "cpu":
            try:
                found = region("a live tensor", candidate)
            except (RuntimeError, NotImplementedError):  # a fake tensor, or one without a storage
                continue
            if found.start <= address and address + itemsize <= found.end:
                return found
    return None
