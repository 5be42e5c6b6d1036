"""CUDA sources to device code by NVRTC, kept on disk.

NVRTC needs no header but the ones beside this file and the ABI's, which are handed to it in memory: neither a toolkit
nor a compiler has to be installed, only the NVRTC library that CuPy finds (a wheel or a toolkit). CuPy prefers one that
the process has loaded already, of whatever CUDA version: as a rule torch's. Each version keeps files of its own.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pagedkern.abi
from pagedkern.environment import folders
from pagedkern.environment.code_cache import CodeCache

log = logging.getLogger("pagedkern")
FOLDER = Path(__file__).parent
ABI_HEADER = Path(pagedkern.abi.__file__).parent / "pagedkern_abi.h"
CODE_CACHE = CodeCache("compiled CuPy kernels", lambda: folders.compiled_folder("cupy"))


def compiled(file: str, macros: Mapping[str, str], capability: int) -> bytes:
    """Device code of a source for a compute capability (90 is 9.0): from the disk, else compiled and kept there.

    Raises `RuntimeError` with the compiler's messages.
    """
    nvrtc = _nvrtc()
    options = options_for(macros, capability, tuple(nvrtc.getSupportedArchs()))
    parts = [file, *options, str(version()), *(text for _, text in headers()), source(file)]
    name = CODE_CACHE.name(Path(file).stem, "\0".join(parts))
    code = CODE_CACHE.load(name)
    if code is None:
        made = build(file, options)
        if made.messages:
            log.warning("pagedkern: %s: %s", file, made.messages)
        CODE_CACHE.save(name, code := made.code)
    return code


def options_for(macros: Mapping[str, str], capability: int, supported: tuple[int, ...]) -> tuple[str, ...]:
    """Native code, or where the compiler is older than the GPU, PTX of the newest kind that both know."""
    newest = max(arch for arch in supported if arch <= capability)
    kind = "sm" if newest == capability else "compute"
    defines = (f"-D{name}={value}" for name, value in macros.items())
    return (f"--gpu-architecture={kind}_{newest}", "--std=c++17", *defines)


class Build(NamedTuple):
    """What came out of the compiler."""

    code: bytes  # a cubin, or PTX if the options name a virtual architecture
    ptx: str
    messages: str


def build(file: str, options: tuple[str, ...]) -> Build:
    """Compile now."""
    nvrtc = _nvrtc()
    names, texts = zip(*headers(), strict=True)
    program = nvrtc.createProgram(source(file), file, [t.encode() for t in texts], [n.encode() for n in names])
    try:
        nvrtc.compileProgram(program, options)
        ptx = nvrtc.getPTX(program)
        text = ptx.decode() if isinstance(ptx, bytes) else ptx
        virtual = options[0].partition("=")[2].startswith("compute")
        return Build(
            text.encode() if virtual else nvrtc.getCUBIN(program), text, nvrtc.getProgramLog(program).strip("\0\n ")
        )
    except nvrtc.NVRTCError as error:
        raise RuntimeError(f"{file} does not compile: {nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)


def version() -> tuple[int, ...]:
    """The version of NVRTC."""
    return tuple(_nvrtc().getVersion())


@cache
def source(file: str) -> str:
    return (FOLDER / file).read_text()


@cache
def headers() -> tuple[tuple[str, str], ...]:
    """Name and text of every header that a source may include."""
    return tuple((path.name, path.read_text()) for path in (*sorted(FOLDER.glob("*.cuh")), ABI_HEADER))


@cache
def _nvrtc() -> Any:
    """CuPy's bindings, with the built-in functions of the NVRTC that CuPy found.

    NVRTC 13.0 of PyPI does not find them beside itself, and whoever loaded it before CuPy may have left them out.
    """
    from cupy_backends.cuda.libs import nvrtc

    major, minor = nvrtc.getVersion()  # CuPy looks for the library only now
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib
    except ImportError:  # CuPy 13 does without it, and takes the library that the loader finds
        return nvrtc
    builtins = Path(load_nvidia_dynamic_lib("nvrtc").abs_path).with_name(f"libnvrtc-builtins.so.{major}.{minor}")
    if builtins.exists():
        ctypes.CDLL(str(builtins))
    return nvrtc
