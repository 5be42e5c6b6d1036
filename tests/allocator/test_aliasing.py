"""Two sequences never hold one list: whatever a plan keeps to give back, each sequence gets its own."""

from __future__ import annotations

import pytest

from pagedkern.allocator import BlockAllocator, Sequence
from pagedkern.errors import AuditError


def computed(allocator: BlockAllocator, tokens: list[int]) -> Sequence:
    seq = allocator.create(tokens)
    allocator.commit(allocator.prefill([seq]))
    return seq


def test_a_fork_of_what_is_swapped_in_survives_that_both_swaps_are_aborted() -> None:
    allocator = BlockAllocator(8, 4, num_host_blocks=8)
    seq = computed(allocator, [1, 2, 3, 4])
    out = allocator.swap_out([seq])
    back = allocator.swap_in([seq])
    (fork,) = allocator.fork(seq)
    allocator.abort(back)
    allocator.abort(out)
    allocator.commit(allocator.append([fork], [[5, 6, 7, 8, 9]]))
    assert (seq.block_ids, fork.block_ids) == ([0], [0, 1, 2])
    step = allocator.append([seq], [5])
    assert step.slot_mapping[0] // 4 not in fork.block_ids, "not the place of the fork's next token"
    allocator.commit(step)
    for each in (seq, fork):
        allocator.free(each)
        allocator.check()
    assert allocator.num_free_blocks == 8


@pytest.mark.parametrize("forks", [1, 2, 3])
@pytest.mark.parametrize("order", ["swap in", "swap out"])
def test_forks_of_what_is_swapped_in_each_have_blocks_of_their_own_after_an_abort(order: str, forks: int) -> None:
    allocator = BlockAllocator(32, 4, num_host_blocks=32)
    seq = computed(allocator, [1, 2, 3, 4, 5, 6, 7, 8])
    out = allocator.swap_out([seq])
    back = allocator.swap_in([seq])
    family = [seq, *allocator.fork(seq, forks)]
    allocator.abort(back)
    if order == "swap in":
        allocator.commit(out)
        allocator.commit(allocator.swap_in(family))
    else:
        allocator.abort(out)
    for i, each in enumerate(family):
        allocator.commit(allocator.append([each], [[i] * (4 * i + 1)]))
        allocator.check()
    assert [len(each.block_ids) for each in family] == [3 + i for i in range(forks + 1)]
    assert len({each.block_ids[-1] for each in family}) == forks + 1


def test_the_table_of_a_step_is_of_the_time_when_it_was_made() -> None:
    """Asked for late, after the sequence has grown, been cut, swapped, and the step has been committed."""
    allocator = BlockAllocator(16, 4, num_host_blocks=8)
    seq = allocator.create(list(range(6)))
    step = allocator.prefill([seq])
    blocks = seq.block_ids
    later = allocator.append([seq], [[6, 7, 8, 9]])
    allocator.commit(step)
    allocator.abort(later)
    allocator.truncate(seq, 2)
    allocator.commit(allocator.swap_out([seq]))
    assert step.block_table.tolist() == [blocks]
    assert step.slot_mapping.tolist() == [blocks[0] * 4 + i for i in range(4)] + [blocks[1] * 4, blocks[1] * 4 + 1]


def test_copies_of_one_step_are_not_those_of_another() -> None:
    allocator = BlockAllocator(8, 4)
    first, second = allocator.prefill([allocator.create(3)]), allocator.prefill([allocator.create(3)])
    first.copies.src.append(5)
    assert (len(second.copies), len(allocator.prefill([allocator.create(3)]).copies)) == (0, 0)


@pytest.mark.parametrize("field", ["_blocks", "_tokens"])
def test_check_sees_two_sequences_that_hold_one_list(field: str) -> None:
    allocator = BlockAllocator(8, 4)
    seq = computed(allocator, [1, 2, 3, 4])
    (fork,) = allocator.fork(seq)
    allocator.check()
    setattr(fork, field, getattr(seq, field))
    with pytest.raises(AuditError, match=r"sequence 2 and sequence 1 hold one (list|array)"):
        allocator.check()


def test_check_sees_a_sequence_and_a_plan_that_hold_one_list() -> None:
    allocator = BlockAllocator(8, 4, num_host_blocks=8)
    seq, other = computed(allocator, [1, 2, 3, 4]), computed(allocator, [5, 6, 7, 8])
    plan = allocator.swap_out([seq])
    (row,) = plan._rows or ()
    assert row.before is not None
    row.before = (row.before[0], other._blocks, row.before[2])  # type: ignore[assignment]
    with pytest.raises(AuditError, match="row 0 of plan 3 and sequence 2 hold one list"):
        allocator.check()
