"""The model that the other examples run: a transformer of two layers with random weights, in plain torch.

It knows nothing of caches. `TinyModel` hands the queries, keys and values of each layer to `attend`, and that is the
one place where a paged KV cache comes in: `paged` writes keys and values into their slots and reads them back through
the block table; `contiguous` attends within one whole sequence, without any cache. The examples run the first and are
checked against the second.

Its tokens are syllables, so that what it babbles can be read out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pagedkern import KVCache, Step, paged_attention, write_kv
from pagedkern.cache import StepInputs

torch.set_num_threads(1)  # for so small a model several would only wait for each other

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2, 8, 2, 16
WIDTH = HEADS * HEAD_DIM
SYLLABLES = [consonant + vowel for consonant in "bdfghjklmnprstvz" for vowel in "aeiou"]

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [T, HEADS, HEAD_DIM], k and v [T, KV_HEADS, HEAD_DIM]) -> [T, HEADS, HEAD_DIM]."""


class TinyModel:
    """Grouped-query attention with rotary positions, and a feed-forward network, twice. Equal seeds, equal models."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def matrix(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=generator) / sqrt(rows)

        self.embedding = matrix(len(SYLLABLES), WIDTH)
        self.layers = [
            (
                matrix(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM),
                matrix(WIDTH, WIDTH),
                matrix(WIDTH, 2 * WIDTH),
                matrix(2 * WIDTH, WIDTH),
            )
            for _ in range(LAYERS)
        ]
        self.unembedding = matrix(WIDTH, len(SYLLABLES)) * 3

    def __call__(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Logits [T, len(SYLLABLES)] of T tokens, int64, of any number of sequences one after another."""
        x = self.embedding[tokens]
        for layer, (to_qkv, to_out, up, down) in enumerate(self.layers):
            qkv = (normalise(x) @ to_qkv).view(len(x), -1, HEAD_DIM)
            q, k, v = torch.split(qkv, [HEADS, KV_HEADS, KV_HEADS], dim=1)
            x = x + attend(layer, rotate(q, positions), rotate(k, positions), v).flatten(1) @ to_out
            x = x + F.silu(normalise(x) @ up) @ down
        return normalise(x) @ self.unembedding


def normalise(x: Tensor) -> Tensor:
    return F.rms_norm(x, (WIDTH,))


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions (arXiv:2104.09864) on x [T, heads, HEAD_DIM]."""
    angles = positions[:, None, None] * 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    (a, b), cos, sin = x.chunk(2, dim=-1), angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


# With a paged cache.


def paged(cache: KVCache, inputs: StepInputs[Any], *, sliding_window: int | None = None) -> Attend:
    """Attention of one step through the block table. Its new keys and values are written first."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k_cache, v_cache = cache.layer(layer)
        write_kv(k, v, k_cache, v_cache, inputs.slot_mapping)
        return paged_attention(
            q,
            k_cache,
            v_cache,
            inputs.block_table,
            inputs.seq_lens,
            cu_seqlens_q=inputs.cu_seqlens_q,
            max_seqlen_q=inputs.max_seqlen_q,
            sliding_window=sliding_window,
        )

    return attend


def new_cache(num_blocks: int, block_size: int, *, num_host_blocks: int = 0) -> KVCache:
    """Memory for the keys and values of `TinyModel`."""
    return KVCache(
        LAYERS,
        num_blocks,
        block_size,
        KV_HEADS,
        HEAD_DIM,
        dtype=torch.float32,
        device="cpu",
        num_host_blocks=num_host_blocks,
    )


def run(
    model: TinyModel, cache: KVCache, step: Step, texts: Iterable[Sequence[int]], *, sliding_window: int | None = None
) -> Tensor:
    """One forward pass over a step of the allocator; `texts` are the token ids of its rows, from their beginning.

    Returns the logits of every token of the step, [T, len(SYLLABLES)]. The step is still to be committed.
    """
    cache.apply(step)  # copies of blocks that are about to be written to while somebody else shares them
    inputs = cache.inputs(step)
    tokens: list[int] = []
    for row, text in enumerate(texts):
        end, count = step.seq_lens[row], step.cu_seqlens_q[row + 1] - step.cu_seqlens_q[row]
        tokens += text[end - count : end]
    return model(torch.tensor(tokens), inputs.positions, paged(cache, inputs, sliding_window=sliding_window))


# Without one: what everything is checked against.


def contiguous(sliding_window: int | None = None) -> Attend:
    """Attention within one whole sequence."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(len(q))
        distance = places[:, None] - places
        visible = (distance >= 0) & (distance < (sliding_window or len(q)))
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # heads first
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True).transpose(0, 1)

    return attend


def recompute(model: TinyModel, text: Sequence[int], *, sliding_window: int | None = None) -> Tensor:
    """The logits of every token of one text, [T, len(SYLLABLES)], with all of it computed from scratch."""
    return model(torch.tensor(text), torch.arange(len(text)), contiguous(sliding_window))


# Text, choices, checks.


def encode(text: str) -> list[int]:
    """Token ids of a text of syllables; spaces are passed over."""
    letters = text.replace(" ", "")
    return [SYLLABLES.index(letters[i : i + 2]) for i in range(0, len(letters), 2)]


def decode(tokens: Iterable[int]) -> str:
    return "".join(SYLLABLES[token] for token in tokens)


def likeliest(logits: Tensor) -> list[int]:
    """The token with the largest logit, of each row."""
    best: list[int] = logits.argmax(-1).tolist()
    return best


def draw(logits: Tensor, seed: int) -> int:
    """A token at random, by its probability. The seed alone says which: not who else is in the batch."""
    noise = torch.rand(len(logits), generator=torch.Generator().manual_seed(seed))
    return int((logits - (-noise.log()).log()).argmax())  # the Gumbel trick


def check(true: bool, claim: str) -> None:
    """Say what has been checked, or end the example with an error."""
    if not true:
        raise SystemExit(f"WRONG: {claim}")
    print(f"checked: {claim}")
