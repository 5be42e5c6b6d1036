"""Plans and steps as other ranks get them: all that can be read, and no way to commit it."""

from __future__ import annotations

import copy
import pickle
import random
from array import array
from collections.abc import Callable

import pytest

from pagedkern.allocator import BlockAllocator, Plan, Sequence, Step
from pagedkern.errors import InvalidArgument, StaleSequence
from tests.allocator.world import ACTIONS, World


def computed(allocator: BlockAllocator, tokens: list[int] | int) -> Sequence:
    seq = allocator.create(tokens)
    allocator.commit(allocator.prefill([seq]))
    return seq


def make_prefill(a: BlockAllocator) -> Plan:
    return a.prefill([a.create(range(10, 21)), a.create(3)], 12)


def make_append(a: BlockAllocator) -> Plan:
    seq = computed(a, [1, 2, 3, 4, 5])
    (fork,) = a.fork(seq)
    return a.append([seq, fork], [6, 7])


def make_decode(a: BlockAllocator) -> Plan:
    batch = [computed(a, [1, 2, 3]), computed(a, [4, 5])]
    for token in range(4):
        a.commit(a.append(batch, [token, token]))
    return a.append(batch, [8, 9])


def make_mixed(a: BlockAllocator) -> Plan:
    return a.mixed([computed(a, [1, 2, 3])], [[4, 5, 6]], [a.create(range(30, 40))], 9)


def make_hit(a: BlockAllocator) -> Plan:
    computed(a, list(range(8)))
    return a.prefill([a.create(list(range(8)))])


def make_swap(a: BlockAllocator) -> Plan:
    return a.swap_out([computed(a, list(range(6)))])


def make_back(a: BlockAllocator) -> Plan:
    seq = computed(a, list(range(6)))
    a.commit(a.swap_out([seq]))
    return a.swap_in([seq])


def make_empty(a: BlockAllocator) -> Plan:
    return a.append([])


PLANS: list[Callable[[BlockAllocator], Plan]] = [
    make_prefill, make_append, make_decode, make_mixed, make_hit, make_swap, make_back, make_empty,
]  # fmt: skip
BUFFERS = ("seq_lens", "cu_seqlens_q", "slot_mapping")
NUMBERS = ("max_seqlen_q", "num_tokens", "num_seqs", "row_stride", "base")


def same(copied: Plan, plan: Plan) -> None:
    """The copy says what the plan says, with the same types."""
    assert type(copied) is type(plan)
    for name in ("id", "state", "block_size", "num_blocks", "moves"):
        assert getattr(copied, name) == getattr(plan, name), name
    assert all(type(x) is array and x.typecode == "q" for _, *buffers in copied.moves for x in buffers)
    assert len(copied.seqs) == len(plan.seqs)
    for ours, theirs in zip(plan.seqs, copied.seqs, strict=True):
        assert repr(ours) == repr(theirs)
        assert (ours.block_ids, ours.num_cached_tokens) == (theirs.block_ids, theirs.num_cached_tokens)
    if isinstance(plan, Step):
        assert isinstance(copied, Step)
        for name in BUFFERS:
            ours, theirs = getattr(plan, name), getattr(copied, name)
            assert (type(theirs), theirs.typecode, theirs) == (type(ours), ours.typecode, ours)
        for name in NUMBERS:
            assert getattr(copied, name) == getattr(plan, name)
        assert list(copied.changed_rows) == list(plan.changed_rows)
        table, other = plan.block_table, copied.block_table
        assert (other.format, other.shape, other.tolist()) == (table.format, table.shape, table.tolist())
        assert list(copied.copies) == list(plan.copies)


@pytest.mark.parametrize("make", PLANS)
@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
@pytest.mark.parametrize("late", [False, True])
def test_a_copy_in_any_phase(make: Callable[[BlockAllocator], Plan], protocol: int, late: bool) -> None:
    a = BlockAllocator(32, 4, num_host_blocks=8)
    plan = make(a)
    if late:  # buffers that are made when asked for are as they were when the step was made
        kept = pickle.loads(pickle.dumps(plan, protocol))
        a.commit(plan)
        for seq in plan.seqs:
            a.free(seq)
        a.create(a.num_free_blocks * 4)
        assert kept.state == "in flight"
        if isinstance(plan, Step):
            assert kept.slot_mapping == plan.slot_mapping
    same(pickle.loads(pickle.dumps(plan, protocol)), plan)
    same(copy.deepcopy(plan), plan)


@pytest.mark.parametrize("make", PLANS)
def test_a_copy_belongs_to_no_allocator(make: Callable[[BlockAllocator], Plan]) -> None:
    a = BlockAllocator(32, 4, num_host_blocks=8)
    plan = make(a)
    copied = pickle.loads(pickle.dumps(plan))
    for call in (a.commit, a.abort, BlockAllocator(32, 4).commit):
        with pytest.raises(InvalidArgument, match=f"plan: {plan.id} is a copy, which belongs to no allocator"):
            call(copied)
    for seq in copied.seqs:
        with pytest.raises(StaleSequence, match="is a copy, which belongs to no allocator"):
            a.free(seq)
    a.commit(plan)
    a.check()


def test_a_copy_is_the_caller_s_own() -> None:
    a = BlockAllocator(32, 4)
    step = make_decode(a)
    assert isinstance(step, Step)
    copied = pickle.loads(pickle.dumps(step))
    copied.block_table[0, 0] = 99
    copied.seq_lens[0] = 99
    assert step.block_table[0, 0] != 99
    assert step.seq_lens[0] != 99
    a.check()


def test_a_copy_is_small() -> None:
    """It carries neither the allocator nor token ids."""
    a = BlockAllocator(5000, 16)
    seq = computed(a, list(range(16_000)))
    step = a.append([seq], [1])
    table, blocks = 4 * 1008, 8 * 1001
    assert len(pickle.dumps(step)) < table + blocks + 2000


@pytest.mark.parametrize("seed", range(5))
def test_any_plan_in_flight_can_be_pickled(seed: int) -> None:
    generator = random.Random(seed)
    world, seen = World(24, 3), 0
    for _ in range(120):
        getattr(world, generator.choice(ACTIONS))(*(generator.randrange(4096) for _ in range(3)))
        for flight in world.flights[-2:]:
            same(pickle.loads(pickle.dumps(flight.real)), flight.real)
            seen += 1
    assert seen > 50
