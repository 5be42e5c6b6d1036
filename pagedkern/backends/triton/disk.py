"""Where Triton keeps what it compiles: in its own folder if nobody else can write there, else in one of this process.

Triton loads what it finds there: code of the GPU, and in some versions a library of the host.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TypeVar

import triton

from pagedkern.environment import folders, notices, trusted

T = TypeVar("T")


def compiling(compile_: Callable[[], T]) -> T:
    """Call what makes Triton compile a kernel or load one from disk.

    Where Triton's folder cannot be used, a warning says why once, and kernels are compiled anew in every process. The
    folder is set for this call alone: what others compile with Triton goes where it went.
    """
    if triton.knobs.cache.manager_class is not None:  # the user's own way of keeping them
        return compile_()
    folder = str(triton.knobs.cache.dir)
    why = _unusable(folder)
    if why is None:
        try:
            return compile_()
        except OSError as error:  # the disk is full, or the folder is gone
            why = notices.reason(error)
    notices.warn_once("triton", f"kernels of Triton are neither loaded from {folder} nor kept there: {why}")
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(folders.scratch() / "triton")
        return compile_()


@cache
def _unusable(folder: str) -> str | None:
    """Why kernels cannot be loaded from a folder and kept there; None if they can."""
    if folder.startswith("~"):
        return "there is no home"
    try:
        with trusted.opened(Path(folder), make=True) as opened:
            trusted.write(opened, name := f".pagedkern-{os.getpid()}", b"")
            with suppress(OSError):
                os.unlink(name, dir_fd=opened)
    except OSError as error:
        return notices.reason(error)
    return None
