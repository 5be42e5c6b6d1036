"""Which addresses an emulated kernel may touch: those of the tensors that its launch was given.

Interpreters read and write raw addresses, so that a kernel which strays outside of its tensors would go unnoticed, or
crash the process. Every access is checked instead, to the storage (a view may be read up to the end of the storage that
it lies in: tests put NaN there).
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class OutOfBounds(Exception):
    """An emulated kernel touched memory outside of its tensors, or at an address that its element type forbids."""


class Region(NamedTuple):
    start: int  # address of the first byte
    end: int  # address behind the last byte
    name: str  # of the argument
    origin: int  # address of the tensor's first element, which offsets are told from


class Memory:
    """The storages of one launch's tensors."""

    def __init__(self, kernel: str, tensors: Mapping[str, Tensor]) -> None:
        self.kernel = kernel
        self.program: tuple[int, ...] = ()
        self.pointers_made = False  # the kernel turned integers into pointers: any live tensor may be meant
        self._regions = sorted(region(name, tensor) for name, tensor in tensors.items())
        self._starts = [each.start for each in self._regions]
        self._ends = np.maximum.accumulate([each.end for each in self._regions] or [0]).tolist()

    def check(self, addresses: NDArray[np.uint64], itemsize: int, access: str) -> None:
        """Raise `OutOfBounds` unless every address [any shape] may be accessed by elements of `itemsize` bytes."""
        if addresses.size == 0:
            return
        first, last = int(addresses.min()), int(addresses.max())
        index = bisect_right(self._starts, first) - 1
        if index < 0 or last + itemsize > self._regions[index].end:
            self._check_each(addresses.ravel(), itemsize, access)
        if itemsize > 1 and np.any(addresses & np.uint64(itemsize - 1)):
            raise OutOfBounds(f"{self._where()} {access} of {itemsize} bytes at an address that is no multiple of that")

    def _check_each(self, addresses: NDArray[np.uint64], itemsize: int, access: str) -> None:
        for address in dict.fromkeys(addresses.tolist()):
            index = bisect_right(self._starts, address) - 1
            inside = index >= 0 and address + itemsize <= self._ends[index]
            if not inside and not (self.pointers_made and _is_live(address, itemsize)):
                raise OutOfBounds(
                    f"{self._where()} {access} of {itemsize} bytes outside of its tensors: {self._nearest(address)}"
                )

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


def region(name: str, tensor: Tensor) -> Region:
    storage = tensor.untyped_storage()
    return Region(storage.data_ptr(), storage.data_ptr() + storage.nbytes(), name, tensor.data_ptr())


def _is_live(address: int, itemsize: int) -> bool:
    """Whether any tensor of this process holds the address. Slow."""
    return any(_holds(each, address, itemsize) for each in gc.get_objects() if issubclass(type(each), torch.Tensor))


def _holds(tensor: Any, address: int, itemsize: int) -> bool:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False
    try:
        found = region("", tensor)
    except RuntimeError:  # a fake tensor, or one without storage
        return False
    return found.start <= address and address + itemsize <= found.end
