"""Arrays from DLPack exporters, read from their capsules by ctypes.

Protocol: https://dmlc.github.io/dlpack/latest/python_spec.html. A capsule is consumed once: it is renamed, and from
then on its consumer owes the exporter exactly one call of the deleter, which `_Managed` makes when the last view dies.
"""

from __future__ import annotations

import ctypes
import operator
from typing import Any

from pagedkern.abi.arrayview import ArrayView, checked, contiguous_strides, unknown_dtype
from pagedkern.abi.codes import DEVICE_CUDA, DEVICE_CUDA_MANAGED, DEVICE_ROCM
from pagedkern.errors import InvalidArgument

_VERSION = (1, 0)  # the newest layout that is understood; minor versions only add codes
_READ_ONLY, _IS_COPIED = 1, 2  # bits of `flags`
_WITH_STREAM = frozenset({DEVICE_CUDA, DEVICE_CUDA_MANAGED, DEVICE_ROCM})
_DTYPES = {  # (code, bits) of one lane
    **{(0, bits): f"int{bits}" for bits in (8, 16, 32, 64)},
    **{(1, bits): f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{(2, bits): f"float{bits}" for bits in (16, 32, 64)},
    (4, 16): "bfloat16",
    (6, 8): "bool",
    (10, 8): "float8_e4m3fn",
    (11, 8): "float8_e4m3fnuz",
    (12, 8): "float8_e5m2",
    (13, 8): "float8_e5m2fnuz",
}


class DLTensor(ctypes.Structure):
    """DLPack's description of an array, which owns nothing."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype_code", ctypes.c_uint8),
        ("dtype_bits", ctypes.c_uint8),
        ("dtype_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),  # in elements; null = row-major, allowed before version 1.2
        ("byte_offset", ctypes.c_uint64),
    )


class DLManagedTensor(ctypes.Structure):
    """What a capsule named "dltensor" points to."""

    _fields_ = (("tensor", DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class DLManagedTensorVersioned(ctypes.Structure):
    """What a capsule named "dltensor_versioned" points to. The fields before `tensor` hold for every major version."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    )


def _immortal(text: bytes) -> bytes:
    """A name whose characters outlive every capsule: a capsule keeps the pointer, not the bytes object."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(text))
    return text


_CAPSULES: dict[bytes, tuple[bytes, Any]] = {  # name of a fresh capsule: its name once consumed, what it points to
    b"dltensor_versioned": (_immortal(b"used_dltensor_versioned"), DLManagedTensorVersioned),
    b"dltensor": (_immortal(b"used_dltensor"), DLManagedTensor),
}
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.argtypes, _is_valid.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_int
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.argtypes, _get_pointer.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
_set_name = ctypes.pythonapi.PyCapsule_SetName
_set_name.argtypes, _set_name.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_int
# Called with the interpreter's lock held: deleters must take it themselves, which nests, and careless ones forget to.
_Deleter = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


class _Managed:
    """A managed tensor that has been taken over: calls its deleter once, when it dies."""

    __slots__ = ("_deleter", "_ptr", "exporter", "record")

    def __init__(self, ptr: int, record: Any, exporter: object) -> None:
        self._ptr = ptr
        self.record = record
        self.exporter = exporter  # all that keeps the memory if there is no deleter
        self._deleter = _Deleter(record.deleter) if record.deleter else None

    def __del__(self) -> None:
        if self._deleter is not None:
            self._deleter(self._ptr)


def view(obj: Any, name: str, stream: int | None) -> ArrayView:
    """Describe a DLPack exporter. Raises `BufferError` if it declines, `InvalidArgument` for what the ABI has not."""
    managed = _consume(_capsule(obj, name, stream), name, obj)
    record = managed.record
    read_only = False
    if isinstance(record, DLManagedTensorVersioned):
        if record.major != _VERSION[0]:
            raise InvalidArgument(f"{name}: got DLPack version {record.major}.{record.minor}, expected 1.x")
        if record.flags & _IS_COPIED:
            raise InvalidArgument(f"{name}: its exporter made a copy, expected memory that can be shared")
        read_only = bool(record.flags & _READ_ONLY)
    tensor: DLTensor = record.tensor
    key = (tensor.dtype_code, tensor.dtype_bits)
    if tensor.dtype_lanes != 1 or key not in _DTYPES:
        raise unknown_dtype(name, f"DLPack (code {key[0]}, {key[1]} bits, {tensor.dtype_lanes} lanes)")
    shape = tuple(tensor.shape[: tensor.ndim]) if tensor.ndim else ()
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.ndim and tensor.strides else contiguous_strides(shape)
    ptr = tensor.data + tensor.byte_offset if tensor.data else 0
    device = tensor.device_type, tensor.device_id
    return checked(name, ptr, _DTYPES[key], shape, strides, *device, read_only, None, managed)


def _capsule(obj: Any, name: str, stream: int | None) -> object:
    """Ask for a capsule: versioned and never a copy; plain where the exporter does not know these arguments."""
    device = obj.__dlpack_device__()
    try:
        device_type, _ = map(operator.index, device)  # JAX and NumPy give an IntEnum, which is an int
    except (TypeError, ValueError) as error:
        raise InvalidArgument(
            f"{name}: its __dlpack_device__ returned {device!r}, expected two integers: device type and id"
        ) from error
    where = {"stream": stream} if device_type in _WITH_STREAM else {}
    try:
        return obj.__dlpack__(max_version=_VERSION, copy=False, **where)
    except TypeError:
        return obj.__dlpack__(**where)


def _consume(capsule: object, name: str, exporter: object) -> _Managed:
    for fresh, (used, layout) in _CAPSULES.items():
        if _is_valid(capsule, fresh):
            ptr = _get_pointer(capsule, fresh)
            managed = _Managed(ptr, layout.from_address(ptr), exporter)
            _set_name(capsule, used)
            return managed
    raise InvalidArgument(f"{name}: its __dlpack__ returned {capsule!r}, expected a DLPack capsule not yet consumed")
