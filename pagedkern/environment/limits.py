"""How many processors and how much memory this process may use, by whatever limits them.

Processors are counted once in a process: they decide under which key a machine's choices are stored.
"""

from __future__ import annotations

import os
import re
import resource
from functools import cache
from pathlib import Path

from pagedkern.environment import cgroups

ROOT = cgroups.ROOT
VARIABLES = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS")
GUESSED_MEMORY = 2 << 30  # bytes, where the system does not tell


@cache
def quota() -> int | None:
    """Processors that this process's control groups let it use at a time, rounded up; None if they do not limit it."""
    return cgroups.processors()


@cache
def processors() -> int:
    """Processors that this process may use at a time: by its affinity and by its control groups."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(own, quota() or own))


@cache
def threads() -> int:
    """Threads that a computation may use: `processors`, or fewer if one of `VARIABLES` says so.

    What a program sets later (`torch.set_num_threads`) is not asked.
    """
    given = (os.environ.get(name, "").partition(",")[0].strip() for name in VARIABLES)  # a list is for nested levels
    return max(1, min([processors(), *(int(limit) for limit in given if limit.isdecimal() and int(limit))]))


def free_memory(root: Path = ROOT) -> int:
    """Bytes that can be taken now: what the system has left, what control groups and `ulimit` leave. `root` is for
    tests."""
    rooms = [_available(root), cgroups.free_memory(root)]
    rooms += [_left_by_limit(resource.RLIMIT_AS, "VmSize", root), _left_by_limit(resource.RLIMIT_DATA, "VmData", root)]
    return min((room for room in rooms if room is not None), default=GUESSED_MEMORY)


def _available(root: Path) -> int | None:
    return _kibibytes(root / "proc/meminfo", "MemAvailable")


def _left_by_limit(limit: int, field: str, root: Path) -> int | None:
    """Bytes between what this process has and a limit of it; None if there is none."""
    most = resource.getrlimit(limit)[0]
    if most == resource.RLIM_INFINITY:
        return None
    return max(0, most - (_kibibytes(root / "proc/self/status", field) or 0))


def _kibibytes(path: Path, field: str) -> int | None:
    """A line of a file that the system writes, "field: 12 kB", in bytes."""
    try:
        found = re.search(rf"^{field}:\s+(\d{{1,15}}) kB", path.read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) << 10 if found else None
