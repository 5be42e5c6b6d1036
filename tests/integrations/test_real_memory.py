"""A real model where memory is short, and where beams share it: the texts that transformers' eager attention gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

import pagedkern.integrations.transformers as paged
from pagedkern.integrations.transformers.generation import forward
from pagedkern.integrations.transformers.run import GenerationRun, PackedCache, most_blocks
from pagedkern.integrations.transformers.sampling import Sampling
from pagedkern.scheduler import Costs
from tests.integrations.conftest import Real
from tests.integrations.models import left_padded, passing

pytestmark = pytest.mark.timeout(600)

CLOSE = 3e-4  # as in test_real_model.py: how far logits may be apart

BEGINNINGS = """
The capital of France is
The largest planet in the solar system is
Water boils at a temperature of
The first president of the United States was
Roses are red, violets are
Once upon a time there was a
The opposite of hot is
The sun rises in the
Two plus two equals
The author of Romeo and Juliet is
Shakespeare wrote the play
The chemical symbol for gold is
My favourite season is
The days of the week are Monday,
The months of the year are January,
One, two, three, four,
The alphabet begins with A, B, C,
A dog is an animal that
The moon goes around the
Bread is made from flour,
In the winter it is cold and in the summer it is
The Pacific is the largest
The speed of light is about
Albert Einstein was born in
The Great Wall is in
To be, or not to
An apple a day keeps the
Birds can fly because they have
A triangle has three sides and a square has
The heart pumps blood through the
Paris is to France as Rome is to
def add(a, b):
""".strip().splitlines()

NEW_TOKENS = 14
BLOCK_SIZE = 4


@dataclass(frozen=True)
class Crowd:
    """32 beginnings, and how eager attention continues them."""

    prompts: list[list[int]]
    tokens: list[list[int]]


@pytest.fixture(scope="module")
def crowd(real: Real) -> Crowd:
    prompts = [real.tokenizer(text)["input_ids"] for text in BEGINNINGS]
    inputs = left_padded(prompts, real.tokenizer.pad_token_id)
    real.model.set_attn_implementation("eager")
    out = real.model.generate(
        **inputs,
        do_sample=False,
        min_new_tokens=NEW_TOKENS,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(out.logits, 1).topk(2).values
    assert (best[..., 0] - best[..., 1]).min() > 2 * CLOSE  # no near tie: equal text is a fair demand
    return Crowd(prompts, out.sequences[:, inputs["input_ids"].shape[1] :].tolist())


# What "auto" reckons with: up to 12 tokens are cheaper to compute again, more are cheaper to swap.
EITHER = Costs(transfer_seconds=6.0, prefill_tokens_per_second=1.0)
POLICIES = {  # what is given, and whether any prompt is preempted by swap and by recomputation
    "plenty": ({}, (False, False)),
    "swap": ({"policy": "swap"}, (True, False)),
    "recompute": ({"policy": "recompute"}, (False, True)),
    "auto": ({"policy": "auto", "costs": EITHER}, (True, True)),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_32_prompts_with_memory_for_8(real: Real, crowd: Crowd, policy: str) -> None:
    """Each says what it says alone, whatever happened to its blocks meanwhile; in the end all blocks are free."""
    options, expected = POLICIES[policy]
    sizes = sorted(most_blocks(len(prompt), 1, NEW_TOKENS, BLOCK_SIZE) for prompt in crowd.prompts)
    num_blocks = sum(sizes) if policy == "plenty" else sum(sizes) // 4
    assert policy == "plenty" or sum(sizes[:7]) < num_blocks < sum(sizes[:10])
    cache = PackedCache(
        real.model.config,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_host_blocks=num_blocks if policy in ("swap", "auto") else 0,
        prefix_caching=True,
    )
    run = GenerationRun(cache, crowd.prompts, 1, NEW_TOKENS, (), Sampling(), **options)
    real.model.set_attn_implementation(paged.NAME)
    with torch.inference_mode():
        while not run.finished:
            run.accept(forward(real.model, cache, run.next()))
            run.scheduler.check()
    assert [samples[0] for samples in run.tokens] == crowd.tokens
    stats = run.scheduler.stats
    assert (stats["preempted_by_swap"] > 0, stats["preempted_by_recomputation"] > 0) == expected
    assert run.blocks_used > num_blocks - 4
    assert not run.allocator.sequences
    assert run.allocator.num_free_blocks == num_blocks
    assert run.allocator.num_free_host_blocks == run.allocator.num_host_blocks
    run.allocator.check()


# Beam search: transformers drives it, the cache forks and frees.

BEAMS = 4
BEAM_TOKENS = 16


class Noise(LogitsProcessor):
    """Adds to log probabilities what rounding could, and more."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + (torch.rand(scores.shape, generator=self.generator) * 2 - 1) * CLOSE


def beam_search(real: Real, prompts: list[list[int]], **options: Any) -> tuple[Tensor, Tensor]:
    """All beams of all prompts, best first, and their scores: [prompts * BEAMS, tokens], [prompts * BEAMS]."""
    inputs = left_padded(prompts, real.tokenizer.pad_token_id)
    out = real.model.generate(
        **inputs,
        do_sample=False,
        num_beams=BEAMS,
        num_return_sequences=BEAMS,
        max_new_tokens=BEAM_TOKENS,
        output_scores=True,
        return_dict_in_generate=True,
        **options,
    )
    return out.sequences[:, inputs["input_ids"].shape[1] :], out.sequences_scores


@dataclass(frozen=True)
class Beams:
    prompts: list[list[int]]
    tokens: Tensor
    scores: Tensor


@pytest.fixture(scope="module")
def beams(real: Real) -> Beams:
    """Eager attention's, for prompts of 5, 8 and 12 tokens whose beams noise does not change."""
    prompts = [real.tokenizer(BEGINNINGS[i])["input_ids"] for i in (0, 14, 20)]
    assert [len(prompt) for prompt in prompts] == [5, 8, 12]
    real.model.set_attn_implementation("eager")
    tokens, scores = beam_search(real, prompts)
    noisy, _ = beam_search(real, prompts, logits_processor=LogitsProcessorList([Noise(0)]))
    assert torch.equal(noisy, tokens)
    assert len({tuple(row) for row in tokens.tolist()}) == len(prompts) * BEAMS
    return Beams(prompts, tokens, scores)


@pytest.mark.parametrize(("backend", "block_size"), [("cpu", 4), ("reference", 1)])
def test_beam_search(real: Real, beams: Beams, backend: str, block_size: int) -> None:
    """The same sequences and scores as without paging; beams share blocks at every step, the prompt's to the end."""
    cache = paged.PagedCache(real.model.config, max_tokens=512, block_size=block_size, backend=backend)
    used = []  # (blocks in use, blocks of all rows counted one by one) after each step's forks and frees
    reorder = cache.reorder_cache

    def watched(index: Tensor) -> None:
        reorder(index)
        cache.allocator.check()
        rows = [seq.block_ids for seq in cache.sequences]
        used.append((cache.allocator.num_blocks - cache.allocator.num_free_blocks, sum(map(len, rows))))
        assert used[-1][0] == len({block for row in rows for block in row})

    cache.reorder_cache = watched  # type: ignore[method-assign]
    real.model.set_attn_implementation(paged.NAME)
    tokens, scores = beam_search(real, beams.prompts, **passing(cache))
    assert torch.equal(tokens, beams.tokens)
    assert (scores - beams.scores).abs().max() < 2e-5
    assert len(used) >= BEAM_TOKENS - 1
    assert all(blocks < rows for blocks, rows in used)
    for i, prompt in enumerate(beams.prompts):
        full = len(prompt) // block_size
        rows = [seq.block_ids for seq in cache.sequences[i * BEAMS : (i + 1) * BEAMS]]
        assert full
        assert len({tuple(row[:full]) for row in rows}) == 1
    cache.reset()
    assert cache.allocator.num_free_blocks == cache.allocator.num_blocks
    cache.allocator.check()
