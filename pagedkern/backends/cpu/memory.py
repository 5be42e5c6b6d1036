"""Raw memory in kernels: scalars behind addresses, copies, and an atomic counter.

Addresses and offsets are int64, in bytes.
"""

from __future__ import annotations

from numba.core.types import float32, int64, void

from pagedkern.backends.cpu import simd
from pagedkern.backends.cpu.jit import emitter
from pagedkern.backends.cpu.simd import F32, I8, I32, I64, Builder, Value


@emitter(int64, int64)
def get_i32(b: Builder, address: Value) -> Value:
    """The int32 at an address, as int64."""
    return b.sext(simd.load(b, I32, address), I64)


@emitter(int64, int64)
def get_i64(b: Builder, address: Value) -> Value:
    return simd.load(b, I64, address)


@emitter(float32, int64)
def get_f32(b: Builder, address: Value) -> Value:
    return simd.load(b, F32, address)


@emitter(void, int64, int64)
def put_i64(b: Builder, address: Value, value: Value) -> None:
    simd.store(b, value, address)


@emitter(void, int64, float32)
def put_f32(b: Builder, address: Value, value: Value) -> None:
    simd.store(b, value, address)


@emitter(int64, int64, int64)
def fetch_add(b: Builder, address: Value, value: Value) -> Value:
    """Add to the int64 at an address; returns what stood there. What was written before is seen by who counts later."""
    return b.atomic_rmw("add", b.inttoptr(address, I64.as_pointer()), value, "seq_cst")


@emitter(void, int64, int64)
def clear(b: Builder, address: Value, size: Value) -> None:
    simd.cgutils.memset(b, b.inttoptr(address, I8.as_pointer()), size, 0)


@emitter(void, int64, int64, int64)
def copy(b: Builder, dst: Value, src: Value, size: Value) -> None:
    """memcpy."""
    simd.cgutils.raw_memcpy(b, *(b.inttoptr(a, I8.as_pointer()) for a in (dst, src)), size, 1)
