"""Seconds of a call: the wall clock on a CPU, events around a CUDA graph on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any

import torch

MOST_GRAPHS = 128  # kept at a time; each may hold workspaces of its kernels


def cpu_seconds(run: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) / repeats


class GpuClock:
    """Times calls by events on the current stream. What launches them costs nothing if they are in a graph; calls that
    cannot be captured are launched one by one, and `refused` says why."""

    def __init__(self) -> None:
        self.refused: dict[Hashable, str] = {}
        self._graphs: dict[Hashable, Any] = {}

    def seconds(self, run: Callable[[], object], repeats: int, key: Hashable = None) -> float:
        """The mean of `repeats` calls in a row. Those of one `key` are always the same calls, and share a graph;
        without a key no graph is made."""
        graph = self._graph(run, repeats, (key, repeats)) if key is not None else None
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        if graph is not None:
            graph.replay()
        else:
            for _ in range(repeats):
                run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3 / repeats

    def _graph(self, run: Callable[[], object], repeats: int, key: tuple[Hashable, int]) -> Any:
        if key[0] in self.refused:
            return None
        if key not in self._graphs:
            if len(self._graphs) >= MOST_GRAPHS:
                self._graphs.clear()
            try:
                run()  # what is made on first use is made outside
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    for _ in range(repeats):
                        run()
            except Exception as error:  # whatever a backend or the driver raises
                self.refused[key[0]] = f"{type(error).__name__}: {error}".partition("\n")[0]
                torch.cuda.synchronize()
                return None
            graph.replay()
            self._graphs[key] = graph
        return self._graphs[key]
