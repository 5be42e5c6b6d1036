"""Random arrivals, cancellations, aborts and stops; every invariant is audited after each batch."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedkern.allocator import Verdict
from pagedkern.scheduler import Request
from tests.scheduler.engine import Engine, prompt_of

SETTINGS = settings(
    max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)  # time never decides


class Run:
    """An engine that is driven by plain numbers."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.requests: list[Request] = []
        self.cut: set[Request] = set()  # cancelled, or stopped early

    def act(self, kind: int, a: int, b: int) -> None:
        scheduler = self.engine.scheduler
        if kind <= 2:
            self.arrive(a, b)
        elif kind == 3:
            living = [r for r in self.requests if not r.ended]
            if living:
                victim = living[a % len(living)]
                assert scheduler.cancel(victim)
                self.cut.add(victim)
        elif kind == 4:
            batch = scheduler.schedule()
            if a % 2:
                self.engine.execute(batch)
            if b % 3 == 0 and batch.rows:
                self.cancel_in_flight(batch.rows[a % len(batch.rows)].sample.request)
            scheduler.abort(batch)
        elif kind == 5:
            batch = scheduler.schedule()
            tokens = self.engine.execute(batch)
            if b % 3 == 0 and batch.rows:
                self.cancel_in_flight(batch.rows[a % len(batch.rows)].sample.request)
            stopped = [i for i in range(len(tokens)) if a >> i & 1 and b % 4 == 0]
            self.cut |= {batch.outputs[i].request for i in stopped}
            scheduler.complete(batch, tokens, stopped=stopped)
            self.engine.firsts += [
                s.request for s in batch.outputs if len(s.tokens) == 1 and s.request not in self.engine.firsts
            ]
        else:
            for _ in range(a % 4 + 1):
                self.engine.step()
        scheduler.check()

    def arrive(self, a: int, b: int) -> None:
        scheduler = self.engine.scheduler
        length, last, n = a % 21 + 1, b % 24 + 1, (1, 1, 1, 2, 3)[(a + b) % 5]
        if scheduler.can_add(length, max_tokens=last, n=n) is Verdict.NEVER:
            return
        prompt = prompt_of(length, a % 2)
        self.requests.append(
            scheduler.add(
                prompt, max_tokens=last, n=n, eos=b % 11 if a % 3 == 0 else (), salt=(None, "tenant")[a % 7 == 0]
            )
        )

    def cancel_in_flight(self, request: Request) -> None:
        if self.engine.scheduler.cancel(request):
            self.cut.add(request)
        self.engine.scheduler.check()

    def finish(self) -> None:
        self.engine.run()
        self.engine.finished([request for request in self.requests if request not in self.cut])
        assert all(request.ended for request in self.requests)
        assert [r.id for r in self.engine.firsts] == sorted(r.id for r in self.engine.firsts)


@SETTINGS
@given(
    policy=st.sampled_from(["swap", "recompute", "auto"]),
    num_blocks=st.integers(6, 20),
    block_size=st.integers(1, 5),
    num_host_blocks=st.integers(0, 16),
    caching=st.booleans(),
    watermark=st.sampled_from([0.0, 0.1]),
    token_budget=st.integers(1, 24),
    max_num_seqs=st.integers(3, 8),
    actions=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 255), st.integers(0, 255)), max_size=40),
)
def test_any_arrivals(
    policy: str,
    num_blocks: int,
    block_size: int,
    num_host_blocks: int,
    caching: bool,
    watermark: float,
    token_budget: int,
    max_num_seqs: int,
    actions: list[tuple[int, int, int]],
) -> None:
    run = Run(
        Engine(
            num_blocks,
            block_size,
            num_host_blocks=num_host_blocks,
            caching=caching,
            watermark=watermark,
            policy=policy,
            token_budget=token_budget,
            max_num_seqs=max_num_seqs,
        )
    )
    for action in actions:
        run.act(*action)
    run.finish()


@pytest.mark.parametrize("seed", range(30))
def test_long_runs(seed: int) -> None:
    rng = random.Random(seed)
    engine = Engine(
        rng.randint(8, 24),
        rng.randint(1, 4),
        num_host_blocks=rng.choice([0, 5, 40]),
        caching=rng.random() < 0.7,
        watermark=rng.choice([0.0, 0.05]),
        policy=rng.choice(["swap", "recompute", "auto"]),
        token_budget=rng.choice([3, 9, 40]),
        max_num_seqs=rng.choice([3, 6, 50]),
    )
    run = Run(engine)
    for _ in range(150):
        run.act(rng.choice((0, 0, 0, 0, 1, 2, 3, 4, 5, 6)), rng.getrandbits(8), rng.getrandbits(8))
    run.finish()
    assert engine.num_batches > 40


def test_the_same_calls_give_the_same_batches() -> None:
    texts = []
    for _ in range(2):
        engine = Engine(12, 4, num_host_blocks=12)
        for i in range(8):
            engine.scheduler.add(prompt_of(5 + i, i % 2), max_tokens=9, n=i % 2 + 1)
        text = []
        while engine.scheduler.has_work:
            batch = engine.step()
            text.append((batch.moves, list(batch.slot_mapping), batch.block_table.tolist(), list(batch.token_ids)))
        texts.append(text)
    assert texts[0] == texts[1]
