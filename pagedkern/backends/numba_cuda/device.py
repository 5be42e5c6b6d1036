"""The few machine instructions that Numba does not offer by itself, and how device functions are declared.

A kernel's *pointer* is a `CPointer`: `p[i]` reads element i, as in C. Tensors enter as addresses, so their strides are
parameters, and offsets are 64-bit numbers that the kernel computes.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import cuda, types
from numba.cuda.extending import intrinsic
from numba.core.errors import RequireLiteralValue

inlined = cuda.jit(device=True, forceinline=True)
"""Decorator of device functions. Inlined, so that small local arrays of the caller stay in registers."""

I16, I32, F16, F32 = ir.IntType(16), ir.IntType(32), ir.HalfType(), ir.FloatType()


@intrinsic
def copy_vector(typingctx: Any, dst: Any, i: Any, src: Any, j: Any, count: Any) -> Any:
    """dst[i : i+count] = src[j : j+count] by one load and one store: of 16 bytes, the widest there are, or fewer.

    dst and src are arrays (shared, local) or pointers of one dtype; count is a constant, `count * itemsize` a power of
    two, and both addresses are multiples of it.
    """
    if not isinstance(count, types.IntegerLiteral):
        raise RequireLiteralValue(count)
    lanes = count.literal_value
    kinds = (dst, src)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.VectorType(context.get_data_type(dst.dtype), lanes)
        size = lanes * dst.dtype.bitwidth // 8
        at = []
        for container, value, index in zip(kinds, (args[0], args[2]), (args[1], args[3]), strict=True):
            is_array = isinstance(container, types.Array)
            base = context.make_array(container)(context, builder, value=value).data if is_array else value
            at.append(builder.bitcast(builder.gep(base, [index]), kind.as_pointer()))
        builder.store(builder.load(at[1], align=size), at[0], align=size)
        return context.get_dummy_value()

    return types.void(dst, types.int64, src, types.int64, count), codegen


@intrinsic
def float_from_bits(typingctx: Any, bits: Any) -> Any:
    """The float32 whose 32 bits are the lower ones of the integer given."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.trunc(args[0], I32), F32)

    return types.float32(types.int64), codegen


@intrinsic
def bits_of_float(typingctx: Any, x: Any) -> Any:
    """The 32 bits of a float32, as a non-negative int64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.zext(builder.bitcast(args[0], I32), ir.IntType(64))

    return types.int64(types.float32), codegen


@intrinsic
def float_from_half(typingctx: Any, bits: Any) -> Any:
    """The float16 whose bits are the lower 16 of the integer given, as float32: one conversion instruction."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(builder.trunc(args[0], I16), F16), F32)

    return types.float32(types.int64), codegen
