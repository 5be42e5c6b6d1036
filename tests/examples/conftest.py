"""How the examples are run: as a user runs them, in a process of their own and from another folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
EMULATION = ("TRITON_INTERPRET", "NUMBA_ENABLE_CUDASIM", "PAGEDKERN_CUPY_LAUNCHER")  # a user sets none of these

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """run(name, *arguments, **environment) -> what the example printed and how it ended."""

    def run(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        inherited = {key: value for key, value in os.environ.items() if key not in EMULATION}
        return subprocess.run(
            [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**inherited, "PYTHONPATH": str(ROOT), **environment},
            check=False,
        )

    return run


@pytest.fixture
def lines(run: Run) -> Callable[..., list[str]]:
    """The lines that an example printed; it must have ended well."""

    def lines(name: str, *arguments: str, **environment: str) -> list[str]:
        done = run(name, *arguments, **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    return lines
