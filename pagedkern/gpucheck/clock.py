"""Timing on a GPU: CUDA events around calls on a cold cache, candidates taken in turn, medians."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import torch

FLUSH_BYTES = 256 << 20  # more than the second-level cache of any GPU so far


class Clock:
    """Times callables on the current device. Between two calls the second-level cache is overwritten; the GPU is busy
    with that while the CPU issues the call, so what is measured is the GPU's time, not the launch."""

    device = "cuda"

    def __init__(self) -> None:
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self.device)

    def medians(self, calls: Mapping[str, Callable[[], object]], rounds: int = 15, warm: int = 2) -> dict[str, float]:
        """Median seconds of each call, one of each a round."""
        for call in calls.values():
            for _ in range(warm):
                call()
        torch.cuda.synchronize()
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            pairs = {name: self._one(call) for name, call in calls.items()}
            torch.cuda.synchronize()
            for name, (begin, end) in pairs.items():
                times[name].append(begin.elapsed_time(end) / 1e3)
        return {name: statistics.median(values) for name, values in times.items()}

    def _one(self, call: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._flush.fill_(1)
        begin.record()
        call()
        end.record()
        return begin, end

    def captured(self, call: Callable[[], object]) -> Callable[[], object]:
        """The call as a replay of a CUDA graph; raises what the capture raises."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay
