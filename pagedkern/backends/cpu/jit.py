"""How the kernels are compiled: decorators, the compile-time target, and what is compiled for.

What Numba compiles for decides, not what the processor has: `NUMBA_CPU_NAME`, `NUMBA_CPU_FEATURES` and
`NUMBA_ENABLE_AVX` may ask for less, and an instruction that LLVM was not told of ends the process.

Most of the code here is LLVM IR emitted by this file's neighbours. Therefore `Target`, which is part of every kernel's
signature, carries a digest of all of them: a change anywhere is a miss of the cache on disk (see `disk`). A lock around
loading and compiling lets a second process load what the first one compiles, where there are locks.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast, get_type_hints

import numba as numba_module
from numba import extending as extending_module
from numba.core import types
from numba.core.registry import cpu_target

from pagedkern.backends.base import ITEMSIZE
from pagedkern.backends.cpu.disk import KernelCache
from pagedkern.environment import compiler, threads

log = logging.getLogger("pagedkern")
PATIENCE = 0.7  # seconds without a note; loading from the disk takes less
F = TypeVar("F", bound=Callable[..., Any])
numba: Any = numba_module  # its type hints are partial: half of what is used here would count as untyped
extending: Any = extending_module


def inlined(function: F) -> F:
    """A helper of a kernel: compiled into whatever calls it, never on its own."""
    return cast(F, numba.njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)(function))


def kernel(function: F) -> F:
    """An entry point: releases the GIL, kept on disk. Its last argument is a `TargetKey`."""
    if (refusal := compiler.refusal()) is not None:
        raise ImportError(refusal)  # of the module that the kernel is in
    dispatcher = numba.njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True)(function)
    dispatcher._cache = KernelCache(function, codegen, source_digest())  # as `cache=True` does with Numba's own
    return cast(F, dispatcher)


def codegen() -> Any:
    """Numba's code generator for this process."""
    return cpu_target.target_context.codegen()


TARGET, LITERAL = object(), object()  # parameters of an emitter that are known while it compiles


def emitter(returns: Any, *parameters: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a function that emits LLVM IR callable from kernels.

    `parameters` are its Numba types, or TARGET or LITERAL. The function gets the builder, then for each parameter the
    LLVM value, the `TargetKey` or the literal.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        def typing(_context: Any, *given: Any) -> Any:
            known = [g if p in (TARGET, LITERAL) else p for p, g in zip(parameters, given, strict=True)]

            def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                values = list(args)
                for i, (p, kind) in enumerate(zip(parameters, signature.args, strict=True)):
                    if p is TARGET:
                        values[i] = kind.key_
                    elif p is LITERAL:
                        values[i] = kind.literal_value
                result = function(builder, *values)
                return context.get_dummy_value() if returns is types.void else result

            return returns(*known), emit

        typing.__name__ = function.__name__
        typing.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]  # Numba counts parameters by it
        return extending.intrinsic(prefer_literal=True)(typing)

    return decorate


class TargetKey(NamedTuple):
    """What a kernel is compiled for."""

    kv_dtype: str  # dtype of the cache, a key of `base.ITEMSIZE`
    lanes: int  # float32 lanes of one vector
    half: bool  # the processor converts float16 itself
    dot: bool  # q is bfloat16, so is what is read, and the processor multiplies pairs of it (AVX512-BF16)

    @property
    def tables(self) -> bool:
        """Whether bfloat16 are made of 8 bits, by tables in registers (AVX512-VBMI)."""
        return self.dot and ITEMSIZE[self.kv_dtype] == 1


class Target(types.Type):
    """`TargetKey` as a Numba type, so that emitters can read it while they compile."""

    def __init__(self, key: TargetKey) -> None:
        self.key_ = key
        super().__init__(name=f"Target({key!r}, {source_digest()})")


class TargetValue:
    """The Python object that carries a `Target` into a kernel; no data, only its type matters."""

    def __init__(self, key: TargetKey) -> None:
        self.key = key
        self.numba_type = Target(key)


extending.register_model(Target)(extending.models.OpaqueModel)


@extending.typeof_impl.register(TargetValue)  # type: ignore[untyped-decorator]
def _typeof(value: TargetValue, _context: object) -> Target:
    return value.numba_type


@extending.unbox(Target)  # type: ignore[untyped-decorator]
def _unbox(_type: Target, _value: object, c: Any) -> Any:
    return extending.NativeValue(c.context.get_dummy_value())


@cache
def source_digest() -> str:
    """Digest of everything here that kernels are made from."""
    digest = hashlib.sha256()
    for path in sources():
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def sources() -> list[Path]:
    """The files of this package."""
    return sorted(Path(__file__).parent.glob("*.py"))


ISAS = ("native", "avx512", "avx2", "portable")


@cache
def target(kv_dtype: str, isa: str = "native", q_dtype: str = "float32") -> TargetValue:
    """The target for a cache dtype and a query dtype.

    isa: "native" is the best that Numba compiles for; the others emit what a lesser one would get: "avx512" vectors of
    64 bytes without bfloat16, "avx2" of 32 bytes, "portable" of 16 and no conversion instructions.
    """
    if isa == "portable":
        return TargetValue(TargetKey(kv_dtype, 4, half=False, dot=False))
    if isa in ("avx512", "avx2"):
        return TargetValue(TargetKey(kv_dtype, 16 if isa == "avx512" else 8, half=converts_half(), dot=False))
    has = features()
    wide = {"avx512bw", "avx512vl"} <= has
    lanes = 16 if wide else 8 if "avx2" in has else 4
    needed = {"avx512bf16"} if kv_dtype == "bfloat16" else {"avx512bf16", "avx512vbmi"}
    dot = wide and q_dtype == "bfloat16" and kv_dtype not in ("float16", "float32") and needed <= has
    return TargetValue(TargetKey(kv_dtype, lanes, converts_half(), dot))


def converts_half() -> bool:
    """Whether the processor that Numba compiles for converts float16 itself. Without AVX none does."""
    return {"avx", "f16c"} <= features() or platform.machine().lower() in ("aarch64", "arm64")


def features() -> set[str]:
    """The features that Numba tells LLVM to use, by their names in LLVM; none where it names a processor alone."""
    _triple, _name, flags = codegen().magic_tuple()
    return {flag[1:] for flag in flags.split(",") if flag.startswith("+")} - {
        flag[1:] for flag in flags.split(",") if flag.startswith("-")
    }


def record(kind: type) -> Any:
    """The Numba type of a NamedTuple class whose fields are annotated as int or float."""
    fields = [types.int64 if hint is int else types.float64 for hint in get_type_hints(kind).values()]
    if len(set(fields)) == 1:
        return numba.types.NamedUniTuple(fields[0], len(fields), kind)
    return numba.types.NamedTuple(fields, kind)


class Entry:
    """A kernel, the types of its arguments before the target, and how the note calls it that a user reads meanwhile."""

    def __init__(self, dispatcher: Any, what: str, *arguments: Any) -> None:
        self.dispatcher = dispatcher
        self._what = what
        self._arguments = arguments
        self._ready: dict[TargetKey, Callable[..., Any]] = {}

    def get(self, target: TargetValue) -> Callable[..., Any]:
        """The compiled function, which takes its arguments without looking at their types again."""
        found = self._ready.get(target.key)
        if found is None:
            signature = (*self._arguments, target.numba_type)
            cache: KernelCache = self.dispatcher._cache
            with _compiling, cache.turn(signature), _note(f"{self._what} ({target.key.kv_dtype})", cache, signature):
                self.dispatcher.compile(signature)
            found = self._ready[target.key] = self.dispatcher.overloads[signature].entry_point
        return found


_compiling = threading.RLock()


def _after_fork() -> None:
    global _compiling
    _compiling = threading.RLock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def _note(what: str, cache: KernelCache, signature: Any) -> Iterator[None]:
    """Say on stderr that a kernel is compiled, if that takes long."""
    start = time.perf_counter()

    def begun() -> None:
        if cache.was_missing(signature):
            log.warning("pagedkern: compiling the CPU %s, once, some seconds ...", what)

    timer = threading.Timer(PATIENCE, begun)
    timer.daemon = True
    threads.start(timer)  # where no thread can be had it is said afterwards only
    try:
        yield
    finally:
        timer.cancel()
    seconds = time.perf_counter() - start
    if seconds > PATIENCE and cache.was_missing(signature):
        kept = "; kept on disk" if cache.is_kept(signature) else ""
        log.warning("pagedkern: compiled the CPU %s in %.1f s%s", what, seconds, kept)
