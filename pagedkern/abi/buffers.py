"""Arrays from Python's buffer protocol (array.array, memoryview, bytes, ctypes arrays), read through the C interface.

`memoryview` alone would not do: it hides the address, and it cannot read the formats that ctypes exports.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from pagedkern.abi.arrayview import ArrayView, checked, contiguous_strides, element_strides, sized_dtype
from pagedkern.abi.codes import DEVICE_CPU
from pagedkern.errors import InvalidArgument

_FULL_RO = 0x011C  # PyBUF_FULL_RO: strides, format and suboffsets, read-only memory allowed
_LETTERS = {"int": "bhilqn", "uint": "BHILQNc", "float": "efd", "bool": "?"}  # of Python's struct module
_KINDS = {letter: kind for kind, letters in _LETTERS.items() for letter in letters}


class _PyBuffer(ctypes.Structure):
    """Python's `Py_buffer`, part of the stable ABI since 3.11."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
        ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
        ("suboffsets", ctypes.POINTER(ctypes.c_ssize_t)),
        ("internal", ctypes.c_void_p),
    )


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes, _get_buffer.restype = (ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int), ctypes.c_int
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes, _release_buffer.restype = (ctypes.POINTER(_PyBuffer),), None
_check_buffer = ctypes.pythonapi.PyObject_CheckBuffer
_check_buffer.argtypes, _check_buffer.restype = (ctypes.py_object,), ctypes.c_int


class _Export:
    """A buffer held: until it is released, its exporter neither moves nor resizes the memory."""

    __slots__ = ("raw",)

    def __init__(self, obj: object) -> None:
        raw = _PyBuffer()
        _get_buffer(obj, raw, _FULL_RO)
        self.raw = raw  # only now: what was not acquired is not released

    def __del__(self, _release: Callable[[object], None] = _release_buffer) -> None:
        if hasattr(self, "raw"):
            _release(self.raw)


def is_exporter(obj: object) -> bool:
    """Whether the object's type implements the buffer protocol."""
    return bool(_check_buffer(obj))


def view(obj: object, name: str) -> ArrayView:
    """Describe a buffer exporter. Raises `InvalidArgument` for what the ABI cannot take."""
    try:
        export = _Export(obj)
    except (BufferError, ValueError, TypeError) as error:  # a released memoryview, a dtype without a format, ...
        raise InvalidArgument(f"{name}: got {type(obj).__name__}, which exports no buffer: {error}") from error
    raw = export.raw
    if raw.suboffsets:
        raise InvalidArgument(f"{name}: got a buffer with indirect rows (suboffsets), expected plain strided memory")
    form = raw.format.decode() if raw.format else "B"
    order, letter = (form[0], form[1:]) if form[:1] in "@=<>!" else ("@", form)
    # The size is the exporter's: ctypes writes "<l" for a long of 8 bytes.
    dtype = sized_dtype(name, _KINDS.get(letter, ""), raw.itemsize, order, f"format {form!r}")
    shape = tuple(raw.shape[: raw.ndim]) if raw.ndim else ()
    if raw.ndim and raw.strides:
        strides = element_strides(name, tuple(raw.strides[: raw.ndim]), raw.itemsize)
    else:
        strides = contiguous_strides(shape)
    return checked(name, raw.buf or 0, dtype, shape, strides, DEVICE_CPU, 0, bool(raw.readonly), None, export)
