"""Parallel sampling: eight continuations of one prompt share its blocks, and copy a block only to write into it.

`fork` makes a sequence that owns the same blocks. Full blocks of the prompt are never written again and stay shared to
the end. The last one is not full: the first token of each sample goes into it, so `append` gives every sample but the
last a copy of its own first (copy-on-write). The step says what to copy, `KVCache.apply` copies it.

Prints the samples and the blocks that they take, shared and not. Every sample must have the tokens that it has when it
is computed alone and without a cache.

    pip install 'pagedkern[cpu]'
    python examples/parallel_sampling.py
"""

from __future__ import annotations

from tiny_model import TinyModel, check, decode, draw, encode, new_cache, recompute, run

from pagedkern import BlockAllocator

NUM_BLOCKS, BLOCK_SIZE, SAMPLES, NEW_TOKENS = 64, 4, 8, 7
PROMPT = encode("ta le no so mi re do va fa ze ga hi ke pu ro bu no da")  # 18 tokens: four blocks and a half


def main() -> None:
    model, cache = TinyModel(), new_cache(NUM_BLOCKS, BLOCK_SIZE)
    allocator = BlockAllocator(NUM_BLOCKS, BLOCK_SIZE)

    prompt = allocator.create(PROMPT)
    step = allocator.prefill([prompt])
    logits = run(model, cache, step, [PROMPT])[-1]  # of what follows the prompt, the same for all samples
    allocator.commit(step)

    sequences = [prompt, *allocator.fork(prompt, SAMPLES - 1)]
    texts = [[*PROMPT, draw(logits, seed)] for seed in range(SAMPLES)]
    copies = 0
    for number in range(1, NEW_TOKENS):
        step = allocator.append(sequences, [text[-1] for text in texts])
        copies += len(step.copies)
        rows = run(model, cache, step, texts)  # one token of each sample
        allocator.commit(step)
        for seed, text in enumerate(texts):
            text.append(draw(rows[seed], SAMPLES * number + seed))

    for text in texts:
        print(f"{decode(PROMPT)} > {decode(text[len(PROMPT) :])}")
    used = NUM_BLOCKS - allocator.num_free_blocks
    alone = sum(len(sequence.block_ids) for sequence in sequences)
    print(f"blocks: {used}, without sharing {alone}; copied on write: {copies}")

    full = len(PROMPT) // BLOCK_SIZE
    check(used == full + SAMPLES * (alone // SAMPLES - full), f"the {full} full blocks of the prompt exist once")
    check(all(text == expected(model, seed) for seed, text in enumerate(texts)), "every sample is what it is alone")


def expected(model: TinyModel, seed: int) -> list[int]:
    """The text of one sample by the book: everything from scratch for each token."""
    text = list(PROMPT)
    for number in range(NEW_TOKENS):
        text.append(draw(recompute(model, text)[-1], SAMPLES * number + seed))
    return text


if __name__ == "__main__":
    main()
