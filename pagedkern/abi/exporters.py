"""`describe`: one door for the arrays of every library, and none of them is imported."""

from __future__ import annotations

import operator
import sys
from typing import Any

from pagedkern.abi import buffers, dlpack
from pagedkern.abi.arrayview import ArrayView, checked, contiguous_strides, element_strides, sized_dtype, unknown_dtype
from pagedkern.abi.codes import DEVICE_CPU, DEVICE_CUDA, DEVICE_ROCM, ITEMSIZE
from pagedkern.errors import InvalidArgument, InvalidType

ACCEPTED = "a torch tensor or an object that exports DLPack, __cuda_array_interface__ or the buffer protocol"


def describe(obj: object, name: str, *, stream: int | None = None) -> ArrayView:
    """Describe an array without copying it. O(1); a torch tensor takes one or two microseconds.

    Args:
        obj: a torch tensor; an exporter of DLPack (NumPy, CuPy, JAX, ...), of `__cuda_array_interface__` (Numba, ...)
            or of the buffer protocol (array.array, memoryview, bytes, ctypes arrays); or an `ArrayView`, returned as
            it is.
        name: how error messages call the argument.
        stream: handed to a DLPack exporter on a GPU: the stream on which the data will be used, as an integer handle;
            None is the legacy default stream, -1 asks for no synchronisation. Torch tensors and
            `__cuda_array_interface__` are not synchronised; the stream that the latter names is kept in the view.

    Raises:
        InvalidType: obj exports no array.
        InvalidArgument: an unknown dtype, a foreign byte order, a last dimension that is not contiguous (no array of
            the ABI has one), a masked array, or a tensor without memory.
    """
    torch = sys.modules.get("torch")  # whoever holds a tensor has imported it
    if torch is not None and isinstance(obj, torch.Tensor):
        return _from_torch(obj, name, torch)
    if isinstance(obj, ArrayView):
        return obj
    if isinstance(obj, type):  # a class has the methods, but no array
        raise InvalidType(f"{name}: got the class {obj.__qualname__}, expected {ACCEPTED}")
    declined = None
    if hasattr(obj, "__dlpack__") and hasattr(obj, "__dlpack_device__"):
        try:
            return dlpack.view(obj, name, stream)
        except BufferError as error:  # what DLPack cannot express, another interface of the object may
            declined = error
    if (interface := getattr(obj, "__cuda_array_interface__", None)) is not None:
        return _from_cuda(obj, name, interface)
    if buffers.is_exporter(obj):
        return buffers.view(obj, name)
    if declined is not None:
        raise InvalidArgument(f"{name}: got {type_name(obj)}, which refuses to export: {declined}") from declined
    raise InvalidType(f"{name}: got {type_name(obj)}, expected {ACCEPTED}")


def type_name(obj: object) -> str:
    """The type of an object for a message: "list", "torch.Tensor"."""
    kind = type(obj)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


# torch's dtype and device objects are looked up, not spelled out, on the hot path. Filled on first sight of each.
_torch_dtypes: dict[object, str] = {}
_torch_devices: dict[object, tuple[int, int]] = {}
_TORCH_DEVICE_TYPES = {"cpu": DEVICE_CPU, "cuda": DEVICE_CUDA, "mps": 8, "xpu": 14}


def _from_torch(t: Any, name: str, torch: Any) -> ArrayView:
    if t.layout is not torch.strided:
        raise InvalidArgument(f"{name}: got a tensor of layout {t.layout}, expected torch.strided")
    dtype = _torch_dtypes.get(t.dtype) or _torch_dtype(t, name)
    device_type, device_id = _torch_devices.get(t.device) or _torch_device(t, name, torch)
    if t.is_neg():
        raise InvalidArgument(f"{name}: got a lazily negated tensor, expected one resolved in memory (resolve_neg)")
    try:
        ptr = t.data_ptr()
    except RuntimeError as error:  # fake tensors, and the wrappers of torch.func
        raise InvalidArgument(f"{name}: got {type_name(t)} without memory of its own: {error}") from error
    return checked(name, ptr, dtype, tuple(t.shape), t.stride(), device_type, device_id, False, None, t)


def _torch_dtype(t: Any, name: str) -> str:
    given = str(t.dtype)
    dtype = given.removeprefix("torch.")
    if dtype not in ITEMSIZE:
        raise unknown_dtype(name, given)
    _torch_dtypes[t.dtype] = dtype
    return dtype


def _torch_device(t: Any, name: str, torch: Any) -> tuple[int, int]:
    kind, index = t.device.type, t.device.index
    if kind not in _TORCH_DEVICE_TYPES:
        raise InvalidArgument(f"{name}: got a tensor on {t.device}, expected {', '.join(_TORCH_DEVICE_TYPES)}")
    device_type = DEVICE_ROCM if kind == "cuda" and torch.version.hip else _TORCH_DEVICE_TYPES[kind]
    _torch_devices[t.device] = device_type, index or 0
    return device_type, index or 0


_CUDA_KINDS = {"i": "int", "u": "uint", "f": "float", "b": "bool"}


def _from_cuda(obj: object, name: str, interface: Any) -> ArrayView:
    """Versions 0 to 3 of https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html."""
    try:
        shape = tuple(_integer(n, 0, 2**63) for n in interface["shape"])
        typestr = str(interface["typestr"])
        order, kind, itemsize = typestr[0], typestr[1], int(typestr[2:])
        address, read_only = interface["data"]
        ptr = _integer(address or 0, 0, 2**64)
        given, stream = interface.get("strides"), interface.get("stream")
        byte_strides = None if given is None else tuple(_integer(n, -(2**63), 2**63) for n in given)
        stream = None if stream is None else _integer(stream, 0, 2**64)
        if byte_strides is not None and len(byte_strides) != len(shape):
            raise ValueError(f"{len(byte_strides)} strides for {len(shape)} dimensions")
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise InvalidArgument(f"{name}: its __cuda_array_interface__ is malformed ({error!r}): {interface}") from error
    if interface.get("mask") is not None:
        raise InvalidArgument(f"{name}: got a masked array, expected one without a mask")
    if stream == 0:
        raise InvalidArgument(f"{name}: its __cuda_array_interface__ names stream 0, expected 1, 2 and handles")
    dtype = sized_dtype(name, _CUDA_KINDS.get(kind, ""), itemsize, order, f"typestr {typestr!r}")
    strides = contiguous_strides(shape) if byte_strides is None else element_strides(name, byte_strides, itemsize)
    device_id = _cuda_index(obj)
    return checked(name, ptr, dtype, shape, strides, DEVICE_CUDA, device_id, bool(read_only), stream, obj)


def _integer(value: Any, low: int, end: int) -> int:
    """An integer of low .. end-1. Raises `TypeError` or `ValueError`."""
    number = operator.index(value)
    if not low <= number < end:
        raise ValueError(f"{number} is out of range")
    return number


def _cuda_index(obj: object) -> int:
    """Which GPU. The interface does not say; CuPy and Numba do, each its way; -1 for the others."""
    for holder in (obj, getattr(obj, "context", None)):
        index = getattr(getattr(holder, "device", None), "id", None)
        if isinstance(index, int):
            return index
    return -1
