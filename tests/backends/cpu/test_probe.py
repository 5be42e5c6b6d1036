"""What `probe()` says where torch, Numba or NumPy is missing or does not work. Each in an interpreter of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

GUARD = """
import json, sys
raises = json.loads(sys.argv[1])
class Guard:
    def find_spec(self, name, path=None, target=None):
        if name in raises:
            kind, message = raises[name]
            error = getattr(__import__("builtins"), kind)(message)
            if kind == "ModuleNotFoundError":
                error.name = name
            raise error
sys.meta_path.insert(0, Guard())
"""
OLD = "Numba needs NumPy 2.3 or less. Got NumPy 2.5."


def gone(name: str) -> dict[str, tuple[str, str]]:
    return {name: ("ModuleNotFoundError", f"No module named {name!r}")}


def python(code: str, raises: dict[str, tuple[str, str]]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", GUARD + code, json.dumps(raises)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("raises", "reason"),
    [
        (gone("torch"), "no module named 'torch': pip install pagedkern[cpu]"),
        (gone("numba"), "no module named 'numba': pip install pagedkern[cpu]"),
        (gone("numpy"), "no module named 'numpy': pip install pagedkern[cpu]"),
        (gone("fcntl"), "no module named 'fcntl': pip install pagedkern[cpu]"),
        (
            {"numba": ("ImportError", OLD)},
            f"numba cannot be imported (ImportError: {OLD}): pip install --upgrade pagedkern[cpu]",
        ),
        (
            {"llvmlite": ("OSError", "libllvmlite.so: no such file")},
            "numba cannot be imported (OSError: libllvmlite.so: no such file): pip install --upgrade pagedkern[cpu]",
        ),
    ],
    ids=["torch", "numba", "numpy", "fcntl", "numba-refuses", "llvmlite-breaks"],
)
def test_says_what_is_missing(raises: dict[str, tuple[str, str]], reason: str) -> None:
    code = """
from pagedkern.backends.cpu import CpuBackend
for _ in range(2):
    probe = CpuBackend().probe()
    print(json.dumps([probe.available, probe.reason]))
"""
    assert [json.loads(line) for line in python(code, raises).splitlines()] == [[False, reason]] * 2


def test_says_that_numba_may_not_compile() -> None:
    code = """
import os
os.environ["NUMBA_DISABLE_JIT"] = "1"
from pagedkern.backends.cpu import CpuBackend
print(CpuBackend().probe().reason)
import numba
numba.core.config.DISABLE_JIT = 0
print(CpuBackend().probe().available)
"""
    refused, allowed = python(code, {}).splitlines()
    assert refused == "NUMBA_DISABLE_JIT is set, so that Numba compiles nothing: unset it"
    assert allowed == "True", "nothing was imported in between that had not been compiled"


def test_auto_passes_over_a_numba_that_does_not_work() -> None:
    code = """
import torch, pagedkern
cache = torch.zeros(2, 8, 2, 16)
pagedkern.write_kv(torch.ones(1, 2, 16), torch.ones(1, 2, 16), cache, cache.clone(), torch.tensor([3]))
assert cache.sum() == 32
table, lens, q = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([4], dtype=torch.int32), torch.ones(1, 2, 16)
choice = pagedkern.explain(q, cache, cache, table, lens)
print(choice.backend, "|", choice)
print([b.reason for b in pagedkern.backends() if b.name == "cpu"])
try:
    pagedkern.paged_attention(q, cache, cache, table, lens, backend="cpu")
except pagedkern.BackendUnavailable as error:
    print(error)
"""
    auto, *passed_over, listed, refused = python(code, {"numba": ("ImportError", OLD)}).splitlines()
    assert auto.startswith("reference |")
    passed_over = [line for line in passed_over if line.startswith("  not cpu: ")]
    assert len(passed_over) == 1
    for line in (*passed_over, listed, refused):
        assert f"numba cannot be imported (ImportError: {OLD})" in line


def test_probe_compiles_nothing_and_importing_pagedkern_imports_nothing() -> None:
    code = """
import pagedkern
print("numba" in sys.modules, "torch" in sys.modules)
from pagedkern.backends.cpu import CpuBackend
print("numba" in sys.modules, "torch" in sys.modules)
print(CpuBackend().probe().available)
from pagedkern.backends.cpu import launch
print(sum(len(e.dispatcher.overloads) for e in (launch.PLAN, launch.ATTEND, launch.WRITE)))
"""
    assert python(code, {}).split() == ["False"] * 4 + ["True", "0"]
