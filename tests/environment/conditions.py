"""Running `program` where something is missing, and the caches it starts with."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from tests.environment.become import closed

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
SOMEBODY = 54321  # a user without an entry in passwd
NAMES = ("PAGEDKERN_CACHE_DIR", "NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "HOME", "TMPDIR", "LD_PRELOAD")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user or mount file systems")
needs_compiler = pytest.mark.skipif(shutil.which(os.environ.get("CC", "cc")) is None, reason="needs a C compiler")


@dataclass
class Outcome:
    """What the program did."""

    right: bool
    warnings: list[str]  # all but the notes that something is compiled
    helpers: int  # threads beside the caller's
    compiled: list[str]  # kernels that were not found on disk
    stderr: str = field(repr=False)


@lru_cache(maxsize=1)
def obstacle() -> str | None:
    """Why file systems cannot be mounted for one process alone here, as in most containers; None if they can."""
    spec = json.dumps({"mounts": [["-t", "tmpfs", "none", "/mnt"]]})
    command = [sys.executable, "-m", "tests.environment.become", spec, sys.executable, "-c", ""]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stderr.strip().rpartition("\n")[2] if done.returncode else None


def run(
    folder: Path, spec: dict[str, Any] | None = None, cwd: Path = ROOT, part: str = "", **environment: str | None
) -> Outcome:
    """The program on the problem in `folder`, under the conditions of `become`, with changes to the environment.

    `part`: "write" for all but attention.
    """
    env: dict[str, str | None] = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA_") and k not in NAMES}
    env |= {"PYTHONDONTWRITEBYTECODE": "1", "OPENBLAS_NUM_THREADS": "1", "HOME": "/nonexistent", **environment}
    command = [sys.executable, "-m", "tests.environment.program", str(folder), *part.split()]
    if spec:
        mounts = spec.keys() & {"mounts", "read_only"} or ("uid" in spec and closed(Path(sys.base_prefix)))
        if mounts and obstacle():
            pytest.skip(f"nothing can be mounted here for one process: {obstacle()}")
        command = [sys.executable, "-m", "tests.environment.become", json.dumps(spec), *command]
    done = subprocess.run(
        command, env={k: v for k, v in env.items() if v is not None}, cwd=cwd, capture_output=True, text=True,
        timeout=170, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr[-3000:]}"
    return Outcome(**json.loads(done.stdout), stderr=done.stderr)


def both(cache: Path) -> dict[str, str | None]:
    """The variables that name a cache folder, to Numba too."""
    return {"PAGEDKERN_CACHE_DIR": str(cache), "NUMBA_CACHE_DIR": str(cache)}


def shim(name: str, folder: Path) -> str:
    """A library to preload, made of `name`.c; the value of LD_PRELOAD."""
    made = folder / f"{name}.so"
    source = str(HERE / f"{name}.c")
    subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", "-o", str(made), source, "-ldl"], check=True)
    return str(made)


def files(cache: Path) -> list[Path]:
    """Every file below a folder."""
    return sorted(path for path in cache.rglob("*") if path.is_file())
