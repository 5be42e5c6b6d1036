"""Swapping, sliding windows and transactions, by hand."""

from __future__ import annotations

import pytest

from pagedkern.allocator import BlockAllocator, Plan, Sequence
from pagedkern.errors import InvalidArgument, OutOfBlocks, StaleSequence
from tests.allocator.world import fingerprint


def computed(allocator: BlockAllocator, tokens: list[int] | int, salt: str | None = None) -> Sequence:
    seq = allocator.create(tokens, salt=salt)
    allocator.commit(allocator.prefill([seq]))
    return seq


def moves(plan: Plan) -> list[tuple[str, list[int], list[int]]]:
    return [(kind, list(src), list(dst)) for kind, src, dst in plan.moves]


def done(allocator: BlockAllocator, plan: Plan) -> Plan:
    allocator.commit(plan)
    allocator.check()
    return plan


@pytest.mark.parametrize("together", [True, False])
def test_swap_out_a_sequence_and_its_fork_then_both_in(together: bool) -> None:
    allocator = BlockAllocator(8, 4, num_host_blocks=8)
    seq = computed(allocator, list(range(10)))
    (fork,) = allocator.fork(seq)
    device = seq.block_ids
    batches = [[seq, fork]] if together else [[seq], [fork]]
    out = [done(allocator, allocator.swap_out(batch)) for batch in batches]
    assert sum(len(src) for plan in out for _, src, _ in plan.moves) == 3, "moved once"
    assert moves(out[0]) == [("swap_out", device, seq.block_ids)]
    assert seq.block_ids == fork.block_ids
    assert (allocator.num_free_blocks, allocator.num_free_host_blocks) == (8, 5)
    filler = allocator.create(32)  # nothing of it is left on the device
    allocator.free(filler)
    back = [done(allocator, allocator.swap_in(batch)) for batch in batches]
    assert sum(len(src) for plan in back for _, src, _ in plan.moves) == 3
    assert seq.block_ids == fork.block_ids, "still shared"
    step = done(allocator, allocator.append([seq, fork], [1, 2]))
    assert len(step.moves) == 1
    assert len(step.copies) == 1  # type: ignore[attr-defined]


def test_swap_out_during_a_copy_waits_for_its_fence() -> None:
    allocator = BlockAllocator(4, 4, num_host_blocks=4)
    seq = computed(allocator, list(range(6)))
    (fork,) = allocator.fork(seq)
    source = seq.block_ids[1]
    step = allocator.append([seq], [9])
    assert [list(pair) for pair in step.copies] == [[source, seq.block_ids[1]]]
    plan = allocator.swap_out([fork, seq])
    assert allocator.num_free_blocks == 1, "nothing is free before it has run"
    with pytest.raises(InvalidArgument, match="commit that first"):
        allocator.commit(plan)
    allocator.commit(step)
    assert allocator.num_free_blocks == 1, "the plan reads the blocks still"
    allocator.commit(plan)
    assert allocator.num_free_blocks == 4
    allocator.check()


def test_swapped_out_handles_are_stale_but_can_be_freed() -> None:
    allocator = BlockAllocator(4, 4, num_host_blocks=4)
    seq = computed(allocator, 5)
    allocator.commit(allocator.swap_out([seq]))
    for call in (
        lambda: allocator.append([seq]),
        lambda: allocator.fork(seq),
        lambda: allocator.truncate(seq, 0),
        lambda: allocator.swap_out([seq]),
        lambda: allocator.release_window(seq, 0),
    ):
        with pytest.raises(StaleSequence, match="swapped out"):
            call()
    allocator.free(seq)
    assert allocator.num_free_host_blocks == 4
    with pytest.raises(StaleSequence):
        allocator.swap_in([seq])
    allocator.check()


def test_swap_needs_room_for_all_or_moves_none() -> None:
    allocator = BlockAllocator(8, 4, num_host_blocks=3)
    seqs = [computed(allocator, 8), computed(allocator, 8)]
    before = fingerprint(allocator)
    with pytest.raises(OutOfBlocks, match="swap_out: 4 host blocks needed, 3 free"):
        allocator.swap_out(seqs)
    assert fingerprint(allocator) == before
    allocator.commit(allocator.swap_out(seqs[:1]))
    allocator.create(20)
    before = fingerprint(allocator)
    with pytest.raises(OutOfBlocks, match="swap_in: 2 device blocks needed, 1 free"):
        allocator.swap_in(seqs[:1])
    assert fingerprint(allocator) == before


def test_tokens_not_computed_need_no_host_block() -> None:
    allocator = BlockAllocator(8, 4, num_host_blocks=2)
    seq = allocator.create(list(range(20)))
    allocator.commit(allocator.prefill([seq], 5))
    plan = done(allocator, allocator.swap_out([seq]))
    assert len(plan.moves[0][1]) == 2
    plan = done(allocator, allocator.swap_in([seq]))
    assert len(seq.block_ids) == 5
    assert list(allocator.prefill([seq]).seq_lens) == [20]


@pytest.mark.parametrize("size", [1, 4])
def test_a_prompt_that_was_cached_whole_is_swapped_before_its_last_token(size: int) -> None:
    allocator = BlockAllocator(8, size, num_host_blocks=8)
    tokens = list(range(2 * size))
    computed(allocator, tokens)
    seq = allocator.create(tokens)
    allocator.commit(allocator.swap_out([seq]))
    allocator.commit(allocator.swap_in([seq]))
    step = allocator.prefill([seq])
    position = 2 * size - 1
    assert list(step.slot_mapping) == [seq.block_ids[1] * size + position % size], (
        "it is written, not taken for granted"
    )
    done(allocator, step)


def test_aborted_swaps_leave_everything_where_it_was() -> None:
    allocator = BlockAllocator(8, 4, num_host_blocks=4)
    seq = computed(allocator, list(range(7)))
    (fork,) = allocator.fork(seq)
    blocks = seq.block_ids
    plan = allocator.swap_out([seq])
    allocator.append([fork], [1])  # in place: its owner has left
    allocator.abort(plan)
    assert (seq.state, seq.block_ids) == ("live", blocks)
    assert allocator.num_free_host_blocks == 4
    allocator.check()
    allocator.commit(allocator.swap_out([seq]))
    plan = allocator.swap_in([seq])
    allocator.abort(plan)
    assert seq.state == "swapped out"
    allocator.commit(allocator.swap_in([seq]))
    assert seq.state == "live"
    allocator.check()


def test_an_aborted_swap_shares_the_last_block_of_a_batch_on_the_fast_path_again() -> None:
    allocator = BlockAllocator(8, 8, num_host_blocks=4)
    seq = computed(allocator, list(range(3)))
    (fork,) = allocator.fork(seq)
    plan = allocator.swap_out([seq])
    for token in range(3):
        assert len(allocator.append([fork], [token]).copies) == 0, "its own, as long as the other is away"
    assert allocator._ledger.lockstep_batches
    allocator.abort(plan)
    allocator.check()
    assert seq.block_ids == fork.block_ids
    assert len(allocator.append([fork], [3]).copies) == 1
    allocator.check()


def test_what_a_plan_in_flight_reads_is_not_overwritten() -> None:
    allocator = BlockAllocator(8, 4, num_host_blocks=4)
    seq = computed(allocator, list(range(7)))
    (fork,) = allocator.fork(seq)
    allocator.swap_out([seq])
    allocator.truncate(fork, 5)
    step = allocator.append([fork], [50])
    assert len(step.copies) == 1, "token 5 of the other is in that place until the plan has run"
    allocator.check()


def test_a_swapped_prefix_is_found() -> None:
    allocator = BlockAllocator(4, 4, num_host_blocks=4)
    seq = computed(allocator, list(range(12)))
    allocator.commit(allocator.swap_out([seq]))
    host = seq.block_ids
    allocator.free(allocator.create(16))  # evicts what the device had
    allocator.free(seq)
    hit = allocator.create(list(range(11)))
    assert hit.num_cached_tokens == 8
    step = allocator.prefill([hit])
    assert moves(step) == [("swap_in", host[:2], hit.block_ids[:2])]
    assert step.num_tokens == 3
    assert allocator.num_free_host_blocks == 2, "fenced"
    done(allocator, step)
    assert allocator.num_free_host_blocks == 4
    assert allocator.create(list(range(5))).block_ids[0] == hit.block_ids[0], "cached on the device too"


def test_a_swapped_prefix_is_not_found_under_another_salt() -> None:
    allocator = BlockAllocator(4, 4, num_host_blocks=4)
    seq = computed(allocator, list(range(12)), salt="a")
    allocator.commit(allocator.swap_out([seq]))
    allocator.free(allocator.create(16))
    assert allocator.create(list(range(11)), salt="b").num_cached_tokens == 0


def test_fork_then_release_window_in_both() -> None:
    allocator = BlockAllocator(8, 4)
    seq = computed(allocator, list(range(14)))
    (fork,) = allocator.fork(seq)
    blocks = seq.block_ids
    allocator.release_window(seq, 9)
    assert seq.block_ids == [-1, -1, *blocks[2:]]
    assert fork.block_ids == blocks
    assert allocator.num_free_blocks == 4, "the fork needs them"
    allocator.release_window(fork, 8)
    assert allocator.num_free_blocks == 6
    allocator.release_window(fork, 8)
    allocator.release_window(seq, 3)
    assert allocator.num_free_blocks == 6, "each given up once"
    allocator.check()
    step = allocator.append([seq, fork], [1, 2])
    assert step.block_table.tolist()[1][:2] == [-1, -1]
    with pytest.raises(InvalidArgument, match="given back"):
        allocator.truncate(seq, 6)
    with pytest.raises(InvalidArgument, match="first_needed: got 15, expected 0 to 14"):
        allocator.release_window(seq, 15)
    allocator.check()


def test_window_and_swap() -> None:
    allocator = BlockAllocator(8, 4, num_host_blocks=8)
    seq = computed(allocator, list(range(14)))
    allocator.release_window(seq, 8)
    plan = done(allocator, allocator.swap_out([seq]))
    assert len(plan.moves[0][1]) == 2
    done(allocator, allocator.swap_in([seq]))
    assert seq.block_ids[:2] == [-1, -1]
    assert min(seq.block_ids[2:]) >= 0


def test_transaction_takes_everything_back() -> None:
    allocator = BlockAllocator(8, 4, num_host_blocks=8)
    cached = computed(allocator, list(range(8)))
    seq = computed(allocator, list(range(50, 59)))
    allocator.free(cached)
    (fork,) = allocator.fork(seq)
    step = allocator.append([seq], [1])
    before = fingerprint(allocator)
    inside: list[Sequence] = []

    def everything() -> None:
        with allocator.transaction():
            allocator.commit(step)
            allocator.append([seq, fork], [2, 3])
            inside.append(allocator.create(8))
            allocator.free(fork)
            with allocator.transaction():
                allocator.swap_out([seq])
            raise KeyError

    with pytest.raises(KeyError):
        everything()
    assert fingerprint(allocator) == before
    assert inside[0].state == "freed"
    allocator.check()
    allocator.commit(step)
    assert allocator.create(list(range(8))).num_cached_tokens == 7, "evictions are taken back too"


def test_inner_transaction_alone_is_taken_back() -> None:
    allocator = BlockAllocator(8, 4)
    with allocator.transaction():
        kept = allocator.create(4)
        with pytest.raises(OutOfBlocks), allocator.transaction():
            allocator.create(1000)
        with pytest.raises(OutOfBlocks):
            allocator.create(1000)
    assert kept.state == "live"
    assert allocator.num_free_blocks == 7
    allocator.check()


def test_a_plan_that_uses_what_an_earlier_one_moves_waits_for_it() -> None:
    allocator = BlockAllocator(8, 4, num_host_blocks=8)
    seq = computed(allocator, list(range(6)))
    (fork,) = allocator.fork(seq)
    blocks = seq.block_ids
    first, second = allocator.swap_out([seq]), allocator.swap_out([fork])
    assert len(second.moves) == 0, "the first moves them"
    before = fingerprint(allocator)
    with pytest.raises(InvalidArgument, match=f"{second.id} comes after {first.id}"):
        allocator.commit(second)
    with pytest.raises(InvalidArgument, match=str(second.id)):
        allocator.abort(first)
    assert fingerprint(allocator) == before
    allocator.abort(second)
    allocator.abort(first)
    assert (seq.state, fork.state, seq.block_ids, fork.block_ids) == ("live", "live", blocks, blocks)
    allocator.check()


@pytest.mark.parametrize("fails", [False, True])
def test_transactions_left_out_of_order_are_all_taken_back(fails: bool) -> None:
    allocator = BlockAllocator(8, 4)
    kept = allocator.create(4)
    before, counts = fingerprint(allocator), allocator.stats
    first, second = allocator.transaction(), allocator.transaction()
    first.__enter__()
    allocator.create(4)
    second.__enter__()
    allocator.create(4)
    error = (ZeroDivisionError, ZeroDivisionError(), None) if fails else (None, None, None)
    with pytest.raises(InvalidArgument, match="left before 1 inside it"):
        first.__exit__(*error)
    assert fingerprint(allocator) == before
    if fails:
        assert not second.__exit__(*error), "what it wanted has happened: its exception goes on"
    else:
        with pytest.raises(InvalidArgument, match="taken back already"):
            second.__exit__(*error)
    assert fingerprint(allocator) == before
    assert allocator.stats | {"peak_blocks_used": 1} == counts
    allocator.check()
    assert allocator.snapshot(), "no transaction is open"
    with allocator.transaction():
        allocator.free(kept)
    assert allocator.num_free_blocks == 8
