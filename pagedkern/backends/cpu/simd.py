"""Vectors in LLVM IR: a thin layer over llvmlite's builder. Addresses are i64 values, offsets are bytes.

LLVM legalises a vector of any width for any processor, so what is emitted here is portable; only the width is chosen
for the machine at hand (`TargetKey.lanes`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils as cgutils_module

cgutils: Any = cgutils_module
Value = Any  # an llvmlite value: llvmlite carries no type hints
Builder = Any

F16, F32 = ir.HalfType(), ir.FloatType()
I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
NEG_INF = float("-inf")


def const(kind: Any, value: float) -> Value:
    """A scalar constant, or the vector that holds it in every lane."""
    if isinstance(kind, ir.VectorType):
        return ir.Constant(kind, [value] * kind.count)
    return ir.Constant(kind, value)


def i64(value: int) -> Value:
    return ir.Constant(I64, value)


def splat(b: Builder, x: Value, n: int) -> Value:
    kind = ir.VectorType(x.type, n)
    one = b.insert_element(ir.Constant(kind, ir.Undefined), x, ir.Constant(I32, 0))
    return b.shuffle_vector(one, ir.Constant(kind, ir.Undefined), const(ir.VectorType(I32, n), 0))


def iota(n: int, start: int = 0) -> Value:
    return ir.Constant(ir.VectorType(I32, n), list(range(start, start + n)))


def pick(b: Builder, x: Value, y: Value, lanes: Sequence[int]) -> Value:
    """The lanes of x and y laid end to end that are named."""
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))


def call(b: Builder, name: str, result: Any, *args: Value) -> Value:
    """Call an LLVM intrinsic or a C function by its full name."""
    kind = ir.FunctionType(result, [a.type for a in args])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), args)


def suffix(kind: Any) -> str:
    """How LLVM spells a type in the name of an overloaded intrinsic."""
    if isinstance(kind, ir.VectorType):
        return f"v{kind.count}{suffix(kind.element)}"
    return {F16: "f16", F32: "f32"}.get(kind) or f"i{kind.width}"


def fma(b: Builder, x: Value, y: Value, z: Value) -> Value:
    return call(b, f"llvm.fma.{suffix(x.type)}", x.type, x, y, z)


def dot_pairs(b: Builder, acc: Value, x: Value, y: Value) -> Value:
    """acc + x * y for the two bfloat16 in each 32-bit lane of x and y; AVX512-BF16."""
    return call(b, "llvm.x86.avx512bf16.dpbf16ps.512", acc.type, acc, x, y)


def look_up(b: Builder, table: Sequence[int], at: Value) -> Value:
    """The byte of a table of 128 that the lower 7 bits of each of 64 bytes name; AVX512-VBMI."""
    lower, upper = (ir.Constant(at.type, list(half)) for half in (table[:64], table[64:]))
    return call(b, "llvm.x86.avx512.vpermi2var.qi.512", at.type, lower, at, upper)


def itemsize(kind: Any) -> int:
    element = kind.element if isinstance(kind, ir.VectorType) else kind
    return {F16: 2, F32: 4}.get(element) or element.width // 8


def load(b: Builder, kind: Any, address: Value, count: Value | None = None) -> Value:
    """A value of that type; with `count`, its first `count` lanes, then zeros, and no byte behind them is touched."""
    p = b.inttoptr(address, kind.as_pointer())
    if count is None:
        return b.load(p, align=itemsize(kind))
    mask = b.icmp_signed("<", iota(kind.count), splat(b, b.trunc(count, I32), kind.count))
    align = ir.Constant(I32, itemsize(kind))
    return call(b, f"llvm.masked.load.{suffix(kind)}.p0", kind, p, align, mask, const(kind, 0))


def store(b: Builder, x: Value, address: Value, count: Value | None = None) -> None:
    """Store a value, or its first `count` lanes."""
    p = b.inttoptr(address, x.type.as_pointer())
    if count is None:
        b.store(x, p, align=itemsize(x.type))
        return
    mask = b.icmp_signed("<", iota(x.type.count), splat(b, b.trunc(count, I32), x.type.count))
    align = ir.Constant(I32, itemsize(x.type))
    call(b, f"llvm.masked.store.{suffix(x.type)}.p0", ir.VoidType(), x, p, align, mask)


def prefetch(b: Builder, address: Value) -> None:
    """Begin to load the cache line of an address, for reading, into the second-level cache; never faults."""
    p = b.inttoptr(address, I8.as_pointer())
    call(b, "llvm.prefetch.p0", ir.VoidType(), p, *(ir.Constant(I32, x) for x in (0, 2, 1)))


def loop(
    b: Builder,
    count: Value,
    carried: Sequence[Value],
    body: Callable[[Value, list[Value]], Sequence[Value]],
) -> list[Value]:
    """`for i in range(count): carried = body(i, carried)`; the carried values stay in registers."""
    before = b.block
    head, inside, after = (b.append_basic_block(f"loop.{name}") for name in ("head", "body", "end"))
    b.branch(head)
    b.position_at_end(head)
    index = b.phi(I64)
    index.add_incoming(i64(0), before)
    phis = [b.phi(x.type) for x in carried]
    for p, x in zip(phis, carried, strict=True):
        p.add_incoming(x, before)
    b.cbranch(b.icmp_signed("<", index, count), inside, after)
    b.position_at_end(inside)
    results = body(index, phis)
    index.add_incoming(b.add(index, i64(1)), b.block)
    for p, x in zip(phis, results, strict=True):
        p.add_incoming(x, b.block)
    b.branch(head)
    b.position_at_end(after)
    return phis


def fold(b: Builder, x: Value, combine: Callable[[Value, Value], Value]) -> Value:
    """One scalar from all lanes, halving the vector each time: the order is fixed."""
    n = x.type.count
    while n > 1:
        half = n // 2
        x = combine(pick(b, x, x, range(half)), pick(b, x, x, range(half, n)))
        n = half
    return b.extract_element(x, ir.Constant(I32, 0))


def sum_lanes(b: Builder, xs: Sequence[Value]) -> tuple[Value, list[int]]:
    """Add up the lanes of each vector: `result[lane] = sum(xs[owner[lane]])`, owner being the second result.

    Pairs of vectors are folded into one, so n sums cost about n vector additions instead of n * log2(lanes). There are
    at most as many vectors as lanes. How a sum is ordered does not depend on their number.
    """
    level = [(x, [i] * x.type.count) for i, x in enumerate(xs)]
    for lower, upper in _folds(xs[0].type.count):
        following = []
        for k in range(0, len(level), 2):
            x, owner_x = level[k]
            y, owner_y = level[k + 1] if k + 1 < len(level) else level[k]
            total = b.fadd(pick(b, x, y, lower), pick(b, x, y, upper))
            following.append((total, [(owner_x + owner_y)[i] for i in lower]))
        level = following
    return level[0]


def _folds(lanes: int) -> list[tuple[list[int], list[int]]]:
    """Which lanes of x and y, laid end to end, each level of `sum_lanes` adds to which.

    The first two levels stay within 16 bytes, where most of the work is and where shuffles are cheapest; the others
    move 16 bytes as one. After them, each lane of a vector belongs to a vector of its own.
    """
    quads = range(0, lanes, 4)
    folds = [
        ([i for q in quads for i in (q, lanes + q, q + 1, lanes + q + 1)], 2),
        ([i for q in quads for i in (q, q + 1, lanes + q, lanes + q + 1)], 2),
    ]
    for _ in range((lanes // 4).bit_length() - 1):
        folds.append(([i + k for start in (0, lanes) for i in range(start, start + lanes, 8) for k in range(4)], 4))
    return [(lower, [i + step for i in lower]) for lower, step in folds]


def vmax(b: Builder, x: Value, y: Value) -> Value:
    """The larger one; y if x is NaN."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def exp(b: Builder, x: Value) -> Value:
    """e**x for x <= 88, within 1.5 units in the last place; 0 below the smallest normal number; NaN stays NaN.

    Range reduction and polynomial as in Cephes' expf (S. Moshier). The rounding constant 1.5 * 2**23 leaves the integer
    part of x * log2(e) in the low bits of the sum.
    """
    kind, bits = x.type, ir.VectorType(I32, x.type.count)
    magic = const(kind, 12582912.0)
    t = fma(b, x, const(kind, 1.44269504088896341), magic)
    n = b.fsub(t, magic)
    r = fma(b, n, const(kind, -0.693359375), x)
    r = fma(b, n, const(kind, 2.12194440e-4), r)
    y = const(kind, 1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y = fma(b, y, r, const(kind, c))
    y = fma(b, b.fmul(r, r), y, b.fadd(r, const(kind, 1.0)))
    power = b.add(b.shl(b.bitcast(t, bits), const(bits, 23)), const(bits, 127 << 23))
    y = b.fmul(y, b.bitcast(power, kind))
    return b.select(b.fcmp_ordered("<", x, const(kind, -87.33)), const(kind, 0.0), y)


def tanh(b: Builder, x: Value) -> Value:
    """tanh(x) within 2 units in the last place, by Cephes' polynomial below 0.625 and by exp above; NaN stays NaN."""
    kind = x.type
    size = call(b, f"llvm.fabs.{suffix(kind)}", kind, x)
    z = b.fmul(x, x)
    small = const(kind, -5.70498872745e-3)
    for c in (2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1):
        small = fma(b, small, z, const(kind, c))
    small = fma(b, b.fmul(small, z), x, x)
    capped = b.select(b.fcmp_ordered(">", size, const(kind, 20.0)), const(kind, 20.0), size)
    e = exp(b, b.fadd(capped, capped))
    large = b.fsub(const(kind, 1.0), b.fdiv(const(kind, 2.0), b.fadd(e, const(kind, 1.0))))
    large = call(b, f"llvm.copysign.{suffix(kind)}", kind, large, x)
    return b.select(b.fcmp_ordered("<", size, const(kind, 0.625)), small, large)
