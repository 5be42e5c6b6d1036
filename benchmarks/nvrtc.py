"""NVRTC of the CUDA version that one asks for, where several are installed.

CuPy compiles with the NVRTC that its process has loaded, and where there is none with the first that cuda-pathfinder
finds: of the packages for CUDA 12 and 13 the newer. A process that loads one first has therefore chosen.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

PACKAGES = {12: "nvidia-cuda-nvrtc-cu12", 13: "nvidia-cuda-nvrtc"}  # by CUDA version


def processes(cuda: int, number: int) -> ProcessPoolExecutor:
    """Processes in which CuPy compiles with it."""
    return ProcessPoolExecutor(number, mp_context=get_context("spawn"), initializer=choose, initargs=(cuda,))


def choose(cuda: int) -> None:
    """Have CuPy compile with it in this process.

    To be called before CuPy has compiled anything, and before torch or another library has loaded an NVRTC. Raises
    `RuntimeError` if CuPy takes another one.
    """
    load(cuda)
    from cupy_backends.cuda.libs import nvrtc

    major, minor = nvrtc.getVersion()  # now CuPy looks for it
    if major != cuda:
        raise RuntimeError(f"NVRTC: CuPy took {major}.{minor}, expected {cuda}: another was loaded before")


def signature(ptx: str) -> str:
    """The version of the compiler, as it signs its PTX: "12.9". NVVM, which compiles for Numba, does it likewise."""
    found = re.search(r"^// Cuda compilation tools, release (\d+\.\d+),", ptx, re.MULTILINE)
    if found is None:
        raise ValueError(f"PTX that no compiler has signed: {ptx[:200]!r}")
    return found[1]


def load(cuda: int) -> ctypes.CDLL:
    """The library alone, as torch and others load it. Raises `ModuleNotFoundError` if its package is missing."""
    return ctypes.CDLL(str(_file(cuda, "libnvrtc.so.*")))


def load_builtins(cuda: int) -> None:
    """The built-in functions of CUDA C++: NVRTC 13.0 does not find them where they are, beside it."""
    ctypes.CDLL(str(_file(cuda, "libnvrtc-builtins.so.*")))


def _file(cuda: int, pattern: str) -> Path:
    try:
        files = importlib.metadata.files(PACKAGES[cuda]) or []
    except importlib.metadata.PackageNotFoundError:
        raise ModuleNotFoundError(f"no NVRTC {cuda}: pip install {PACKAGES[cuda]}=={cuda}.*") from None
    (found,) = (file for file in files if file.match(pattern))
    return Path(str(found.locate()))
