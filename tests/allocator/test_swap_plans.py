"""Swap plans that land after their sequences have moved on: a plan remembers what it writes, an abort restores what is
true now.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from pagedkern.allocator import BlockAllocator, Plan, Sequence


def computed(allocator: BlockAllocator, tokens: list[int], **how: Any) -> Sequence:
    seq = allocator.create(tokens, **how)
    allocator.commit(allocator.prefill([seq]))
    return seq


def found(allocator: BlockAllocator, tokens: list[int]) -> int:
    """How many tokens a prompt finds; it is not kept."""
    seq = allocator.create(tokens)
    allocator.free(seq)
    return seq.num_cached_tokens


def stored(allocator: BlockAllocator) -> list[tuple[str, int]]:
    return [(event.memory, event.block) for event in allocator.events if event.kind == "stored"]


def written(plan: Plan) -> list[int]:
    return [b for _, _, dst in plan.moves for b in dst]


def test_a_fork_that_has_left_the_plan_is_not_cached_by_it() -> None:
    """Both go out and come back; the fork goes out once more, to host blocks that the first plan has not written."""
    allocator = BlockAllocator(12, 4, num_host_blocks=8)
    allocator.record_events()
    seq = computed(allocator, [1, 2, 3, 4])
    (fork,) = allocator.fork(seq)
    out, back = allocator.swap_out([seq, fork]), allocator.swap_in([seq, fork])
    again = allocator.swap_out([fork])
    assert stored(allocator) == [("device", 0)]
    allocator.commit(out)
    assert {b for memory, b in stored(allocator) if memory == "host"} <= set(written(out))
    allocator.check()
    allocator.abort(again)
    allocator.abort(back)
    allocator.check()
    assert {event.block for event in allocator.cached_events() if event.memory == "host"} <= set(written(out))


@pytest.mark.parametrize("num_committed", range(4))
def test_however_many_of_a_row_of_swaps_land_only_what_was_written_is_cached(num_committed: int) -> None:
    allocator = BlockAllocator(16, 4, num_host_blocks=12)
    seq = computed(allocator, [1, 2, 3, 4, 5, 6, 7, 8])
    plans = [allocator.swap_out([seq]), allocator.swap_in([seq]), allocator.swap_out([seq]), allocator.swap_in([seq])]
    for plan in plans[:num_committed]:
        allocator.commit(plan)
        allocator.check()
    for plan in reversed(plans[num_committed:]):
        allocator.abort(plan)
        allocator.check()
    on_host = set(itertools.chain(*(written(plan) for plan in plans[:num_committed:2])))
    assert {event.block for event in allocator.cached_events() if event.memory == "host"} <= on_host
    allocator.free(seq)
    assert found(allocator, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 8
    allocator.check()


def test_contents_that_have_come_are_not_awaited_once_more() -> None:
    """The swap back is committed before the second swap out is taken back: nothing is to come any more."""
    allocator = BlockAllocator(16, 2, num_host_blocks=8)
    seq = allocator.create([0, 2, 1, 2])
    plans = [allocator.prefill([seq]), allocator.swap_out([seq]), allocator.swap_in([seq]), allocator.swap_out([seq])]
    for plan in plans[:3]:
        allocator.commit(plan)
    allocator.abort(plans[3])
    allocator.check()
    allocator.free(seq)
    assert found(allocator, [0, 2, 1, 2, 9]) == 4
    step = allocator.prefill([allocator.create([0, 2, 1, 2, 9])])
    assert step.moves == ()


@pytest.mark.parametrize("by_a_step_in_flight", [False, True])
def test_what_another_sequence_has_moved_in_is_not_moved_in_again(by_a_step_in_flight: bool) -> None:
    """Two sequences await one host block. One goes out; the other's step moves it in; the way out is taken back."""
    allocator = BlockAllocator(8, 2, num_host_blocks=8)
    seq = computed(allocator, [1, 2])
    allocator.commit(allocator.swap_out([seq]))
    allocator.free(seq)
    allocator.free(allocator.create(16))  # only the host has the prefix now
    seq = allocator.create([1, 2, 3])
    (other,) = allocator.fork(seq)
    assert seq.num_cached_tokens == 2
    out = allocator.swap_out([seq])
    step = allocator.prefill([other])
    assert [kind for kind, _, _ in step.moves].count("swap_in") == 1
    if not by_a_step_in_flight:
        allocator.commit(step)
    allocator.abort(out)
    allocator.check()
    second = allocator.prefill([seq])
    assert [kind for kind, _, _ in second.moves].count("swap_in") == 0, "it would be written under its readers"
    if by_a_step_in_flight:
        allocator.commit(step)
    allocator.commit(second)
    allocator.check()
    allocator.free(seq)
    allocator.free(other)
    assert found(allocator, [1, 2, 3]) == 2
    assert allocator.num_free_blocks == 8


def test_a_block_filled_behind_what_came_from_the_host_keeps_the_order_of_levels() -> None:
    allocator = BlockAllocator(8, 2, num_host_blocks=4)
    seq = allocator.create([1, 2, 3, 4])
    plans = allocator.prefill([seq]), allocator.swap_out([seq])
    for plan in plans:
        allocator.commit(plan)
    allocator.free(seq)  # only the host has the two blocks
    again = allocator.create([1, 2, 3, 4, 5], priority=2)
    allocator.commit(allocator.prefill([again]))
    steps = allocator.append([again], [6]), allocator.append([again], [7])
    for step in steps:
        allocator.commit(step)
        allocator.check()
    allocator.free(again)
    allocator.check()
    assert found(allocator, [1, 2, 3, 4, 5, 6, 7]) == 6


def test_a_way_out_taken_back_after_the_step_before_it_is_committed() -> None:
    """The step was committed while its sequence was on its way out: what it computed is to be found nevertheless."""
    allocator = BlockAllocator(8, 2, num_host_blocks=4)
    seq = allocator.create([1, 2, 3, 4])
    step, out = allocator.prefill([seq]), allocator.swap_out([seq])
    allocator.commit(step)
    allocator.abort(out)
    assert found(allocator, [1, 2, 3, 4, 5]) == 4, "while it lives"
    allocator.free(seq)
    assert found(allocator, [1, 2, 3, 4, 5]) == 4, "and when it is freed"
    allocator.check()
