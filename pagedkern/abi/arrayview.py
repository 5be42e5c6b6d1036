"""`ArrayView`: what one array is (address, dtype, shape, strides, device), apart from the library that made it."""

from __future__ import annotations

import sys
from math import prod
from typing import NamedTuple

from pagedkern.abi.codes import HOST_DEVICES, ITEMSIZE, device_name
from pagedkern.errors import InvalidArgument


class ArrayView(NamedTuple):
    """One array, described. It holds the exporter in `owner`, so the memory stays valid as long as the view lives.

    Nothing was copied: what the exporter writes later is seen. Two views are equal if they describe the same memory in
    the same way, whoever owns it. (A named tuple, because a frozen dataclass takes four times as long to make.)
    """

    ptr: int  # address of element [0, ..., 0]; may be 0 if there are no elements
    dtype: str  # "int32", "bfloat16", ...: a key of `ITEMSIZE`
    shape: tuple[int, ...]  # elements in each dimension
    strides: tuple[int, ...]  # in elements, one for each dimension; the last is 1 if that dimension has 2 or more
    device_type: int  # DLPack's number: 1 CPU, 2 CUDA, ...
    device_id: int  # from 0; -1 if the exporter does not say
    read_only: bool  # whether the exporter forbids to write
    stream: int | None  # from `__cuda_array_interface__`: the data are valid in the order of this stream
    owner: object  # what exported it

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEMSIZE[self.dtype]

    @property
    def on_host(self) -> bool:
        """Whether this process may read the memory at any time (pinned memory included, managed memory not)."""
        return self.device_type in HOST_DEVICES

    @property
    def device(self) -> str:
        """The device as text: "cpu", "cuda:0"."""
        return device_name(self.device_type, self.device_id)

    def __repr__(self) -> str:
        access = ", read-only" if self.read_only else ""
        layout = f"{self.dtype} {list(self.shape)}, strides {list(self.strides)}"
        return f"ArrayView({layout}, at {self.ptr:#x} on {self.device}{access})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ArrayView) and self[:-1] == other[:-1]  # owners may not be comparable

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self[:-1])


def checked(
    name: str,
    ptr: int,
    dtype: str,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    device_type: int,
    device_id: int,
    read_only: bool,
    stream: int | None,
    owner: object,
) -> ArrayView:
    """The view, after the two checks that every exporter needs. Raises `InvalidArgument`."""
    if shape and strides[-1] != 1 and shape[-1] > 1 and 0 not in shape:
        raise InvalidArgument(
            f"{name}: got a last dimension with a stride of {strides[-1]} elements (shape {shape}, strides {strides}), "
            "expected a stride of 1 (contiguous in the last dimension)"
        )
    if not ptr and 0 not in shape:
        raise InvalidArgument(f"{name}: got an array of shape {shape} without memory, expected one with an address")
    return ArrayView(ptr, dtype, shape, strides, device_type, device_id, read_only, stream, owner)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides of that shape, in elements."""
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * max(shape[i + 1], 1)
    return tuple(strides)


def element_strides(name: str, byte_strides: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Strides in elements; raises `InvalidArgument` if one is no whole number of elements."""
    if any(s % itemsize for s in byte_strides):
        raise InvalidArgument(
            f"{name}: got strides of {byte_strides} bytes, expected multiples of the element's {itemsize} bytes"
        )
    return tuple(s // itemsize for s in byte_strides)


def sized_dtype(name: str, kind: str, itemsize: int, order: str, given: str) -> str:
    """The dtype of a kind ("int", "uint", "float", "bool", or "" if unknown) whose elements take `itemsize` bytes.

    order: the byte order as Python's struct module writes it. given: the exporter's own word for the dtype.
    Raises `InvalidArgument` for a dtype that the ABI does not know, and for one that this machine cannot read as it is.
    """
    dtype = kind if kind == "bool" else f"{kind}{8 * itemsize}"
    if ITEMSIZE.get(dtype) != itemsize:
        raise unknown_dtype(name, given)
    if itemsize > 1 and order in ("<" if sys.byteorder == "big" else ">!"):
        raise InvalidArgument(
            f"{name}: got {given} in foreign byte order, expected this machine's ({sys.byteorder}-endian)"
        )
    return dtype


def unknown_dtype(name: str, given: str) -> InvalidArgument:
    """The error for a dtype that the ABI does not know."""
    return InvalidArgument(f"{name}: got dtype {given}, expected {', '.join(ITEMSIZE)}")
