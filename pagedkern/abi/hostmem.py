"""Reading the index arrays of a batch on the host, by address."""

from __future__ import annotations

import ctypes

from pagedkern.abi.arrayview import ArrayView
from pagedkern.abi.exporters import describe
from pagedkern.errors import InvalidArgument


def index_array(obj: object, name: str, dtype: str, ndim: int) -> ArrayView:
    """Describe an index array that must be on the host. Raises `InvalidType` or `InvalidArgument`."""
    view = describe(obj, name)
    if view.dtype != dtype:
        raise InvalidArgument(f"{name}: got dtype {view.dtype}, expected {dtype}")
    if view.ndim != ndim:
        raise InvalidArgument(f"{name}: got shape {view.shape}, expected {ndim} dimension{'s' * (ndim > 1)}")
    return on_host(view, name)


def on_host(view: ArrayView, name: str) -> ArrayView:
    """The view itself; raises `InvalidArgument` if its memory cannot be read here."""
    if not view.on_host:
        raise InvalidArgument(
            f"{name}: got an array on {view.device}, expected one in host memory: copy it there first (to read it "
            "here would wait for the device)"
        )
    return view


def numbers(view: ArrayView, row: int | None = None) -> memoryview[int]:
    """The elements of a one-dimensional view, or of one row of a two-dimensional one, as integers, without a copy.

    The view's owner must outlive the result.
    """
    length = view.shape[-1]
    offset = 0 if row is None else row * view.strides[0] * view.itemsize
    memory = (ctypes.c_char * (length * view.itemsize)).from_address(view.ptr + offset)
    return memoryview(memory).cast("B").cast("i" if view.dtype == "int32" else "q")
