"""The structs of instance.cuh in ctypes, and what follows from an instance: its macro, its shared memory.

The header rules: a test compares sizes and offsets.
"""

from __future__ import annotations

import ctypes
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import ClassVar

from pagedkern.abi import DTYPE_CODES

MAX_DIM, MAX_KEYS, MAX_STAGES = 256, 64, 8
COPY = {"plain": 0, "async": 1, "bulk": 2}
FEATURE_SOFTCAP, FEATURE_ALIBI = 1, 2
COPY_CACHES, COPY_DIMS = 256, 5
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}  # all others have one byte


class InstanceStruct(ctypes.Structure):
    _fields_: ClassVar = [
        (name, ctypes.c_int32)
        for name in (
            "q_dtype", "kv_dtype", "dim_k", "dim_v", "tensor_cores", "rows", "row_warps", "key_warps", "tile",
            "stages", "span", "copy", "prefill", "features",
        )
    ]  # fmt: skip


class AttentionPlan(ctypes.Structure):
    _fields_: ClassVar = [
        ("instance", InstanceStruct),
        *((name, ctypes.c_int32) for name in ("splits", "row_tiles", "decode_tokens", "partial_tokens")),
        *((name, ctypes.c_int32) for name in ("first_sequence", "k_unit", "v_unit")),
        ("partial_out", ctypes.c_void_p),
        ("partial_state", ctypes.c_void_p),
    ]


class WritePlan(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("k", "v", "k_scale", "v_scale")),
        *((f"{x}_stride_{of}", ctypes.c_int64) for x in "kv" for of in ("token", "head")),
        ("dtype", ctypes.c_int32),
        ("unit", ctypes.c_int32),
    ]


class CopyPlan(ctypes.Structure):
    _fields_: ClassVar = [
        ("src_blocks", ctypes.c_void_p),
        ("dst_blocks", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("pairs", "stride_block", "run_bytes", "runs")),
        ("sizes", ctypes.c_int64 * COPY_DIMS),
        ("strides", ctypes.c_int64 * COPY_DIMS),
        ("column", ctypes.c_int32),
        ("unit", ctypes.c_int32),
        ("caches", ctypes.c_void_p * COPY_CACHES),
    ]


@dataclass(frozen=True)
class Instance:
    """The constants that an attention kernel is compiled for; field by field `struct Instance` of instance.cuh.

    What follows from them is found once: a launch asks for it each time.
    """

    q_dtype: str
    kv_dtype: str
    dim_k: int
    dim_v: int
    tensor_cores: bool
    rows: int
    row_warps: int
    key_warps: int
    tile: int
    stages: int
    span: int
    copy: str
    prefill: bool
    features: int

    @property
    def threads(self) -> int:
        return 32 * self.row_warps * self.key_warps

    @property
    def block_rows(self) -> int:
        """Query rows of a block of threads."""
        return self.rows * self.row_warps

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        q, kv, *rest = astuple(self)
        return (DTYPE_CODES[q], DTYPE_CODES[kv], *(COPY[x] if isinstance(x, str) else int(x) for x in rest))

    @cached_property
    def struct(self) -> InstanceStruct:
        return InstanceStruct(*self.numbers)

    @cached_property
    def macro(self) -> str:
        """The value of PAGEDKERN_INSTANCE."""
        return "{" + ",".join(map(str, self.numbers)) + "}"

    @cached_property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: barriers, q, stages and weights, or the sums that take their place at the end."""
        q_pitch = pitch(self.dim_k, self.q_dtype) if self.tensor_cores else 4 * self.dim_k
        stage = self.tile * (pitch(self.dim_k, self.kv_dtype) + pitch(self.dim_v, self.kv_dtype))
        weights = 0 if self.tensor_cores else 4 * self.row_warps * self.tile * self.rows
        barriers = 8 * MAX_STAGES if self.copy == "bulk" else 0
        streaming = self.block_rows * q_pitch + self.stages * stage + weights
        sums_pitch = self.dim_v + (8 if self.kv_dtype in ITEMSIZE else 4)
        joining = 4 * self.block_rows * (self.key_warps * (sums_pitch + 3) + 1)
        return barriers + max(streaming, joining)


def pitch(dim: int, dtype: str) -> int:
    """Bytes from row to row of a tile in shared memory: an odd multiple of 16."""
    return (dim * ITEMSIZE.get(dtype, 1) // 16 | 1) * 16
