"""torch's attention over contiguous K and V: what there is without a block table. Part of torch."""

from __future__ import annotations

from benchmarks.meter import Meter
from benchmarks.peers import without
from benchmarks.timer import Timer
from pagedkern.gpucheck import peers
from pagedkern.gpucheck.problems import CallTensors


def attention(problem: CallTensors, meter: Meter) -> Timer:
    without(problem, "quantized")
    return meter.timer(peers.contiguous(problem))
