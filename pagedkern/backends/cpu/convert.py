"""Numbers of every cache dtype to and from float32 vectors, in registers.

`widen` reads elements in their natural order. `widen_cache` reads one chunk of a cache row in *kernel order*: the order
that costs least. It differs for bfloat16, where a vector of 32-bit words holds two elements each, and a shift gives the
even ones, a mask the odd ones; or, where pairs are multiplied natively, in that in which two rows are woven. The query
is brought into kernel order once, the result out of it once.

Where pairs of bfloat16 are multiplied natively, numbers of 8 bits become bfloat16 too: `bytes_to_pairs` finds each of
the two bytes in a table of 128 by 7 bits, and copies the sign. An int8 is found by its magnitude, and comes out divided
by 64: so 128, of which 7 bits are those of 0, becomes 2.0, which is 0 with one bit set.

Elsewhere float8_e4m3fn becomes float16 bits by moving exponent and mantissa into place, which leaves the value 256
times too small (the exponent biases are 7 and 15). `unit` gives such factors, which sums are multiplied by.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from functools import cache

from llvmlite import ir
from numba.core.types import float32, int64, void

from pagedkern.backends.base import ITEMSIZE
from pagedkern.backends.cpu import simd
from pagedkern.backends.cpu.jit import LITERAL, TARGET, TargetKey, emitter
from pagedkern.backends.cpu.simd import F16, F32, I1, I8, I16, I32, Builder, Value, const

SHORT = {"float8_e4m3fn": 256.0}  # what `widen` leaves out
CODES = {"float32": 0, "float16": 1, "bfloat16": 2, "float8_e4m3fn": 3, "float8_e5m2": 4, "int8": 5}
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def unit(key: TargetKey) -> float:
    """What the numbers of `widen_cache` and `bytes_to_pairs` are still to be multiplied by."""
    if key.tables:
        return 64.0 if key.kv_dtype == "int8" else 1.0
    return SHORT.get(key.kv_dtype, 1.0)


def units(key: TargetKey) -> int:
    """Vectors of float32 in one chunk of a cache row."""
    if key.tables:
        return 4
    return 2 if key.kv_dtype == "bfloat16" else 1


def chunk(key: TargetKey) -> int:
    """Elements in one chunk of a cache row."""
    return units(key) * key.lanes


def kernel_order(key: TargetKey) -> list[list[int]]:
    """Which elements of a chunk each of its vectors holds."""
    n = key.lanes
    if units(key) == 1:
        return [list(range(n))]
    if key.tables:  # first bytes, then words are woven: each vector has 4 of each 16
        return [[16 * k + 4 * u + i for k in range(n // 4) for i in range(4)] for u in range(4)]
    if key.dot:
        return woven_order(n)
    return [list(range(0, 2 * n, 2)), list(range(1, 2 * n, 2))]


def woven_order(n: int) -> list[list[int]]:
    """The 16-bit words of 2n that go into the first and the second vector when two rows of them are woven.

    The processor weaves within 16 bytes, which hold 8 words: the lower four of each 8, and the upper four.
    """
    return [[8 * k + i + half for k in range(n // 4) for i in range(4)] for half in (0, 4)]


def weave(b: Builder, x: Value, y: Value) -> list[Value]:
    """Words of x and y in turn, x in the lower halves of 32-bit lanes, columns in `woven_order`."""
    n = x.type.count // 2
    i32 = ir.VectorType(I32, n)
    return [b.bitcast(simd.pick(b, x, y, [j for c in half for j in (c, c + 2 * n)]), i32) for half in woven_order(n)]


def weave_bytes(b: Builder, x: Value, y: Value) -> list[Value]:
    """64 bytes of x and y in turn: the lower eight of each 16, and the upper eight."""
    n = x.type.count
    halves = ([16 * k + i + half for k in range(n // 16) for i in range(8)] for half in (0, 8))
    return [simd.pick(b, x, y, [j for c in half for j in (c, c + n)]) for half in halves]


def bytes_to_pairs(b: Builder, key: TargetKey, x: Value) -> list[Value]:
    """64 bytes of a cache by `key.tables`: two vectors of bfloat16, in the order of `weave_bytes`."""
    upper, lower = _tables(key.kv_dtype)
    sign = b.and_(x, const(x.type, 0x80))
    if key.kv_dtype == "int8":
        x = simd.call(b, f"llvm.abs.{simd.suffix(x.type)}", x.type, x, ir.Constant(I1, 0))
    low, high = simd.look_up(b, lower, x), b.or_(simd.look_up(b, upper, x), sign)
    if key.kv_dtype == "int8":
        words = ir.VectorType(I16, x.type.count // 2)
        shifted = b.bitcast(b.lshr(b.bitcast(x, words), const(words, 1)), x.type)
        high = b.or_(high, b.and_(shifted, const(x.type, 0x40)))
    return weave_bytes(b, low, high)


@cache
def _tables(dtype: str) -> tuple[list[int], list[int]]:
    """The upper and the lower byte of the bfloat16 for each of 7 bits."""
    if dtype == "int8":
        values = [i / 64 for i in range(128)]
    else:
        values = [_float8(dtype, i) for i in range(128)]
    bits = [struct.unpack("<I", struct.pack("<f", x))[0] for x in values]
    return [x >> 24 for x in bits], [x >> 16 & 0xFF for x in bits]


def _float8(dtype: str, bits: int) -> float:
    """The value of a float8 without sign."""
    mantissa = {"float8_e4m3fn": 3, "float8_e5m2": 2}[dtype]
    if bits >= {"float8_e4m3fn": 0x7F, "float8_e5m2": 0x7C}[dtype]:
        return math.inf if bits == 0x7C else math.nan
    exponent, rest = bits >> mantissa, bits % (1 << mantissa)
    bias = (1 << (6 - mantissa)) - 1
    return math.ldexp(rest + ((1 << mantissa) if exponent else 0), max(exponent, 1) - bias - mantissa)


def widen(b: Builder, key: TargetKey, dtype: str, address: Value, count: Value | None = None) -> Value:
    """`lanes` elements as float32 in natural order, those from `count` on as zero; e4m3 is short of `SHORT`."""
    n = key.lanes
    i32, f32 = ir.VectorType(I32, n), ir.VectorType(F32, n)
    if dtype == "float32":
        return simd.load(b, f32, address, count)
    if dtype in ("float16", "bfloat16"):
        x = simd.load(b, ir.VectorType(I16, n), address, count)
        if dtype == "bfloat16":
            return b.bitcast(b.shl(b.zext(x, i32), const(i32, 16)), f32)
        return half_to_float(b, key, x)
    x = simd.load(b, ir.VectorType(I8, n), address, count)
    if dtype == "int8":
        return b.sitofp(b.sext(x, i32), f32)
    i16 = ir.VectorType(I16, n)
    if dtype == "float8_e5m2":  # the upper byte of a float16
        return half_to_float(b, key, b.shl(b.zext(x, i16), const(i16, 8)))
    h = b.and_(b.shl(b.sext(x, i16), const(i16, 7)), const(i16, 0xBFFF))
    is_nan = b.icmp_unsigned("==", b.and_(h, const(i16, 0x3FFF)), const(i16, 0x3F80))
    return half_to_float(b, key, b.select(is_nan, const(i16, 0x7E00), h))


def widen_cache(b: Builder, key: TargetKey, address: Value, count: Value | None = None) -> list[Value]:
    """One chunk of a cache row in kernel order, as `units(key)` vectors of float32."""
    i32, f32 = ir.VectorType(I32, key.lanes), ir.VectorType(F32, key.lanes)
    if key.tables:
        x = simd.load(b, ir.VectorType(I8, chunk(key)), address, count)
        words = ir.VectorType(I16, 2 * key.lanes)
        halves = [b.bitcast(half, words) for half in bytes_to_pairs(b, key, x)]
        return [b.bitcast(x, f32) for half in halves for x in weave(b, const(words, 0), half)]
    if key.kv_dtype != "bfloat16":
        return [widen(b, key, key.kv_dtype, address, count)]
    x = simd.load(b, ir.VectorType(I16, 2 * key.lanes), address, count)
    if key.dot:
        return [b.bitcast(half, f32) for half in weave(b, const(x.type, 0), x)]
    x = b.bitcast(x, i32)
    even = b.shl(x, const(i32, 16))
    odd = b.and_(x, const(i32, 0xFFFF0000))
    return [b.bitcast(even, f32), b.bitcast(odd, f32)]


def half_to_float(b: Builder, key: TargetKey, x: Value) -> Value:
    """float16 bits to float32, exactly; by integer arithmetic where the processor has no conversion."""
    n = x.type.count
    i32, f32 = ir.VectorType(I32, n), ir.VectorType(F32, n)
    if key.half:
        return b.fpext(b.bitcast(x, ir.VectorType(F16, n)), f32)
    x = b.zext(x, i32)
    sign = b.shl(b.and_(x, const(i32, 0x8000)), const(i32, 16))
    size = b.and_(x, const(i32, 0x7FFF))
    normal = b.add(b.shl(size, const(i32, 13)), const(i32, 112 << 23))
    tiny = b.bitcast(b.fmul(b.sitofp(size, f32), const(f32, 2.0**-24)), i32)  # exponent 0: mantissa * 2**-24
    bits = b.select(b.icmp_unsigned("<", size, const(i32, 0x400)), tiny, normal)
    special = b.icmp_unsigned(">=", size, const(i32, 0x7C00))
    quiet = b.select(b.icmp_unsigned(">", size, const(i32, 0x7C00)), const(i32, 1 << 22), const(i32, 0))
    bits = b.select(special, b.or_(b.add(bits, const(i32, 112 << 23)), quiet), bits)
    return b.bitcast(b.or_(bits, sign), f32)


def narrow(b: Builder, key: TargetKey, dtype: str, x: Value) -> Value:
    """float32 to the bits of dtype, to nearest even. float8 and int8 saturate; NaN stays NaN, in int8 it becomes 0."""
    n = x.type.count
    i32 = ir.VectorType(I32, n)
    if dtype == "float32":
        return x
    if dtype == "bfloat16":
        bits = b.bitcast(x, i32)
        even = b.and_(b.lshr(bits, const(i32, 16)), const(i32, 1))
        rounded = b.add(bits, b.add(even, const(i32, 0x7FFF)))
        nan = b.or_(bits, const(i32, 1 << 22))
        bits = b.select(b.fcmp_unordered("uno", x, x), nan, rounded)
        return b.trunc(b.lshr(bits, const(i32, 16)), ir.VectorType(I16, n))
    if dtype == "int8":
        return _narrow_int8(b, x)
    if dtype == "float16":
        if key.half:
            return b.bitcast(b.fptrunc(x, ir.VectorType(F16, n)), ir.VectorType(I16, n))
        return b.trunc(_narrow_float(b, x, 5, 10, 0x7C00), ir.VectorType(I16, n))
    exponent, mantissa, nan_bits = (4, 3, 0x7F) if dtype == "float8_e4m3fn" else (5, 2, 0x7F)
    top = const(x.type, LARGEST[dtype])
    size = simd.call(b, f"llvm.fabs.{simd.suffix(x.type)}", x.type, x)
    size = b.select(b.fcmp_ordered(">", size, top), top, size)
    x = simd.call(b, f"llvm.copysign.{simd.suffix(x.type)}", x.type, size, x)
    return b.trunc(_narrow_float(b, x, exponent, mantissa, nan_bits), ir.VectorType(I8, n))


def _narrow_int8(b: Builder, x: Value) -> Value:
    kind = x.type
    x = b.select(b.fcmp_ordered(">", x, const(kind, 127.0)), const(kind, 127.0), x)
    x = b.select(b.fcmp_ordered("<", x, const(kind, -128.0)), const(kind, -128.0), x)
    x = b.select(b.fcmp_unordered("uno", x, x), const(kind, 0.0), x)
    x = simd.call(b, f"llvm.rint.{simd.suffix(kind)}", kind, x)  # the default rounding mode: to nearest even
    return b.trunc(b.fptosi(x, ir.VectorType(I32, kind.count)), ir.VectorType(I8, kind.count))


def _narrow_float(b: Builder, x: Value, exponent: int, mantissa: int, nan_bits: int) -> Value:
    """The bits of a small float format, in 32-bit lanes; what rounds past its top becomes infinity (float16 only).

    Normal results: the exponent is rebiased, half of the last place (less one, plus the last bit kept) is added and
    carries by itself. Subnormal ones: adding a power of two aligns the last place of the format with float32's.
    """
    i32 = ir.VectorType(I32, x.type.count)
    bias = 2 ** (exponent - 1) - 1
    dropped = 23 - mantissa
    bits = b.bitcast(x, i32)
    size = b.and_(bits, const(i32, 0x7FFFFFFF))
    even = b.and_(b.lshr(size, const(i32, dropped)), const(i32, 1))
    rounded = b.add(size, b.add(even, const(i32, (1 << (dropped - 1)) - 1)))
    normal = b.lshr(b.sub(rounded, const(i32, (127 - bias) << 23)), const(i32, dropped))
    anchor = 2.0 ** (1 - bias - mantissa + 23)
    shifted = b.fadd(b.bitcast(size, x.type), const(x.type, anchor))
    anchor_bits = (127 + 1 - bias - mantissa + 23) << 23
    tiny = b.sub(b.bitcast(shifted, i32), const(i32, anchor_bits))
    small = b.icmp_unsigned("<", size, const(i32, (128 - bias) << 23))  # below the smallest normal number
    out = b.select(small, tiny, normal)
    if exponent == 5 and mantissa == 10:
        infinite = const(i32, 0x7C00)
        out = b.select(b.icmp_unsigned(">", out, infinite), infinite, out)
        nan_bits = 0x7E00
    out = b.select(b.icmp_unsigned(">", size, const(i32, 0x7F800000)), const(i32, nan_bits), out)
    sign = b.lshr(b.and_(bits, const(i32, 0x80000000)), const(i32, 31 - exponent - mantissa))
    return b.or_(out, sign)


# Rows: what kernels call ----------------------------------------------------------------------------------------------


def _for_chunks(b: Builder, lanes: int, n: Value, body: Callable[[Value, Value | None], None]) -> None:
    """`body(start, count)` for each group of lanes of a row of n elements; count is None for whole ones."""
    whole = b.sdiv(n, simd.i64(lanes))

    def full(i: Value, _: list[Value]) -> list[Value]:
        body(b.mul(i, simd.i64(lanes)), None)
        return []

    simd.loop(b, whole, [], full)
    start = b.mul(whole, simd.i64(lanes))
    rest = b.sub(n, start)
    with b.if_then(b.icmp_signed(">", rest, simd.i64(0))):
        body(start, rest)


@emitter(void, TARGET, LITERAL, int64, int64, int64)
def widen_row(b: Builder, key: TargetKey, dtype: str, src: Value, dst: Value, n: Value) -> None:
    """dst[:n] float32 = src[:n], natural order; whole vectors are written, zeros behind n."""

    def body(start: Value, rest: Value | None) -> None:
        x = widen(b, key, dtype, b.add(src, b.mul(start, simd.i64(ITEMSIZE[dtype]))), rest)
        if dtype in SHORT:
            x = b.fmul(x, const(x.type, SHORT[dtype]))
        simd.store(b, x, b.add(dst, b.mul(start, simd.i64(4))))

    _for_chunks(b, key.lanes, n, body)


@emitter(void, TARGET, LITERAL, int64, int64, int64, float32)
def narrow_row(b: Builder, key: TargetKey, dtype: str, src: Value, dst: Value, n: Value, factor: Value) -> None:
    """dst[:n] of dtype = src[:n] float32 times `unit`, times factor: not one product, which could overflow."""
    factor = simd.splat(b, factor, key.lanes)

    def body(start: Value, rest: Value | None) -> None:
        x = simd.load(b, ir.VectorType(F32, key.lanes), b.add(src, b.mul(start, simd.i64(4))), rest)
        if unit(key) != 1.0:
            x = b.fmul(x, const(x.type, unit(key)))
        bits = narrow(b, key, dtype, b.fmul(x, factor))
        simd.store(b, bits, b.add(dst, b.mul(start, simd.i64(ITEMSIZE[dtype]))), rest)

    _for_chunks(b, key.lanes, n, body)


@emitter(void, TARGET, LITERAL, int64, int64, int64, float32)
def convert_row(b: Builder, key: TargetKey, dtype: str, src: Value, dst: Value, n: Value, scale: Value) -> None:
    """dst[:n], of the cache's dtype, = src[:n] of dtype divided by scale."""
    scale = simd.splat(b, scale, key.lanes)

    def body(start: Value, rest: Value | None) -> None:
        x = widen(b, key, dtype, b.add(src, b.mul(start, simd.i64(ITEMSIZE[dtype]))), rest)
        bits = narrow(b, key, key.kv_dtype, b.fdiv(x, scale))
        simd.store(b, bits, b.add(dst, b.mul(start, simd.i64(ITEMSIZE[key.kv_dtype]))), rest)

    _for_chunks(b, key.lanes, n, body)


@emitter(void, TARGET, int64, int64, int64, int64, float32, float32)
def mix_row(
    b: Builder, key: TargetKey, x: Value, y: Value, dst: Value, n: Value, x_share: Value, y_share: Value
) -> None:
    """dst[:n] = x[:n] * x_share + y[:n] * y_share, all of the target's dtype, computed in float32.

    Both products are rounded, so that x and y may change places.
    """
    dtype = key.kv_dtype
    shares = [simd.splat(b, share, key.lanes) for share in (x_share, y_share)]

    def body(start: Value, rest: Value | None) -> None:
        offset = b.mul(start, simd.i64(ITEMSIZE[dtype]))
        parts = [
            b.fmul(widen(b, key, dtype, b.add(at, offset), rest), share)
            for at, share in zip((x, y), shares, strict=True)
        ]
        simd.store(b, narrow(b, key, dtype, b.fadd(*parts)), b.add(dst, offset), rest)

    _for_chunks(b, key.lanes, n, body)


@emitter(void, TARGET, int64, int64, LITERAL)
def reorder_row(b: Builder, key: TargetKey, row: Value, chunks: Value, to_kernel: int) -> None:
    """Bring a float32 row of whole chunks into kernel order, or out of it, in place."""
    if units(key) == 1:
        return
    n = chunk(key)
    order = [c for vector in kernel_order(key) for c in vector]
    if not to_kernel:
        order = [order.index(c) for c in range(n)]

    def body(i: Value, _: list[Value]) -> list[Value]:
        at = b.add(row, b.mul(i, simd.i64(4 * n)))
        x, y = (simd.load(b, ir.VectorType(F32, n // 2), b.add(at, simd.i64(half))) for half in (0, 2 * n))
        simd.store(b, simd.pick(b, x, y, order), at)
        return []

    simd.loop(b, chunks, [], body)
