"""Run an unchanged Hugging Face transformers model (version 5 or later) on a paged KV cache.

Importing this module registers `attn_implementation="pagedkern"`. Then either transformers drives the model, with a
`PagedCache` in place of its own cache (an argument that later versions call `cache`),

    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="pagedkern")
    model.generate(**inputs, past_key_values=PagedCache(model.config, num_blocks=512, block_size=16))

or `generate` does, with prompts of different lengths packed into one batch without padding, samples of one prompt
sharing its blocks, and prompts taking turns, by swapping or recomputation, where memory is short (`num_blocks`):

    result = generate(model, ["A haiku about rain:"], tokenizer=tokenizer, n=4, max_new_tokens=40, temperature=0.8)

Decoder-only models whose layers all do causal softmax attention, over everything or over a sliding window, are in scope
(Llama, Mistral, Qwen2 and 3, Gemma 2, gpt-oss and their relatives): grouped heads, logit soft capping, attention sinks
and windows that differ between layers included. What is out of scope raises `Unsupported` and says so.
"""

from __future__ import annotations

try:
    from pagedkern.integrations.transformers.attention import register
    from pagedkern.integrations.transformers.generation import generate
    from pagedkern.integrations.transformers.layer import NAME
    from pagedkern.integrations.transformers.paged_cache import PagedCache
    from pagedkern.integrations.transformers.result import Completion, GenerationResult
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}: pip install 'pagedkern[transformers]'", name=error.name) from error

__all__ = ["NAME", "Completion", "GenerationResult", "PagedCache", "generate", "register"]

register()
