"""A `generate` call that is looked at after every step, on a cache with poison in every slot that nobody wrote."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from pagedkern.integrations.transformers.generation import forward
from pagedkern.integrations.transformers.run import GenerationRun, Inputs, PackedCache
from pagedkern.integrations.transformers.sampling import Sampling


class Watched(GenerationRun):
    """Audits scheduler and allocator at every step, and keeps what was planned."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.copies: list[int] = []  # blocks copied on write, step by step
        self.sizes: list[int] = []  # tokens of each step

    def next(self) -> Inputs:
        inputs = super().next()
        self.scheduler.check()
        assert self._batch is not None
        self.copies.append(sum(len(step.copies) for step in self._batch.steps))
        self.sizes.append(len(inputs.ids))
        return inputs


def watch(
    model: Any,
    prompts: list[list[int]],
    n: int = 1,
    max_new_tokens: int = 12,
    sampling: Sampling | None = None,
    eos: Collection[int] = (),
    *,
    num_blocks: int = 100,
    num_host_blocks: int = 0,
    prefix_caching: bool = False,
    **options: Any,
) -> Watched:
    """A run at its end: every sample has finished, every block has been given back."""
    cache = PackedCache(
        model.config,
        num_blocks=num_blocks,
        block_size=4,
        backend="reference",
        num_host_blocks=num_host_blocks,
        prefix_caching=prefix_caching,
    )
    like = torch.empty(1, model.config.num_key_value_heads, 1, model.config.head_dim)
    kv = cache._memory(like, like)
    for pool in (*(tensor for i in range(kv.num_layers) for tensor in kv.layer(i)), *kv._host):
        pool.fill_(torch.nan)
    model.set_attn_implementation("pagedkern")
    run = Watched(cache, prompts, n, max_new_tokens, eos, sampling or Sampling(), **options)
    with torch.inference_mode():
        while not run.finished:
            logits = forward(model, cache, run.next())
            assert torch.isfinite(logits).all()
            run.accept(logits)
    run.scheduler.check()
    assert not run.allocator.sequences
    assert run.allocator.num_free_blocks == num_blocks
    assert run.allocator.num_free_host_blocks == num_host_blocks
    return run
