"""`generate` with too little memory for all prompts: who waits, is swapped or is computed again says the same."""

from __future__ import annotations

from typing import Any

import pytest

from pagedkern.integrations.transformers import generate
from pagedkern.integrations.transformers.sampling import Sampling
from pagedkern.scheduler import Costs
from tests.integrations.models import prompts, tiny
from tests.integrations.watched import watch

PROMPTS = prompts((9, 4, 14, 7, 11, 5, 8, 13))  # 12 new tokens: 4 to 7 blocks of 4 tokens for each, 42 for all
NUM_BLOCKS = 15
# What makes "auto" choose now this, now that, for 1 and 3 samples: few tokens are computed again, many are swapped.
EITHER = {
    n: Costs(bytes_per_block=1, transfer_seconds=seconds, prefill_tokens_per_second=1.0)
    for n, seconds in ((1, 4.0), (3, 2.0))
}
SAMPLING = Sampling(temperature=0.8, top_p=0.9, seed=3)
KINDS = {  # what the policy is given: (preempted by swap?, by recomputation?)
    "swap": ({"policy": "swap", "num_host_blocks": 60}, (True, False)),
    "a small host": ({"policy": "swap", "num_host_blocks": 4}, (True, True)),
    "recompute": ({"policy": "recompute", "num_host_blocks": 60}, (False, True)),
    "auto": ({"policy": "auto", "num_host_blocks": 60}, (True, True)),
}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("gemma2")  # with sliding windows and soft caps


@pytest.fixture(scope="module")
def undisturbed(model: Any) -> dict[int, list[list[list[int]]]]:
    """The texts with memory for everybody, for 1 and 3 samples of each prompt."""
    runs = {n: watch(model, PROMPTS, n, sampling=SAMPLING) for n in (1, 3)}
    for run in runs.values():
        assert not run.scheduler.stats["preempted_by_swap"] + run.scheduler.stats["preempted_by_recomputation"]
        assert run.sizes[0] == sum(map(len, PROMPTS))
        assert len(run.sizes) == 12
    return {n: run.tokens for n, run in runs.items()}


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_is_said(model: Any, undisturbed: Any, kind: str, n: int, prefix_caching: bool) -> None:
    """Samples keep their generators and their past, whatever happens to their blocks."""
    options, expected = KINDS[kind]
    run = watch(
        model,
        PROMPTS,
        n,
        sampling=SAMPLING,
        num_blocks=NUM_BLOCKS,
        prefix_caching=prefix_caching,
        costs=EITHER[n],
        **options,
    )
    assert run.tokens == undisturbed[n]
    stats = run.scheduler.stats
    assert (stats["preempted_by_swap"] > 0, stats["preempted_by_recomputation"] > 0) == expected
    assert run.blocks_used <= NUM_BLOCKS
    if stats["preempted_by_recomputation"] and not prefix_caching:
        assert stats["tokens_recomputed"] > 0


@pytest.mark.parametrize("budget", [1, 5, 16])
@pytest.mark.parametrize("n", [1, 3])
def test_prompts_in_chunks(model: Any, undisturbed: Any, n: int, budget: int) -> None:
    """A batch of few tokens computes parts of prompts, some of them without an output, and mixes them with decoding."""
    run = watch(model, PROMPTS, n, sampling=SAMPLING, num_blocks=200, max_batch_tokens=budget)
    assert run.tokens == undisturbed[n]
    assert max(run.sizes) == budget
    assert run.scheduler.stats["preempted_by_recomputation"] == 0


def test_chunks_and_preemptions_at_once(model: Any, undisturbed: Any) -> None:
    run = watch(
        model, PROMPTS, 3, sampling=SAMPLING, num_blocks=NUM_BLOCKS, max_batch_tokens=7, **KINDS["a small host"][0]
    )
    assert run.tokens == undisturbed[3]
    assert run.scheduler.stats["preempted_by_swap"] > 0


def test_later_prompts_share_what_earlier_ones_have_computed(model: Any) -> None:
    """Prompts with a common beginning that are taken up one after the other, and the same without a prefix cache."""
    (beginning,) = prompts((12,), seed=7)
    given = [beginning + end for end in prompts((3, 5, 1, 2), seed=8)]
    runs = [watch(model, given, max_batch_tokens=15, prefix_caching=caching) for caching in (True, False)]
    assert runs[0].tokens == runs[1].tokens
    assert [[request.num_cached_tokens for request in run.requests] for run in runs] == [[0, 12, 12, 12], [0] * 4]
    assert sum(runs[0].sizes) == sum(runs[1].sizes) - 3 * 12
    assert runs[0].blocks_shared == 3
    assert runs[1].blocks_shared == 0


def test_the_figures_of_a_result(model: Any) -> None:
    """Through `generate`: the host pool is there by default if, and only if, it can be of use."""
    options = {"max_new_tokens": 12, "eos_token_id": (), "block_size": 4, "backend": "reference"}
    plenty = generate(model, PROMPTS, **options)
    assert (plenty.preempted_by_swap, plenty.preempted_by_recomputation, plenty.tokens_recomputed) == (0, 0, 0)
    by_kind = {
        policy: generate(model, PROMPTS, num_blocks=NUM_BLOCKS, policy=policy, prefix_caching=False, **options)
        for policy in ("swap", "recompute", "auto")
    }
    for policy, result in by_kind.items():
        assert result.tokens == plenty.tokens
        assert (result.preempted_by_swap > 0) == (policy != "recompute")  # this model is cheap to swap
        assert (result.preempted_by_recomputation > 0) == (policy == "recompute")
        assert (result.tokens_recomputed > 0) == (policy == "recompute")
        assert NUM_BLOCKS - 3 <= result.blocks_used <= NUM_BLOCKS
        assert result.new_tokens == 12 * len(PROMPTS)
        assert result.decode_tokens < plenty.decode_tokens
    fast = Costs(prefill_tokens_per_second=1e9)
    other = generate(model, PROMPTS, num_blocks=NUM_BLOCKS, costs=fast, **options)
    assert other.tokens == plenty.tokens
    assert other.preempted_by_swap == 0
    assert other.preempted_by_recomputation > 0


def test_a_prompt_that_needs_the_whole_pool(model: Any) -> None:
    """The others wait for it, or are preempted for it; it is not refused."""
    options = {"max_new_tokens": 12, "eos_token_id": (), "block_size": 4, "backend": "reference"}
    whole = -(-(14 + 11) // 4)
    result = generate(model, PROMPTS, num_blocks=whole, **options)
    assert result.tokens == generate(model, PROMPTS, **options).tokens
    assert result.blocks_used == whole
