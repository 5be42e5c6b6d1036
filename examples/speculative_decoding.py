"""Speculative decoding: several tokens are guessed, verified in one step, and the wrong ones taken back.

The guess costs nothing: what came the last time that the last two tokens stood in the text (prompt lookup). `append`
takes the last token and all guesses at once, as one row with several queries; the model's choice after each of them
tells how many were right; `truncate` gives up the keys and values of the rest, and the blocks that held nothing else.

Prints each step that guesses. The text must be that of plain decoding, one token a step, without a cache.

    pip install 'pagedkern[cpu]'
    python examples/speculative_decoding.py
"""

from __future__ import annotations

from tiny_model import TinyModel, check, decode, encode, likeliest, new_cache, recompute, run

from pagedkern import BlockAllocator

NUM_BLOCKS, BLOCK_SIZE, NEW_TOKENS, MOST_GUESSES = 64, 4, 60, 4
PROMPT = encode("ta le no so mi re do va fa ze")


def guess(text: list[int]) -> list[int]:
    """What followed when the last two tokens were there the last time."""
    for start in range(len(text) - 3, -1, -1):
        if text[start : start + 2] == text[-2:]:
            return text[start + 2 : start + 2 + MOST_GUESSES]
    return []


def main() -> None:
    model, cache = TinyModel(), new_cache(NUM_BLOCKS, BLOCK_SIZE)
    allocator = BlockAllocator(NUM_BLOCKS, BLOCK_SIZE)

    sequence = allocator.create(PROMPT)
    step = allocator.prefill([sequence])
    text = [*PROMPT, *likeliest(run(model, cache, step, [PROMPT])[-1:])]
    allocator.commit(step)

    steps = 1
    while len(text) < len(PROMPT) + NEW_TOKENS:
        guesses = guess(text)
        step = allocator.append([sequence], [[text[-1], *guesses]])
        choices = likeliest(run(model, cache, step, [[*text, *guesses]]))  # after the last token, after each guess
        allocator.commit(step)
        right = 0
        while right < len(guesses) and guesses[right] == choices[right]:
            right += 1
        text += choices[: right + 1]  # the right guesses, and one token more that the model chose itself
        allocator.truncate(sequence, len(text) - 1)  # that one is still to be computed
        steps += 1
        if guesses:
            print(f"step {steps:2}: guessed {decode(guesses)}, {right} of {len(guesses)} right")

    del text[len(PROMPT) + NEW_TOKENS :]
    print(f"{decode(PROMPT)} > {decode(text[len(PROMPT) :])}")
    check(steps < NEW_TOKENS, f"{NEW_TOKENS} tokens in {steps} steps")
    check(text == expected(model), "they are those of plain decoding without a cache")
    allocator.check()


def expected(model: TinyModel) -> list[int]:
    text = list(PROMPT)
    for _ in range(NEW_TOKENS):
        text += likeliest(recompute(model, text)[-1:])
    return text


if __name__ == "__main__":
    main()
