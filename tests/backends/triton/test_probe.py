"""What the backend says about where it runs, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pagedkern.backends import triton
from pagedkern.backends.base import Problem
from pagedkern.backends.triton import TritonBackend

ROOT = Path(__file__).parents[3]
PROBLEM = Problem("cuda", "bfloat16", "bfloat16", 32, 8, 128, 128, 5, 4, 4, 1, 8192)


def test_a_missing_package_is_named_with_the_command_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "find_spec", lambda name: None if name == "triton" else object())
    found = TritonBackend().probe()
    assert not found.available
    assert found.reason == "no module named 'triton': pip install 'pagedkern[triton]'"


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for version, reason in (("12.8", "no CUDA device"), (None, "built without CUDA")):
        monkeypatch.setattr("torch.version.cuda", version)
        found = TritonBackend().probe()
        assert not found.available
        assert reason in found.reason


def test_an_old_gpu_is_refused_by_its_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr("torch.version.cuda", "12.8")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "Tesla V100")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (7, 0))
    found = TritonBackend().probe()
    assert not found.available
    assert "Tesla V100 has compute capability (7, 0), needed is (8, 0)" in found.reason


def test_probing_imports_no_triton() -> None:
    program = "import sys, pagedkern.backends.triton as t; t.TritonBackend().probe(); sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_what_it_supports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any block size, head dims up to 256; tensors where its kernels run."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    backend = TritonBackend()
    assert backend.supports(PROBLEM) is None
    assert "head_dim is 264" in str(backend.supports(replace(PROBLEM, head_dim=264)))
    assert "on 'cpu'; this backend computes on 'cuda'" in str(backend.supports(replace(PROBLEM, device="cpu")))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "on 'cuda'; this backend computes on 'cpu'" in str(backend.supports(PROBLEM))
