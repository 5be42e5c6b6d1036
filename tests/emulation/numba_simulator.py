"""Numba's CUDA simulator, extended: what our kernels need of a GPU and the simulator lacks, and fast enough for tests.

The simulator that Numba brings runs a kernel as plain Python, each CUDA thread in a thread of the operating system.
This extension keeps the first and replaces the second: the threads of a block are fibers (greenlets) of one thread,
switched at barriers only. It adds what is missing, with the meaning that the CUDA C++ Programming Guide gives it:

- warps: `shfl_sync`, `shfl_up_sync`, `shfl_down_sync`, `shfl_xor_sync`, `ballot_sync`, `all_sync`, `any_sync`,
  `eq_sync`, `syncwarp`, `activemask`, `laneid`;
- pointers: a `CPointer` parameter of a kernel's signature takes a torch tensor, seen from its first element to the end
  of its storage; reading or writing past that end raises IndexError;
- functions that a kernel package declares by `@intrinsic` for instructions (`EMULATED`).

It reports what a GPU answers with undefined behaviour: a barrier that some threads of the block pass and others do not
(`DivergentBarrier`), a shuffle whose lanes are not all there, or that reads an absent lane, a vector access at an
address that is not aligned. Shared and local memory begin as garbage, and an index behind their end raises IndexError.
`options.order` runs the threads of a block, and the blocks of a grid, in another order: results must not change.

Arithmetic: floats are Python's, in float64, and rounded to float32 where they are stored into a shared or global array.
`options.single_precision` computes in NumPy's float32 scalars instead, as a GPU does, but slower. A product and a sum
that a GPU would fuse are rounded twice there; `cuda.fma` rounds once.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
import threading
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch

from tests.emulation.simulated_blocks import EXCHANGES, OF_BLOCK, WARP, Block, Index, Request, options, place_of, state

# ---- Memory ----------------------------------------------------------------------------------------------------------

FORMATS = {"float32": "f", "float64": "d", "int8": "b", "uint8": "B", "int16": "h", "uint16": "H", "int32": "i",
           "uint32": "I", "int64": "q", "uint64": "Q"}  # fmt: skip
GARBAGE = b"\xfb\xfc\xfd\xff" * 4  # NaN as float32, far from anything as an integer


def _array(memory: memoryview, dtype: Any) -> Any:
    """Bytes as an array of a Numba type: a memoryview, whose elements are Python numbers, is the fastest there is."""
    letter = dtype.simulated_format
    if letter == "f" and options.single_precision:
        return np.frombuffer(memory, dtype=np.float32)
    return memory.cast(letter)


@cache
def _garbage(size: int, dtype: Any) -> bytes:
    count = size * struct_size(dtype)
    return (GARBAGE * (count // 16 + 1))[:count]


@cache
def _garbage_element(dtype: Any, single_precision: bool) -> Any:
    return _new_array(1, dtype)[0]


def _new_array(size: int, dtype: Any) -> Any:
    return _array(memoryview(bytearray(_garbage(size, dtype))), dtype)


def struct_size(dtype: Any) -> int:
    """Bytes of one element of a Numba type."""
    return int(dtype.bitwidth) // 8


def _pointer(tensor: torch.Tensor | None, dtype: Any) -> Any:
    """A tensor as a kernel's pointer sees it; index 0 is its first element. No tensor is a null pointer."""
    if tensor is None:
        return None
    assert tensor.element_size() == struct_size(dtype) or str(dtype) == "uint8", f"{tensor.dtype} as {dtype}"
    storage = tensor.untyped_storage()
    start = tensor.storage_offset() * tensor.element_size()
    count = (storage.nbytes() - start) // struct_size(dtype) * struct_size(dtype)
    if count == 0:
        return memoryview(b"").cast(dtype.simulated_format)
    if tensor.data_ptr() % 16:
        state.unaligned = True
    memory = (ctypes.c_uint8 * count).from_address(tensor.data_ptr())
    return _array(memoryview(memory).cast("B"), dtype)


def _argument(value: Any, kind: Any) -> Any:
    """What the kernel gets for an argument of the launch."""
    name = type(kind).__name__
    if name == "CPointer":
        return _pointer(value, kind.dtype)
    if name == "UniTuple":
        return tuple(_argument(each, kind.dtype) for each in value)
    return CASTS[str(kind)](value)


def _float32(x: Any) -> Any:
    return np.float32(x) if options.single_precision else float(x)


def _integer(bits: int, signed: bool) -> Callable[[Any], int]:
    least = -(1 << bits - 1) if signed else 0
    most = least + (1 << bits) - 1

    def cast(x: Any) -> int:
        x = int(x)
        return x if least <= x <= most else ((x - least) & (most - least)) + least  # wraps around

    return cast


CASTS: dict[str, Callable[[Any], Any]] = {"float32": _float32, "float64": float} | {
    f"{prefix}int{bits}": _integer(bits, not prefix) for prefix in ("", "u") for bits in (8, 16, 32, 64)
}
"""What `float32(x)`, `int64(x)` do in a kernel."""

NUMBERS = {int, float, bool, np.float32}  # no types: Numba takes its time to find that out of each


# ---- Kernels ---------------------------------------------------------------------------------------------------------


class Kernel:
    """A function decorated by `cuda.jit`, to be launched from the host."""

    def __init__(self, function: Callable[..., Any], signature: Any = None) -> None:
        self.function = self.py_func = function
        self.kinds = None if signature is None else getattr(signature, "args", signature)

    def __getitem__(self, configuration: tuple[Any, ...]) -> Callable[..., None]:
        grid, size = (_index(each) for each in configuration[:2])
        return lambda *args: self._launch(grid, size, args)

    def _launch(self, grid: Index, size: Index, args: tuple[Any, ...]) -> None:
        kinds = self.kinds
        if kinds is None:
            raise TypeError(f"{self.function.__name__}: a kernel that is launched needs a signature")
        if len(kinds) != len(args):
            raise TypeError(f"{self.function.__name__}: got {len(args)} arguments, expected {len(kinds)}")
        if not (0 < grid.x < 2**31 and 0 < grid.y < 2**16 and 0 < grid.z < 2**16):
            raise ValueError(f"{self.function.__name__}: a grid of {tuple(grid)} blocks")
        if not 0 < size.x * size.y * size.z <= 1024:
            raise ValueError(f"{self.function.__name__}: blocks of {tuple(size)} threads")
        with state.lock, np.errstate(all="ignore"):
            before, state.unaligned = state.thread, False
            seen = tuple(_argument(value, kind) for value, kind in zip(args, kinds, strict=True))
            pool = state.threads(size)
            indices = [Index(x, y, z) for z in range(grid.z) for y in range(grid.y) for x in range(grid.x)]
            try:
                for index in options.arranged(indices):
                    Block(self.function, seen, index, size, grid, {}).run(options.arranged(pool))
            finally:
                state.thread = before
            state.pools[threading.get_ident(), size] = pool  # not after an error: its fibers hang where they were


def _index(size: Any) -> Index:
    parts = (size,) if isinstance(size, int) else tuple(size)
    return Index(*parts, *(1,) * (3 - len(parts)))


# ---- The module that kernels see as `cuda` ---------------------------------------------------------------------------


def _barrier(operation: str) -> Callable[..., Any]:
    def wait(mask: int = 0, value: Any = None, operand: Any = None) -> Any:
        thread = state.thread
        assert thread is not None
        return thread.wait(Request(place_of(sys._getframe(1)), operation, mask, value, operand))

    return wait


def _block_barrier(operation: str) -> Callable[..., Any]:
    def wait(value: Any = None) -> Any:
        assert state.thread is not None
        return state.thread.wait(Request(place_of(sys._getframe(1)), operation, 0, value))

    return wait


def _syncwarp(mask: int = 0xFFFFFFFF) -> None:
    assert state.thread is not None
    state.thread.wait(Request(place_of(sys._getframe(1)), "syncwarp", mask))


class _Shared:
    """`cuda.shared`: an array belongs to the line of code that declares it, and to the block."""

    def array(self, shape: int, dtype: Any, alignment: int | None = None) -> Any:
        assert state.thread is not None
        assert state.thread.block is not None
        arrays, place = state.thread.block.shared, place_of(sys._getframe(1))
        if place not in arrays:
            arrays[place] = _new_array(shape, dtype)
        return arrays[place]


class _Local:
    """`cuda.local`: registers, as a list of numbers, which is the fastest there is."""

    def array(self, shape: int, dtype: Any, alignment: int | None = None) -> list[Any]:
        return [_garbage_element(dtype, options.single_precision)] * shape


class _Cuda(ModuleType):
    """Numba's `cuda` module with what the running thread is."""

    threadIdx = property(lambda self: state.thread.index)  # type: ignore[union-attr]
    blockIdx = property(lambda self: state.thread.block.index)  # type: ignore[union-attr]
    blockDim = property(lambda self: state.thread.block.size)  # type: ignore[union-attr]
    gridDim = property(lambda self: state.thread.block.grid)  # type: ignore[union-attr]
    laneid = property(lambda self: state.thread.lane)  # type: ignore[union-attr]
    warpsize = WARP


def _jit(signature: Any = None, *, device: bool = False, **_: Any) -> Any:
    """`cuda.jit`: of a device function the function itself, else a kernel, which is launched by its signature."""
    if device:
        return lambda function: function
    if inspect.isfunction(signature):
        return Kernel(signature)
    return lambda function: Kernel(function, signature)


# ---- Instructions that a kernel package declares by @intrinsic -------------------------------------------------------


def _copy_vector(dst: Any, i: int, src: Any, j: int, count: int) -> None:
    if (i | j) % count or state.unaligned:
        _check_vector(dst, i, count)
        _check_vector(src, j, count)
    part = src[j : j + count]
    if type(dst) is list:
        if len(part) != count or i + count > len(dst):
            raise IndexError(f"{count} elements from {j} on of {len(src)} to {i} of {len(dst)}")
        dst[i : i + count] = part
    elif type(part) is list:
        for n in range(count):
            dst[i + n] = part[n]
    else:
        dst[i : i + count] = part  # raises ValueError where either ends too early


def _copy_async(*copy: Any) -> None:
    assert state.thread is not None
    state.thread.copies[-1].append(copy)


def _commit_copies() -> None:
    assert state.thread is not None
    state.thread.copies.append([])


def _wait_copies(but: int = 0) -> None:
    """Only now do the copies take place: who reads without waiting reads what was there before."""
    assert state.thread is not None
    groups = state.thread.copies
    while len(groups) > 1 + but:
        for copy in groups.pop(0):
            _copy_vector(*copy)


def _check_vector(array: Any, at: int, count: int) -> None:
    """Raise unless `count` elements from `at` on are one aligned vector. Local and shared arrays begin aligned."""
    owner = array.base if isinstance(array, np.ndarray) else array
    start, size = 0, 1
    if isinstance(owner, memoryview) and isinstance(owner.obj, ctypes.Array):
        start, size = ctypes.addressof(owner.obj), array.itemsize
    if at < 0 or (start + at * size) % (count * size):
        raise ValueError(f"a vector of {count} elements at element {at} of what begins at address {start:#x}")


_WORD = memoryview(bytearray(4))
_FLOAT, _INTEGER = _WORD.cast("f"), _WORD.cast("I")
_HALVES = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32).tolist()


def _float_from_bits(bits: int) -> Any:
    _INTEGER[0] = bits & 0xFFFFFFFF
    return np.float32(_FLOAT[0]) if options.single_precision else _FLOAT[0]


def _bits_of_float(x: Any) -> int:
    _FLOAT[0] = x
    return int(_INTEGER[0])


def _float_from_half(bits: int) -> Any:
    return np.float32(_HALVES[bits]) if options.single_precision else _HALVES[bits]


EMULATED: dict[str, Callable[..., Any]] = {
    "copy_vector": _copy_vector,
    "load_vector": _copy_vector,
    "store_vector": _copy_vector,
    "copy_async": _copy_async,
    "commit_copies": _commit_copies,
    "wait_copies": _wait_copies,
    "wait_copies_but_last": lambda: _wait_copies(1),
    "float_from_bits": _float_from_bits,
    "bits_of_float": _bits_of_float,
    "float_from_half": _float_from_half,
}


def _intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """`@intrinsic`: the emulation of that name."""
    if function.__name__ not in EMULATED:
        raise NotImplementedError(
            f"tests/emulation/numba_simulator.py does not know the instruction {function.__name__}"
        )
    return EMULATED[function.__name__]


def apply() -> None:
    """Extend the simulator. Called once Numba has been imported, with NUMBA_ENABLE_CUDASIM=1."""
    from numba import cuda, types
    from numba.cuda import extending

    cuda.__class__ = _Cuda
    cuda.jit = _jit
    cuda.shared, cuda.local = _Shared(), _Local()
    for name in EXCHANGES:
        setattr(cuda, name, _barrier(name))
    cuda.syncwarp = _syncwarp
    for name in OF_BLOCK:
        setattr(cuda, name, _block_barrier(name))
    cuda.activemask = lambda: 0xFFFFFFFF
    cuda.fma = lambda x, y, z: _float32(float(x) * float(y) + float(z))  # the product of two float32 is exact
    extending.intrinsic = _intrinsic
    for name, cast in CASTS.items():
        getattr(types, name).simulated_cast = cast
        getattr(types, name).simulated_format = FORMATS[name]
    for kind in (types.Integer, types.Float):
        kind.__call__ = _calling(kind.__call__)


def _calling(typed: Callable[..., Any]) -> Callable[..., Any]:
    """`float32(x)` of a number, at the speed of a cast; anything else as Numba means it."""
    from numba.types import Type

    def call(self: Any, *args: Any) -> Any:
        if len(args) == 1 and state.thread is not None:
            value = args[0]
            kind = type(value)
            if kind is float and self.simulated_format in "fd" and not options.single_precision:
                return value
            if kind in NUMBERS or not isinstance(value, Type):
                return self.simulated_cast(value)
        return typed(self, *args)  # the type of a function

    return call
