"""Shared objects from CUDA sources, built by g++ and kept in a cache by the contents of everything they are made of."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

HERE = Path(__file__).parent
INCLUDE = HERE / "include"
RUNTIME = HERE / "runtime"

Mode = Literal["plain", "checked", "address", "portable"]
"""plain: fast. checked: every access goes through runtime/checks.cpp. address: AddressSanitizer, which the process must
have loaded first (LD_PRELOAD). portable: the fibers of other processors than x86-64."""

COMMON = ["-std=c++17", "-fPIC", "-shared", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-exceptions"]
COMMON += ["-U_FORTIFY_SOURCE"]  # it takes a jump out of a fiber for a mistake
KERNEL = ["-w", "-fvisibility=hidden", "-fno-gnu-unique", "-fno-stack-protector"]
KERNEL += ["-ftrivial-auto-var-init=pattern"]  # what registers hold before they are set is large and not chance
CHECKS = "thread,alignment,bounds,signed-integer-overflow,shift"  # what they call is in runtime/checks.cpp
MODES: Mapping[Mode, tuple[list[str], list[str]]] = {  # of kernels, of the runtime
    "plain": ([], ["-O2"]),
    "checked": (["-g1", f"-fsanitize={CHECKS}", "-nodefaultlibs", "-lm", "-lc"], ["-O2", "-DPAGEDKERN_CHECKED"]),
    "address": (["-g1", "-fsanitize=address"], ["-O1", "-fno-builtin", "-DPAGEDKERN_ADDRESS"]),  # memcpy is checked
    "portable": ([], ["-O2", "-DPAGEDKERN_UCONTEXT"]),
}

SOURCE = """
#include "{source}"
static thread_local char anchor;
extern "C" __attribute__((visibility("default"))) void *pagedkern_shared() {{ return &anchor; }}
"""
ENTRY = """
extern "C" __attribute__((visibility("default"))) void pagedkern_entry_{i}(void **arguments) {{
  pagedkern_host::invoke(&{name}, arguments);
}}
"""


class CompileError(Exception):
    """What g++ said about a source."""


@dataclass(frozen=True)
class Kernel:
    """A kernel ready to run."""

    path: Path
    entry: ctypes._FuncPtr  # type: ignore[name-defined]
    shared: ctypes._FuncPtr  # type: ignore[name-defined]
    runtime: ctypes.CDLL


@functools.cache
def compiler() -> str | None:
    """The path of g++, or None if there is none of version 12 or later."""
    path = shutil.which(os.environ.get("CXX", "g++"))
    if path is None:
        return None
    version = subprocess.run([path, "-dumpversion"], capture_output=True, text=True).stdout.partition(".")[0].strip()
    return path if version.isdecimal() and int(version) >= 12 else None


def compile_kernels(
    source: Path,
    names: Sequence[str],
    macros: Mapping[str, object] | None = None,
    *,
    include: Sequence[Path] = (),
    mode: Mode = "plain",
    level: int = 1,
) -> dict[str, Kernel]:
    """Compile kernels of one source file into one object, or take it from the cache.

    Names are expressions such as `copy<float, 4>`. Sources do not change while a process runs. `level` 0 to 3: how much
    to optimise; 0 compiles in a third of the time that 1 takes.

    Raises:
        CompileError: with the messages of g++.
    """
    return _compile(source.resolve(), tuple(names), tuple((macros or {}).items()), tuple(include), mode, level)


@functools.cache
def _compile(
    source: Path,
    names: tuple[str, ...],
    macros: tuple[tuple[str, object], ...],
    include: tuple[Path, ...],
    mode: Mode,
    level: int,
) -> dict[str, Kernel]:
    folders = (INCLUDE, source.parent, *include)
    text = SOURCE.format(source=source.name) + "".join(ENTRY.format(i=i, name=name) for i, name in enumerate(names))
    flags = [
        *COMMON,
        *KERNEL,
        f"-O{level}",
        *(f"-D{key}={value}" for key, value in macros),
        "-include",
        "pagedkern_host.h",
    ]
    runtime = _runtime(mode)
    inputs = [path for folder in folders for path in sorted(folder.glob("*")) if path.suffix in SUFFIXES]
    key = [text, *flags, *MODES[mode][0], str(runtime), *(path.read_text() for path in inputs)]

    def build(target: Path) -> list[str]:
        entry = target.with_suffix(".cpp")
        entry.write_text(text)
        return [*flags, *(f"-I{folder}" for folder in folders), str(entry), str(runtime), *MODES[mode][0]]

    return _load(_cached(f"{source.stem}-{mode}", key, build), names, runtime)


SUFFIXES = {".cu", ".cuh", ".h"}


@functools.cache
def _runtime(mode: Mode) -> Path:
    sources = sorted(RUNTIME.glob("*.cpp"))
    inputs = [*sources, *sorted(RUNTIME.glob("*.h")), *sorted(INCLUDE.glob("*.h"))]
    flags = [*COMMON, *MODES[mode][1]]
    return _cached(
        f"runtime-{mode}", [*flags, *(p.read_text() for p in inputs)], lambda _: [*flags, *map(str, sources)]
    )


def _cached(label: str, key: Sequence[str], build: Callable[[Path], list[str]]) -> Path:
    """The shared object of that key; `build(path)` gives the arguments for g++ if it has to be made."""
    digest = hashlib.sha256("\0".join([_version(), *key]).encode()).hexdigest()[:24]
    target = cache_folder() / f"{label}-{digest}.so"
    if target.exists():
        os.utime(target)
        return target
    with open(target.with_suffix(".lock"), "w") as lock:  # workers that start together need the same objects
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            unfinished = target.with_suffix(".new")
            command = [str(compiler()), *build(target), "-o", str(unfinished)]
            made = subprocess.run(command, capture_output=True, text=True)
            if made.returncode:
                raise CompileError(f"{' '.join(command)}\n{made.stderr}")
            os.replace(unfinished, target)
            _forget(target.parent)
    return target


def _forget(folder: Path, days: int = 14) -> None:
    """Delete what no run has used for so long."""
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # another process may have renamed or deleted it
            if path.stat().st_mtime < time.time() - days * 86400:
                path.unlink()


@functools.cache
def _version() -> str:
    return subprocess.run([str(compiler()), "--version"], capture_output=True, text=True, check=True).stdout


@functools.cache
def cache_folder() -> Path:
    """Beside pytest's own cache; PAGEDKERN_HOST_CACHE names another place."""
    folder = Path(os.environ.get("PAGEDKERN_HOST_CACHE", HERE.parents[2] / ".pytest_cache" / "d" / "cuda_host"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # the tests of an installed package may lie where nobody can write
        folder = Path(tempfile.gettempdir()) / f"pagedkern-cuda-host-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _load(path: Path, names: Sequence[str], runtime: Path) -> dict[str, Kernel]:
    library = ctypes.CDLL(str(path))
    run = ctypes.CDLL(str(runtime))
    run.pagedkern_host_launch.restype = ctypes.c_char_p
    entries = [getattr(library, f"pagedkern_entry_{i}") for i in range(len(names))]
    return {
        name: Kernel(path, entry, library.pagedkern_shared, run) for name, entry in zip(names, entries, strict=True)
    }
