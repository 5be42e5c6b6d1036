"""The kernels compiled for real GPUs, by Numba and ptxas. benchmarks/results/numba_cuda_kernels.md shows all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
EVERY = 29  # cells of the grid; no divisor of its dimensions, so that all GPUs, kernels and some dtypes occur
PARTS = 2


@pytest.fixture(scope="module", params=range(PARTS))
def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What every n-th cell of the grid became, in a process in which Numba compiles instead of simulating."""
    command = [sys.executable, "-m", "benchmarks.numba_cuda_aot", "--json", "--every", str(EVERY * PARTS)]
    command += ["--first", str(EVERY * request.param)]
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "0"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=170)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_kernels_for_real_gpus(results: list[dict[str, Any]], record_property: Callable[[str, object], None]) -> None:
    """Nothing spills or lies in local memory, every function is inlined, K and V are read by 16 bytes."""
    assert len(results) >= 2
    [nvvm] = {result["nvvm"] for result in results}
    assert nvvm.split(".")[0] == version("cuda-bindings").split(".")[0]
    record_property("compiled by", f"NVVM {nvvm}")
    for result in results:
        cell = result["cell"]
        assert (result["spilled"], result["stack"]) == (0, 0), result
        assert result["calls"] == 0, result
        assert result["shared"] <= 48 * 1024, result
        if cell["kernel"] in ("gather", "scatter"):
            assert result["wide_loads"] >= 1, result
        elif cell["kernel"] != "merge":
            size = {"float32": 4, "float16": 2, "bfloat16": 2}.get(cell["kv_dtype"], 1)
            rows_of_16_bytes = sum(dim * size % 16 == 0 for dim in (cell["head_dim"], cell["head_dim_v"]))
            assert result["wide_loads"] >= rows_of_16_bytes, result
