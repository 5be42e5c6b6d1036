"""Counts say what clients asked for and what was carried out, once: not what was tried, undone or aborted."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from pagedkern.allocator import BlockAllocator, Sequence
from pagedkern.errors import InvalidArgument, InvalidType, OutOfBlocks

PROMPT = list(range(9))


def computed(allocator: BlockAllocator, tokens: list[int], again: bool = False) -> Sequence:
    seq = allocator.create(tokens, again=again)
    allocator.commit(allocator.prefill([seq]))
    return seq


def asked(allocator: BlockAllocator) -> tuple[int, int]:
    stats = allocator.stats
    return stats["prefix_tokens_asked"], stats["prefix_tokens_found"]


def test_what_is_computed_again_is_counted_once() -> None:
    allocator = BlockAllocator(16, 4)
    allocator.free(computed(allocator, PROMPT))
    assert asked(allocator) == (9, 0)
    for _ in range(3):
        allocator.free(computed(allocator, PROMPT, again=True))
    assert asked(allocator) == (9, 0)
    computed(allocator, PROMPT)
    assert asked(allocator) == (18, 8)


def test_what_is_freed_before_anything_is_committed_is_taken_back() -> None:
    allocator = BlockAllocator(16, 4)
    computed(allocator, PROMPT)
    for _ in range(5):
        seq = allocator.create(PROMPT)
        assert asked(allocator) == (18, 8)
        allocator.abort(allocator.prefill([seq]))
        allocator.free(seq)
        assert asked(allocator) == (9, 0)
    seq = allocator.create(PROMPT)
    step = allocator.prefill([seq])
    allocator.free(seq)  # its step is in flight
    allocator.commit(step)
    assert asked(allocator) == (9, 0)


def test_a_cut_prompt_is_taken_back_as_it_was_counted() -> None:
    allocator = BlockAllocator(16, 4)
    computed(allocator, PROMPT)
    seq = allocator.create(PROMPT)
    allocator.truncate(seq, 3)
    allocator.free(seq)
    assert asked(allocator) == (9, 0)
    seq = allocator.create(PROMPT)
    allocator.truncate(seq, 3)
    allocator.commit(allocator.append([seq], [7]))
    allocator.free(seq)
    assert asked(allocator) == (18, 8)


@pytest.mark.parametrize("first", [True, False])
def test_forks_made_before_the_prompt_is_computed_asked_once_together(first: bool) -> None:
    allocator = BlockAllocator(32, 4, num_host_blocks=8)
    seq = allocator.create(PROMPT)
    forks = allocator.fork(seq, 2)
    forks += allocator.fork(forks[0], 1)
    allocator.free(seq)
    assert asked(allocator) == (9, 0), "a fork may still compute it"
    allocator.check()
    allocator = BlockAllocator.restore(allocator.snapshot())
    forks = allocator.sequences
    if first:
        allocator.commit(allocator.prefill(forks[:1]))
    for fork in forks:
        allocator.free(fork)
        allocator.check()
    assert asked(allocator) == ((9, 0) if first else (0, 0))


def test_copies_and_swaps_that_are_aborted_do_not_count() -> None:
    allocator = BlockAllocator(16, 4, num_host_blocks=16)
    seq = computed(allocator, [1, 2, 3, 4, 5])
    (fork,) = allocator.fork(seq)
    before = allocator.stats
    step = allocator.append([seq, fork], [6, 7])
    assert allocator.stats["blocks_copied"] == 1
    allocator.abort(step)
    out = allocator.swap_out([seq, fork])
    back = allocator.swap_in([seq])
    assert (allocator.stats["blocks_swapped_out"], allocator.stats["blocks_swapped_in"]) == (2, 2)
    allocator.abort(back)
    allocator.abort(out)
    names = ("blocks_copied", "blocks_swapped_out", "blocks_swapped_in", "forks", "prefix_tokens_asked")
    assert [allocator.stats[name] for name in names] == [before[name] for name in names]


def test_what_a_transaction_or_an_error_takes_back_does_not_count() -> None:
    allocator = BlockAllocator(12, 4, num_host_blocks=12)
    seq = computed(allocator, PROMPT)
    fresh = allocator.create(PROMPT)
    before = allocator.stats

    def fails() -> None:
        with allocator.transaction():
            allocator.fork(fresh, 2)
            allocator.free(fresh)
            allocator.commit(allocator.swap_out([seq]))
            allocator.create([7] * 20)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    allocator.check()
    peaks = {name: before[name] for name in before if name.startswith("peak")}
    assert peaks == {name: allocator.stats[name] for name in peaks}, "nor as the most that was ever used"
    with pytest.raises(OutOfBlocks):
        allocator.create([1] * 100)
    assert allocator.stats | {"out_of_blocks": 0, "plans": 0} == before | {"plans": 0}
    allocator.free(fresh)
    assert asked(allocator) == (9, 0)


@pytest.mark.parametrize("again", [1, None, "yes"])
def test_again_is_true_or_false(again: object) -> None:
    allocator = BlockAllocator(8, 4)
    with pytest.raises(InvalidType, match=r"again: got .*, expected True or False"):
        allocator.create(PROMPT, again=again)  # type: ignore[arg-type]
    assert not allocator.sequences


@pytest.mark.parametrize("seed", range(10))
def test_any_requests_are_counted_once(seed: int) -> None:
    """Requests that are given up, preempted, forked and computed again; an independent tally of what was asked."""
    generator = random.Random(seed)
    allocator = BlockAllocator(64, 2, num_host_blocks=16)
    waiting: dict[int, list[int]] = {}  # prompts that were preempted
    families: list[tuple[int, list[Sequence]]] = []  # of one request each
    tally: dict[int, tuple[int, int]] = {}
    committed: set[int] = set()

    def act(step: int) -> None:
        prompt = [generator.randrange(2) for _ in range(generator.randrange(1, 12))]
        key = generator.choice([*waiting, step]) if waiting and generator.random() < 0.5 else step
        again = key in waiting
        seq = allocator.create(waiting.pop(key, prompt), again=again)
        if not again:
            tally[key] = (seq.num_tokens, seq.num_cached_tokens)
        families.append((key, [seq]))

    for step in range(300):
        kind = generator.choice(["create", "create", "run", "run", "abort", "fork", "free", "free", "undone"])
        pick = generator.randrange(len(families)) if families else None
        if kind == "create" and allocator.num_free_blocks > 8:
            act(step)
        elif kind == "undone" and allocator.num_free_blocks > 8 and pick is not None:
            _undone(allocator, families[pick][1])
        elif pick is None:
            continue
        elif kind in ("run", "abort"):
            key, seqs = families[pick]
            able = [s for s in seqs if s.num_computed_tokens < s.num_tokens][:1]
            if able:
                plan = allocator.prefill(able)
                (allocator.commit if kind == "run" else allocator.abort)(plan)
                committed |= {key} if kind == "run" else set()
        elif kind == "fork" and allocator.num_free_blocks > 8:
            families[pick][1].extend(allocator.fork(families[pick][1][0]))
        elif kind == "free":
            key, seqs = families[pick]
            seq = seqs.pop(generator.randrange(len(seqs)))
            tokens = list(range(seq.num_tokens))
            allocator.free(seq)
            if not seqs:
                families.pop(pick)
                if key not in committed:
                    tally.pop(key, None)
                elif generator.random() < 0.3:
                    waiting[key] = tokens
        allocator.check()
        assert asked(allocator) == tuple(map(sum, zip((0, 0), *tally.values(), strict=True)))


def _undone(allocator: BlockAllocator, seqs: list[Sequence]) -> None:
    calls: list[Callable[[], object]] = [
        lambda: allocator.create([1, 2, 3]),
        lambda: allocator.fork(seqs[0]),
        lambda: allocator.free(seqs[-1]),
    ]
    with pytest.raises(InvalidArgument), allocator.transaction():  # noqa: PT012
        for call in calls:
            call()
        raise InvalidArgument
