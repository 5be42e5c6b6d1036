"""The allocator's bookkeeping, beside vLLM's block manager where PAGEDKERN_VLLM_PYTHON names an interpreter with it.

vLLM's figures are medians of its own process; ratios that are measured in turn come from `python -m
benchmarks.allocator --peer PYTHON`.
"""

from __future__ import annotations

import pytest

from benchmarks.allocator import CASES, HERE, run
from benchmarks.meter import Measure
from benchmarks.peers import Missing, vllm_cpu

VLLM = "vLLM's block manager"
SHARED = ("decode", "decode, no prefix cache", "admit", "hit look-up")  # what both do


@pytest.mark.parametrize("name", CASES)
def test_allocator(name: str, measure: Measure) -> None:
    case = CASES[name]
    calls = 3 if measure.size == "tiny" else case.calls
    measure.benchmark.group = f"allocator, {name}, for each {case.unit}"
    measure.benchmark.extra_info["row"] = "pagedkern"
    timer = case.make(calls + 2)
    measure(lambda: timer() / case.per, cold=False, rounds=calls)


@pytest.fixture(scope="module")
def vllm() -> dict[str, float]:
    try:
        return run(vllm_cpu.python(), HERE / "allocator_vllm.py")
    except Missing as why:
        pytest.skip(f"{VLLM}: {why}")


@pytest.mark.parametrize("name", SHARED)
def test_vllm(name: str, vllm: dict[str, float], measure: Measure) -> None:
    measure.benchmark.group = f"allocator, {name}, for each {CASES[name].unit}"
    measure.benchmark.extra_info["row"] = VLLM
    measure(lambda: vllm[name] * 1e-6, cold=False, rounds=1)
