"""Arrays for the ABI's tests: exporters made by hand, and views over no memory at all."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any

from pagedkern.abi import ArrayView, describe
from pagedkern.abi.arrayview import contiguous_strides
from pagedkern.abi.dlpack import DLManagedTensor, DLManagedTensorVersioned, DLTensor

_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.argtypes, _new_capsule.restype = (
    (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p),
    ctypes.py_object,
)
_capsule_name = ctypes.pythonapi.PyCapsule_GetName
_capsule_name.argtypes, _capsule_name.restype = (ctypes.py_object,), ctypes.c_char_p
_NAMES = {False: b"dltensor", True: b"dltensor_versioned"}


class CapsuleExporter:
    """A DLPack exporter made by ctypes, over `memory`. It records the calls of its deleter and the last capsule."""

    def __init__(
        self,
        memory: Any,
        shape: Sequence[int],
        strides: Sequence[int] | None = None,
        *,
        dtype: tuple[int, int, int] = (0, 32, 1),  # code, bits, lanes: int32
        device: tuple[int, int] = (1, 0),
        byte_offset: int = 0,
        versioned: bool = True,
        version: tuple[int, int] = (1, 1),
        flags: int = 0,
        has_deleter: bool = True,
        knows_versions: bool = True,  # its __dlpack__ takes max_version and copy
    ) -> None:
        self.memory, self.device = memory, device
        self.versioned, self.knows_versions = versioned, knows_versions
        self.deleted: list[int] = []
        self.asked: list[dict[str, Any]] = []
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        self._strides = None if strides is None else (ctypes.c_int64 * len(strides))(*strides)
        self._deleter = _DELETER(self.deleted.append)
        data = memory if isinstance(memory, int) else ctypes.addressof(memory)
        tensor = DLTensor(data, *device, len(shape), *dtype, self._shape, self._strides, byte_offset)
        deleter = ctypes.cast(self._deleter, ctypes.c_void_p) if has_deleter else None
        if versioned:
            self.record: Any = DLManagedTensorVersioned(*version, None, deleter, flags, tensor)
        else:
            self.record = DLManagedTensor(tensor, None, deleter)
        self.capsule: object = None

    @property
    def address(self) -> int:
        """Of the managed tensor, which the deleter gets."""
        return ctypes.addressof(self.record)

    @property
    def capsule_name(self) -> bytes:
        """What the last capsule is called now."""
        return bytes(_capsule_name(self.capsule))

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **kwargs: Any) -> object:
        if not self.knows_versions and kwargs.keys() - {"stream"}:
            raise TypeError(f"__dlpack__() got an unexpected keyword argument {sorted(kwargs)[0]!r}")
        self.asked.append(kwargs)
        self.capsule = _new_capsule(self.address, _NAMES[self.versioned], None)
        return self.capsule


class Delegate:
    """Shows nothing of an array but its DLPack side."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.array.__dlpack__(**kwargs)


class CudaArray:
    """An exporter of `__cuda_array_interface__`, over an address that nobody may follow."""

    def __init__(self, **interface: Any) -> None:
        base = {"shape": (2, 3), "typestr": "<i4", "data": (0x7000_0000, False), "strides": None, "version": 3}
        self.__cuda_array_interface__ = {**base, **interface}


def view(
    dtype: str,
    shape: Sequence[int],
    strides: Sequence[int] | None = None,
    *,
    device: tuple[int, int] = (2, 0),
    ptr: int = 0x7000_0000,
    read_only: bool = False,
) -> ArrayView:
    """A view of memory that does not exist, on a GPU by default: what reads it crashes."""
    steps = contiguous_strides(tuple(shape)) if strides is None else tuple(strides)
    return ArrayView(ptr, dtype, tuple(shape), steps, *device, read_only, None, None)


def int_table(rows: Sequence[Sequence[int]], width: int, stride: int | None = None, fill: int = -(2**31)) -> ArrayView:
    """An int32 table on the host, its rows `stride` elements apart and the gaps between them filled with garbage."""
    step = width if stride is None else stride
    flat = array("i", [fill]) * (len(rows) * step)
    for i, row in enumerate(rows):
        flat[i * step : i * step + width] = array("i", row)
    return describe(flat, "table")._replace(shape=(len(rows), width), strides=(step, 1))
