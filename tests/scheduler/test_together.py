"""Requests that start in one call of the allocator do exactly what they would do one by one."""

from __future__ import annotations

import io
import random
from typing import Any

import pytest

from pagedkern.allocator import BlockAllocator, Retention
from pagedkern.allocator.replay import replay
from pagedkern.errors import OutOfBlocks
from pagedkern.scheduler import Batch, Scheduler


class Pair:
    """Two schedulers that are told the same; the second one starts every request by itself."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        size, blocks, host = rng.randint(1, 5), rng.randint(8, 60), rng.choice([0, 0, 30])
        caching, watermark = rng.random() < 0.85, rng.choice([0.0, 0.0, 0.1])
        budget, seats = rng.choice([5, 20, 60, 10_000]), rng.choice([2, 6, 50])
        policy = rng.choice(["swap", "recompute", "auto"])
        self.log = io.StringIO()
        self.both = [
            Scheduler(
                BlockAllocator(blocks, size, num_host_blocks=host, prefix_caching=caching, watermark=watermark),
                token_budget=budget,
                max_num_seqs=seats,
                policy=policy,
            )
            for _ in range(2)
        ]
        for scheduler in self.both:
            scheduler.allocator.record_events()
        self.both[0].allocator.log_to(self.log)
        self.foreign: list[tuple[Any, ...]] = []
        self.families = [[rng.randrange(99) for _ in range(30)] for _ in range(3)]

    def prompt(self) -> list[int]:
        """Often one that begins as others do."""
        rng = self.rng
        length = rng.randint(1, 24)
        if rng.random() < 0.5:
            return [rng.randrange(99) for _ in range(length)]
        return rng.choice(self.families)[:length] + [rng.randrange(3) for _ in range(rng.randrange(3))]

    def arrive(self) -> None:
        rng, prompt = self.rng, self.prompt()
        options: dict[str, Any] = {"max_tokens": rng.randint(1, 8), "salt": rng.choice([None, None, "a", b"a", 7])}
        special = rng.randrange(12)
        if special == 0:
            options["n"] = 2
        elif special == 1:
            options["priority"] = rng.randint(1, 3)
        elif special == 2:
            options["keys"] = [(0, 1, "picture")]
        elif special == 3:
            options["retention"] = [Retention(0, 4, 2)]
        outcomes = []
        for scheduler in self.both:
            try:
                outcomes.append(scheduler.add(prompt, **options).id)
            except ValueError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]
        for request in [r for r in self.both[1].waiting if r.id == outcomes[1]]:
            request._plain = False

    def hold(self) -> None:
        """Sequences of others come and go, and leave something in the cache."""
        if self.foreign and self.rng.random() < 0.5:
            for scheduler, seq in zip(self.both, self.foreign.pop(), strict=True):
                scheduler.allocator.free(seq)
            return
        free = self.both[0].allocator.num_free_blocks * self.both[0].allocator.block_size
        prompt = self.rng.choice([self.prompt(), list(range(max(1, free)))])
        try:
            self.foreign.append(tuple(scheduler.allocator.create(prompt) for scheduler in self.both))
        except OutOfBlocks:
            with pytest.raises(OutOfBlocks):
                self.both[1].allocator.create(prompt)
            return
        for scheduler, seq in zip(self.both, self.foreign[-1], strict=True):
            scheduler.allocator.commit(scheduler.allocator.prefill([seq]))

    def cancel(self) -> None:
        requests = [[*s.running, *s.waiting, *s.preempted] for s in self.both]
        if requests[0]:
            number = self.rng.randrange(len(requests[0]))
            assert len({s.cancel(r[number]) for s, r in zip(self.both, requests, strict=True)}) == 1

    def step(self) -> None:
        batches: list[Batch] = []
        errors: list[str] = []
        for scheduler in self.both:
            try:
                batches.append(scheduler.schedule())
            except OutOfBlocks as error:
                errors.append(str(error))
        assert len(set(errors)) == 1 if errors else len(batches) == 2
        self.compare()
        if errors:
            return
        assert told(batches[0]) == told(batches[1])
        aborts, tokens = self.rng.random() < 0.2, [self.rng.randrange(99) for _ in batches[0].outputs]
        stopped = [i for i in range(len(tokens)) if self.rng.random() < 0.1]
        for scheduler, batch in zip(self.both, batches, strict=True):
            scheduler.abort(batch) if aborts else scheduler.complete(batch, tokens, stopped=stopped)
        self.compare()
        assert self.both[0].allocator.snapshot() == self.both[1].allocator.snapshot()

    def compare(self) -> None:
        for scheduler in self.both:
            scheduler.check()
        assert state(self.both[0]) == state(self.both[1])


def told(batch: Batch) -> tuple[object, ...]:
    """All that an engine is told."""
    return (
        [(row.sample.request.id, row.sample.index, row.start, row.end) for row in batch.rows],
        [(sample.request.id, sample.index) for sample in batch.outputs],
        [[r.id for r in requests] for requests in (batch.dropped, batch.swapped_out, batch.resumed)],
        [(kind, list(src), list(dst)) for kind, src, dst in batch.moves],
        batch.block_table.tolist(),
        [list(a) for a in (batch.seq_lens, batch.cu_seqlens_q, batch.slot_mapping, batch.token_ids, batch.logits_rows)],
    )


def state(scheduler: Scheduler) -> tuple[object, ...]:
    """All that can be seen of a scheduler and its allocator."""
    allocator = scheduler.allocator
    queues = (scheduler.running, scheduler.waiting, scheduler.preempted, scheduler.stuck)
    return (
        [[(r.id, r.state, r.num_cached_tokens, r.num_preemptions) for r in queue] for queue in queues],
        [(s.id, s.state, s.num_tokens, s.num_computed_tokens, s.block_ids) for s in allocator.sequences],
        scheduler.stats,
        allocator.stats,
        allocator.events,
    )


@pytest.mark.parametrize("seed", range(60))
def test_starting_together_is_starting_one_by_one(seed: int) -> None:
    pair = Pair(random.Random(seed))
    for _ in range(25):
        for _ in range(pair.rng.choice([0, 1, 4, 12])):
            pair.arrive()
        if pair.rng.random() < 0.3:
            pair.hold()
        if pair.rng.random() < 0.3:
            pair.cancel()
        pair.step()
    if not seed % 10:
        assert replay(pair.log.getvalue().splitlines()) is None


def test_most_requests_start_together() -> None:
    """What is compared above is not one way with itself: the log of the allocator's calls is that much shorter."""
    lines = []
    for one_by_one in (False, True):
        log, scheduler = io.StringIO(), Scheduler(BlockAllocator(99, 4), token_budget=999)
        scheduler.allocator.log_to(log)
        for i in range(20):
            scheduler.add([i] * 5, max_tokens=1, salt=i % 3)._plain = not one_by_one
        assert len(scheduler.schedule().rows) == 20
        lines.append(len(log.getvalue().splitlines()))
    assert lines[1] - lines[0] == 18, "the first one starts alone, the others in one call"


@pytest.mark.parametrize("policy", ["swap", "recompute"])
def test_whoever_ran_before_is_not_started_with_those_who_wait(policy: str) -> None:
    """One that was set aside is back at its place in line, before one that ran meanwhile and was preempted."""
    allocator = BlockAllocator(12, 4, num_host_blocks=8)
    scheduler = Scheduler(allocator, policy=policy)
    hoard = allocator.create(8 * 4)
    large = scheduler.add(range(20), max_tokens=1)
    with pytest.raises(OutOfBlocks):
        scheduler.schedule()
    small = [scheduler.add([i] * 4, max_tokens=12) for i in (21, 22)]
    while not scheduler.preempted:
        batch = scheduler.schedule()
        scheduler.complete(batch, [9] * len(batch.outputs))
    assert scheduler.preempted == small[1:]
    allocator.free(hoard)
    batch = scheduler.schedule()
    assert scheduler.running == [large, *small]
    assert batch.resumed == (small[1:] if policy == "swap" else [])
    scheduler.check()
    while scheduler.has_work:
        scheduler.complete(batch, [9] * len(batch.outputs))
        scheduler.check()
        batch = scheduler.schedule()
    assert [sample.tokens for request in small for sample in request.samples] == [[9] * 12] * 2
    assert allocator.stats["prefix_tokens_asked"] == 20 + 2 * 4, "each prompt once"
