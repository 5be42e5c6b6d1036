"""Launching a compiled kernel, under the settings in force: mode, order of the threads, poison."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.emulation.cuda_host.compiler import Kernel, Mode

ORDERS = {"forward": 0, "backward": 1}


@dataclass(frozen=True)
class Settings:
    """How kernels run: as PAGEDKERN_HOST_MODE, _ORDER and _POISON say unless a test says otherwise."""

    mode: Mode = "plain"
    order: str = "vary"  # "forward", "backward", a number from 2 on as the seed of a random order; "vary": see `_order`
    poison: int = 0xFF  # fills fresh shared memory: NaN in every floating-point format, -1 in every integer
    level: int = 1  # of optimisation
    sources: Path | None = None  # compile the kernels of this folder in place of the package's


_current = Settings(
    mode=os.environ.get("PAGEDKERN_HOST_MODE", "plain"),  # type: ignore[arg-type]
    order=os.environ.get("PAGEDKERN_HOST_ORDER", "vary"),
    poison=int(os.environ.get("PAGEDKERN_HOST_POISON", "0xff"), 0),
)
_launches: tuple[str, int] = ("", 0)  # the test that is running, and how often it launched


def current() -> Settings:
    return _current


@contextmanager
def settings(**changes: Any) -> Iterator[Settings]:
    """Other settings for a while, in every thread."""
    global _current
    before = _current
    _current = replace(before, **changes)
    try:
        yield _current
    finally:
        _current = before


class EmulationError(Exception):
    """A kernel did what would be undefined, or an error, on a GPU."""


def _order(order: str) -> int:
    """The number of an order. "vary" takes another one for each launch, from the first on in each test: what depends on
    the order then differs between launches that must agree to the bit, and a failing test fails when run alone."""
    global _launches
    if order != "vary":
        return ORDERS[order] if order in ORDERS else int(order)
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    count = _launches[1] + 1 if _launches[0] == test else 0
    _launches = (test, count)
    return count % 8


class _Range(ctypes.Structure):
    _fields_ = (("begin", ctypes.c_void_p), ("end", ctypes.c_void_p))


class _Launch(ctypes.Structure):
    """Mirrors `Launch` in runtime/launch.cpp."""

    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_size_t),
        ("order", ctypes.c_ulonglong),
        ("poison", ctypes.c_ubyte),
        ("ranges", ctypes.c_void_p),
        ("num_ranges", ctypes.c_long),
    )


def launch(
    kernel: Kernel,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    shared_bytes: int,
    arguments: Sequence[Any],
    arrays: Sequence[tuple[int, int]] | None = None,
) -> None:
    """Run the kernel over the grid and return when it is done.

    Args:
        arguments: ctypes objects, passed by value.
        arrays: (address, bytes) of all memory that the kernel may touch; None: any. Only the checked mode looks at it.

    Raises:
        EmulationError: names the block, the thread and what it did.
    """
    kernel.shared()  # brings this thread's copy of the shared variables to life
    addresses = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
    spans = [(begin, size) for begin, size in arrays or ()]
    spans += [(ctypes.addressof(a), ctypes.sizeof(a)) for a in (*arguments, addresses)]
    ranges = (_Range * len(spans))(*((begin, begin + size) for begin, size in spans))
    order = _order(_current.order)
    given = _Launch(
        ctypes.cast(kernel.entry, ctypes.c_void_p),
        ctypes.addressof(addresses),
        (ctypes.c_uint * 3)(*grid),
        (ctypes.c_uint * 3)(*block),
        shared_bytes,
        order,
        _current.poison,
        ctypes.addressof(ranges),
        -1 if arrays is None else len(spans),
    )
    message = kernel.runtime.pagedkern_host_launch(ctypes.byref(given))
    if message is not None:
        text = re.sub(r" @\{([0-9a-f]+)\}", lambda m: _source_line(kernel.path, m[1]), message.decode())
        raise EmulationError(f"{kernel.path.stem.partition('-')[0]}, order {order}: {text}")


def _source_line(path: Path, offset: str) -> str:
    """Where in the source the code at that offset of a shared object comes from, if binutils can tell."""
    tool = shutil.which("addr2line")
    if tool is None:
        return ""
    address = hex(int(offset, 16) - 1)  # of the call, not of what follows it
    found = subprocess.run([tool, "-i", "-s", "-e", str(path), address], capture_output=True, text=True).stdout.split(
        "\n"
    )
    lines = [line.partition(" (")[0] for line in found if ":" in line and "?" not in line]
    return f" at {' in '.join(lines)}" if lines else ""
