"""Short ways through Triton's interpreter: what follows from types alone is worked out once.

Without them most of the time of an emulated kernel goes into building the same types, choosing the same conversions and
making the same constants, for every operation again. The results are those of the long ways, which are taken first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as original
from triton.runtime.interpreter import TensorHandle


class Semantic(original.TritonSemantic):  # type: ignore[misc]
    """The front between language and builder, which does once what depends on types alone."""

    def __init__(self, builder: Any) -> None:
        super().__init__(builder)
        self.alike: set[tuple[Any, ...]] = set()  # two element types and the options: operands that need no cast
        self.numbers: dict[tuple[Any, ...], Any] = {}  # a tensor's type, a number, the options: the number as a tensor
        self.shapes: dict[tuple[str, str], tuple[Any, Any]] = {}  # two types: the types that they are broadcast to

    def binary_op_type_checking_impl(self, lhs: Any, rhs: Any, *options: Any, **named: Any) -> tuple[Any, Any]:
        left, right = isinstance(lhs, tl.tensor), isinstance(rhs, tl.tensor)
        key: tuple[Any, ...] = (*options, *named.items())
        if left and right:
            key = (lhs.dtype.name, rhs.dtype.name, *key)
            if key in self.alike:
                return self.broadcast_impl_value(lhs, rhs)
        elif left or right:
            tensor, number = (lhs, rhs) if left else (rhs, lhs)
            exactly = number.hex() if type(number) is float else number  # 0.0 and -0.0 are equal
            key = (tensor.type.name, left, type(number), exactly, *key)
            if key in self.numbers:
                return (lhs, self.numbers[key]) if left else (self.numbers[key], rhs)
        pair = super().binary_op_type_checking_impl(lhs, rhs, *options, **named)
        if left and right:
            if (pair[0].dtype.name, pair[1].dtype.name) == key[:2]:
                self.alike.add(key)
        elif (left and pair[0] is lhs) or (right and pair[1] is rhs):
            self.numbers[key] = pair[left]
        return pair

    def cast(self, input: Any, dst_ty: Any, *rounding: Any, **named: Any) -> Any:
        if input.dtype.name == dst_ty.scalar.name:
            return input
        return super().cast(input, dst_ty, *rounding, **named)

    def broadcast_impl_value(self, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if lhs.handle.data.shape == rhs.handle.data.shape and lhs.type.is_block() == rhs.type.is_block():
            return lhs, rhs
        key = lhs.type.name, rhs.type.name
        if key not in self.shapes:
            pair = super().broadcast_impl_value(lhs, rhs)
            self.shapes[key] = pair[0].type, pair[1].type
            return pair
        left, right = self.shapes[key]
        return _broadcast(lhs, left), _broadcast(rhs, right)


def _broadcast(tensor: Any, to: Any) -> Any:
    """A tensor of the type `to`, whose shape its own is compatible with."""
    if tensor.type.name == to.name:
        return tensor
    data, dtype = tensor.handle.data, tensor.handle.dtype.scalar
    array = np.full(to.shape, data, data.dtype) if data.size == 1 else np.broadcast_to(data, to.shape)
    return tl.tensor(TensorHandle(array, dtype), to)


def _patch_attr(owner: Any, name: str, member: Any, _builder: Any, scope: Any) -> None:
    """Have a function of the language use the interpreter, without two more calls for each of its own."""
    function, semantic = getattr(member, "__wrapped__", member), original.interpreter_semantic

    def interpreted(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    scope.set_attr(owner, name, interpreted)


LEAVES = {tl.tensor, tl.dtype, tl.block_type, tl.pointer_type, bool, int, float, type(None)}


def _unwrap(value: Any) -> Any:
    """The value of a `tl.constexpr`, which most of what Triton's language asks about is not."""
    return value if type(value) in LEAVES else _unwrap_any(value)


_unwrap_any = tl.core._unwrap_if_constexpr


def _remember_types() -> None:
    """Build each type of a block, and what a tensor derives from its type, once: half of the time of an operation."""
    build_type, build_tensor, find_np_dtype = tl.block_type.__init__, tl.tensor.__init__, original._get_np_dtype
    types: dict[Any, dict[str, Any]] = {}
    tensors: dict[Any, dict[str, Any]] = {}
    np_dtypes: dict[str, Any] = {}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *[getattr(size, "value", size) for size in shape])
        if key not in types:
            build_type(self, element_ty, shape)
            types[key] = dict(self.__dict__)
        self.__dict__.update(types[key])

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in tensors:
            build_tensor(self, handle, type)
            tensors[type.name] = {
                name: value for name, value in self.__dict__.items() if name not in ("handle", "type")
            }
        self.__dict__.update(tensors[type.name], handle=handle, type=type)

    def np_dtype(dtype: Any) -> Any:
        if dtype.name not in np_dtypes:
            np_dtypes[dtype.name] = find_np_dtype(dtype)
        return np_dtypes[dtype.name]

    tl.block_type.__init__, tl.tensor.__init__ = init_type, init_tensor
    original._get_np_dtype = np_dtype


def apply() -> None:
    """Put them into the imported triton."""
    _remember_types()
    original.interpreter_semantic = Semantic(original.interpreter_builder)
    original._patch_attr = _patch_attr
    tl.core._unwrap_if_constexpr = _unwrap
