"""How the kernels are compiled: decorators, the compile-time target, and a disk cache that several processes share.

Numba's cache watches only the file that defines a kernel, while most of the code here is LLVM IR emitted by its
neighbours. Therefore `Target`, which is part of every kernel's signature, carries a digest of all of them: a change
anywhere is a cache miss. Numba also hands the same file name to two processes that compile two signatures of one kernel
at the same time; a file lock around loading and compiling excludes that, and lets the second process load what the
first one compiled.
"""

from __future__ import annotations

import fcntl
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
from llvmlite import binding
from numba import extending as extending_module
from numba.core import types

from pagedkern.backends.base import ITEMSIZE

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
    try:
        return cast(F, numba.njit(nogil=True, cache=True, error_model="numpy", no_cfunc_wrapper=True)(function))
    except RuntimeError as error:  # neither the package's folder nor the user's can be written
        log.warning("pagedkern: the compiled CPU kernels cannot be kept on disk (%s)", error)
        return cast(F, numba.njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True)(function))


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

    isa: "native" is the best of this processor; the others emit what a lesser one would get: "avx512" vectors of 64
    bytes without bfloat16, "avx2" of 32 bytes, "portable" of 16 and no conversion instructions.
    """
    if isa == "portable":
        return TargetValue(TargetKey(kv_dtype, 4, half=False, dot=False))
    if isa in ("avx512", "avx2"):
        return TargetValue(TargetKey(kv_dtype, 16 if isa == "avx512" else 8, half=True, dot=False))
    features = {name for name, on in binding.get_host_cpu_features().items() if on}
    wide = {"avx512bw", "avx512vl"} <= features
    lanes = 16 if wide else 8 if "avx2" in features else 4
    arm = platform.machine().lower() in ("aarch64", "arm64")
    needed = {"avx512bf16"} if kv_dtype == "bfloat16" else {"avx512bf16", "avx512vbmi"}
    dot = wide and q_dtype == "bfloat16" and kv_dtype not in ("float16", "float32") and needed <= features
    return TargetValue(TargetKey(kv_dtype, lanes, "f16c" in features or arm, dot))


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
            with _compiling, _file_lock(self.dispatcher), _note(f"{self._what} ({target.key.kv_dtype})"):
                self.dispatcher.compile(signature)
            found = self._ready[target.key] = self.dispatcher.overloads[signature].entry_point
        return found


_compiling = threading.RLock()


def _after_fork() -> None:
    global _compiling
    _compiling = threading.RLock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def _file_lock(dispatcher: Any) -> Iterator[None]:
    folder = dispatcher.stats.cache_path
    if folder is None:
        yield
        return
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "pagedkern-compile.lock"), "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed
        yield


@contextmanager
def _note(what: str) -> Iterator[None]:
    """Say on stderr what takes long, unless it came from the disk at once."""
    timer = threading.Timer(PATIENCE, log.warning, ("pagedkern: compiling the CPU %s, once, some seconds ...", what))
    timer.daemon = True
    start = time.perf_counter()
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    seconds = time.perf_counter() - start
    if seconds > PATIENCE:
        log.warning("pagedkern: compiled the CPU %s in %.1f s; kept on disk", what, seconds)
