"""Compiled kernels on disk: what Numba's dispatchers ask for a kernel before they compile it.

As for the CPU backend, in place of Numba's own cache, which unpickles what it finds in whichever folder it can write.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from numba.cuda import utils
from numba.cuda.dispatcher import _Kernel
from numba.cuda.serialize import dumps

from pagedkern.backends.numba_cuda.device import SOURCES
from pagedkern.environment import compiler, folders
from pagedkern.environment.code_cache import CodeCache


def folder() -> Path | None:
    """Where kernels are kept, if anywhere."""
    return folders.compiled_folder("numba_cuda", compiler.cache_folder())


CODE_CACHE = CodeCache("compiled Numba CUDA kernels", folder)


class KernelCache:
    """A kernel that was compiled for one signature, as `CUDACache` of Numba has it; for `CUDADispatcher._cache`."""

    def __init__(self, function: Any, made_for: object, options: object) -> None:
        """`made_for`: all that a function was made for, beside the sources; `options` those of `cuda.jit`."""
        self._stem = function.__name__
        self._made_of = f"{function.__module__}.{function.__qualname__} {SOURCES} {made_for!r} {options!r}"

    def name(self, signature: Any, codegen: Any) -> str:
        """The file of a kernel: its name stands for all that it depends on."""
        return CODE_CACHE.name(self._stem, f"{self._made_of} {signature!r} {codegen.magic_tuple()!r} {compiler.key()}")

    @property
    def cache_path(self) -> str | None:
        found = folder()
        return None if found is None else str(found)

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """The kernel, or None if it has to be compiled."""
        with utils.numba_target_override():
            target_context.refresh()
            name = self.name(signature, target_context.codegen())
            content = CODE_CACHE.load(name)
            if content is None:
                return None
            try:
                return _Kernel._rebuild(**pickle.loads(content))
            except Exception as error:  # it was written by a Numba that calls itself the same and is another
                CODE_CACHE.damaged(name, f"{type(error).__name__}: {error}")
                return None

    def save_overload(self, signature: Any, kernel: Any) -> None:
        if not getattr(kernel, "launch_config_sensitive", False):  # else it is right for one grid only
            CODE_CACHE.save(self.name(signature, kernel.codegen), dumps(kernel._reduce_states()))
