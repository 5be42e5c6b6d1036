"""The objective: its parts by hand, its page, and its ranking against the simulation that knows no formula."""

from __future__ import annotations

import doctest
import random
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from pagedkern.autotune import objective, workloads
from pagedkern.autotune.objective import best, score
from pagedkern.autotune.profile import distil, from_json
from pagedkern.autotune.rates import Rates, Speed
from pagedkern.autotune.workloads import Quantiles, Request, Traffic, causal_pairs
from tests.autotune.recordings import recording
from tests.autotune.simulation import play

ROOT = Path(__file__).parents[2]
LLAMA = workloads.model("llama-3-8b")
SHARE = {8: 0.70, 16: 0.80, 32: 0.86, 64: 0.885, 128: 0.895, 256: 0.90}  # of a plain read, as round figures
GPU = Rates(3e12, 400e12, 25e9, {b: Speed(3e12 * s, 5e-6, 200e12) for b, s in SHARE.items()})
PLAYED = {  # memory of the cache in bytes, and requests: enough for chance to be less than what block sizes differ by
    "chat": (4 * 10**9, 300), "code": (8 * 10**9, 400), "long-context": (32 * 10**9, 200),
    "retrieval": (16 * 10**9, 400), "parallel-sampling": (4 * 10**9, 150), "beam": (4 * 10**9, 80),
}  # fmt: skip


def fixed(prompt: int, output: int, shared: float = 0.0, **fields: object) -> Traffic:
    """Requests that are all alike."""
    parts = Quantiles((0, 1), (shared, shared)) if shared else None
    lengths = (Quantiles((0, 1), (n, n)) for n in (prompt, output))
    return Traffic("fixed", "", "", "", "", 1 << 20, *lengths, shared=parts, **fields)  # type: ignore[arg-type]


def kendall(a: list[float], b: list[float]) -> float:
    """Kendall's tau: of all pairs, those in the same order less those in the other."""
    pairs = list(combinations(range(len(a)), 2))
    signs = [(a[i] - a[j]) * (b[i] - b[j]) for i, j in pairs]
    return (sum(s > 0 for s in signs) - sum(s < 0 for s in signs)) / len(pairs)


def test_the_numbers_of_the_page_are_computed() -> None:
    done = doctest.testfile(str(ROOT / "docs" / "objective.md"), module_relative=False)
    assert done.attempted > 10
    assert done.failed == 0


@pytest.mark.parametrize("name", workloads.names())
def test_formula_and_simulation_rank_the_block_sizes_alike(name: str) -> None:
    traffic, (memory, count) = workloads.load(name), PLAYED[name]
    scores = score(traffic, LLAMA, GPU, memory)
    played = [play(traffic, LLAMA, GPU, memory, s.block_size, count) for s in scores]
    assert len(scores) == len(SHARE)
    simulated = [p.tokens_per_second for p in played]
    foretold = [s.tokens_per_second for s in scores]
    assert kendall(simulated, foretold) >= 0.8, list(zip(SHARE, simulated, foretold, strict=True))
    chosen = simulated[foretold.index(max(foretold))]
    assert chosen >= 0.995 * max(simulated)  # and what is chosen is as good as the best
    for p, s in zip(played, scores, strict=True):
        assert p.tokens_per_second == pytest.approx(s.tokens_per_second, rel=0.1)


def test_they_agree_on_recorded_rates_too() -> None:
    """A small model on the rates that are distilled from records, which differ from a GPU's in every respect."""
    document = distil(recording())
    assert document is not None
    rates, smol, traffic = from_json(document).rates, workloads.model("smollm2-135m"), workloads.load("chat")
    scores = score(traffic, smol, rates, 1_500_000_000)
    simulated = [play(traffic, smol, rates, 1_500_000_000, s.block_size, 300).tokens_per_second for s in scores]
    assert kendall(simulated, [s.tokens_per_second for s in scores]) >= 0.8


def test_tau() -> None:
    assert kendall([1, 2, 3], [4, 5, 6]) == 1
    assert kendall([1, 2, 3], [6, 5, 4]) == -1
    assert kendall([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(4 / 6)


@pytest.mark.parametrize("b", [1, 8, 24, 256])
@pytest.mark.parametrize("n", [1, 4])
def test_blocks_are_those_of_a_loop_over_steps(b: int, n: int) -> None:
    rng = random.Random(b)
    for _ in range(20):
        r = Request(rng.randrange(1, 600), rng.randrange(1, 300), 0)
        whole = r.prompt // b if n > 1 else 0
        slow = sum(whole + n * (-(-(r.prompt + t) // b) - whole) for t in range(r.output))
        assert objective._sample_blocks(n, b)(r) == slow
        assert objective._sum_tokens(fixed(1, 1, samples=n), r) == sum(r.prompt + n * t for t in range(r.output))
    assert causal_pairs(3, 7) == 4 + 5 + 6 + 7


def test_windows_bound_what_is_read_and_nothing_else() -> None:
    mistral = workloads.model("mistral-7b")
    wide = replace(mistral, sliding_window=None, window_layers=0)
    long, short = fixed(6000, 100), fixed(600, 100)
    near, far = (score(long, m, GPU, 8 * 10**9, [16])[0] for m in (mistral, wide))
    assert near.concurrency == far.concurrency
    assert near.attention_seconds < 0.7 * far.attention_seconds
    assert score(short, mistral, GPU, 8 * 10**9, [16]) == score(short, wide, GPU, 8 * 10**9, [16])


def test_a_shared_beginning_is_held_and_computed_once() -> None:
    alone, shared = (score(fixed(1000, 100, s), LLAMA, GPU, 2 * 10**9)[0] for s in (0.0, 0.8))
    assert alone.cached_tokens == 0
    assert shared.cached_tokens == pytest.approx(800, abs=1)
    assert shared.concurrency > 2.5 * alone.concurrency
    assert shared.prefill_seconds < 0.3 * alone.prefill_seconds


def test_large_blocks_lose_prefix_hits() -> None:
    hits = {s.block_size: s.cached_tokens for s in score(fixed(1000, 100, 0.255), LLAMA, GPU, 2 * 10**9)}
    assert hits[8] == pytest.approx(248, abs=1)
    assert hits[128] == pytest.approx(128, abs=1)
    assert hits[256] == 0


def test_families_share_among_themselves_only() -> None:
    few, many = (score(fixed(1000, 100, 0.8, families=f), LLAMA, GPU, 2 * 10**9)[0] for f in (1, 1000))
    assert many.cached_tokens < 0.1 * few.cached_tokens


def test_forks_copy_a_block_that_is_begun() -> None:
    scores = {s.block_size: s for s in score(fixed(96, 100, samples=4), LLAMA, GPU, 2 * 10**9)}
    assert scores[32].copy_seconds == 0  # the prompt ends with a block
    assert scores[64].copy_seconds == pytest.approx(3 * 2 * 64 * LLAMA.token_bytes / 3e12)
    assert scores[64].copy_seconds < scores[128].copy_seconds


def test_the_beams_of_a_search_meet() -> None:
    """The means of the ancestors against a search played out."""
    rng, steps, runs = random.Random(0), 40, 3000
    total = [0] * (steps + 1)
    for _ in range(runs):
        parents = []
        for _ in range(steps):
            dead = rng.randrange(4)
            alive = [i for i in range(4) if i != dead]
            parents.append([rng.choice(alive) if i == dead else i for i in range(4)])
        lines = set(range(4))
        total[0] += len(lines)
        for age, chosen in enumerate(reversed(parents), 1):
            lines = {chosen[i] for i in lines}
            total[age] += len(lines)
    foretold = objective._lineages(4, 1)
    for age in (0, 1, 2, 5, 10, 20, 40):
        assert foretold(age) == pytest.approx(total[age] / runs, rel=0.03)
    assert objective._lineages(4, 0)(1000) == 4  # nobody is forked: they never met


def test_concurrency_has_a_limit() -> None:
    few = score(fixed(100, 100, concurrency=8, samples=4), LLAMA, GPU, 8 * 10**9)
    assert all(s.concurrency == 8 for s in few)


def test_what_does_not_fit_is_left_out() -> None:
    memory = 1100 * LLAMA.token_bytes  # 1,100 slots
    assert [s.block_size for s in score(fixed(1000, 50), LLAMA, GPU, memory)] == [8, 16, 32, 64]
    assert score(fixed(2000, 50), LLAMA, GPU, memory) == []
    assert best([]) is None


def test_of_equals_the_smallest_block_is_the_best() -> None:
    (one,) = score(fixed(1000, 50), LLAMA, GPU, 8 * 10**9, [32])
    assert best([replace(one, block_size=64), one, replace(one, block_size=128)]) == one


@pytest.mark.parametrize("num_blocks", [78, 90, 110])
def test_in_little_memory_one_request_runs(num_blocks: int) -> None:
    lengths = [workloads.Quantiles((0, 1), (n, n)) for n in (1000, 200)]
    traffic = workloads.Traffic("one", "", "", "", "", limit=4096, prompt=lengths[0], output=lengths[1])
    memory = num_blocks * 16 * LLAMA.token_bytes
    (alone,) = score(traffic, LLAMA, GPU, memory, [16])
    assert alone.concurrency == pytest.approx(1, rel=0.2)
    played = play(traffic, LLAMA, GPU, memory, 16, 20)
    assert alone.tokens_per_second == pytest.approx(played.tokens_per_second, rel=0.15)


def test_the_simulation_counts_what_it_says() -> None:
    """One request at a time: every number can be told beforehand."""
    played = play(replace(fixed(100, 11), concurrency=1), LLAMA, GPU, 10**9, 16, 10)
    assert (played.outputs, played.computed, played.copies, played.swapped) == (11, 1000, 0, 0)
    assert (played.steps, played.tokens, played.decoding) == (77, 77, 70)  # of 7 requests, first tokens with prompts
    read = 7 * sum(range(101, 111)) * LLAMA.token_bytes / (3e12 * SHARE[16])
    other = 77 * LLAMA.weight_bytes / 3e12 + 70 * 2 * LLAMA.num_weights / 400e12 + 77 * LLAMA.num_layers * 5e-6
    assert played.seconds == pytest.approx(read + other)
    pairs = LLAMA.num_layers * 4 * LLAMA.num_heads * LLAMA.head_dim * causal_pairs(0, 100) / 200e12
    assert played.prompt_seconds == pytest.approx(10 * (100 * 2 * LLAMA.num_weights / 400e12 + pairs))
