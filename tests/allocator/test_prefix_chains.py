"""What is cached can be found: a block takes all that is behind it out of the cache, and leaves after it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from pagedkern.allocator import BlockAllocator, BlockEvent, Sequence
from pagedkern.errors import AuditError


def computed(allocator: BlockAllocator, tokens: list[int], **options: Any) -> Sequence:
    seq = allocator.create(tokens, **options)
    allocator.commit(allocator.prefill([seq]))
    return seq


def hits(allocator: BlockAllocator, tokens: list[int], **options: Any) -> int:
    seq = allocator.create(tokens, again=True, **options)
    allocator.free(seq)
    return seq.num_cached_tokens


def evict(allocator: BlockAllocator, count: int) -> None:
    """Let so many cached blocks leave: somebody takes all that is blank, and as many more."""
    blank = allocator.stats["blocks_free"] - allocator.stats["blocks_idle"]
    allocator.free(allocator.create((blank + count) * allocator.block_size))
    allocator.check()


def windowed(allocator: BlockAllocator, tokens: list[int], chunk: int, behind: int) -> Sequence:
    """Computed in chunks, with a sliding window behind."""
    seq = allocator.create(tokens)
    while seq.num_computed_tokens < len(tokens):
        allocator.commit(allocator.prefill([seq], chunk))
        allocator.release_window(seq, max(0, seq.num_computed_tokens - behind))
    return seq


class Router:
    """Knows what the events say."""

    def __init__(self, allocator: BlockAllocator) -> None:
        self.allocator = allocator
        allocator.record_events()
        self.found = {(e.memory, e.digest) for e in allocator.cached_events()}

    def look(self) -> list[BlockEvent]:
        events = self.allocator.events
        for event in events:
            place = (event.memory, event.digest)
            assert (place in self.found) == (event.kind == "removed")
            self.found ^= {place}
        stats = self.allocator.stats
        assert len(self.found) == stats["blocks_cached"] + stats["host_blocks_cached"]
        return events


def test_a_prompt_behind_a_window_leaves_tail_first() -> None:
    allocator = BlockAllocator(12, 4)
    prompt = list(range(33))
    allocator.free(windowed(allocator, prompt, 4, 8))
    for left in range(7, 0, -1):
        evict(allocator, 1)
        assert (allocator.num_cached_blocks, hits(allocator, prompt)) == (left, 4 * left)


def test_events_count_what_is_cached_after_a_rewrite() -> None:
    allocator = BlockAllocator(16, 2)
    router = Router(allocator)
    prompt = list(range(9))
    seq = computed(allocator, prompt)
    assert len(router.look()) == 4
    allocator.truncate(seq, 1)
    step = allocator.append([seq], [99])
    assert [(e.kind, e.reason) for e in router.look()] == [("removed", "orphaned")] * 3 + [("removed", "rewritten")]
    allocator.commit(step)
    allocator.commit(allocator.prefill([allocator.create(prompt)], 2))
    router.look()
    assert len(router.found) == 2


def test_a_rewritten_block_takes_with_it_what_others_own_and_what_nobody_owns() -> None:
    allocator = BlockAllocator(16, 2)
    first = computed(allocator, [1, 2, 3, 4, 5])
    allocator.free(computed(allocator, [1, 2, 3, 4, 6, 7, 8]))
    second = computed(allocator, [1, 2, 9, 9])
    allocator.truncate(second, 2)
    allocator.free(first)
    assert allocator.num_cached_blocks == 4
    allocator.truncate(second, 1)
    allocator.append([second], [2])  # the same token, but it is written anew
    assert (allocator.num_cached_blocks, allocator.num_free_blocks) == (0, 15)
    allocator.check()


def test_what_leaves_the_host_takes_with_it_what_only_hangs_on_it() -> None:
    """The first block is on the host only, the second one on the device only."""
    allocator = BlockAllocator(8, 2, num_host_blocks=2)
    router = Router(allocator)
    prompt = [1, 2, 3, 4, 5]
    seq = computed(allocator, prompt)
    (short,) = allocator.fork(seq)
    allocator.truncate(short, 2)
    allocator.commit(allocator.swap_out([short]))
    allocator.free(short)
    allocator.truncate(seq, 1)
    allocator.commit(allocator.append([seq], [9]))  # rewrites the first block on the device
    router.look()
    assert hits(allocator, prompt) == 4
    allocator.commit(allocator.swap_out([computed(allocator, [7, 7, 7, 7])]))  # takes both blocks of the host
    gone = [(e.memory, e.reason) for e in router.look() if e.kind == "removed"]
    assert gone == [("device", "orphaned"), ("host", "evicted")]
    assert hits(allocator, prompt) == 0
    allocator.check()


def two_at_once(allocator: BlockAllocator, tokens: list[int]) -> tuple[Sequence, Sequence]:
    """Two sequences that compute the same: the blocks of the first are cached, and what the second adds is behind."""
    first, second = allocator.create(tokens), allocator.create(tokens)
    allocator.commit(allocator.prefill([first, second]))
    return first, second


def test_a_sequence_that_lost_its_beginning_is_cached_with_its_own_blocks_when_it_fills_the_next() -> None:
    allocator = BlockAllocator(8, 2)
    first, second = two_at_once(allocator, [1, 2, 3, 4, 5])
    allocator.commit(allocator.append([second], [6]))  # behind the blocks of the first
    assert hits(allocator, [1, 2, 3, 4, 5, 6, 7]) == 6
    allocator.free(first)
    evict(allocator, 2)
    assert allocator.num_cached_blocks == 0
    allocator.commit(allocator.append([second], [7]))
    assert allocator.num_cached_blocks == 0, "nothing was filled"
    allocator.commit(allocator.append([second], [8]))
    assert hits(allocator, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 8
    allocator.check()


def test_on_the_fast_path_too() -> None:
    allocator = BlockAllocator(24, 2)
    first, second = two_at_once(allocator, [1, 2, 3, 4, 5])
    other = computed(allocator, [50])
    for token in range(4):
        allocator.commit(allocator.append([second, other], [token, token]))
    allocator.free(first)
    evict(allocator, 2)
    for token in range(4, 8):
        allocator.commit(allocator.append([second, other], [token, token]))
        allocator.check()
    assert hits(allocator, [1, 2, 3, 4, 5, *range(8)]) == 12


@pytest.mark.parametrize("swapped", [False, True])
def test_when_it_is_freed_it_is_cached_with_its_own_blocks(swapped: bool) -> None:
    allocator = BlockAllocator(8, 2, num_host_blocks=4)
    first, second = two_at_once(allocator, [1, 2, 3])
    if swapped:
        allocator.commit(allocator.swap_out([second]))
    allocator.free(first)
    evict(allocator, 1)
    allocator.free(second)
    assert hits(allocator, [1, 2, 3]) == 2
    allocator.check()


def test_without_its_first_blocks_it_is_not() -> None:
    allocator = BlockAllocator(8, 2)
    first, second = two_at_once(allocator, [1, 2, 3, 4, 5])
    allocator.release_window(second, 2)
    allocator.free(first)
    evict(allocator, 2)
    allocator.commit(allocator.append([second], [6]))
    allocator.free(second)
    assert (allocator.num_cached_blocks, allocator.num_free_blocks) == (0, 8)


def test_a_pinned_prefix_stays_though_another_one_s_blocks_are_cached() -> None:
    allocator = BlockAllocator(8, 2)
    first, second = two_at_once(allocator, [1, 2, 3, 4, 5])
    pinned = allocator.pin(second)
    allocator.free(first)
    allocator.free(second)
    filler = allocator.create(2 * allocator.num_free_blocks)
    allocator.free(filler)
    assert hits(allocator, [1, 2, 3, 4, 5]) == 4
    allocator.free(pinned)
    allocator.check()
    assert allocator.num_free_blocks == 8


def test_a_salt_that_a_live_sequence_is_under_is_not_forgotten() -> None:
    allocator = BlockAllocator(8, 2)
    seq = allocator.create([1], salt="kept")
    allocator.commit(allocator.prefill([seq]))
    for salt in range(3000):
        allocator.free(allocator.create([1], salt=salt))
    allocator.commit(allocator.append([seq], [2]))
    assert allocator.num_cached_blocks == 1
    assert hits(allocator, [1, 2, 3], salt="kept") == 2
    allocator.check()


def test_a_head_counts_as_used_when_what_is_behind_it_is() -> None:
    """A window goes on behind a sequence while another prompt comes and goes: that one leaves first."""
    allocator = BlockAllocator(16, 2)
    seq = computed(allocator, list(range(6)))
    allocator.release_window(seq, 4)  # two blocks are idle
    allocator.free(computed(allocator, [50, 51, 52]))  # another one
    allocator.commit(allocator.append([seq], [[6, 7, 8, 9]]))
    allocator.release_window(seq, 6)
    evict(allocator, 1)
    assert hits(allocator, [50, 51, 52]) == 0
    allocator.free(seq)
    assert hits(allocator, list(range(10))) == 9


def operations(allocator: BlockAllocator, calls: Callable[[], object]) -> int:
    """How many calls of functions something takes, whatever the machine does beside."""
    count = 0

    def note(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        calls()
    finally:
        sys.setprofile(None)
    allocator.check()
    return count


def test_a_window_costs_the_same_whatever_is_idle_behind_it() -> None:
    allocator = BlockAllocator(4000, 2)
    seq = computed(allocator, list(range(8)))
    costs = []
    for number in range(1500):
        step = allocator.append([seq], [[number, number]])

        def slide(step: Any = step) -> None:
            allocator.commit(step)
            allocator.release_window(seq, seq.num_computed_tokens - 4)

        costs.append(operations(allocator, slide) if number % 300 == 299 else slide())
        if number % 3 == 0:  # somebody else's block becomes idle meanwhile
            allocator.free(computed(allocator, [10_000 + number] * 2))
    counted = [cost for cost in costs if cost is not None]
    assert max(counted) <= 1.3 * min(counted), counted


def test_check_sees_a_block_that_cannot_be_reached() -> None:
    for damage in ("_kids", "_at"):
        allocator = BlockAllocator(8, 2)
        computed(allocator, [1, 2, 3, 4, 5])
        computed(allocator, [1, 2, 5, 6, 7])
        allocator.check()
        entries = getattr(allocator._ledger.prefix, damage)
        entries.pop(next(iter(entries)))
        with pytest.raises(AuditError):
            allocator.check()
