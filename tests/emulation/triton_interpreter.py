"""Triton's interpreter (3.6 to 3.9) mended: it computes what a GPU computes, checks what a GPU does not, and is faster.

What it gets wrong, and what is done here:

- bfloat16 is held as uint16, and arithmetic, comparisons and `tl.dot` work on those integers; rounding to it truncates.
  Here they work on the values and round to nearest even. Likewise float8 (e4m3fn, e5m2), their NaN and infinities.
- `tl.dot` of float32 ignores `input_precision`. Here "tf32", which is Triton's default, loses precision as on a GPU.
- A comparison has the type of its operands, so that a later cast goes wrong. Here it is int1.
- A masked load without `other` gives 0. On a GPU it is undefined; here it is NaN, or a large integer.
- A loop variable is a Python int, which never overflows and has no `.to`. Here it is an int32 or int64 scalar, as on a
  GPU. Likewise arguments have the types that they are annotated with, and floats are float32 instead of float64.
- Loads and stores go to any address. Here they must stay inside the tensors of the launch (see `memory.py`).
- `tl.multiple_of` is believed. Here it is checked: on a GPU a wide load at an address that it misjudged fails.
- `tl.dot` takes any shape. Here its operands must be as large as CUDA wants them.
- Programs run in order. Here they run in a shuffled order (the same in each run), since a GPU promises none.
- A sum of bfloat16 adds bit patterns. Here it is refused: on a GPU its rounding depends on the order of the terms.
- Functions of libdevice are missing. Here those in `LIBDEVICE` work.
- Each launch looks up and replaces all of Triton's language, each call of a device function does so again, and every
  addition of integers computes an overflow check whose result is dropped. Here that is done once, or not at all; with
  what `triton_shortcuts.py` does, a small attention kernel runs six times as fast.

`apply()` puts all of it into the imported triton. Names that start with `create_` are those that Triton's language
calls for each operation; values are Triton's `TensorHandle`: a NumPy array and the element type.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton._C.libtriton import interpreter as raw
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import min_dot_size
from triton.runtime import interpreter as original
from triton.runtime.interpreter import InterpretedFunction, TensorHandle
from triton.runtime.jit import _normalize_ty, mangle_type

from tests.emulation import triton_shortcuts
from tests.emulation.memory import Memory
from tests.emulation.number_formats import BFLOAT16, E4M3FN, E5M2, round_to_tf32

# Types by their names: to compare types takes Triton longer than an addition.
PACKED = {"bf16": BFLOAT16, "fp8e4nv": E4M3FN, "fp8e5": E5M2}  # held as the integers of their bits
FLOAT8 = ("fp8e4nv", "fp8e5")
COMPARISONS = {np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal}
LIBDEVICE: dict[str, Callable[..., Any]] = {
    "__nv_tanhf": np.tanh,
    "__nv_rintf": np.rint,
    "__nv_nearbyintf": np.rint,
    "__nv_expf": np.exp,
    "__nv_exp2f": np.exp2,
    "__nv_logf": np.log,
    "__nv_log2f": np.log2,
    "__nv_isnanf": np.isnan,
}


def values(handle: TensorHandle) -> Any:
    """The numbers that a handle stands for: float32 for the packed formats, else its array."""
    number_format = PACKED.get(handle.dtype.scalar.name)
    return handle.data if number_format is None else number_format.widen(handle.data)


def packed(array: Any, dtype: tl.dtype) -> TensorHandle:
    """The handle of `dtype` for these numbers, rounded to nearest even."""
    number_format = PACKED.get(dtype.name)
    if number_format is not None:
        return TensorHandle(number_format.narrow(np.asarray(array, np.float32)), dtype)
    return TensorHandle(np.asarray(array).astype(original._get_np_dtype(dtype), copy=False), dtype)


class Builder(original.InterpreterBuilder):  # type: ignore[misc]
    """Operations, where Triton's own go wrong."""

    memory: Memory

    # casts

    def cast_impl(self, src: TensorHandle, dst_type: tl.dtype) -> TensorHandle:
        return packed(values(src), dst_type.scalar)

    def create_fp_to_fp(self, src: TensorHandle, dst_type: tl.dtype, rounding_mode: Any) -> TensorHandle:
        if rounding_mode == ir.ROUNDING_MODE.RTZ:
            raise NotImplementedError("the emulation rounds to nearest even only")
        return self.cast_impl(src, dst_type)

    def create_bitcast(self, src: TensorHandle, dst_type: tl.dtype) -> TensorHandle:
        if isinstance(dst_type.scalar, tl.pointer_type) and not isinstance(src.dtype.scalar, tl.pointer_type):
            self.memory.pointers_made = True
        return super().create_bitcast(src, dst_type)

    create_int_to_ptr = create_bitcast
    create_ptr_to_int = create_bitcast

    def get_bf16(self, value: float) -> TensorHandle:
        return packed([value], tl.bfloat16)

    # arithmetic

    def binary_op(self, lhs: TensorHandle, rhs: TensorHandle, op: Callable[..., Any]) -> TensorHandle:
        if op in COMPARISONS:
            return TensorHandle(op(values(lhs), values(rhs)), tl.int1)
        dtype = lhs.dtype.scalar
        if dtype.name in FLOAT8:
            raise TypeError(f"no GPU computes in {dtype}: convert to a wider type first")
        if dtype.name == "bf16":
            return packed(op(values(lhs), values(rhs)), dtype)
        return super().binary_op(lhs, rhs, op)

    def unary_op(self, arg: TensorHandle, op: Callable[..., Any]) -> TensorHandle:
        return packed(op(values(arg)), arg.dtype.scalar)

    def create_fneg(self, arg: TensorHandle) -> TensorHandle:
        return self.unary_op(arg, np.negative)

    def create_minnumf(self, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
        return self.binary_op(lhs, rhs, np.fmin)

    def create_maxnumf(self, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
        return self.binary_op(lhs, rhs, np.fmax)

    def create_clampf(self, arg: TensorHandle, low: TensorHandle, high: TensorHandle, nan: Any) -> TensorHandle:
        if nan == ir.PROPAGATE_NAN.NONE:
            return self.binary_op(self.binary_op(arg, low, np.fmax), high, np.fmin)
        return packed(np.clip(values(arg), values(low), values(high)), arg.dtype.scalar)

    def create_fma(self, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        if x.dtype.scalar.name in PACKED:
            raise NotImplementedError(f"the emulation has no fused multiply-add in {x.dtype.scalar}")
        return super().create_fma(x, y, z)

    def create_dot(
        self, a: TensorHandle, b: TensorHandle, d: TensorHandle, input_precision: Any, max_num_imprecise_acc: Any
    ) -> TensorHandle:
        lhs, rhs = values(a), values(b)
        if a.dtype.scalar == tl.float32 and input_precision == ir.INPUT_PRECISION.TF32:
            lhs, rhs = round_to_tf32(lhs), round_to_tf32(rhs)
        return TensorHandle(np.matmul(lhs, rhs, dtype=d.data.dtype) + d.data, d.dtype.scalar)

    def create_extern_elementwise(
        self, library: str, path: str, symbol: str, args: list[TensorHandle], dtype: tl.dtype, is_pure: bool
    ) -> TensorHandle:
        if symbol not in LIBDEVICE:
            raise NotImplementedError(f"{symbol} is not among the functions of libdevice that the emulation knows")
        return packed(LIBDEVICE[symbol](*(arg.data for arg in args)), dtype.scalar)

    # memory

    def create_masked_load(
        self, pointers: TensorHandle, mask: TensorHandle, other: TensorHandle | None, *rest: Any, **more: Any
    ) -> TensorHandle:
        dtype = pointers.get_element_ty()
        np_dtype = original._get_np_dtype(dtype)
        self._check(pointers, mask, np_dtype.itemsize, "load")
        unmasked = np.full(pointers.data.shape, _undefined(dtype), np_dtype) if other is None else other.data
        return TensorHandle(raw.load(pointers.data, mask.data, unmasked, np_dtype), dtype)

    def create_masked_store(
        self, pointers: TensorHandle, value: TensorHandle, mask: TensorHandle, *rest: Any, **more: Any
    ) -> Any:
        self._check(pointers, mask, value.data.itemsize, "store")
        return raw.store(pointers.data, value.data, mask.data)

    def create_atomic_rmw(
        self, op: Any, pointers: TensorHandle, value: TensorHandle, mask: TensorHandle, sem: Any, scope: Any
    ) -> TensorHandle:
        if value.dtype.scalar.name in PACKED:
            raise NotImplementedError(f"the emulation has no atomic operations on {value.dtype.scalar}")
        self._check(pointers, mask, value.data.itemsize, "atomic operation")
        return super().create_atomic_rmw(op, pointers, value, mask, sem, scope)

    def create_atomic_cas(
        self, pointers: TensorHandle, expected: TensorHandle, value: TensorHandle, sem: Any, scope: Any
    ) -> TensorHandle:
        self.memory.check(pointers.data, value.data.itemsize, "atomic operation")
        return super().create_atomic_cas(pointers, expected, value, sem, scope)

    def _check(self, pointers: TensorHandle, mask: TensorHandle, itemsize: int, access: str) -> None:
        addresses = pointers.data
        if not mask.data.all():
            addresses = addresses[np.broadcast_to(mask.data, addresses.shape)]
        self.memory.check(addresses, itemsize, access)


def _undefined(dtype: tl.dtype) -> Any:
    """What stands for a value that a GPU leaves undefined."""
    if isinstance(dtype, tl.pointer_type):
        return 2**63
    if dtype.name in PACKED:
        return 0x7F if dtype.name in FLOAT8 else 0x7FFF
    if not dtype.is_floating():
        return 0 if dtype.name == "int1" else np.iinfo(original._get_np_dtype(dtype)).max
    return np.nan


# Launches


_one_launch = threading.RLock()
"""Held during a launch: the interpreter's state and the replaced language belong to the process."""


def _run(self: InterpretedFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """Run every program of a launch. Options that are no parameters of the kernel (num_warps ...) change nothing."""
    if warmup:
        return
    kernel = self.rewrite()
    parameters = _parameters(kernel)
    named = {name: value for name, value in options.items() if name in parameters}
    for hook in self.pre_run_hooks:
        hook(*args, **named)
    given = inspect.getcallargs(kernel, *args, **named)
    tensors = dict(_tensors(given))
    builder = original.interpreter_builder
    with _one_launch, _language(), np.errstate(all="ignore"):
        call = {name: _argument(value, parameters[name]) for name, value in given.items()}
        sizes = grid(call) if callable(grid) else grid
        sizes = tuple(int(size) for size in sizes) + (1,) * (3 - len(sizes))
        builder.set_grid_dim(*sizes)
        outer, builder.memory = builder.memory, Memory(self.fn.__name__, tensors)
        try:
            for program in _shuffled(sizes):
                builder.set_grid_idx(*program)
                builder.memory.program = program
                kernel(**call)
        finally:
            builder.memory = outer


def _call(self: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
    """Call a device function from a kernel."""
    return self.rewrite()(*args, **kwargs)


@cache
def _parameters(kernel: Callable[..., Any]) -> dict[str, str]:
    """The parameters of a kernel and the names of their types: "constexpr", "i64" ..., or "" if not annotated."""
    annotations = inspect.get_annotations(kernel)
    return {name: _normalize_ty(annotations.get(name, "")) for name in inspect.signature(kernel).parameters}


def _tensors(given: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in given.items():
        if isinstance(value, tuple):
            yield from _tensors({f"{name}[{index}]": each for index, each in enumerate(value)})
        elif isinstance(value, torch.Tensor):
            if value.device.type != "cpu":
                raise ValueError(f"{name} is on {value.device}: emulated kernels take tensors of the CPU")
            yield name, value


def _argument(value: Any, annotation: str) -> Any:
    """A kernel's argument as Triton passes it to a GPU."""
    if annotation == "constexpr" or not isinstance(value, (bool, int, float)):
        return original._implicit_cvt(value) if annotation != "constexpr" else value
    if not annotation:
        annotation = "fp32" if isinstance(value, float) else mangle_type(value)
    dtype = tl.str_to_ty(annotation, None)
    return tl.tensor(packed([value], dtype), dtype)


@cache
def _shuffled(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    programs = list(np.ndindex(*sizes))
    random.Random(0).shuffle(programs)
    return programs


# The language that kernels see


_replaced: list[tuple[Any, str, Any, Any]] = []  # object, attribute, what it is outside of kernels, and inside
_depth = 0


@contextmanager
def _language() -> Iterator[None]:
    """Inside, Triton's language is the interpreted one."""
    global _depth
    if not _replaced:
        _find_replacements()
    _depth += 1
    if _depth == 1:
        for owner, name, _, inside in _replaced:
            setattr(owner, name, inside)
    try:
        yield
    finally:
        _depth -= 1
        if _depth == 0:
            for owner, name, outside, _ in _replaced:
                if outside is original._MISSING:
                    delattr(owner, name)
                else:
                    setattr(owner, name, outside)


def _find_replacements() -> None:
    """Have Triton replace its language once, change what is mended, and remember the result."""
    languages = {"tl": tl, "core": tl.core}
    scope = original._patch_lang(SimpleNamespace(__globals__=languages))
    for language in languages.values():
        scope.set_attr(language, "range", _device_range)
        scope.set_attr(language, "multiple_of", _multiple_of)
    scope.set_attr(tl.tensor, "__index__", lambda tensor: int(tensor.handle.data.item()))
    libdevice = sys.modules.get("triton.language.extra.cuda.libdevice")
    if libdevice is not None:
        original._patch_builtin(libdevice, original.interpreter_builder, scope)
    first: dict[tuple[int, str], tuple[Any, str, Any]] = {}
    for owner, name, outside in scope._changes:
        first.setdefault((id(owner), name), (owner, name, outside))
    _replaced.extend((owner, name, outside, owner.__dict__[name]) for owner, name, outside in first.values())
    scope.restore()


def _device_range(start: Any, end: Any = None, step: Any = None, **hints: Any) -> Iterator[Any]:
    """`tl.range` and `range` of a kernel: the variable is a scalar tensor."""
    start, end, step = (0, start, 1) if end is None else (start, end, 1 if step is None else step)
    bounds = [
        getattr(bound, "value", bound) if isinstance(bound, tl.constexpr) else bound for bound in (start, end, step)
    ]
    wide = any(isinstance(bound, tl.tensor) and bound.dtype.primitive_bitwidth == 64 for bound in bounds)
    dtype, np_dtype = (tl.int64, np.int64) if wide else (tl.int32, np.int32)
    for index in range(*(int(bound) for bound in bounds)):
        yield tl.tensor(TensorHandle(np.array([index], np_dtype), dtype), dtype)


def _multiple_of(tensor: Any, multiples: Any) -> Any:
    """Check the hint where it is certain what it says: at elements a whole number of `multiples` from the first."""
    if not isinstance(tensor, tl.tensor):
        return tensor
    claims = [
        int(getattr(each, "value", each))
        for each in (multiples if isinstance(multiples, (list, tuple)) else [multiples])
    ]
    itemsize = max(1, tensor.dtype.element_ty.primitive_bitwidth // 8) if tensor.dtype.is_ptr() else 1
    firsts = tensor.handle.data
    if tensor.shape:
        firsts = firsts[tuple(slice(None, None, max(1, claim // itemsize)) for claim in claims)]
    if np.any(firsts % min(claims)):
        raise ValueError(
            f"tl.multiple_of claims multiples of {claims}, but there are {firsts[firsts % min(claims) != 0][:4]}"
        )
    return tensor


class Transformer(original.ASTTransformer):  # type: ignore[misc]
    """Rewrites the source of kernels as Triton does, and loops as described above."""

    def visit_For(self, node: ast.For) -> ast.AST:
        loop = self.generic_visit(node)
        call = node.iter
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "range":
            call.func.id = _device_range.__name__
        return loop


def _float_sum(method: Callable[..., Any]) -> Callable[..., Any]:
    """A sum in a packed format rounds after each term, in an order that is not defined: refused."""

    def summed(self: Any, tensor: Any) -> Any:
        if tensor.dtype.scalar.name in PACKED:
            raise TypeError(f"the emulation does not sum in {tensor.dtype.scalar}: sum in float32")
        return method(self, tensor)

    return summed


def apply() -> None:
    """Mend the imported triton."""
    triton_shortcuts.apply()
    for owner, name in ((original.ReduceOps, "sum"), (original.ScanOps, "cumsum"), (original.ScanOps, "cumprod")):
        setattr(owner, name, _float_sum(getattr(owner, name)))
    builder = original.interpreter_builder
    builder.__class__ = Builder
    builder.memory = Memory("none", {})
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    builder.codegen_fns["min_dot_size"] = min_dot_size(GPUTarget("cuda", 80, 32))
    original._device_range = _device_range  # rewritten kernels find their names among those of that module
    original.FunctionRewriter.ast_transformer = Transformer()
    InterpretedFunction.run = _run
    InterpretedFunction.__call__ = _call
