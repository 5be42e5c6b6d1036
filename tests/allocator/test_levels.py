"""A cached block is as dear as the dearest of its users, and as what is cached behind it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pagedkern.allocator import BlockAllocator, Sequence
from pagedkern.errors import InvalidArgument


def computed(allocator: BlockAllocator, tokens: list[int], **options: Any) -> Sequence:
    seq = allocator.create(tokens, **options)
    if seq.num_computed_tokens < len(tokens):
        allocator.commit(allocator.prefill([seq]))
    return seq


def used(allocator: BlockAllocator, tokens: list[int], **options: Any) -> None:
    allocator.free(computed(allocator, tokens, **options))


def found(allocator: BlockAllocator, tokens: list[int], **options: Any) -> int:
    """How many tokens of a prompt are in the cache. Uses nothing."""

    def look() -> int:
        with allocator.transaction():
            seq = allocator.create([*tokens, -1], **options)
            raise InvalidArgument(str(seq.num_cached_tokens))

    try:
        return look()
    except InvalidArgument as error:
        return int(str(error))


def evict(allocator: BlockAllocator, count: int) -> None:
    blank = allocator.stats["blocks_free"] - allocator.stats["blocks_idle"]
    allocator.free(allocator.create((blank + count) * allocator.block_size))
    allocator.check()


def test_the_dearest_user_counts_not_the_last_one() -> None:
    allocator = BlockAllocator(32, 4)
    dear = list(range(16))
    used(allocator, dear, priority=3)
    used(allocator, dear)
    for i in range(1, 6):
        used(allocator, [100 * i] * 16, priority=1)
    evict(allocator, 4)
    assert found(allocator, dear) == 16
    assert [found(allocator, [100 * i] * 16) for i in range(1, 6)] == [0, 16, 16, 16, 16]
    evict(allocator, 16)
    assert found(allocator, dear) == 16
    evict(allocator, 1)
    assert found(allocator, dear) == 12


def test_a_user_counts_while_another_one_still_owns_the_block() -> None:
    allocator = BlockAllocator(8, 4)
    cheap = computed(allocator, [1] * 8)
    used(allocator, [1] * 8, priority=2)
    allocator.free(cheap)
    used(allocator, [2] * 8, priority=1)
    evict(allocator, 2)
    assert (found(allocator, [1] * 8), found(allocator, [2] * 8)) == (8, 0)


def test_what_is_before_a_dear_block_is_as_dear() -> None:
    """The first block is that of a sequence of priority 0, what is behind it that of one of priority 3."""
    allocator = BlockAllocator(8, 4)
    first, second = allocator.create([1] * 4), allocator.create([1] * 8, priority=3)
    allocator.commit(allocator.prefill([first, second]))
    allocator.free(first)  # idle, and the second one lives
    used(allocator, [2] * 4, priority=2)
    evict(allocator, 1)
    assert (found(allocator, [1] * 4), found(allocator, [2] * 4)) == (4, 0)
    allocator.free(second)
    used(allocator, [3] * 4, priority=2)
    evict(allocator, 1)
    assert (found(allocator, [1] * 8), found(allocator, [3] * 4)) == (8, 0)


def test_what_is_only_behind_is_not() -> None:
    allocator = BlockAllocator(8, 4)
    used(allocator, [1] * 4, priority=3)
    used(allocator, [1, 1, 1, 1, 5, 5, 5, 5])
    used(allocator, [2] * 4, priority=1)
    evict(allocator, 1)
    assert found(allocator, [1, 1, 1, 1, 5, 5, 5, 5]) == 4


@pytest.mark.parametrize("how", ["clear", "evict", "rewrite"])
def test_a_level_ends_when_the_block_leaves(how: str) -> None:
    allocator = BlockAllocator(8, 4)
    seq = computed(allocator, [1] * 4, priority=3)
    if how == "rewrite":
        allocator.truncate(seq, 3)
        allocator.commit(allocator.append([seq], [7]))
        allocator.truncate(seq, 0)
    allocator.free(seq)
    if how == "clear":
        allocator.clear_cache()
    evict(allocator, allocator.stats["blocks_idle"])
    used(allocator, [1] * 4)
    used(allocator, [2] * 4, priority=1)
    evict(allocator, 1)
    assert (found(allocator, [1] * 4), found(allocator, [2] * 4)) == (0, 4)


def test_levels_are_kept_in_a_snapshot() -> None:
    allocator = BlockAllocator(8, 4)
    used(allocator, [1] * 8, priority=2)
    used(allocator, [2] * 8)
    allocator = BlockAllocator.restore(allocator.snapshot())
    evict(allocator, 2)
    assert (found(allocator, [1] * 8), found(allocator, [2] * 8)) == (8, 0)


@pytest.mark.parametrize("seed", range(8))
def test_any_prompts_leave_in_the_order_of_their_levels(seed: int) -> None:
    """Prompts of one tree, used with any priorities: what leaves is always the least recently used leaf of the lowest
    level, where each block has the highest level of what is behind it.
    """
    generator = random.Random(seed)
    allocator, size = BlockAllocator(16, 2), 2
    levels: dict[tuple[int, ...], int] = {}
    times: dict[tuple[int, ...], int] = {}
    for time in range(400):
        tokens = [generator.randrange(2) for _ in range(2 * generator.randint(1, 5))]
        paths = [tuple(tokens[:n]) for n in range(size, len(tokens) + 1, size)]
        known = sum(path in levels for path in paths)
        need = len(paths) - known
        room = 16 - len(levels)
        order = sorted((p for p in levels if p not in paths), key=lambda p: (levels[p], times[p], -len(p)))
        for path in order[: max(0, need - room)]:
            del levels[path], times[path]
        priority = generator.choice([0, 0, 0, 1, 2, 3])
        used(allocator, tokens, priority=priority)
        for path in paths:
            levels[path] = max(levels.get(path, 0), priority)
            times[path] = time
        allocator.check()
        assert allocator.num_cached_blocks == len(levels)
        assert all(found(allocator, list(path)) == len(path) for path in levels if len(path) < 32)
