"""torch's flex_attention over its paged cache of pages of 128 tokens. Part of torch, and experimental.

Compiling it takes half a minute for each problem, so only some are: the first of each kind.
"""

from __future__ import annotations

import torch

from benchmarks.meter import Meter
from benchmarks.peers import Missing, without
from benchmarks.timer import Timer
from pagedkern.gpucheck import peers
from pagedkern.gpucheck.problems import CallTensors

COMPILED_FOR = ("8 x 2048", "prompt of 1024", *peers.COMPILED_FOR)
COMPILED_FROM = 1 << 20  # bytes of K and V: a tiny problem is not worth it


def attention(problem: CallTensors, meter: Meter) -> Timer:
    without(problem, "quantized")
    shape = problem.shape
    large = shape.kv_bytes >= COMPILED_FROM
    if large and (shape.name not in COMPILED_FOR or shape.q_dtype == "float16"):
        raise Missing("not compiled for this problem, to save time")
    torch.compiler.reset()  # else the sizes of the next problem would be compiled as unknown ones
    call = peers.flex_paged(problem, compiled=large)

    def attend() -> None:
        with torch.inference_mode():
            call()

    return meter.timer(attend)
