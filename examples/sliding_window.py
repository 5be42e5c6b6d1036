"""A sliding window: a text grows without end in a constant number of blocks.

The model sees the last 10 tokens only. After each step `release_window` gives back the blocks that hold nothing but
older ones; their entries in the block table become -1, and no kernel follows them. So the pool here, four blocks of
four tokens, is enough for a text of any length.

Prints the block table as it moves on. Every logit must be that of the same model, with the same window, without a
cache.

    pip install 'pagedkern[cpu]'
    python examples/sliding_window.py
"""

from __future__ import annotations

from tiny_model import TinyModel, check, decode, draw, encode, new_cache, recompute, run

from pagedkern import BlockAllocator

NUM_BLOCKS, BLOCK_SIZE, WINDOW, NEW_TOKENS = 4, 4, 10, 50
PROMPT = encode("ta le no so mi re do va fa ze")


def main() -> None:
    model, cache = TinyModel(), new_cache(NUM_BLOCKS, BLOCK_SIZE)
    allocator = BlockAllocator(
        NUM_BLOCKS, BLOCK_SIZE, prefix_caching=False
    )  # a text without its beginning is no prefix

    sequence = allocator.create(PROMPT)
    step = allocator.prefill([sequence])
    text, same = list(PROMPT), True
    for number in range(NEW_TOKENS):
        logits = run(model, cache, step, [text], sliding_window=WINDOW)[-1]
        allocator.commit(step)
        exact = recompute(model, text, sliding_window=WINDOW)[-1]
        same = same and bool((logits - exact).abs().max() < 1e-4)
        text.append(draw(logits, number))
        if number % 10 == 0:
            print(f"{len(text):2} tokens, block table {' '.join(map(str, sequence.block_ids))}")
        # The next query stands at position len(text) - 1 and sees WINDOW tokens, its own included.
        allocator.release_window(sequence, max(0, len(text) - WINDOW))
        step = allocator.append([sequence], [text[-1]])
    allocator.abort(step)

    print(decode(text))
    check(same, f"all logits are those of the model without a cache, with a window of {WINDOW} tokens")
    check(len(text) > NUM_BLOCKS * BLOCK_SIZE, f"{len(text)} tokens in a pool for {NUM_BLOCKS * BLOCK_SIZE}")


if __name__ == "__main__":
    main()
