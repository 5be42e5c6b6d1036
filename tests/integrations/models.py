"""Tiny random models of several families, made from configurations: no download, a few milliseconds a step."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 97
PAD, BOS, EOS = 0, 1, 2

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.4,  # large, for texts that do not repeat themselves
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}

FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"head_dim": 16}),
    "mistral": (MistralConfig, MistralForCausalLM, {"head_dim": 24, "sliding_window": 5}),  # a window in every layer
    "qwen2": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},  # a window in the second layer
    ),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32}),
    "gemma2": (
        Gemma2Config,
        Gemma2ForCausalLM,
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 10,  # the scale is not head_dim ** -0.5
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 30.0,
            "sliding_window": 6,  # in the first layer
            "tie_word_embeddings": False,  # tied random embeddings repeat the last token for ever
        },
    ),
    "gpt_oss": (
        GptOssConfig,
        GptOssForCausalLM,
        {  # with sinks
            "head_dim": 16,
            "sliding_window": 8,  # in the first layer
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
            "experts_implementation": "eager",
        },
    ),
}


def tiny(family: str, seed: int = 1, **changes: Any) -> Any:
    """A random model in float32, with eager attention."""
    config, model, special = FAMILIES[family]
    torch.manual_seed(seed)
    return model(config(**{**_COMMON, **special, **changes}, attn_implementation="eager")).eval()


def passing(cache: Any) -> dict[str, Any]:
    """The argument that hands a cache to a model: named `past_key_values` in earlier versions of transformers."""
    accepted = inspect.signature(LlamaForCausalLM.forward).parameters
    return {"cache" if "cache" in accepted else "past_key_values": cache}


def prompts(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    """Random token ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def left_padded(rows: list[list[int]], pad: int = PAD) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask`, [rows, longest]."""
    longest = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[pad] * (longest - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows]),
    }
