"""What the launcher hands to a GPU, and what it finds on disk: see launch_without_gpu.py, which replaces the driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


def launched(folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.backends.numba_cuda.launch_without_gpu"]
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "0", "NUMBA_CACHE_DIR": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=170)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Warning" not in done.stderr
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="module")
def twice(folder: Path) -> list[dict[str, Any]]:
    return [launched(folder), launched(folder)]


def test_a_second_process_compiles_nothing(twice: list[dict[str, Any]], folder: Path) -> None:
    """And nothing is left to Numba's own cache, which would load what anybody has put there."""
    assert twice[0]["compiled"] == ["decode", "merge", "prefill", "write", "gather", "scatter"]
    assert twice[1]["compiled"] == []
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {(path.parent.relative_to(folder), path.suffix) for path in files} == {
        (Path("pagedkern/numba_cuda"), ".bin")
    }
    assert len(files) == 6


def test_launches(twice: list[dict[str, Any]]) -> None:
    """Grids, torch's stream, and addresses with their strides, in the order of the kernels' parameters."""
    launches = {each["kernel"]: each for each in twice[1]["launches"]}
    assert list(launches) == ["decode", "merge", "prefill", "write", "gather", "scatter"]
    assert all(each["block"] == [128, 1, 1] and each["stream"] == "stream 7" for each in launches.values())
    assert [each["grid"] for each in launches.values()] == [
        [3, 1, 2],  # sequences, splits (80 tokens are one span), KV heads
        [3 + 1, 2, 1],
        [-(-25 * 2 // 32) + 3, 2, 1],
        [7, 1, 1],
        [3, 2, 1],
        [3, 2, 1],
    ]
    q, caches = ["q", 128, 32], ["k", 1024, 64, 32, "v", 1024, 64, 32]
    inputs = [*q, *caches, "table", 5, "lens", "starts", "scales", 0, 0.5, 1.0, 9]
    assert launches["decode"]["args"][: len(inputs)] == inputs
    results = ["out", 128, 32, "lse", 4, 1]
    assert launches["prefill"]["args"] == [*inputs, 3, "scales", 0, *results]
    assert launches["merge"]["args"][2:] == [1, 1, 3, 25, "starts", "scales", 0, *results]
    assert launches["merge"]["args"][:2] == launches["decode"]["args"][-2:]
    assert launches["write"]["args"][:5] == ["slots", 2, *q]
    assert launches["write"]["args"][-10:] == [*caches, "scales", "scales"]
    assert launches["gather"]["args"] == launches["scatter"]["args"]
    assert launches["gather"]["args"][16:][0] == 1024
