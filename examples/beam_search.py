"""Beam search: four hypotheses share all the blocks that they have in common.

In each step the four best continuations survive. Each is a fork of the hypothesis that it continues; then all the old
ones are freed, and with them the blocks that no survivor needs. Nothing is copied but the last block of a hypothesis
that goes on in two ways, when it is not full.

Prints the hypotheses, and the blocks that they take, shared and not. They and their scores must be those of a beam
search that keeps no cache and computes everything from scratch.

    pip install 'pagedkern[cpu]'
    python examples/beam_search.py
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from tiny_model import SYLLABLES, TinyModel, check, decode, encode, new_cache, recompute, run
from torch import Tensor

from pagedkern import BlockAllocator

NUM_BLOCKS, BLOCK_SIZE, WIDTH, NEW_TOKENS = 64, 4, 4, 12
PROMPT = encode("ta le no so mi re do va fa ze ga hi ke pu ro bu no da")


class Choice(NamedTuple):
    """Hypothesis number `parent` goes on with `token`, and is then worth `score`, the sum of log probabilities."""

    parent: int
    token: int
    score: float


def best(scores: list[float], logits: Tensor) -> list[Choice]:
    """The WIDTH best continuations, best first, of hypotheses with these scores; logits: one row for each."""
    total = torch.tensor(scores)[:, None] + logits.log_softmax(-1)
    top = total.flatten().topk(WIDTH)
    places = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [Choice(place // len(SYLLABLES), place % len(SYLLABLES), score) for place, score in places]


def main() -> None:
    model, cache = TinyModel(), new_cache(NUM_BLOCKS, BLOCK_SIZE)
    allocator = BlockAllocator(NUM_BLOCKS, BLOCK_SIZE)

    prompt = allocator.create(PROMPT)
    step = allocator.prefill([prompt])
    logits = run(model, cache, step, [PROMPT])[-1:]
    allocator.commit(step)

    beams, texts, scores = [prompt], [PROMPT], [0.0]
    most_used = most_alone = copies = 0
    for number in range(NEW_TOKENS):
        choices = best(scores, logits)
        survivors = [allocator.fork(beams[choice.parent])[0] for choice in choices]
        for beam in beams:
            allocator.free(beam)
        beams = survivors
        texts = [[*texts[choice.parent], choice.token] for choice in choices]
        scores = [choice.score for choice in choices]
        if number == NEW_TOKENS - 1:
            break
        step = allocator.append(beams, [text[-1] for text in texts])
        copies += len(step.copies)
        logits = run(model, cache, step, texts)
        allocator.commit(step)
        most_used = max(most_used, NUM_BLOCKS - allocator.num_free_blocks)
        most_alone = max(most_alone, sum(len(beam.block_ids) for beam in beams))

    for text, score in zip(texts, scores, strict=True):
        print(f"{score:6.2f} {decode(text[len(PROMPT) :])}")
    print(f"blocks: at most {most_used}, without sharing {most_alone}; copied on write: {copies}")

    by_the_book = naive(model)
    check(texts == by_the_book[0], "the hypotheses are those of a beam search without a cache")
    close = all(abs(a - b) < 1e-3 for a, b in zip(scores, by_the_book[1], strict=True))
    check(close, "and so are their scores")
    for beam in beams:
        allocator.free(beam)
    check(allocator.num_free_blocks == NUM_BLOCKS, "every block is free again")


def naive(model: TinyModel) -> tuple[list[list[int]], list[float]]:
    """Texts and scores of the same search, with every hypothesis computed from scratch in every step."""
    texts, scores = [PROMPT], [0.0]
    for _ in range(NEW_TOKENS):
        choices = best(scores, torch.stack([recompute(model, text)[-1] for text in texts]))
        texts = [[*texts[choice.parent], choice.token] for choice in choices]
        scores = [choice.score for choice in choices]
    return texts, scores


if __name__ == "__main__":
    main()
