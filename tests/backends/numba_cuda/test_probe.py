"""What `probe()` says where something is missing. Each in an interpreter of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import sys
class Guard:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Guard())
import pagedkern
from pagedkern.backends import probe
found = probe("numba_cuda")
print(found.available, found.emulated, "numba.cuda" in sys.modules, found.reason)
"""


def probe(missing: str = "", **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", CODE, missing], capture_output=True, text=True, timeout=120, env=os.environ | environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("package", ["torch", "numba", "numba_cuda", "cuda.bindings"])
def test_a_missing_package_is_named(package: str) -> None:
    said = probe(package)
    assert said.startswith("False False False")
    assert repr(package) in said
    assert "pip install 'pagedkern[cuda12]'" in said


def test_without_a_gpu_numba_is_not_imported() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    said = probe(NUMBA_ENABLE_CUDASIM="0")
    assert said.startswith("False False False")
    assert "without CUDA" in said or "no NVIDIA GPU" in said


def test_the_bare_simulator_is_not_enough() -> None:
    said = probe(NUMBA_ENABLE_CUDASIM="1")
    assert said.startswith("False False True")
    assert "warp shuffles" in said
