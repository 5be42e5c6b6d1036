"""Tiny random models of several families against eager attention: windows, soft caps, sinks, scales, grouped heads."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import pagedkern.integrations.transformers as paged
from tests.integrations.models import FAMILIES, left_padded, passing, prompts, tiny

NEW_TOKENS = 24
PROMPTS = prompts((3, 30, 17))


class Expected(NamedTuple):
    model: Any
    tokens: Tensor  # [3, NEW_TOKENS]
    exact: Tensor  # float64 [3, NEW_TOKENS, vocabulary]
    error: float  # of eager attention in float32
    scale: float  # largest logit


def logits_of(model: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Greedy tokens [rows, NEW_TOKENS] and logits [rows, NEW_TOKENS, vocabulary] of the padded batch."""
    out = model.generate(
        **left_padded(PROMPTS),
        do_sample=False,
        min_new_tokens=NEW_TOKENS,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    return out.sequences[:, -NEW_TOKENS:], torch.stack(out.logits, 1)


@cache
def expected(family: str) -> Expected:
    model = tiny(family)
    tokens, logits = logits_of(model)
    double, rows = copy.deepcopy(model).double(), []
    for prompt, new in zip(PROMPTS, tokens.tolist(), strict=True):  # one by one: padding is not computed in float64
        with torch.no_grad():
            rows.append(double(torch.tensor([prompt + new[:-1]])).logits[0, -NEW_TOKENS:])
    exact = torch.stack(rows)
    best = exact.topk(2).values
    error = float((logits - exact).abs().max())
    assert (best[..., 0] - best[..., 1]).min() > 10 * error  # no near tie: equal text is a fair demand
    return Expected(model, tokens, exact, error, float(exact.abs().max()))


@pytest.mark.parametrize("block_size", [1, 8, 24])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("family", FAMILIES)
def test_agrees_with_eager(family: str, backend: str, block_size: int) -> None:
    """Both ways give eager attention's tokens, and logits at most twice as far from float64 as its own."""
    judge = expected(family)
    judge.model.set_attn_implementation("pagedkern")
    cache = paged.PagedCache(judge.model.config, max_tokens=300, block_size=block_size, backend=backend)
    tokens, logits = logits_of(judge.model, **passing(cache))
    assert torch.equal(tokens, judge.tokens)
    assert (logits - judge.exact).abs().max() <= 2 * judge.error + 1e-6 * judge.scale
    cache.allocator.check()

    result = paged.generate(
        judge.model, PROMPTS, max_new_tokens=NEW_TOKENS, eos_token_id=(), block_size=block_size, backend=backend
    )
    assert [samples[0] for samples in result.tokens] == judge.tokens.tolist()


@pytest.mark.parametrize("family", ["mistral", "qwen2", "gemma2", "gpt_oss"])
def test_the_special_features_matter(family: str) -> None:
    """The comparison would see a window, a soft cap or sinks that were left out: without them the text is another."""
    judge, plain = expected(family), tiny(family)
    for layer in plain.model.layers:
        layer.self_attn.sliding_window = None
        layer.self_attn.attn_logit_softcapping = None
        if family == "gpt_oss":
            torch.nn.init.constant_(layer.self_attn.sinks, -1e4)
    plain.config.sliding_window = 10_000
    assert not torch.equal(logits_of(plain)[0], judge.tokens)
