"""Where Triton keeps what it compiles: below its own folder if nobody else can write there, else in the process's.

Triton loads what it finds there: code of the GPU, and in some versions a library of the host. It makes a folder for
each kernel, which the umask may let others write; so all of ours lie in one that nobody else can enter.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TypeVar

import triton

from pagedkern.environment import folders, notices, trusted

T = TypeVar("T")
OWN, OWN_MODE = "pagedkern", 0o700  # the folder of our kernels in Triton's
_turn = threading.RLock()  # what Triton is set to is the process's


def compiling(compile_: Callable[[], T]) -> T:
    """Call what makes Triton compile a kernel or load one from disk.

    Where Triton's folder cannot be used, a warning says why once, and kernels are compiled anew in every process. The
    folder is set for this call alone: what others compile with Triton goes where it went.
    """
    if triton.knobs.cache.manager_class is not None:  # the user's own way of keeping them
        return compile_()
    with _turn:
        folder = str(triton.knobs.cache.dir)
        own = Path(folder) / OWN
        why = _unusable(folder)
        if why is None:
            try:
                return _compile_into(own, compile_)
            except OSError as error:  # the disk is full, or the folder is gone
                why = notices.reason(error)
        notices.warn_once("triton", f"kernels of Triton are neither loaded from {own} nor kept there: {why}")
        return _compile_into(folders.scratch() / "triton", compile_)


def _compile_into(folder: Path, compile_: Callable[[], T]) -> T:
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(folder)
        return compile_()


@cache
def _unusable(folder: str) -> str | None:
    """Why kernels cannot be loaded from ours in a folder and kept there; None if they can."""
    if folder.startswith("~"):
        return "there is no home"
    try:
        with trusted.opened(Path(folder) / OWN, make=True) as opened:
            trusted.keep_out_others(opened, OWN_MODE)
            trusted.write(opened, name := f".pagedkern-{os.getpid()}", b"")
            with suppress(OSError):
                os.unlink(name, dir_fd=opened)
    except OSError as error:
        return notices.reason(error)
    return None
