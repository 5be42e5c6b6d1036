"""Greedy text of a real model through the paged cache, against transformers' eager attention: equal token for token.

Each configuration writes 100 tokens for each of three prompts of different lengths. To read the model's weights once
for all of them, they run side by side (see `fan.py`); what each cache is asked to do is the same as alone.
"""

from __future__ import annotations

import itertools

import pytest
import torch

import pagedkern.integrations.transformers as paged
from pagedkern.integrations.transformers import generation
from pagedkern.integrations.transformers.run import GenerationRun, Inputs, PackedCache, most_blocks
from pagedkern.integrations.transformers.sampling import Sampling
from tests.integrations.conftest import NEW_TOKENS, Judge
from tests.integrations.fan import Fan
from tests.integrations.models import passing

pytestmark = pytest.mark.timeout(600)  # seconds; half a minute each, on a core that does nothing else

SIZES = (1, 8, 16, 24, 256)
BACKENDS = ("reference", "cpu")
CONFIGURATIONS = list(itertools.product(BACKENDS, SIZES))

# The logits of this model lie between -20 and 30; float32 sums of them in another order differ by a few 1e-5.
CLOSE = 3e-4


def test_the_texts_are_decided(judge: Judge) -> None:
    """No near tie: the likeliest token leads by more than logits may differ, so equal text is a fair demand."""
    best = judge.logits.topk(2).values
    assert (best[..., 0] - best[..., 1]).min() > 2 * CLOSE
    assert (judge.logits.argmax(-1) == judge.tokens).all()
    assert len({len(prompt) for prompt in judge.prompts}) == 3


def test_generate(judge: Judge) -> None:
    """The loop of `generate`, for every backend and block size: equal tokens, close logits, every block given back."""
    batches = []
    for backend, size in CONFIGURATIONS:
        blocks = sum(most_blocks(len(prompt), 1, NEW_TOKENS, size) for prompt in judge.prompts)
        cache = PackedCache(judge.model.config, num_blocks=blocks, block_size=size, backend=backend)
        batches.append(GenerationRun(cache, judge.prompts, 1, NEW_TOKENS, (), Sampling()))
    worst = [0.0] * len(batches)
    judge.model.set_attn_implementation(paged.NAME)
    with torch.inference_mode():
        for step in range(NEW_TOKENS):
            inputs = [batch.next() for batch in batches]
            sizes = [len(x.ids) for x in inputs]
            offsets = itertools.accumulate(sizes, initial=0)
            together = Inputs(
                [token for x in inputs for token in x.ids],
                [position for x in inputs for position in x.positions],
                [offset + last for offset, x in zip(offsets, inputs, strict=False) for last in x.last],
            )
            fan = Fan([batch.cache for batch in batches], 2, sizes)
            logits = generation.forward(judge.model, fan, together).split([len(x.last) for x in inputs])
            for i, (batch, part) in enumerate(zip(batches, logits, strict=True)):
                worst[i] = max(worst[i], float((part - judge.logits[:, step]).abs().max()))
                batch.accept(part)
    for configuration, batch, error in zip(CONFIGURATIONS, batches, worst, strict=True):
        assert [samples[0] for samples in batch.tokens] == judge.tokens.tolist(), configuration
        assert error < CLOSE, configuration
        assert batch.finished, configuration
        batch.allocator.check()
        assert batch.allocator.num_free_blocks == batch.allocator.num_blocks, configuration


def test_model_generate(judge: Judge) -> None:
    """`model.generate` with a `PagedCache`, left-padded: every block size on `cpu`, one on `reference`."""
    configurations = [*(("cpu", size) for size in SIZES), ("reference", 16)]
    caches = [
        paged.PagedCache(judge.model.config, max_tokens=1024, block_size=size, backend=backend)
        for backend, size in configurations
    ]
    count, longest = len(caches), judge.input_ids.shape[1]
    judge.model.set_attn_implementation(paged.NAME)
    out = judge.model.generate(
        judge.input_ids.repeat(count, 1),
        attention_mask=judge.attention_mask.repeat(count, 1),
        **passing(Fan(caches, 0, [3] * count)),
        do_sample=False,
        min_new_tokens=NEW_TOKENS,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens, logits = out.sequences[:, longest:].split(3), torch.stack(out.logits, 1).split(3)
    for i, (configuration, cache) in enumerate(zip(configurations, caches, strict=True)):
        assert torch.equal(tokens[i], judge.tokens), configuration
        assert (logits[i] - judge.logits).abs().max() < CLOSE, configuration
        lengths = [len(prompt) + NEW_TOKENS - 1 for prompt in judge.prompts]  # the last token is never fed back
        assert [seq.num_tokens for seq in cache.sequences] == lengths, configuration
        cache.allocator.check()


def test_generate_as_a_user_calls_it(judge: Judge) -> None:
    """The whole of `generate`, with a tokenizer and the model's own end of text."""
    judge.model.set_attn_implementation("eager")
    result = paged.generate(judge.model, judge.prompts, tokenizer=judge.tokenizer, max_new_tokens=12)
    assert judge.model.config._attn_implementation == "eager"
    eos = judge.model.generation_config.eos_token_id
    for expected, (completion,) in zip(judge.tokens.tolist(), result.completions, strict=True):
        stop = expected.index(eos) + 1 if eos in expected[:12] else 12
        assert completion.tokens == expected[:stop]
        assert completion.finish_reason == ("stop" if expected[stop - 1] == eos else "length")
        assert completion.text == judge.tokenizer.decode(expected[:stop], skip_special_tokens=True)
    assert {completion.finish_reason for (completion,) in result.completions} == {"stop", "length"}
    assert "Paris" in result.texts[0][0]
