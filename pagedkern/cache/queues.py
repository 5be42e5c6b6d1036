"""Where moves run: at once on a CPU, on three streams of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

COMPUTE, OUT, IN = "compute", "out", "in"
"""The queues: kernels and copies on the device; from device to host; from host to device."""


class Queues(Protocol):
    """Work in one queue is done in order; between queues only fences order it. Nothing here waits on the host."""

    def run(self, queue: str, work: Callable[[], object]) -> None:
        """Put work at the end of a queue."""

    def record(self, queue: str) -> Any:
        """The event that everything put into the queue so far is done."""

    def wait(self, queue: str, event: Any) -> None:
        """What is put into the queue from now on starts after the event."""


class Immediate:
    """A CPU: work is done when it is put, so every fence has been passed already."""

    def run(self, queue: str, work: Callable[[], object]) -> None:
        work()

    def record(self, queue: str) -> None:
        return None

    def wait(self, queue: str, event: None) -> None:
        pass


class Streams:
    """A GPU: the caller's current stream computes, two streams of our own carry swaps, one each way, for the link
    carries both ways at a time.

    Args:
        pools: tensors on one GPU that swaps read and write. Their memory is not given to anybody else before the
            streams are done with it, even if the last reference goes while a swap is under way. (torch sees to that
            for pinned memory by itself.)
    """

    def __init__(self, pools: Sequence[Tensor]) -> None:
        self._device = pools[0].device  # with its index: the current device may be another one when swaps come
        self._pools = pools
        self._side: dict[str, torch.cuda.Stream] = {}  # made by the first swap

    def _stream(self, queue: str) -> torch.cuda.Stream:
        if queue == COMPUTE:
            return torch.cuda.current_stream(self._device)
        if queue not in self._side:
            stream = torch.cuda.Stream(self._device)
            for pool in self._pools:
                pool.record_stream(stream)
            self._side[queue] = stream
        return self._side[queue]

    def run(self, queue: str, work: Callable[[], object]) -> None:
        if queue == COMPUTE:
            work()
        else:
            with torch.cuda.stream(self._stream(queue)):
                work()

    def record(self, queue: str) -> torch.cuda.Event:
        event: torch.cuda.Event = self._stream(queue).record_event()
        return event

    def wait(self, queue: str, event: torch.cuda.Event) -> None:
        self._stream(queue).wait_event(event)
