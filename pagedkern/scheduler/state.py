"""What a scheduler keeps: three queues in the order of arrival, and sums over those who run."""

from __future__ import annotations

from collections.abc import Iterable

from pagedkern.allocator import BlockAllocator
from pagedkern.scheduler.batch import Batch
from pagedkern.scheduler.costs import Costs
from pagedkern.scheduler.queue import Queue
from pagedkern.scheduler.request import DROPPED, RUNNING, Request, Stage

COUNTS = (
    "requests_added",
    "requests_finished",
    "requests_cancelled",
    "preempted_by_swap",
    "preempted_by_recomputation",
    "tokens_scheduled",
    "tokens_recomputed",
)


class SchedulerState:
    """Every request that has not ended is in one queue. Those that run arrived before those in line, but for requests
    that have been set aside: who is preempted is the last that runs, who starts or is resumed is the first in line.

    Nothing here changes while a call can still fail: calls use the allocator in a transaction first, then change this.
    """

    def __init__(
        self, allocator: BlockAllocator, token_budget: int, max_num_seqs: int, policy: str, costs: Costs
    ) -> None:
        self.allocator = allocator
        self.block_size = allocator.block_size
        self.token_budget = token_budget
        self.max_num_seqs = max_num_seqs
        self.policy = policy
        self.costs = costs
        self.running = Queue()
        self.line = Queue()  # those that have been preempted, and those that have never run
        self.aside = Queue()  # had no room even alone, beside foreign sequences: others pass them
        self.most_beside = 0  # foreign sequences held no more blocks when any of these was set aside
        self.batch: Batch | None = None  # in flight
        self.num_batches = 0
        self.num_requests = 0
        self.counts = dict.fromkeys(COUNTS, 0)
        self.refusal = (0, 0)  # the request that had no room the last time, and the blocks that there were
        # Sums over `running`.
        self.num_seqs = 0  # sequences that they have, or will have once their prompts are computed
        self.num_prefilling = 0  # requests whose prompts are being computed
        self.num_promised = 0  # blocks that these need at once when they are: each sample but one a last block

    @property
    def queues(self) -> tuple[Queue, Queue, Queue]:
        return self.running, self.line, self.aside

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def blocks_of(self, prompt: int, lengths: Iterable[int]) -> int:
        """The blocks of samples of these lengths, prompt included, that share the full blocks of their prompt."""
        shared = prompt // self.block_size
        return shared + sum(self.blocks_for(length) - shared for length in lengths)

    def queue_of(self, request: Request) -> Queue | None:
        """The queue that a request is in. O(1)."""
        for queue in (self.line, self.running, self.aside):
            if request in queue:
                return queue
        return None

    def enter(self, request: Request, stage: Stage) -> None:
        """The request is at this stage from now on, and in the queue for it. It is in none. Amortised O(1)."""
        request._stage = stage
        if stage is RUNNING:
            self.running.add(request)
            self._count([request])
        else:
            self.line.add(request)

    def run(self, requests: list[Request]) -> None:
        """Requests in the order of arrival, all of them in line or all aside, run from now on. Amortised O(1) each."""
        if requests:
            (self.line if requests[0] in self.line else self.aside).remove_all(requests)
            self.running.add_all(requests)
            for request in requests:
                request._stage = RUNNING
            self._count(requests)

    def _count(self, requests: list[Request]) -> None:
        """These requests run."""
        prefilling = [len(request._unfinished) for request in requests if request._prefilling]
        self.num_seqs += sum([len(request._unfinished) for request in requests])
        self.num_prefilling += len(prefilling)
        self.num_promised += sum(prefilling) - len(prefilling)

    def leave(self, request: Request) -> None:
        """Out of the queue that it is in. O(1)."""
        if request._stage is RUNNING:
            self.running.remove(request)
            samples = len(request._unfinished)
            self.num_seqs -= samples
            if request._prefilling:
                self.num_prefilling -= 1
                self.num_promised -= samples - 1
        else:
            (self.line if request in self.line else self.aside).remove(request)

    def prefilled(self, request: Request) -> None:
        """The prompt of a request that runs is computed."""
        request._prefilling = False
        self.num_prefilling -= 1
        self.num_promised -= len(request._unfinished) - 1

    def end(self, request: Request, stage: Stage) -> None:
        """The request has ended, its sequences have been freed."""
        self.leave(request)
        self.forget(request)
        request._stage = stage

    def lose(self, request: Request) -> None:
        """The request is preempted, and what it has computed is given up: its sequences have been freed."""
        self.leave(request)
        self.forget(request)
        request._stage = DROPPED
        request.num_preemptions += 1
        self.counts["preempted_by_recomputation"] += 1

    @staticmethod
    def forget(request: Request) -> None:
        """The request's sequences have been freed. It is in no queue. O(samples)."""
        request._prefilling, request._ahead = False, None
        for sample in request._unfinished:
            sample.seq, sample._computed = None, 0
