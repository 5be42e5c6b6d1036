"""What a scheduler keeps: three queues in the order of arrival, and how to take changes back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from pagedkern.allocator import BlockAllocator
from pagedkern.scheduler.batch import Batch
from pagedkern.scheduler.costs import Costs
from pagedkern.scheduler.journal import Journal
from pagedkern.scheduler.request import Request, Stage

COUNTS = (
    "requests_added",
    "requests_finished",
    "requests_cancelled",
    "preempted_by_swap",
    "preempted_by_recomputation",
    "tokens_scheduled",
    "tokens_recomputed",
)


class State:
    """Every request that has not ended is in one queue, and all that run arrived before all that are preempted, and
    those before all that wait: who is preempted is the last that runs, who is resumed is the first that was preempted.
    """

    def __init__(
        self, allocator: BlockAllocator, token_budget: int, max_num_seqs: int, policy: str, costs: Costs
    ) -> None:
        self.allocator = allocator
        self.token_budget = token_budget
        self.max_num_seqs = max_num_seqs
        self.policy = policy
        self.costs = costs
        self.running: list[Request] = []
        self.preempted: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.batch: Batch | None = None  # in flight
        self.num_batches = 0
        self.num_requests = 0
        self.counts = dict.fromkeys(COUNTS, 0)
        self.refusal = (0, 0)  # the request that had no room the last time, and the blocks that there were
        self.journal = Journal()

    @contextmanager
    def atomic(self) -> Iterator[None]:
        """A context for several operations: if one raises, allocator and scheduler are as they were before."""
        counts = dict(self.counts)
        try:
            with self.allocator.transaction():
                yield
        except BaseException:
            self.journal.rollback()
            self.counts = counts
            raise
        finally:
            self.journal.clear()

    @property
    def num_seqs(self) -> int:
        """Sequences that the running requests have, or will have once their prompts are computed."""
        return sum(len(request._unfinished) for request in self.running)

    @property
    def num_promised(self) -> int:
        """Blocks that requests whose prompts are being computed need at once when they are: each sample but one a last
        block of its own. O(requests that run).
        """
        return sum(len(request._unfinished) - 1 for request in self.running if request._prefilling)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.allocator.block_size)

    def blocks_of(self, prompt: int, lengths: list[int]) -> int:
        """The blocks of samples of these lengths, prompt included, that share the full blocks of their prompt."""
        shared = prompt // self.allocator.block_size
        return shared + sum(self.blocks_for(length) - shared for length in lengths)

    def enter(self, request: Request, stage: Stage) -> None:
        """The request's place from now on. It leaves the queue that it was in; in the new one it keeps its rank."""
        self.leave(request)
        self.journal.set(request, "_stage", stage)
        if stage is Stage.RUNNING:
            self.journal.set(self, "running", sorted((*self.running, request), key=_arrival))
        elif stage is Stage.SWAPPED or stage is Stage.DROPPED:
            self.journal.set(self, "preempted", sorted((*self.preempted, request), key=_arrival))
        elif stage is Stage.WAITING:
            self.waiting.appendleft(request)
            self.journal.append((self.waiting.popleft, ()))

    def leave(self, request: Request) -> None:
        """Out of the queue that it is in."""
        stage = request._stage
        if stage is Stage.RUNNING:
            self.journal.set(self, "running", [r for r in self.running if r is not request])
        elif stage is Stage.SWAPPED or stage is Stage.DROPPED:
            self.journal.set(self, "preempted", [r for r in self.preempted if r is not request])
        elif stage is Stage.WAITING and request in self.waiting:
            index = self.waiting.index(request)
            del self.waiting[index]
            self.journal.append((self.waiting.insert, (index, request)))

    def give_up(self, request: Request) -> None:
        """Free all that a request has in the allocator."""
        for sample in request.samples:
            if sample.seq is not None:
                self.allocator.free(sample.seq)
                self.journal.set(sample, "seq", None)
            self.journal.set(sample, "_computed", 0)
        self.journal.set(request, "_prefilling", False)


def _arrival(request: Request) -> int:
    return request.id
