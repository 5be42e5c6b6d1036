"""Compiled kernels on disk: what Numba's dispatchers ask for an overload before they compile it.

Numba's own cache unpickles what it finds in whichever folder it can write, beside the sources at first. It watches
only the file that defines a kernel, and gives two processes that compile at the same time the same file name. Here the
key is the name of the file, so that nothing has to be locked, and files are loaded and written where nobody else can
write.
"""

from __future__ import annotations

import pickle
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from numba.core import compiler as numba_compiler
from numba.core import serialize

from pagedkern.environment import compiler, folders
from pagedkern.environment.code_cache import CodeCache


def folder() -> Path | None:
    """Where kernels are kept, if anywhere."""
    return folders.compiled_folder("cpu", compiler.cache_folder())


rebuild: Any = numba_compiler.CompileResult._rebuild  # Numba has no type hints for these
dumps: Any = serialize.dumps

CODE_CACHE = CodeCache("compiled CPU kernels", folder)


class KernelCache:
    """The compiled overloads of one kernel, as `numba.core.caching.Cache` has them; for `Dispatcher._cache`."""

    def __init__(self, function: Any, codegen: Any, sources: str) -> None:
        """`codegen` returns Numba's code generator; `sources` is a digest of all that the kernel is made from."""
        self._stem = function.__name__
        self._made_of = f"{function.__module__}.{function.__qualname__} {sources}"
        self._codegen = codegen
        self._enabled = True
        self._missing: set[str] = set()  # names of overloads that were not on disk
        self._kept: set[str] = set()  # and of those that this process has put there

    def name(self, signature: Any) -> str:
        """The file of an overload: its name stands for the kernel, its sources and signature, the processor, features
        and settings that Numba compiles for, and versions."""
        key = f"{self._made_of} {signature!r} {self._codegen().magic_tuple()!r} {compiler.key()}"
        return CODE_CACHE.name(self._stem, key)

    def turn(self, signature: Any) -> AbstractContextManager[None]:
        """Exclude other processes while they or this one compile an overload, if it is not on disk."""
        return CODE_CACHE.turn(self.name(signature))

    def was_missing(self, signature: Any) -> bool:
        """Whether this process has looked for an overload and had to compile it."""
        return self.name(signature) in self._missing

    def is_kept(self, signature: Any) -> bool:
        """Whether this process has put an overload on disk."""
        return self.name(signature) in self._kept

    @property
    def cache_path(self) -> str | None:
        found = folder()
        return None if found is None else str(found)

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """The overload, or None if it has to be compiled."""
        target_context.refresh()
        name = self.name(signature)
        content = CODE_CACHE.load(name) if self._enabled else None
        if content is not None:
            try:
                return rebuild(target_context, *pickle.loads(content))
            except Exception as error:  # it was written by a Numba that calls itself the same and is another
                CODE_CACHE.damaged(name, f"{type(error).__name__}: {error}")
        self._missing.add(name)
        return None

    def save_overload(self, signature: Any, result: Any) -> None:
        if result.lifted or result.library.has_dynamic_globals:  # of no use to another process
            return
        name = self.name(signature)
        if self._enabled and CODE_CACHE.save(name, dumps(result._reduce())):
            self._kept.add(name)

    def enable(self) -> None:
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False

    def flush(self) -> None:
        """What is on disk no longer counts in this process."""
        self.disable()
