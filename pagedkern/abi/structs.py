"""The ctypes mirror of pagedkern_abi.h, and how its structs are filled. The header rules; a test compares the two."""

from __future__ import annotations

import ctypes
import math
from array import array
from numbers import Real
from typing import ClassVar

from pagedkern.abi.arrayview import ArrayView
from pagedkern.abi.batch import Batch, check_batch, count
from pagedkern.abi.codes import ABI_VERSION, DTYPE_CODES, HOST_DEVICES
from pagedkern.abi.exporters import describe, type_name
from pagedkern.errors import InvalidArgument, InvalidType


class BatchStruct(ctypes.Structure):
    """`pagedkern_batch`. Pointers are addresses (None = null), counts int64, strides in elements.

    `keep_alive` holds what the pointers point to. A copy of the bytes does not.
    """

    keep_alive: object = None
    _fields_: ClassVar = (
        ("version", ctypes.c_uint32),
        ("struct_size", ctypes.c_uint32),
        ("num_seqs", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("max_seqlen_q", ctypes.c_int64),
        ("table_width", ctypes.c_int64),
        ("num_blocks", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("head_dim_v", ctypes.c_int64),
        ("q_dtype", ctypes.c_int32),
        ("kv_dtype", ctypes.c_int32),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("block_table", ctypes.c_void_p),  # int32 [num_seqs, table_width]
        ("seq_lens", ctypes.c_void_p),  # int32 [num_seqs]
        ("cu_seqlens_q", ctypes.c_void_p),  # int32 [num_seqs + 1]
        ("slot_mapping", ctypes.c_void_p),  # int64 [num_tokens]
        ("k_cache", ctypes.c_void_p),  # kv_dtype [num_blocks, block_size, num_kv_heads, head_dim]
        ("v_cache", ctypes.c_void_p),  # kv_dtype [num_blocks, block_size, num_kv_heads, head_dim_v]
        ("q", ctypes.c_void_p),  # q_dtype [num_tokens, num_heads, head_dim]
        ("out", ctypes.c_void_p),  # q_dtype [num_tokens, num_heads, head_dim_v]
        ("lse", ctypes.c_void_p),  # float32 [num_tokens, num_heads]
        ("block_table_stride", ctypes.c_int64),
        ("k_stride_block", ctypes.c_int64),
        ("k_stride_token", ctypes.c_int64),
        ("k_stride_head", ctypes.c_int64),
        ("v_stride_block", ctypes.c_int64),
        ("v_stride_token", ctypes.c_int64),
        ("v_stride_head", ctypes.c_int64),
        ("q_stride_token", ctypes.c_int64),
        ("q_stride_head", ctypes.c_int64),
        ("out_stride_token", ctypes.c_int64),
        ("out_stride_head", ctypes.c_int64),
        ("lse_stride_token", ctypes.c_int64),
    )


class AttentionParamsStruct(ctypes.Structure):
    """`pagedkern_attention_params`: the scalars and optional arrays of attention. `keep_alive` as in `BatchStruct`."""

    keep_alive: object = None
    _fields_: ClassVar = (
        ("version", ctypes.c_uint32),
        ("struct_size", ctypes.c_uint32),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),  # 0 = none
        ("sliding_window", ctypes.c_int64),  # 0 = none
        ("causal", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("alibi_slopes", ctypes.c_void_p),  # float32 [num_heads]
        ("sinks", ctypes.c_void_p),  # float32 [num_heads]
        ("k_scale", ctypes.c_void_p),  # float32 [num_kv_heads]
        ("v_scale", ctypes.c_void_p),  # float32 [num_kv_heads]
    )


_STRIDES = {  # array: the fields that hold its strides, from the first dimension on
    "block_table": ("block_table_stride",),
    "k_cache": ("k_stride_block", "k_stride_token", "k_stride_head"),
    "v_cache": ("v_stride_block", "v_stride_token", "v_stride_head"),
    "q": ("q_stride_token", "q_stride_head"),
    "out": ("out_stride_token", "out_stride_head"),
    "lse": ("lse_stride_token",),
}
_ARRAYS = ("block_table", "seq_lens", "cu_seqlens_q", "slot_mapping", "k_cache", "v_cache", "q", "out", "lse")


def to_struct(batch: Batch) -> BatchStruct:
    """The batch as the C struct that kernels and engines in other languages take. It keeps the arrays alive.

    Raises:
        InvalidType: `batch` is no `Batch`.
    """
    check_batch(batch)
    struct = BatchStruct(
        version=ABI_VERSION,
        struct_size=ctypes.sizeof(BatchStruct),
        num_seqs=batch.num_seqs,
        num_tokens=batch.num_tokens,
        max_seqlen_q=batch.max_seqlen_q,
        table_width=batch.width,
        num_blocks=batch.num_blocks or 0,
        block_size=batch.block_size,
        num_heads=batch.num_heads,
        num_kv_heads=batch.num_kv_heads,
        head_dim=batch.head_dim,
        head_dim_v=batch.head_dim_v,
        q_dtype=DTYPE_CODES[batch.q.dtype] if batch.q is not None else 0,
        kv_dtype=DTYPE_CODES[batch.k_cache.dtype] if batch.k_cache is not None else 0,
        device_type=batch.device_type,
        device_id=batch.device_id,
    )
    for name in _ARRAYS:
        view: ArrayView | None = getattr(batch, name)
        if view is not None:
            setattr(struct, name, view.ptr if view.size else None)  # an empty array may lie anywhere
            for field, stride in zip(_STRIDES.get(name, ()), view.strides, strict=False):  # the last needs no field
                setattr(struct, field, stride)
    struct.keep_alive = batch
    return struct


def to_params(
    batch: Batch,
    *,
    scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: object = None,
    sinks: object = None,
    k_scale: object = None,
    v_scale: object = None,
) -> AttentionParamsStruct:
    """The parameters of attention over a batch as the C struct. It keeps the arrays alive.

    Args:
        batch: of `validate`.
        scale: factor of the scores; None means `head_dim ** -0.5`.
        causal: a query sees no key after its own position.
        sliding_window: tokens that a query sees, its own included, at least 1.
        softcap: scores become `softcap * tanh(score / softcap)`; greater than 0.
        alibi_slopes, sinks: float32 [num_heads] on the batch's device.
        k_scale, v_scale: float32 [num_kv_heads] there, or a number if the batch is on the host; given exactly when the
            caches are quantized.

    Raises:
        InvalidArgument (InvalidType): names the argument, what was given and what was expected.
    """
    check_batch(batch)
    if batch.q is None:
        raise InvalidArgument("batch: got one without q, expected one that asks for attention")
    if not isinstance(causal, bool):
        raise InvalidType(f"causal: got {type_name(causal)} {causal!r}, expected True or False")
    arrays = {
        "alibi_slopes": _floats(batch, alibi_slopes, "alibi_slopes", "num_heads", batch.num_heads),
        "sinks": _floats(batch, sinks, "sinks", "num_heads", batch.num_heads),
        "k_scale": _kv_scale(batch, k_scale, "k_scale"),
        "v_scale": _kv_scale(batch, v_scale, "v_scale"),
    }
    struct = AttentionParamsStruct(
        version=ABI_VERSION,
        struct_size=ctypes.sizeof(AttentionParamsStruct),
        scale=batch.head_dim**-0.5 if scale is None else _real(scale, "scale"),
        softcap=0.0 if softcap is None else _real(softcap, "softcap", positive=True),
        sliding_window=0 if sliding_window is None else count(sliding_window, "sliding_window", at_least=1),
        causal=causal,
        **{name: view.ptr for name, view in arrays.items() if view is not None},
    )
    struct.keep_alive = arrays
    return struct


def _real(value: object, name: str, *, positive: bool = False) -> float:
    """A finite host number that float32 can hold."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidType(f"{name}: got {type_name(value)}, expected a number")
    try:
        number = ctypes.c_float(float(value)).value
    except OverflowError:  # an integer or fraction that float64 cannot hold
        number = math.inf
    if not math.isfinite(number) or (positive and number <= 0):
        accepted = "a finite float32 greater than 0" if positive else "a finite float32"
        raise InvalidArgument(f"{name}: got {_short(value)}, expected {accepted}")
    return number


def _short(value: Real) -> str:
    """A number for a message, a long one cut off."""
    try:
        text = repr(value)
    except ValueError:  # Python prints no integer of many thousand digits
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:60]}..."


def _floats(batch: Batch, obj: object, name: str, dim: str, length: int) -> ArrayView | None:
    """An optional float32 array of one number a head, on the batch's device."""
    if obj is None:
        return None
    view = describe(obj, name)
    if view.dtype != "float32":
        raise InvalidArgument(f"{name}: got dtype {view.dtype}, expected float32")
    if view.shape != (length,):
        raise InvalidArgument(f"{name}: got shape {view.shape}, expected ({length},): {dim}")
    both_known = view.device_id >= 0 and batch.device_id >= 0
    if view.device_type != batch.device_type or (both_known and view.device_id != batch.device_id):
        raise InvalidArgument(f"{name}: got an array on {view.device}, expected {batch.device}, where the batch is")
    return view


def _kv_scale(batch: Batch, obj: object, name: str) -> ArrayView | None:
    """The scales of a quantized cache, one a KV head; a number stands for the same in each."""
    if batch.quantized != (obj is not None):
        dtype = batch.k_cache.dtype if batch.k_cache is not None else None
        given = "an array or number" if obj is not None else "None"
        accepted = "a scale" if batch.quantized else "None"
        raise InvalidArgument(f"{name}: got {given} for a cache of {dtype}, expected {accepted}")
    if isinstance(obj, Real):
        if batch.device_type not in HOST_DEVICES:
            raise InvalidArgument(
                f"{name}: got a number for a batch on {batch.device}, expected a float32 array of shape "
                f"({batch.num_kv_heads},) there"
            )
        return describe(array("f", [_real(obj, name)]) * batch.num_kv_heads, name)
    return _floats(batch, obj, name, "num_kv_heads", batch.num_kv_heads)
