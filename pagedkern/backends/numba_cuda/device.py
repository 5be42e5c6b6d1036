"""The few machine instructions that Numba does not offer by itself, and how device functions are declared.

A kernel's *pointer* is a `CPointer`: `p[i]` reads element i, as in C. Tensors enter as addresses, so their strides are
parameters, and offsets are 64-bit numbers that the kernel computes.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import cuda, types
from numba.core.errors import RequireLiteralValue
from numba.cuda.extending import intrinsic

inlined = cuda.jit(device=True, forceinline=True)
"""Decorator of device functions. Inlined, so that small local arrays of the caller stay in registers."""

SOURCES = sha256(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))).hexdigest()


def instruction(definition: Any) -> Any:
    """Numba's `@intrinsic`, with a name that stays.

    Numba finds a compiled kernel on disk by the bytes of all that the kernel refers to. Those of an intrinsic hold a
    number that is drawn anew in every process, so that nothing would ever be found. This one changes with the files of
    this folder instead, all of which go into a kernel. For the same reason llvmlite's types are made where they are
    used: they change when they are printed.
    """
    made = intrinsic(definition)
    if hasattr(made, "_set_uuid"):
        made._set_uuid(f"{__name__}.{definition.__name__} {SOURCES}")
    return made


# ---- Vectors: of 16 bytes, the widest access there is, or fewer. Addresses are multiples of the vector's size. -----


class _Vector:
    """Access to `count` elements of an array or a pointer as 32-bit words, or as one shorter word."""

    def __init__(self, container: Any, count: Any) -> None:
        if not isinstance(count, types.IntegerLiteral):
            raise RequireLiteralValue(count)
        self.container, self.lanes = container, count.literal_value
        self.bits = container.dtype.bitwidth
        self.size = self.lanes * self.bits // 8
        self.word = ir.IntType(min(32, 8 * self.size))
        self.words = 8 * self.size // self.word.width

    def address(self, context: Any, builder: Any, value: Any, index: Any) -> Any:
        """The address of element `index`, as a pointer to all words."""
        is_array = isinstance(self.container, types.Array)
        base = context.make_array(self.container)(context, builder, value=value).data if is_array else value
        return builder.bitcast(builder.gep(base, [index]), ir.VectorType(self.word, self.words).as_pointer())

    def element(self, context: Any, builder: Any, value: Any, index: Any, n: int) -> Any:
        """Pointer to element index + n of an array."""
        base = context.make_array(self.container)(context, builder, value=value).data
        return builder.gep(base, [builder.add(index, index.type(n))])

    @property
    def per_word(self) -> int:
        return self.word.width // self.bits


@instruction
def copy_vector(typingctx: Any, dst: Any, i: Any, src: Any, j: Any, count: Any) -> Any:
    """dst[i : i+count] = src[j : j+count] from memory to memory: by one load and one store.

    dst and src are pointers or shared arrays of one dtype; count is a constant.
    """
    to, origin = _Vector(dst, count), _Vector(src, count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words = builder.load(origin.address(context, builder, args[2], args[3]), align=origin.size)
        builder.store(words, to.address(context, builder, args[0], args[1]), align=to.size)
        return context.get_dummy_value()

    return types.void(dst, types.int64, src, types.int64, count), codegen


@instruction
def load_vector(typingctx: Any, registers: Any, i: Any, src: Any, j: Any, count: Any) -> Any:
    """registers[i : i+count] = src[j : j+count] by one load, into a local array that lives in registers."""
    to, origin = _Vector(registers, count), _Vector(src, count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words = builder.load(origin.address(context, builder, args[2], args[3]), align=origin.size)
        for n in range(origin.lanes):
            word = builder.extract_element(words, ir.IntType(32)(n // origin.per_word))
            bits = builder.lshr(word, origin.word(n % origin.per_word * origin.bits))
            target = to.element(context, builder, args[0], args[1], n)
            code = builder.trunc(bits, ir.IntType(origin.bits)) if origin.bits < origin.word.width else bits
            builder.store(builder.bitcast(code, target.type.pointee), target)
        return context.get_dummy_value()

    return types.void(registers, types.int64, src, types.int64, count), codegen


@instruction
def store_vector(typingctx: Any, dst: Any, i: Any, registers: Any, j: Any, count: Any) -> Any:
    """dst[i : i+count] = registers[j : j+count] by one store, from a local array that lives in registers."""
    to, origin = _Vector(dst, count), _Vector(registers, count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.VectorType(to.word, to.words)
        words = kind(ir.Undefined)
        for m in range(to.words):
            word = to.word(0)
            for n in range(to.per_word):
                code = builder.load(origin.element(context, builder, args[2], args[3], m * to.per_word + n))
                bits = builder.bitcast(code, ir.IntType(to.bits))
                if to.bits < to.word.width:
                    bits = builder.shl(builder.zext(bits, to.word), to.word(n * to.bits))
                word = builder.or_(word, bits)
            words = builder.insert_element(words, word, ir.IntType(32)(m))
        builder.store(words, to.address(context, builder, args[0], args[1]), align=to.size)
        return context.get_dummy_value()

    return types.void(dst, types.int64, registers, types.int64, count), codegen


# ---- Copies that run beside the computation (PTX: cp.async) --------------------------------------------------------


@instruction
def copy_async(typingctx: Any, dst: Any, i: Any, src: Any, j: Any, count: Any) -> Any:
    """Begin dst[i : i+count] = src[j : j+count], from a pointer to a shared array: done when `wait_copies` says so.

    Of 4, 8 or 16 bytes; what is shorter is copied at once.
    """
    to, origin = _Vector(dst, count), _Vector(src, count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target, source = (
            to.address(context, builder, args[0], args[1]),
            origin.address(context, builder, args[2], args[3]),
        )
        if origin.size < 4:
            builder.store(builder.load(source, align=origin.size), target, align=origin.size)
            return context.get_dummy_value()
        shared = builder.ptrtoint(builder.addrspacecast(target, target.type.pointee.as_pointer(3)), ir.IntType(32))
        memory = builder.ptrtoint(builder.addrspacecast(source, source.type.pointee.as_pointer(1)), ir.IntType(64))
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(32), ir.IntType(64)])
        cached = "cg" if origin.size == 16 else "ca"  # "cg" passes over the first level of the cache
        code = f"cp.async.{cached}.shared.global [$0], [$1], {origin.size};"
        builder.call(ir.InlineAsm(kind, code, "r,l,~{memory}", side_effect=True), [shared, memory])
        return context.get_dummy_value()

    return types.void(dst, types.int64, src, types.int64, count), codegen


def _without_operands(code: str) -> Any:
    """An intrinsic of one PTX instruction without operands that orders all accesses to memory."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(ir.InlineAsm(kind, code, "~{memory}", side_effect=True), [])
        return context.get_dummy_value()

    return types.void(), codegen


@instruction
def commit_copies(typingctx: Any) -> Any:
    """End a group: the copies that this thread has begun since the last one."""
    return _without_operands("cp.async.commit_group;")


@instruction
def wait_copies(typingctx: Any) -> Any:
    """Wait until all groups of this thread have arrived. A barrier then makes those of other threads visible."""
    return _without_operands("cp.async.wait_group 0;")


@instruction
def wait_copies_but_last(typingctx: Any) -> Any:
    """Wait until all groups but the last have arrived."""
    return _without_operands("cp.async.wait_group 1;")


# ---- Bits ----------------------------------------------------------------------------------------------------------


@instruction
def float_from_bits(typingctx: Any, bits: Any) -> Any:
    """The float32 whose 32 bits are the lower ones of the integer given."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.trunc(args[0], ir.IntType(32)), ir.FloatType())

    return types.float32(types.int64), codegen


@instruction
def bits_of_float(typingctx: Any, x: Any) -> Any:
    """The 32 bits of a float32, as a non-negative int64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.zext(builder.bitcast(args[0], ir.IntType(32)), ir.IntType(64))

    return types.int64(types.float32), codegen


@instruction
def float_from_half(typingctx: Any, bits: Any) -> Any:
    """The float16 whose bits are the lower 16 of the integer given, as float32: one conversion instruction."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(builder.trunc(args[0], ir.IntType(16)), ir.HalfType()), ir.FloatType())

    return types.float32(types.int64), codegen
