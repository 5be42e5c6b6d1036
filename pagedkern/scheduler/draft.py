"""A batch in the making."""

from __future__ import annotations

from collections import Counter

from pagedkern.allocator import Plan, Sequence
from pagedkern.scheduler.batch import Batch
from pagedkern.scheduler.request import DROPPED, SWAPPED, WAITING, Request
from pagedkern.scheduler.state import SchedulerState


class Draft:
    """What a batch is going to change. The allocator has done it already, in a transaction; the scheduler takes part in
    `settle`, when nothing can fail any more.

    Whoever is preempted is the last that runs, whoever starts is the first in line, and no draft has both.
    """

    def __init__(self, state: SchedulerState, ident: int) -> None:
        self.state = state
        self.batch = Batch(ident)
        self.num_running = len(state.running)  # and the sums over them
        self.num_seqs = state.num_seqs
        self.num_promised = state.num_promised
        self.started: list[tuple[Request, Sequence]] = []
        self.prompts: list[tuple[Request, Sequence]] = []  # others whose prompts the batch can compute
        self.num_left = 0  # tokens of prompts that are left to compute
        self.room = 0  # blocks that are free for the next in line, watermark and promises kept; there may be more
        self._owners: Counter[int] | None = None

    # Making room.

    def stops(self, request: Request) -> None:
        """It is about to give up its blocks."""
        if self._owners is not None:
            self._owners.subtract(blocks_of(request))
        self.num_running -= 1

    @property
    def owners(self) -> Counter[int]:
        """How many of the requests that run hold each block. O(blocks of what runs), once for each batch."""
        if self._owners is None:
            self._owners = Counter()
            for number, request in enumerate(self.state.running):
                if number < self.num_running:
                    self._owners.update(blocks_of(request))
        return self._owners

    # Taking room.

    def starts(self, requests: list[Request], seqs: list[Sequence]) -> None:
        """The first sample of each has this sequence; the others are forked once it is computed."""
        samples = sum([len(request._unfinished) for request in requests])
        self.started += zip(requests, seqs, strict=True)
        self.num_left += sum([seq.num_tokens - seq.num_cached_tokens for seq in seqs])
        self.num_running += len(requests)
        self.num_seqs += samples
        self.num_promised += samples - len(requests)

    def resumes(self, request: Request, plan: Plan) -> None:
        """This plan brings its sequences back from the host."""
        samples = request._unfinished
        self.batch._add(plan)
        self.batch.resumed.append(request)
        if request._prefilling and samples[0].seq is not None:
            self.prompt(request, samples[0].seq)
            self.num_promised += len(samples) - 1
        self.num_running += 1
        self.num_seqs += len(samples)

    def prompt(self, request: Request, seq: Sequence) -> None:
        """The prompt of a request that runs, not started here, can be computed; `seq` is of its first sample."""
        self.prompts.append((request, seq))
        self.num_left += seq.num_tokens - seq.num_computed_tokens

    # In the end.

    def settle(self) -> Batch:
        """The batch is made. Raises nothing."""
        state, batch = self.state, self.batch
        for request in batch.swapped_out:
            state.leave(request)
            state.enter(request, SWAPPED)
            request.num_preemptions += 1
            state.counts["preempted_by_swap"] += 1
        for request in batch.dropped:
            state.lose(request)
            state.enter(request, DROPPED)
        for request, seq in self.started:
            stage, leader = request._stage, request._unfinished[0]
            batch._admitted.append((request, stage))
            leader.seq, leader._computed = seq, seq.num_cached_tokens
            if stage is WAITING:
                request.num_cached_tokens = leader._computed
            request._prefilling = True
        state.run([request for request, _ in self.started])
        state.run(batch.resumed)
        state.num_batches, state.batch = batch.id, batch
        return batch


def blocks_of(request: Request) -> set[int]:
    """The blocks of all its sequences. O(their number)."""
    return {b for sample in request._unfinished if sample.seq is not None for b in sample.seq.block_ids}
