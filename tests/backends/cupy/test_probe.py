"""What the backend says where something is missing. Without the emulation's launcher, as a user's process would be."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from pagedkern.backends.base import Probe, Problem
from pagedkern.backends.cupy import CupyBackend
from pagedkern.backends.cupy.launcher import CupyLauncher


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> CupyBackend:
    """The backend with its own launcher."""
    monkeypatch.setattr("pagedkern.backends.cupy.current_launcher", CupyLauncher)
    return CupyBackend()


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "pagedkern.backends.cupy.launcher.find_spec", lambda name: None if name == package else find(name)
    )


def gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0), cuda: str = "12.8") -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")


def test_without_a_gpu(real: CupyBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is built without CUDA: install" in real.probe().reason
    assert not real.probe().available
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert real.probe() == Probe(False, "torch finds no CUDA device")


def test_without_cupy(real: CupyBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch)
    without(monkeypatch, "cupy")
    assert real.probe() == Probe(False, "no module named 'cupy': pip install 'pagedkern[cuda12]'")
    gpu(monkeypatch, cuda="13.0")
    assert real.probe() == Probe(False, "no module named 'cupy': pip install 'pagedkern[cuda13]'")


def test_without_torch(real: CupyBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "torch")
    assert "pip install 'pagedkern[cuda12]'" in real.probe().reason


CODE = """
import sys
class Guard:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Guard())
import pagedkern
[found] = [info for info in pagedkern.backends() if info.name == "cupy"]
print(found.available, found.emulated, "cupy" in sys.modules, found.reason)
"""


@pytest.mark.parametrize("package", ["torch", "cupy"])
def test_a_missing_package_is_named_with_the_command(package: str) -> None:
    """In an interpreter of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "PAGEDKERN_CUPY_LAUNCHER"}
    done = subprocess.run(
        [sys.executable, "-c", CODE, package], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("False False False")
    assert f"no module named {package!r}: pip install 'pagedkern[cuda1" in done.stdout


def test_with_a_gpu(real: CupyBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch)
    pytest.importorskip("cupy", reason="no module named 'cupy': pip install 'pagedkern[cuda12]'")
    assert real.probe() == Probe(True, "a GPU, kernels compiled by NVRTC through CuPy")
    gpu(monkeypatch, capability=(7, 5))
    assert not real.probe().available
    assert "8.0" in real.probe().reason


def test_what_is_not_supported(real: CupyBackend) -> None:
    problem = Problem("cuda", "float16", "float16", 8, 8, 64, 64, 5, 1, 1, 1, 64)
    assert real.supports(problem) is None
    for change in (
        {"device": "cpu"}, {"head_dim": 264}, {"head_dim_v": 20}, {"q_dtype": "float64"}, {"kv_dtype": "x"},
        {"num_kv_heads": 70_000}, {"num_heads": 300_000},
    ):  # fmt: skip
        fields = {name: getattr(problem, name) for name in Problem.__dataclass_fields__} | change
        reason = real.supports(Problem(**fields))
        assert reason is not None
        assert str(next(iter(change.values()))) in reason
