"""What a call accepts: one check a rule, each with a message that names the argument, what came and what was expected.

`pagedkern.ops` calls these once, before anything is written. They read shapes, dtypes, strides and host numbers only,
never device memory, and `torch.compile` traces through them.
"""

from __future__ import annotations

import math
import operator
from typing import Any, NoReturn, Protocol, TypeAlias

import torch
import torch.utils.dlpack
from torch import Tensor

from pagedkern.abi import describe
from pagedkern.backends.base import LARGEST_SCALE, SMALLEST_SCALE
from pagedkern.errors import InvalidArgument, InvalidType


class SupportsDLPack(Protocol):
    """NumPy, CuPy and JAX arrays, among others."""

    def __dlpack__(self) -> Any: ...


class SupportsCudaArray(Protocol):
    """CuPy and Numba arrays on a GPU."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


ArrayLike: TypeAlias = Tensor | SupportsDLPack | SupportsCudaArray
"""What every call takes for an array: never copied, always on one device."""

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INDICES = (torch.int64, torch.int32)
QUANTIZED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
DTYPE_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in (*FLOATS, *QUANTIZED)}


def refuse(name: str, got: object, accepted: str) -> NoReturn:
    """Raise the error for a value, shape, dtype or device that is not accepted."""
    raise InvalidArgument(f"{name}: got {got}, expected {accepted}")


def tensor(name: str, value: object, ndim: int | None, axes: str, *, write: bool = False) -> Tensor:
    """A tensor of that rank (None: any but 0), from a tensor or an exporter, without a copy."""
    if not isinstance(value, Tensor):
        if write and _is_read_only(value):
            refuse(name, f"a read-only {type(value).__name__}", "memory that may be written")
        value = _imported(name, value)
    if value.ndim != ndim and (ndim is not None or value.ndim == 0):
        refuse(name, f"shape {list(value.shape)}", f"{'some' if ndim is None else ndim} dimensions {axes}")
    if value.layout is not torch.strided:
        refuse(name, f"layout {value.layout}", "a strided tensor")
    if value.requires_grad and torch.is_grad_enabled():
        refuse(name, "a tensor that requires grad", "inference only: call it under torch.no_grad()")
    return value


def _imported(name: str, value: object) -> Tensor:
    try:
        if hasattr(value, "__dlpack__"):
            return torch.utils.dlpack.from_dlpack(value)
        if hasattr(value, "__cuda_array_interface__"):
            return torch.as_tensor(value, device="cuda")
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidArgument(
            f"{name}: got {type(value).__name__} that torch cannot import without a copy: {error}"
        ) from error
    raise InvalidType(
        f"{name}: got {type(value).__name__}, "
        "expected a torch tensor or an exporter of DLPack or __cuda_array_interface__"
    )


def _is_read_only(value: object) -> bool:
    """torch imports read-only memory as if it could be written; the exporters themselves say what it is."""
    try:
        return describe(value, "array").read_only
    except InvalidArgument:  # a dtype or strides that the ABI does not have
        return getattr(getattr(value, "flags", None), "writeable", True) is False


def dtype(name: str, value: Tensor, *accepted: torch.dtype) -> None:
    if value.dtype not in accepted:
        refuse(name, f"dtype {value.dtype}", " or ".join(map(str, accepted)))


def device(name: str, value: Tensor, expected: torch.device, like_name: str) -> None:
    if value.device != expected:
        refuse(name, f"a tensor on {value.device}", f"{expected}, where {like_name} is")


def shape(name: str, value: Tensor, expected: tuple[int, ...], axes: str) -> None:
    if value.shape != expected:
        refuse(name, f"shape {list(value.shape)}", f"{axes} = {list(expected)}")


def last_contiguous(name: str, value: Tensor) -> None:
    if value.stride(-1) != 1 and value.shape[-1] > 1:
        refuse(name, f"strides {list(value.stride())}", "a last dimension that is contiguous (stride 1)")


def index_vector(
    name: str, value: object, length: int | None, axes: str, like: Tensor, like_name: str, *kinds: torch.dtype
) -> Tensor:
    """A contiguous vector of integers of one of the dtypes `kinds`, on the device of `like`."""
    result = tensor(name, value, 1, axes)
    dtype(name, result, *kinds)
    device(name, result, like.device, like_name)
    if length is not None:
        shape(name, result, (length,), axes)
    last_contiguous(name, result)
    return result


def head_vector(name: str, value: object, length: int, axes: str, like: Tensor) -> Tensor:
    """A contiguous float32 vector with a number for each head."""
    result = tensor(name, value, 1, axes)
    dtype(name, result, torch.float32)
    device(name, result, like.device, "q")
    shape(name, result, (length,), axes)
    last_contiguous(name, result)
    return result


def integer(name: str, value: object, minimum: int, accepted: str, maximum: int = 2**63 - 1) -> int:
    """A host integer, of Python or NumPy; floats, bools and tensors are refused rather than rounded or read back."""
    if isinstance(value, (bool, float, Tensor)):
        raise InvalidType(f"{name}: got {type(value).__name__} {value!r}, expected {accepted}")
    if not isinstance(value, (int, torch.SymInt)):
        _scalar(name, value, accepted)
        try:
            value = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            raise InvalidType(f"{name}: got {type(value).__name__} {value!r}, expected {accepted}") from None
    if value < minimum or value > maximum:
        refuse(name, value, accepted if value < minimum else f"{accepted}, at most {maximum}")
    return value  # type: ignore[return-value]


def number(name: str, value: object, accepted: str) -> float:
    """A finite host number, of Python, NumPy or whatever else converts to float."""
    if isinstance(value, (bool, Tensor, str, bytes, bytearray)):
        raise InvalidType(f"{name}: got {type(value).__name__}, expected {accepted}")
    if not isinstance(value, float):
        _scalar(name, value, accepted)
        try:
            value = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise InvalidType(f"{name}: got {type(value).__name__} {value!r}, expected {accepted}") from None
        except OverflowError:
            refuse(name, "an integer beyond float64", accepted)
    if not -math.inf < value < math.inf:  # torch.compile cannot trace math.isfinite
        refuse(name, value, accepted)
    return float(value)


def _is_array(value: object) -> bool:
    return isinstance(value, Tensor) or hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__")


def _scalar(name: str, value: object, accepted: str) -> None:
    """Refuse what converts to a number and is none: NumPy's bools and complex numbers, and arrays of one element."""
    kind: object = getattr(getattr(value, "dtype", None), "kind", None)
    if kind in ("b", "c") or getattr(value, "ndim", 0) != 0:
        raise InvalidType(f"{name}: got {type(value).__name__} {value!r}, expected {accepted}")


def float32_number(name: str, value: object, default: str) -> float:
    """A host number that kernels can take: finite also once rounded to float32."""
    accepted = f"a finite number up to {LARGEST_SCALE:.3g}, or None for {default}"
    result = number(name, value, accepted)
    if abs(result) > LARGEST_SCALE:
        refuse(name, value, accepted)
    return result


def flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidType(f"{name}: got {type(value).__name__} {value!r}, expected True or False")
    return value


def caches(k_cache: object, v_cache: object, *, write: bool = False) -> tuple[Tensor, Tensor]:
    """The two halves of one layer's cache: equal in dtype, device, blocks, block size and KV heads."""
    k = tensor("k_cache", k_cache, 4, "[num_blocks, block_size, num_kv_heads, head_dim]", write=write)
    v = tensor("v_cache", v_cache, 4, "[num_blocks, block_size, num_kv_heads, head_dim_v]", write=write)
    dtype("k_cache", k, *FLOATS, *QUANTIZED)
    dtype("v_cache", v, k.dtype)
    device("v_cache", v, k.device, "k_cache")
    blocks, size, heads, dim = k.shape
    v_blocks, v_size, v_heads, v_dim = v.shape
    if v_blocks != blocks or v_size != size or v_heads != heads:
        refuse(
            "v_cache", f"shape {list(v.shape)}", f"the blocks, block size and KV heads of k_cache {list(k.shape[:3])}"
        )
    if size == 0 or heads == 0 or dim == 0 or v_dim == 0:
        name, empty = ("v_cache", v) if size and heads and dim else ("k_cache", k)
        refuse(name, f"shape {list(empty.shape)}", "at least 1 in block size, KV heads and head_dim")
    last_contiguous("k_cache", k)
    last_contiguous("v_cache", v)
    return k, v


def scale(name: str, value: object, cache: Tensor) -> tuple[Tensor | None, float]:
    """The scale of a quantized cache: (float32 vector over KV heads or None, number that holds if there is none).

    Numbers are checked here, those in a tensor where they can be read: `checked.check_scale`.
    """
    if value is None:
        return None, 1.0
    if cache.dtype not in QUANTIZED:
        refuse(name, "a scale", f"None for a cache of {cache.dtype}: only quantized caches are scaled")
    if not isinstance(value, (int, float)) and _is_array(value):
        vector = value if isinstance(value, Tensor) else _imported(name, value)
        if vector.ndim or vector.device.type != "cpu" or cache.device.type == "cpu":
            return _scales(name, vector, cache), 1.0
        value = vector.item()  # a number of the host for a cache that is elsewhere, as torch takes them, too
    accepted = "a positive number or float32 [num_kv_heads]"
    result = number(name, value, accepted)
    if not SMALLEST_SCALE <= result <= LARGEST_SCALE:
        refuse(name, value, f"{accepted}, {SMALLEST_SCALE:.3g} to {LARGEST_SCALE:.3g}")
    return None, result


def _scales(name: str, value: Tensor, cache: Tensor) -> Tensor:
    """float32 [num_kv_heads] of a tensor that has as many numbers, or one for all."""
    heads = cache.shape[2]
    if value.ndim == 0:
        dtype(name, value, *FLOATS, torch.float64, torch.int64, torch.int32)
        value = value.to(torch.float32)[None]
    if value.shape == (1,):
        value = value.expand(heads).contiguous()
    return head_vector(name, value, heads, "[num_kv_heads]", cache)


def output(name: str, value: object, expected: tuple[int, ...], axes: str, kind: torch.dtype, like: Tensor) -> Tensor:
    """A tensor to write into."""
    result = tensor(name, value, len(expected), axes, write=True)
    dtype(name, result, kind)
    device(name, result, like.device, "q")
    shape(name, result, expected, axes)
    last_contiguous(name, result)
    return result


def written(name: str, value: Tensor) -> None:
    """Refuse to write into a tensor two of whose elements share memory (an expanded one, or overlapping rows).

    For tensors with memory, inside an operator: `torch.compile` cannot trace the sorting.
    """
    if value.is_contiguous():
        return
    reach = 1  # elements that the dimensions of smaller stride span
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1:
            if stride < reach:
                refuse(name, f"strides {list(value.stride())}", "memory of its own for each element")
            reach = stride * (size - 1) + reach


def backend_name(value: object) -> str:
    if not isinstance(value, str):
        raise InvalidType(f"backend: got {type(value).__name__}, expected 'auto' or a name from pagedkern.backends()")
    return value
