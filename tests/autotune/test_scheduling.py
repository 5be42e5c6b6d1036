"""Advice for the scheduler, against the scheduler itself: `simulation` knows nothing of the formula."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkern import recommend
from pagedkern.autotune import profile as profiles
from pagedkern.autotune import workloads
from pagedkern.autotune.objective import score
from pagedkern.autotune.rates import Rates, Speed
from pagedkern.autotune.scheduling import LOSS, TOKEN_BUDGETS, advise_scheduler, tokens_per_second
from pagedkern.autotune.store import device
from pagedkern.autotune.store import profiles as stored
from tests.autotune.recordings import LLAMA as RECORDED
from tests.autotune.recordings import recording
from tests.autotune.simulation import play
from tests.autotune.test_objective import fixed

LLAMA = workloads.model("llama-3-8b")
GPU = Rates(3e12, 400e12, 25e9, {16: Speed(2.4e12, 5e-6, 200e12)})
CPU = Rates(50e9, 4e11, 25e9, {16: Speed(22e9, 1.4e-4, 1.7e11)})
PLAYED = {  # memory of the cache in bytes, and requests
    "chat": (4 * 10**9, 150), "code": (8 * 10**9, 150), "retrieval": (16 * 10**9, 80),
    "parallel-sampling": (4 * 10**9, 60),
}  # fmt: skip
WITHIN = 0.03  # of the best of the sweep


@lru_cache(maxsize=256)
def played(name: str, machine: str, token_budget: int, max_num_seqs: int) -> float:
    traffic, (memory, count) = workloads.load(name), PLAYED[name]
    limits = {"token_budget": token_budget, "max_num_seqs": max_num_seqs}
    return play(traffic, LLAMA, {"gpu": GPU, "cpu": CPU}[machine], memory, 16, count, **limits).tokens_per_second


@pytest.mark.parametrize("machine", ["gpu", "cpu"])
@pytest.mark.parametrize("name", PLAYED)
def test_the_advice_is_within_3_percent_of_the_best_of_a_sweep(name: str, machine: str) -> None:
    traffic, (memory, _) = workloads.load(name), PLAYED[name]
    rates = {"gpu": GPU, "cpu": CPU}[machine]
    (one,) = score(traffic, LLAMA, rates, memory)
    found = advise_scheduler(traffic, LLAMA, rates, one)
    advised = played(name, machine, found.token_budget, found.max_num_seqs)
    n = traffic.samples
    sweep = [played(name, machine, budget, traffic.concurrency) for budget in (256, 1024, 16384)]
    sweep += [played(name, machine, 8192, seqs * n) for seqs in (4, 16) if seqs * n <= traffic.concurrency]
    assert advised >= (1 - WITHIN) * max(sweep), (found, advised, sweep)
    assert found.max_num_seqs % n == 0
    if machine == "gpu":  # where weights are what a step waits for, much less of either is too little
        fewer = max(n, found.max_num_seqs // 4 // n * n)
        assert played(name, machine, found.token_budget, fewer) < (1 - WITHIN) * max(sweep)
        if found.token_budget > 256:
            assert played(name, machine, found.token_budget // 8, found.max_num_seqs) < (1 - WITHIN) * max(sweep)


@pytest.mark.parametrize("name", ["chat", "parallel-sampling"])
def test_formula_and_scheduler_lose_the_same_by_small_limits(name: str) -> None:
    traffic, (memory, _) = workloads.load(name), PLAYED[name]
    (one,) = score(traffic, LLAMA, GPU, memory)
    best = (16384, traffic.concurrency)
    whole = played(name, "gpu", *best), tokens_per_second(traffic, LLAMA, GPU, one, *best)
    n = traffic.samples
    for limits in ((128, traffic.concurrency), (512, traffic.concurrency), (8192, 4 * n), (8192, 12 * n)):
        seen = played(name, "gpu", *limits) / whole[0]
        predicted = tokens_per_second(traffic, LLAMA, GPU, one, *limits) / whole[1]
        assert predicted == pytest.approx(seen, rel=0.08), limits


@settings(max_examples=25)
@given(
    prompt=st.integers(1, 20000), output=st.integers(1, 2000), shared=st.floats(0, 0.9),
    samples=st.sampled_from([1, 3]),
    concurrency=st.integers(3, 512), memory=st.integers(5, 80), cpu=st.booleans(),
)  # fmt: skip
def test_the_advice_is_the_least_that_gives_all_but_2_percent(
    prompt: int, output: int, shared: float, samples: int, concurrency: int, memory: int, cpu: bool
) -> None:
    traffic = fixed(prompt, output, shared, samples=samples, concurrency=concurrency)
    rates = CPU if cpu else GPU
    scores = score(traffic, LLAMA, rates, memory * 10**9)
    if not scores:
        return
    found = advise_scheduler(traffic, LLAMA, rates, scores[0])
    assert samples <= found.max_num_seqs <= max(samples, concurrency)
    assert found.max_num_seqs % samples == 0
    assert found.token_budget >= found.max_num_seqs
    assert found.token_budget in TOKEN_BUDGETS
    assert found.step_seconds > 0

    def speed(budget: int, seqs: int) -> float:
        return tokens_per_second(traffic, LLAMA, rates, scores[0], budget, seqs)

    most = speed(TOKEN_BUDGETS[-1], concurrency // samples * samples)
    assert speed(found.token_budget, found.max_num_seqs) >= (1 - 2 * LOSS) * most * (1 - 1e-6)
    speeds = [speed(budget, found.max_num_seqs) for budget in TOKEN_BUDGETS]
    assert all(b >= a * (1 - 1e-3) for a, b in pairwise(speeds))  # more is no worse


def test_a_batch_that_memory_does_not_bound_is_as_large_as_it_helps() -> None:
    """On a processor a larger batch soon gives nothing; on a GPU it does as long as weights take the time."""
    traffic = fixed(1000, 200, concurrency=512)
    most = []
    for rates in (CPU, GPU):
        (one,) = score(traffic, LLAMA, rates, 800 * 10**9)
        most.append(advise_scheduler(traffic, LLAMA, rates, one).max_num_seqs)
    assert most[0] <= 128 < most[1]


def test_it_is_part_of_a_recommendation() -> None:
    document = profiles.distil(recording(rounds=7))
    assert document is not None
    assert recommend("chat", "24GB", model=RECORDED).token_budget is None  # nothing was measured
    code = {"cpu": dict(device.code("cpu"))}
    stored.save_rates({**document, "device": dict(device.identity("cpu")), "code": code}, "shape")
    found = recommend("chat", "24GB", model=RECORDED)
    rates = profiles.from_json(document).rates
    chosen = next(s for s in found.scores if s.block_size == found.block_size)
    expected = advise_scheduler(workloads.load("chat"), RECORDED, rates, chosen)
    assert (found.token_budget, found.max_num_seqs) == (expected.token_budget, expected.max_num_seqs)
    few = replace(workloads.load("chat"), concurrency=3)
    assert (recommend(few, "24GB", model=RECORDED).max_num_seqs or 99) <= 3
