"""Many sequences created in one call are those that `create` gives one by one."""

from __future__ import annotations

import random

import pytest

from pagedkern.allocator import BlockAllocator
from pagedkern.errors import OutOfBlocks

SALTS = (None, None, "a", b"a", 7)


def used(rng: random.Random, caching: bool) -> BlockAllocator:
    """An allocator that has cached prompts on the device and on the host, of sequences that live or are freed."""
    a = BlockAllocator(rng.randint(20, 40), 3, num_host_blocks=rng.choice([0, 9]), prefix_caching=caching)
    a.record_events()
    for _ in range(rng.randrange(8)):
        seq = a.create(prompt(rng), salt=rng.choice(SALTS), priority=rng.choice([0, 0, 2]))
        a.commit(a.prefill([seq]))
        if a.num_free_host_blocks > 3 and rng.random() < 0.4:
            a.commit(a.swap_out([seq]))
        if rng.random() < 0.8 or a.num_free_blocks < 12:
            a.free(seq)
    return a


def prompt(rng: random.Random) -> list[int]:
    """Often one that begins as another does."""
    length = rng.randint(1, 11)
    if rng.random() < 0.6:
        return list(range(rng.choice([0, 0, 50]), 100))[:length]
    return [rng.randrange(9) for _ in range(length)]


def seen(a: BlockAllocator) -> tuple[object, ...]:
    """All that can be seen, but for how often blocks were lacking."""
    sequences = [(s.id, s.block_ids, s.num_tokens, s.num_computed_tokens, s.num_cached_tokens) for s in a.sequences]
    return sequences, {**a.stats, "out_of_blocks": 0}


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("seed", range(60))
def test_many_are_as_one_by_one(seed: int, caching: bool) -> None:
    together, singly = (used(random.Random(seed), caching) for _ in range(2))
    rng = random.Random(-seed)
    prompts = [prompt(rng) for _ in range(rng.randint(1, 16))]
    salts = [rng.choice(SALTS) for _ in prompts]
    before = seen(together)
    assert seen(singly) == before
    try:
        seqs = together._create_many(prompts, salts)
    except OutOfBlocks:
        assert seen(together) == before
        assert together.stats["out_of_blocks"] == 1
        with pytest.raises(OutOfBlocks), singly.transaction():
            [singly.create(p, salt=salt) for p, salt in zip(prompts, salts, strict=True)]
    else:
        ones = [singly.create(p, salt=salt) for p, salt in zip(prompts, salts, strict=True)]
        assert [s.block_ids for s in seqs] == [s.block_ids for s in ones]
        assert seen(together) == seen(singly)
        assert together.snapshot() == singly.snapshot()
    for a in (together, singly):
        a.check()
        for seq in a.sequences:
            a.free(seq)
        a.create(a.num_free_blocks * 3)
    assert together.sequences[0].block_ids == singly.sequences[0].block_ids, "the order of eviction"
    assert together.events == singly.events


def test_what_fails_in_the_middle_is_not_counted() -> None:
    a = BlockAllocator(4, 4)
    seq = a.create([1] * 5)
    a.commit(a.prefill([seq]))
    before = seen(a)
    with pytest.raises(OutOfBlocks):
        a._create_many([[2] * 4, [1] * 5, [3] * 4], [None] * 3)
    assert seen(a) == before
    with pytest.raises(OutOfBlocks), a.transaction():
        assert a._create_many([[2] * 4], [None]) + a._create_many([[1] * 5, [3] * 4], [None] * 2)
    assert seen(a) == before
    a.check()
