"""Random arrivals, cancellations, aborts and stops; every invariant is audited after each batch."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedkern.allocator import Verdict
from pagedkern.errors import OutOfBlocks
from pagedkern.scheduler import Batch, Request
from tests.scheduler.engine import Engine, prompt_of

SETTINGS = settings(
    max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)  # time never decides


class Run:
    """An engine that is driven by plain numbers, beside sequences that are not the scheduler's."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.requests: list[Request] = []
        self.cut: set[Request] = set()  # cancelled, or stopped early
        self.named: list[Request] = []  # had no room even alone

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
            if batch := self.schedule():
                if a % 2:
                    self.engine.execute(batch)
                self.meanwhile(batch, a, b)
                scheduler.abort(batch)
        elif kind == 5:
            if batch := self.schedule():
                tokens = self.engine.execute(batch)
                self.meanwhile(batch, a, b)
                stopped = [i for i in range(len(tokens)) if a >> i & 1 and b % 4 == 0]
                self.cut |= {batch.outputs[i].request for i in stopped}
                self.engine.complete(batch, tokens, stopped=stopped)
        elif kind <= 8:
            for _ in range(a % 4 + 1):
                self.step()
        else:
            self.interfere(kind, a, b)
        scheduler.check()

    def arrive(self, a: int, b: int) -> None:
        scheduler = self.engine.scheduler
        length, last, n = a % 21 + 1, b % 24 + 1, (1, 1, 1, 2, 3)[(a + b) % 5]
        if scheduler.can_add(length, max_tokens=last, n=n) is Verdict.NEVER:
            return
        salt = (None, "tenant")[a % 7 == 0]
        eos = b % 11 if a % 3 == 0 else ()
        prompt = prompt_of(length, a % 2)
        self.requests.append(scheduler.add(prompt, max_tokens=last, n=n, eos=eos, salt=salt, priority=b % 4))

    def interfere(self, kind: int, a: int, b: int) -> None:
        """Foreign sequences come and go."""
        engine = self.engine
        samples = [s for r in engine.scheduler.running for s in r.samples if s.seq is not None]
        if kind == 9:
            engine.hold(a % 6 + 1)
        elif kind == 10:
            engine.compute(prompt_of(a % 21 + 1, b % 2), ("tenant", None)[b % 3 > 0])
        elif kind == 11 and samples:
            engine.pin(samples[a % len(samples)])
        elif kind == 12 and samples:
            engine.fork(samples[a % len(samples)])
        elif engine.foreign:
            engine.let_go(a % len(engine.foreign))

    def meanwhile(self, batch: Batch, a: int, b: int) -> None:
        """While a batch is in flight."""
        if b % 3 == 0 and batch.rows:
            request = batch.rows[a % len(batch.rows)].sample.request
            if self.engine.scheduler.cancel(request):
                self.cut.add(request)
        elif b % 3 == 1 and a % 3:
            self.interfere(9 + a % 5, a, b)
        self.engine.scheduler.check()

    def schedule(self) -> Batch | None:
        """A batch; None if somebody has no room even alone, which is true."""
        scheduler = self.engine.scheduler
        try:
            return scheduler.schedule()
        except OutOfBlocks as error:
            request = error.request
            assert isinstance(request, Request)
            assert not request.ended
            assert not self.engine.fits_alone(request)
            assert request in scheduler.stuck or scheduler.running == [request]
            self.named.append(request)
            return None

    def step(self) -> bool:
        batch = self.schedule()
        if batch is not None:
            self.engine.complete(batch, self.engine.execute(batch))
        return batch is not None

    def finish(self) -> None:
        """Nobody who could run waits for ever; and when the foreign sequences have gone, everybody finishes."""
        vain = 0
        while vain <= len(self.requests) and self.engine.scheduler.has_work:
            vain = 0 if self.step() else vain + 1
            assert self.engine.num_batches < 5000, "somebody is starving"
        for request in self.requests:
            assert request.ended or not self.engine.fits_alone(request)
        while self.engine.foreign:
            self.engine.let_go()
        self.engine.run()
        self.engine.finished([request for request in self.requests if request not in self.cut])
        assert all(request.ended for request in self.requests)
        firsts = [request.id for request in self.engine.firsts if request not in self.named]
        assert firsts == sorted(firsts)


@SETTINGS
@given(
    policy=st.sampled_from(["swap", "recompute", "auto"]),
    num_blocks=st.integers(6, 20),
    block_size=st.integers(1, 5),
    num_host_blocks=st.integers(0, 16),
    caching=st.booleans(),
    watermark=st.sampled_from([0.0, 0.1, 0.3]),
    token_budget=st.integers(1, 24),
    max_num_seqs=st.integers(3, 8),
    actions=st.lists(st.tuples(st.integers(0, 13), st.integers(0, 255), st.integers(0, 255)), max_size=40),
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


KINDS = (
    (0, 0, 0, 0, 1, 2, 3, 4, 5, 6),
    (0, 0, 0, 1, 2, 3, 4, 5, 6, 6, 9, 10, 11, 13, 13),
    (0, 0, 0, 1, 2, 3, 4, 5, 6, 6, 9, 10, 11, 12, 13, 13, 13),
)


@pytest.mark.parametrize("seed", range(60))
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
        run.act(rng.choice(KINDS[seed % 3]), rng.getrandbits(8), rng.getrandbits(8))
    run.finish()
    assert engine.num_batches > 25


@pytest.mark.parametrize("seed", range(35))
def test_the_blocks_that_rows_take_are_known_in_advance(seed: int) -> None:
    """Copies on write included: the allocator never has to refuse."""
    rng = random.Random(seed)
    size = rng.choice([3, 4, 5, 8])
    engine = Engine(
        rng.randint(10, 24),
        size,
        policy=rng.choice(["recompute", "swap"]),
        num_host_blocks=rng.choice([0, 0, 40]),
        token_budget=rng.choice([4, 9, 16, 40]),
        audits=False,
    )
    for i in range(10):
        length, last, n = rng.randint(1, 14), rng.randint(2, 16), rng.choice([1, 2, 3, 4])
        if engine.scheduler.can_add(length, max_tokens=last, n=n) is not Verdict.NEVER:
            engine.scheduler.add(prompt_of(length, i), max_tokens=last, n=n)
    engine.run()
    assert engine.allocator.stats["out_of_blocks"] == 0


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
