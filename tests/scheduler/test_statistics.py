"""What is counted is what clients asked for and what was done: once, and not what was merely tried."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest

from pagedkern.errors import OutOfBlocks
from pagedkern.scheduler import Request
from tests.scheduler.engine import Engine, prompt_of


def hit_rate(engine: Engine) -> tuple[int, int]:
    stats = engine.allocator.stats
    return stats["prefix_tokens_asked"], stats["prefix_tokens_found"]


def asked_by(requests: list[Request]) -> tuple[int, int]:
    return sum(len(r.prompt) for r in requests), sum(r.num_cached_tokens for r in requests)


@pytest.mark.parametrize("policy", ["swap", "recompute"])
def test_hit_rate_of_a_request_that_is_preempted(policy: str) -> None:
    engine = Engine(8, 4, num_host_blocks=8, policy=policy)
    requests = [engine.scheduler.add(prompt_of(length, i), max_tokens=12) for i, length in enumerate((13, 14))]
    engine.run()
    engine.finished(requests)
    assert sum(request.num_preemptions for request in requests) > 0
    assert hit_rate(engine) == (27, 0)


def test_hit_rate_of_batches_that_are_aborted() -> None:
    engine = Engine(8, 4)
    request = engine.scheduler.add(prompt_of(9), max_tokens=2)
    for _ in range(5):
        engine.scheduler.abort(engine.scheduler.schedule())
        assert request.num_cached_tokens == 0
        assert hit_rate(engine) == (0, 0)
    engine.run()
    assert hit_rate(engine) == (9, 0)
    again = engine.scheduler.add(prompt_of(9), max_tokens=2)
    for _ in range(5):
        engine.scheduler.abort(engine.scheduler.schedule())
        assert again.num_cached_tokens == 0, "it waits, as if the batch had not been made"
    engine.run()
    assert again.num_cached_tokens == 8
    assert hit_rate(engine) == (18, 8)


def test_hit_rate_of_samples_is_that_of_their_prompt() -> None:
    engine = Engine(30, 4)
    requests = [engine.scheduler.add(prompt_of(10), max_tokens=5, n=4)]
    engine.run()
    requests.append(engine.scheduler.add(prompt_of(10), max_tokens=5, n=3))
    engine.run()
    engine.finished(requests)
    assert hit_rate(engine) == asked_by(requests) == (20, 8)


def test_hit_rate_of_requests_that_are_cancelled() -> None:
    engine = Engine(8, 4, token_budget=8)
    waits, admitted, computed = (engine.scheduler.add(prompt_of(7, i), max_tokens=3) for i in range(3))
    engine.scheduler.cancel(waits)
    batch = engine.scheduler.schedule()
    engine.scheduler.cancel(admitted)
    engine.scheduler.complete(batch, engine.execute(batch))
    assert hit_rate(engine) == (7, 0), "only the third has begun: the batch computed one of its tokens"
    engine.step()
    engine.scheduler.cancel(computed)
    assert hit_rate(engine) == (7, 0)


def test_hit_rate_beside_foreign_sequences() -> None:
    """A request that is set aside, tried in vain, and dropped while it runs, is counted once."""
    engine = Engine(8, 4)
    assert engine.hold(5)
    big = engine.scheduler.add(prompt_of(14), max_tokens=2)
    small = engine.scheduler.add(prompt_of(10, 1), max_tokens=20)
    for _ in range(20):
        with suppress(OutOfBlocks):
            engine.step()
    assert engine.scheduler.stuck == [big, small]
    engine.let_go()
    engine.run()
    engine.finished([big, small])
    assert hit_rate(engine) == (24, big.num_cached_tokens + small.num_cached_tokens)


@pytest.mark.parametrize("seed", range(40))
def test_counts_of_random_runs(seed: int) -> None:
    """Preempted in any way, aborted and cancelled at any time."""
    rng = random.Random(seed)
    engine = Engine(
        rng.randint(8, 20),
        rng.randint(1, 4),
        num_host_blocks=rng.choice([0, 6, 40]),
        policy=rng.choice(["swap", "recompute", "auto"]),
        token_budget=rng.choice([3, 9, 40]),
    )
    scheduler = engine.scheduler
    requests: list[Request] = []
    begun: set[Request] = set()  # of which anything was computed for the client
    while len(requests) < 25 or scheduler.has_work:
        if len(requests) < 25 and rng.random() < 0.6:
            length, last, n = rng.randint(1, 18), rng.randint(1, 9), rng.choice([1, 1, 2, 3])
            if scheduler.most_blocks(length, max_tokens=last, n=n) <= engine.allocator.num_blocks:
                prompt = prompt_of(length, rng.randrange(2))
                requests.append(scheduler.add(prompt, max_tokens=last, n=n, eos=rng.randrange(11)))
        if rng.random() < 0.06 and (living := [r for r in requests if not r.ended]):
            scheduler.cancel(rng.choice(living))
        batch = scheduler.schedule()
        stats = scheduler.stats
        if batch.rows and rng.random() < 0.1:
            scheduler.cancel(rng.choice(batch.rows).sample.request)
        if rng.random() < 0.25:
            scheduler.abort(batch)
            continue
        engine.complete(batch, engine.execute(batch))
        begun |= {row.sample.request for row in batch.rows if row.sample.request.state != "cancelled"}
        assert scheduler.stats["tokens_scheduled"] - stats["tokens_scheduled"] == batch.num_tokens
        assert hit_rate(engine) == asked_by(list(begun))
    stats = scheduler.stats
    ended = [request.state for request in requests]
    assert stats["requests_added"] == len(requests)
    assert stats["requests_finished"] == ended.count("finished")
    assert stats["requests_cancelled"] == ended.count("cancelled")
    preemptions = sum(request.num_preemptions for request in requests)
    assert stats["preempted_by_swap"] + stats["preempted_by_recomputation"] == preemptions


@pytest.mark.parametrize("policy", ["swap", "recompute"])
@pytest.mark.parametrize("seed", range(10))
def test_tokens_recomputed_are_those_computed_twice(seed: int, policy: str) -> None:
    """Without a prefix cache, the others are each prompt once and each new token but the last."""
    rng = random.Random(seed)
    engine = Engine(14, 3, num_host_blocks=3, policy=policy, caching=False, token_budget=rng.choice([11, 40]))
    requests = [
        engine.scheduler.add(
            prompt_of(rng.randint(1, 9), i), max_tokens=rng.randint(5, 10), n=1 + i % 3, eos=[] if i % 4 else 5
        )
        for i in range(12)
    ]
    engine.run()
    engine.finished(requests)
    new = sum(len(sample.tokens) - 1 for request in requests for sample in request.samples)
    stats = engine.scheduler.stats
    assert stats["preempted_by_recomputation"] > 0
    assert stats["tokens_scheduled"] - stats["tokens_recomputed"] == new + sum(len(r.prompt) for r in requests)


@pytest.mark.parametrize("seed", range(10))
def test_aborted_batches_leave_no_trace_in_the_counts(seed: int) -> None:
    """The same requests with and without aborted batches; whoever is preempted goes to the host, so nothing is lost."""
    found = []
    for aborts in (0.0, 0.4):
        rng, chance = random.Random(seed), random.Random(seed)
        engine = Engine(16, 3, num_host_blocks=90, policy="swap", caching=False, token_budget=16)
        for i in range(10):
            engine.scheduler.add(prompt_of(rng.randint(1, 12), i), max_tokens=rng.randint(2, 12), n=1 + i % 3)
        while engine.scheduler.has_work:
            batch = engine.scheduler.schedule()
            if chance.random() < aborts:
                engine.scheduler.abort(batch)
            else:
                engine.complete(batch, engine.execute(batch))
        found.append(engine.scheduler.stats)
    assert found[0] == found[1]
    assert found[0]["preempted_by_swap"] > 0
    assert found[0]["preempted_by_recomputation"] == 0
