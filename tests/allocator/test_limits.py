"""Lengths near the end of int32, and blocks larger than any sequence."""

from __future__ import annotations

import pytest

from pagedkern.allocator import BlockAllocator, Sequence
from pagedkern.errors import InvalidArgument, OutOfBlocks
from tests.allocator.world import fingerprint

MOST = 2**31 - 1


def computed(allocator: BlockAllocator, tokens: int) -> Sequence:
    seq = allocator.create(tokens)
    allocator.commit(allocator.prefill([seq]))
    return seq


def test_a_lockstep_batch_ends_at_the_longest_length() -> None:
    allocator = BlockAllocator(2**12, 2**20)
    seq, short = computed(allocator, MOST - 3), computed(allocator, 1)
    for length in range(MOST - 2, MOST + 1):
        step = allocator.append([seq, short])
        assert step.seq_lens[0] == length
        allocator.commit(step)
    assert allocator._ledger.lockstep_batches, "it was on the fast path"
    for _ in range(2):  # the first on the fast path, the second behind it
        with pytest.raises(InvalidArgument, match=r"sequence 1 would have 2147483648 tokens, expected at most 2\^31-1"):
            allocator.append([seq, short])
        allocator.check()
        assert (seq.num_tokens, short.num_tokens) == (MOST, 4)
        allocator.truncate(short, 4)
    allocator.commit(allocator.append([short]))
    assert short.num_tokens == 5


@pytest.mark.parametrize("num_tokens", [2**31 - 5, 2**31 - 1, 2**31, 2**70])
def test_too_many_new_tokens(num_tokens: int) -> None:
    allocator = BlockAllocator(8, 2**30)
    seq = computed(allocator, 5)
    before = fingerprint(allocator)
    with pytest.raises(InvalidArgument, match=r"num_tokens: got|tokens, expected at most"):
        allocator.append([seq], num_tokens=num_tokens)
    assert fingerprint(allocator) == before
    step = allocator.append([seq], num_tokens=MOST - 5)
    assert step.seq_lens[0] == MOST


def test_a_step_of_too_many_tokens() -> None:
    allocator = BlockAllocator(8, 2**30)
    seqs = [allocator.create(2**30) for _ in range(2)]
    before = fingerprint(allocator)
    with pytest.raises(InvalidArgument, match="a step of 2147483648 tokens"):
        allocator.prefill(seqs)
    assert fingerprint(allocator) == before
    assert allocator.prefill(seqs, MOST).num_tokens == MOST


@pytest.mark.parametrize("lookahead", [2**31, 2**70])
def test_too_much_lookahead(lookahead: int) -> None:
    allocator = BlockAllocator(8, 2**30)
    seq = computed(allocator, 5)
    with pytest.raises(InvalidArgument, match="lookahead: got"):
        allocator.append([seq], lookahead=lookahead)
    few = BlockAllocator(2, 2**30)
    with pytest.raises(OutOfBlocks):
        few.append([computed(few, 5)], lookahead=MOST)
    allocator.check()


def test_work_to_start_a_lockstep_batch_does_not_depend_on_the_block_size() -> None:
    allocator = BlockAllocator(4, 2**31 - 1)
    seq = computed(allocator, 1)
    allocator.commit(allocator.append([seq]))
    (lockstep,) = allocator._ledger.lockstep_batches.values()
    assert len(lockstep._calendar) == 1, "one phase for one row"
    assert allocator.append([seq]).slot_mapping[0] % allocator.block_size == 2
    allocator.check()
