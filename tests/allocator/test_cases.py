"""Sequences of operations that broke other KV block managers, each as the test of its kind."""

from __future__ import annotations

import sys
import timeit
from array import array
from collections.abc import Callable
from types import FrameType

import pytest

from pagedkern.allocator import BlockAllocator, Sequence, Step, Verdict
from pagedkern.allocator.prefix import PrefixIndex
from pagedkern.allocator.roots import Nodes
from pagedkern.allocator.undo import UndoLog
from pagedkern.errors import InvalidArgument, OutOfBlocks, StaleSequence
from tests.allocator.world import fingerprint


def prompt(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def computed(allocator: BlockAllocator, tokens: list[int] | int, **options: object) -> Sequence:
    """A sequence whose prompt has been computed."""
    seq = allocator.create(tokens, **options)  # type: ignore[arg-type]
    allocator.commit(allocator.prefill([seq]))
    return seq


def grow(allocator: BlockAllocator, seqs: list[Sequence], tokens: list[int] | None = None) -> Step:
    step = allocator.append(seqs, tokens)
    allocator.commit(step)
    return step


def test_fork_with_half_full_last_block_then_append_to_both() -> None:
    allocator = BlockAllocator(8, 4)
    seq = computed(allocator, prompt(0, 6))
    (fork,) = allocator.fork(seq)
    before = seq.block_ids
    assert fork.block_ids == before
    step = allocator.append([seq, fork], [10, 11])
    assert list(step.copies) == [(before[1], seq.block_ids[1])]
    assert [kind for kind, _, _ in step.moves] == ["copy"]
    assert fork.block_ids == before, "the last owner writes in place"
    assert seq.block_ids[0] == before[0]
    assert list(step.slot_mapping) == [seq.block_ids[1] * 4 + 2, before[1] * 4 + 2]
    allocator.commit(step)
    assert len(grow(allocator, [seq, fork]).copies) == 0
    allocator.check()


@pytest.mark.parametrize("forks", [1, 2, 5])
def test_each_fork_but_one_copies(forks: int) -> None:
    allocator = BlockAllocator(16, 4)
    seq = computed(allocator, prompt(0, 5))
    family = [seq, *allocator.fork(seq, forks)]
    step = grow(allocator, family)
    assert len(step.copies) == forks
    assert len({s.block_ids[1] for s in family}) == forks + 1
    assert len({s.block_ids[0] for s in family}) == 1


def test_out_of_blocks_on_the_second_append_of_a_batch_changes_nothing() -> None:
    allocator = BlockAllocator(4, 4)
    seq = computed(allocator, prompt(0, 6))
    (fork,) = allocator.fork(seq)
    other = computed(allocator, 4)
    before = fingerprint(allocator)
    with pytest.raises(OutOfBlocks, match="2 needed, 1 of 4 free"):
        allocator.append([fork, other], [1, 2])
    assert fingerprint(allocator) == before
    allocator.check()


def test_free_twice() -> None:
    allocator = BlockAllocator(4, 4)
    seq = computed(allocator, prompt(0, 3))
    allocator.free(seq)
    with pytest.raises(StaleSequence, match="freed"):
        allocator.free(seq)
    assert allocator.num_free_blocks == 4


def test_free_then_append_fork_truncate_prefill() -> None:
    allocator = BlockAllocator(4, 4)
    seq = allocator.create(prompt(0, 3))
    allocator.free(seq)
    for call in (
        lambda: allocator.append([seq], [1]),
        lambda: allocator.fork(seq),
        lambda: allocator.truncate(seq, 0),
        lambda: allocator.prefill([seq]),
    ):
        with pytest.raises(StaleSequence, match="freed"):
            call()


def test_sequence_of_another_allocator() -> None:
    allocator, other = BlockAllocator(4, 4), BlockAllocator(4, 4)
    seq, foreign = computed(allocator, 3), computed(other, 3)
    with pytest.raises(StaleSequence, match="another allocator"):
        allocator.append([seq, foreign])
    assert (seq.num_tokens, foreign.num_tokens) == (3, 3)


def test_no_block_ever_has_two_owners_after_free_free_free_touch() -> None:
    allocator = BlockAllocator(4, 4)
    seq = computed(allocator, prompt(0, 8))
    twin = computed(allocator, prompt(0, 8))
    allocator.free(seq)
    for _ in range(3):
        with pytest.raises(StaleSequence):
            allocator.free(seq)
    again = computed(allocator, prompt(0, 8))
    other = computed(allocator, prompt(50, 8))
    assert set(again.block_ids) == set(twin.block_ids)
    assert not set(other.block_ids) & set(again.block_ids)
    allocator.check()


@pytest.mark.parametrize("salts", [("a", "b"), ("a", None), ("a", b"a"), (1, "1"), ("", None), (0, None)])
def test_tenants_with_different_salts_share_nothing(salts: tuple[object, object]) -> None:
    allocator = BlockAllocator(16, 4)
    first = computed(allocator, prompt(0, 9), salt=salts[0])
    second = computed(allocator, prompt(0, 9), salt=salts[1])
    assert second.num_cached_tokens == 0
    assert not set(first.block_ids) & set(second.block_ids)
    third = allocator.create(prompt(0, 9), salt=salts[1])
    assert third.num_cached_tokens == 8
    assert third.block_ids[:2] == second.block_ids[:2]


def test_no_token_passes_from_one_tenant_to_another_by_fork_and_free() -> None:
    allocator = BlockAllocator(16, 4)
    seq = computed(allocator, prompt(0, 8), salt="a")
    (fork,) = allocator.fork(seq)
    grow(allocator, [fork], [8])
    allocator.free(seq)
    allocator.free(fork)
    assert allocator.create(prompt(0, 9), salt="b").num_cached_tokens == 0
    assert allocator.create(prompt(0, 9)).num_cached_tokens == 0
    assert allocator.create(prompt(0, 9), salt="a").num_cached_tokens == 8


COLLIDING = [
    ([0] * 4, [2**61 - 1] * 4),  # equal hashes of Python integers
    ([-1] * 4, [-2] * 4),  # the same, hash(-1) == hash(-2)
    ([1, 0, 0, 0], [2**61, 0, 0, 0]),
    ([1, 2, 3, 4], [1, 2, 3, 4 + 2**32]),  # the same in 32 bits
    ([0, 1, 2, 3], [3, 2, 1, 0]),
    ([0, 0, 0, 0], [-(2**63), 0, 0, 0]),
]


@pytest.mark.parametrize(("known", "crafted"), COLLIDING)
def test_ids_crafted_to_collide_are_never_served(known: list[int], crafted: list[int]) -> None:
    allocator = BlockAllocator(16, 4)
    computed(allocator, [*known, 7])
    assert allocator.create([*crafted, 7]).num_cached_tokens == 0
    assert allocator.create([*known, 7]).num_cached_tokens == 4


class Same(bytes):
    """Bytes whose hash is that of any others: the worst hash there is."""

    def __hash__(self) -> int:
        return 0


def test_a_hash_that_always_collides_costs_time_only() -> None:
    index = PrefixIndex("device", 16, 2, UndoLog(), Nodes(2))
    chunks = [Same(array("q", [i, i + 1]).tobytes()) for i in range(8)]
    for b, chunk in enumerate(chunks):
        assert index.find(1, chunk) is None
        index.insert_one(1, chunk, b)
    assert [index.find(1, chunk) for chunk in chunks] == list(range(8))
    assert index.find(1, Same(array("q", [9, 9]).tobytes())) is None


def test_the_same_block_after_another_prefix_is_another_block() -> None:
    allocator = BlockAllocator(16, 4)
    computed(allocator, [*prompt(0, 4), *prompt(100, 4), 1])
    assert allocator.create([*prompt(50, 4), *prompt(100, 4), 1]).num_cached_tokens == 0
    assert allocator.create([*prompt(100, 4), 1]).num_cached_tokens == 0


@pytest.mark.parametrize("end", ["free", "abort"])
def test_freed_before_its_prefill_was_computed(end: str) -> None:
    allocator = BlockAllocator(8, 4)
    seq = allocator.create(prompt(0, 8))
    step = allocator.prefill([seq])
    if end == "abort":
        allocator.abort(step)
    allocator.free(seq)
    assert allocator.create(prompt(0, 8)).num_cached_tokens == 0
    if end == "free":
        allocator.commit(step)  # it ran after all, but for nobody
    assert allocator.create(prompt(0, 8)).num_cached_tokens == 0
    allocator.check()


@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize("size", [1, 4, 16])
def test_prompt_of_full_blocks_that_are_all_cached(blocks: int, size: int) -> None:
    allocator = BlockAllocator(4 * blocks, size)
    tokens = prompt(0, blocks * size)
    first = computed(allocator, tokens)
    second = allocator.create(tokens)
    assert second.num_cached_tokens == len(tokens) - 1, "one token is left to compute"
    assert second.block_ids == first.block_ids
    step = allocator.prefill([second])
    assert (step.num_tokens, list(step.seq_lens)) == (1, [len(tokens)])
    assert list(step.slot_mapping) == [-1], "its K and V are there: nothing to write, nothing to copy"
    assert len(step.copies) == 0
    allocator.commit(step)
    step = grow(allocator, [second], [1])
    assert list(step.slot_mapping) == [second.block_ids[-1] * size]
    assert first.block_ids == second.block_ids[:blocks]
    allocator.check()


def test_appending_after_truncating_into_a_cached_block_leaves_the_cache_right() -> None:
    allocator = BlockAllocator(8, 4)
    first = computed(allocator, prompt(0, 8))
    allocator.truncate(first, 6)
    step = grow(allocator, [first], [99])
    assert len(step.copies) == 0, "nobody else has the block"
    assert allocator.create(prompt(0, 9)).num_cached_tokens == 4, "what was cached is overwritten"
    second = computed(allocator, prompt(20, 8))
    third = allocator.create(prompt(20, 9))
    allocator.truncate(second, 6)
    step = grow(allocator, [second], [99])
    assert len(step.copies) == 1, "another sequence reads the block"
    assert third.block_ids[1] != second.block_ids[1]
    allocator.check()


def test_blocks_that_an_uncommitted_copy_reads_are_not_handed_out() -> None:
    allocator = BlockAllocator(6, 4)
    seq = computed(allocator, prompt(0, 6))
    (fork,) = allocator.fork(seq)
    source = seq.block_ids[1]
    step = allocator.append([fork], [9])
    assert list(step.copies) == [(source, fork.block_ids[1])]
    allocator.free(seq)
    assert allocator.num_free_blocks == 3 - 1 + 1, "3 were free, the copy took 1, and only blocks not fenced are free"
    other = allocator.create(allocator.num_free_blocks * 4)
    assert source not in other.block_ids
    with pytest.raises(OutOfBlocks):
        allocator.create(1)
    allocator.commit(step)
    assert allocator.create(1).block_ids == [source]
    allocator.check()


def test_blocks_of_a_sequence_freed_during_its_step_are_not_handed_out() -> None:
    allocator = BlockAllocator(4, 4)
    seq = computed(allocator, 8)
    step = allocator.append([seq])
    allocator.free(seq)
    assert allocator.num_free_blocks == 1
    allocator.commit(step)
    assert allocator.num_free_blocks == 4
    allocator.check()


def test_prompt_larger_than_the_pool_is_refused_at_once() -> None:
    allocator = BlockAllocator(4, 4, watermark=0.25)
    assert allocator.can_allocate(17) is Verdict.NEVER
    assert allocator.can_allocate(13) is Verdict.NEVER, "with the watermark kept"
    assert allocator.can_allocate(12) is Verdict.OK
    seq = allocator.create(5)
    assert allocator.can_allocate(12) is Verdict.LATER
    assert allocator.can_allocate(4) is Verdict.OK
    assert allocator.can_allocate(5) is Verdict.LATER
    with pytest.raises(OutOfBlocks):
        allocator.create(12)
    allocator.free(seq)
    assert allocator.can_allocate(prompt(0, 12)) is Verdict.OK


def test_spare_blocks_come_on_top_of_the_watermark() -> None:
    allocator = BlockAllocator(10, 4, watermark=0.2)
    assert allocator.can_allocate(16, spare_blocks=4) is Verdict.OK
    assert allocator.can_allocate(16, spare_blocks=5) is Verdict.LATER
    allocator.free(computed(allocator, prompt(0, 16)))
    assert allocator.can_allocate(prompt(0, 16), spare_blocks=4) is Verdict.OK, "what is cached must be kept, too"
    assert allocator.can_allocate(prompt(0, 16), spare_blocks=5) is Verdict.LATER
    owner = allocator.create([*prompt(0, 16), 7])
    assert allocator.can_allocate(prompt(0, 16), spare_blocks=3) is Verdict.OK, "shared with its owner"
    assert allocator.can_allocate(prompt(0, 16), spare_blocks=4) is Verdict.LATER
    allocator.free(owner)
    assert allocator.can_allocate(36, spare_blocks=0) is Verdict.NEVER
    assert allocator.can_allocate(4, spare_blocks=10**6) is Verdict.LATER, "the prompt by itself is not too large"
    allocator.check()


def test_cached_blocks_that_are_revived_count_against_capacity() -> None:
    allocator = BlockAllocator(4, 4)
    seq = computed(allocator, prompt(0, 8))
    allocator.free(seq)
    assert allocator.num_free_blocks == 4
    filler = allocator.create(8)
    assert allocator.num_free_blocks == 2, "both are cached"
    assert allocator.can_allocate(prompt(0, 12)) is Verdict.LATER, "2 hits and 1 more are 3 of 2 free blocks"
    before = fingerprint(allocator)
    with pytest.raises(OutOfBlocks, match="1 blocks needed beside 2 cached ones, 0 free"):
        allocator.create(prompt(0, 12))
    assert fingerprint(allocator) == before
    allocator.free(filler)
    assert allocator.create(prompt(0, 12)).num_cached_tokens == 8


def test_a_forgotten_commit_is_named_when_blocks_are_lacking() -> None:
    allocator = BlockAllocator(4, 4)
    for start in (0, 50):
        seq = allocator.create(prompt(start, 6))
        step = allocator.prefill([seq])
        allocator.free(seq)  # without a commit: the step may still write
    with pytest.raises(OutOfBlocks, match="0 free, 4 more once steps in flight are committed"):
        allocator.create(prompt(100, 6))
    allocator.commit(step)
    with pytest.raises(OutOfBlocks, match="4 blocks needed beside 0 cached ones, 2 free, 2 more once"):
        allocator.create(prompt(100, 16))
    allocator.check()


def test_eviction_takes_least_recently_used_and_tails_before_heads() -> None:
    allocator = BlockAllocator(6, 4)
    old, new = computed(allocator, prompt(0, 12)), computed(allocator, prompt(50, 12))
    allocator.free(old)
    allocator.free(new)
    expected = [*old.block_ids[::-1], *new.block_ids[::-1]]
    assert [allocator.create(1).block_ids[0] for _ in range(6)] == expected


def test_priority_is_evicted_last() -> None:
    allocator = BlockAllocator(4, 4)
    system = computed(allocator, prompt(0, 8), priority=1)
    allocator.free(system)
    allocator.free(computed(allocator, prompt(50, 8)))
    assert allocator.create(8).block_ids
    assert allocator.create(prompt(0, 8)).num_cached_tokens == 7
    allocator.check()


def lines_run(call: Callable[[], object]) -> int:
    """How many lines of Python the call executes."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> object:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def test_work_of_a_hit_does_not_depend_on_the_pool() -> None:
    work, least = {}, {}
    for num_blocks in (2_000, 200_000):
        allocator = BlockAllocator(num_blocks, 16)
        for i in range(num_blocks // 64):
            allocator.free(computed(allocator, [i, *prompt(0, 1023)]))
        tokens = [num_blocks // 64 - 1, *prompt(0, 1023)]
        work[num_blocks] = lines_run(lambda: allocator.free(allocator.create(tokens)))  # noqa: B023
        least[num_blocks] = min(timeit.repeat(lambda: allocator.free(allocator.create(tokens)), number=1, repeat=50))  # noqa: B023
        assert allocator.create(tokens).num_cached_tokens == 1023
    assert work[2_000] == work[200_000]
    assert least[200_000] < 10 * least[2_000], "100 times as many blocks, and nothing that C walks through is as long"


@pytest.mark.parametrize("length", range(9))
def test_block_size_1(length: int) -> None:
    allocator = BlockAllocator(24, 1)
    seq = allocator.create(prompt(0, length))
    assert len(seq.block_ids) == length
    if length:
        step = allocator.prefill([seq])
        assert list(step.slot_mapping) == seq.block_ids
        allocator.commit(step)
    for n in range(3):
        step = grow(allocator, [seq], [n])
        assert list(step.slot_mapping) == seq.block_ids[-1:]
        assert seq.num_tokens == seq.num_computed_tokens == len(seq.block_ids) == length + n + 1
    allocator.truncate(seq, length // 2)
    assert len(seq.block_ids) == length // 2
    allocator.free(seq)
    assert allocator.create(prompt(0, length)).num_cached_tokens == max(0, length - 1)
    allocator.check()


@pytest.mark.parametrize("ids", [[-(2**63), -1, 0, 2**63 - 1], [2**63 - 1] * 4, [1, 0, 2, 3], (5, 6, 7, 8)])
def test_ids_of_64_bits_are_kept_exactly(ids: list[int] | tuple[int, ...]) -> None:
    allocator = BlockAllocator(8, 4)
    allocator.free(computed(allocator, [*ids]))
    assert allocator.create([*array("q", ids), 0]).num_cached_tokens == 4
    assert allocator.create([*array("q", ids[:3]), 9, 0]).num_cached_tokens == 0
    for wrong in (2**63, -(2**63) - 1, 2**64 - 1):
        with pytest.raises(InvalidArgument, match="does not fit into 64 bits"):
            allocator.create([*ids, wrong])


def test_a_prompt_whose_tail_is_evicted_is_found_up_to_there() -> None:
    allocator = BlockAllocator(8, 4)
    ids = list(range(24))
    allocator.free(computed(allocator, ids))
    allocator.free(allocator.create(16))  # evicts the last two blocks of the prompt
    assert allocator.num_cached_blocks == 4
    for length, found in ((24, 16), (17, 16), (16, 15), (14, 12)):
        seq = allocator.create(ids[:length])
        assert seq.num_cached_tokens == found
        allocator.free(seq)
    assert allocator.create([*ids[:9], 99, *ids[10:16]]).num_cached_tokens == 8
    allocator.check()
