"""A shared system prompt: the second request computes only what comes after it, and other tenants see nothing of it.

`commit` puts full blocks into the prefix cache. `create` finds the longest prefix that is there, and `prefill` then has
only the rest to compute. A block is found by its tokens and all tokens before it, compared in full, and by the salt:
requests with different salts share nothing, so that nobody can find out what another tenant has asked.

Prints how many tokens each request computed. The logits after each prompt must be those of the model without a cache.

    pip install 'pagedkern[cpu]'
    python examples/shared_system_prompt.py
"""

from __future__ import annotations

from tiny_model import TinyModel, check, encode, new_cache, recompute, run

from pagedkern import BlockAllocator

NUM_BLOCKS, BLOCK_SIZE = 64, 4
SYSTEM = encode("ta le no so mi re do va fa ze ga hi ke pu ro bu no da")  # 18 tokens: four blocks and a half
REQUESTS = [
    ("the first", "ko li bi", "red"),
    ("the second", "ba na na", "red"),
    ("another tenant", "ba na na", "blue"),
    ("the second again", "ba na na", "red"),
]


def main() -> None:
    model, cache = TinyModel(), new_cache(NUM_BLOCKS, BLOCK_SIZE)
    allocator = BlockAllocator(NUM_BLOCKS, BLOCK_SIZE)
    computed, same = [], True
    for title, question, tenant in REQUESTS:
        prompt = SYSTEM + encode(question)
        sequence = allocator.create(prompt, salt=tenant)
        step = allocator.prefill([sequence])
        logits = run(model, cache, step, [prompt])[-1]
        allocator.commit(step)
        allocator.free(sequence)  # its blocks can be handed out again, and are found for as long as they are not
        computed.append(step.num_tokens)
        print(f"{title:16} tenant {tenant:4}: {len(prompt)} tokens, {step.num_tokens:2} computed")
        same = same and bool((logits - recompute(model, prompt)[-1]).abs().max() < 1e-4)

    shared = len(SYSTEM) // BLOCK_SIZE * BLOCK_SIZE  # full blocks only
    whole = len(SYSTEM) + 3
    check(computed[:3] == [whole, whole - shared, whole], f"{shared} tokens are shared, but not with another tenant")
    check(same, "the logits after each prompt are those of the model without a cache")


if __name__ == "__main__":
    main()
