"""Which moves may overlap with what, and the fences between them.

Device and host are three queues of work, see `queues`. The rules:

1. What follows a call of `apply` on the compute queue may use any block that earlier calls moved, since the allocator
   hands blocks out again once a plan is committed: it starts after all transfers of earlier calls.
2. A transfer starts after everything that was on the compute queue when `apply` was called, and after the copies before
   it: those wrote what it reads, or read what it overwrites.
3. Within one call, moves that touch the same block are done in their order, in whatever queues they are.
4. What the kernels that follow read, of that which the call itself brings in, is there before they start. They write
   nothing that it takes out: the allocator's fences keep those blocks until the plan is committed.

So a swap out runs beside the kernels of its own batch, and is waited for by the next; a swap in that this batch does
not read, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from pagedkern.cache.queues import COMPUTE, IN, Queues


class _Transfer(NamedTuple):
    queue: str
    event: Any  # it is done
    reads: set[int]  # blocks: b of the device, ~b of the host
    writes: set[int]


class Transfers:
    """Puts moves into queues, with the fences that they need."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self._pending: list[_Transfer] = []  # that the compute queue does not wait for yet
        self._computed: Any = None  # event of the compute queue; None: it may have more work than the last one saw

    def begin(self) -> None:
        """A call of `apply` begins (rule 1)."""
        for event in {transfer.queue: transfer.event for transfer in self._pending}.values():  # the last of each queue
            self._queues.wait(COMPUTE, event)
        self._pending.clear()
        self._computed = None

    def compute(self, work: Callable[[], object], reads: Iterable[int], writes: Iterable[int]) -> None:
        """Copies within the device."""
        if self._pending:
            self._keep_order(COMPUTE, set(reads), set(writes))
        self._queues.run(COMPUTE, work)
        self._computed = None

    def transfer(self, queue: str, work: Callable[[], object], reads: Iterable[int], writes: Iterable[int]) -> None:
        """A move between device and host."""
        if self._computed is None:
            self._computed = self._queues.record(COMPUTE)
        self._queues.wait(queue, self._computed)  # rule 2
        source, target = set(reads), set(writes)
        self._keep_order(queue, source, target)
        try:
            self._queues.run(queue, work)
        finally:  # part of it may be under way even if it raises
            self._pending.append(_Transfer(queue, self._queues.record(queue), source, target))

    def _keep_order(self, queue: str, reads: set[int], writes: set[int]) -> None:
        """Rule 3."""
        for other in self._pending:
            if other.queue != queue and not (
                writes.isdisjoint(other.reads) and writes.isdisjoint(other.writes) and reads.isdisjoint(other.writes)
            ):
                self._queues.wait(queue, other.event)

    def end(self, is_read: Callable[[set[int]], bool]) -> None:
        """The call ends; `is_read` tells whether the kernels that follow read any of these blocks (rule 4)."""
        for transfer in self._pending:
            if transfer.queue == IN and is_read(transfer.writes):
                self._queues.wait(COMPUTE, transfer.event)
