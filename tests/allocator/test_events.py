"""What routers are told: from when they like, why a block went, never more than a bound, and that some was lost."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from typing import Any

import pytest

from pagedkern.allocator import BlockAllocator, BlockEvent, Sequence
from pagedkern.errors import InvalidArgument, InvalidType
from tests.allocator.world import ACTIONS, World


def computed(allocator: BlockAllocator, tokens: list[int], **options: Any) -> Sequence:
    seq = allocator.create(tokens, **options)
    allocator.commit(allocator.prefill([seq]))
    return seq


class Router:
    """Does what the documentation says, and nothing else."""

    def __init__(self, events: Iterable[BlockEvent] = ()) -> None:
        self.known: set[tuple[str, int, bytes]] = set()
        self.losses = 0
        self.follow(events)

    def follow(self, events: Iterable[BlockEvent]) -> None:
        for event in events:
            place = (event.memory, event.block, event.digest)
            if event.kind == "lost":
                self.known.clear()
                self.losses += 1
            elif event.kind == "stored":
                assert event.reason == ""
                assert place not in self.known
                self.known.add(place)
            else:
                assert event.reason in ("evicted", "rewritten", "cleared", "orphaned")
                self.known.remove(place)


def cached(allocator: BlockAllocator) -> set[tuple[str, int, bytes]]:
    return {(e.memory, e.block, e.digest) for e in allocator.cached_events()}


def test_each_reason() -> None:
    allocator = BlockAllocator(4, 2)
    allocator.record_events()
    seq = computed(allocator, [1, 2, 3, 4, 5, 6])
    assert [e.reason for e in allocator.events] == ["", "", ""]
    allocator.truncate(seq, 3)  # the third block is idle, and the second one is about to be written
    allocator.append([seq], [9])
    gone = allocator.events
    digests = allocator.digests([1, 2, 3, 4, 5, 6])
    assert [(e.reason, e.digest, e.parent) for e in gone] == [
        ("orphaned", digests[2], digests[1]),
        ("rewritten", digests[1], digests[0]),
    ]
    other = BlockAllocator(4, 2)
    other.record_events()
    other.free(computed(other, [1, 2, 3, 4]))
    other.create(6)
    other.clear_cache()
    assert [(e.kind, e.reason) for e in other.events][2:] == [("removed", "evicted"), ("removed", "cleared")]


def test_recording_begins_at_any_time_and_begins_anew() -> None:
    allocator = BlockAllocator(16, 2)
    allocator.free(computed(allocator, [1, 2, 3, 4, 5]))
    assert allocator.events == []
    allocator.record_events()
    router = Router(allocator.cached_events())
    assert len(router.known) == 2
    allocator.free(computed(allocator, [1, 2, 7, 8, 9]))
    allocator.create(26)
    router.follow(allocator.events)
    assert router.known == cached(allocator)
    computed(allocator, [1])
    allocator.clear_cache()
    allocator.record_events()
    assert allocator.events == [], "what was told to nobody is forgotten"


def test_the_dump_has_parents_first_and_both_memories() -> None:
    allocator = BlockAllocator(16, 2, num_host_blocks=8)
    first = computed(allocator, [1, 2, 3, 4, 5], salt="x")
    allocator.commit(allocator.swap_out([first]))
    computed(allocator, [1, 2, 3, 4, 6, 7, 8], salt="x")
    dump = allocator.cached_events()
    digests = allocator.digests([1, 2, 3, 4, 6, 7], salt="x")
    assert sorted((e.memory, e.digest) for e in dump) == sorted(
        [("device", d) for d in digests] + [("host", d) for d in digests[:2]]
    )
    told = {allocator.digests([1, 2], salt="x")[0]: True}
    for event in dump:
        assert event.digest in told or event.parent in told
        told[event.digest] = True
    restored = BlockAllocator.restore(json.loads(json.dumps(allocator.snapshot())))
    assert sorted(restored.cached_events()) == sorted(dump)


@pytest.mark.parametrize("limit", [1, 5, 40])
def test_whoever_never_looks_costs_a_bound_and_is_told_that_it_lost(limit: int) -> None:
    allocator = BlockAllocator(16, 2)
    allocator.record_events(limit=limit)
    for i in range(6000):
        allocator.free(computed(allocator, [i, i, i, i, i]))
    log = allocator._ledger.events
    assert log is not None
    assert len(log) <= limit + 50, "what a few operations add"
    events = allocator.events
    assert (events[0].kind, events[0].memory, events[0].block, events[0].digest) == ("lost", "", -1, b"")
    assert {(e.memory, e.block, e.digest) for e in events[1:]} == cached(allocator)
    assert {e.kind for e in events[1:]} == {"stored"}
    assert allocator.events == []


def test_exactly_the_limit_is_not_lost() -> None:
    allocator = BlockAllocator(16, 2)
    allocator.record_events(limit=4)
    for last in (4, 5):
        allocator.clear_cache()
        allocator.events  # noqa: B018
        computed(allocator, list(range(2 * last)))
        assert (allocator.events[0].kind == "lost") == (last > 4)


def test_what_a_transaction_takes_back_is_not_lost() -> None:
    allocator = BlockAllocator(16, 2)
    allocator.record_events(limit=4)
    computed(allocator, [1, 2, 3])

    def fails() -> None:
        with allocator.transaction():
            for i in range(5):
                computed(allocator, [i, 7, 7])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    for _ in range(40):
        allocator.can_allocate(1)
    assert [e.kind for e in allocator.events] == ["stored"]


def test_salts_that_were_forgotten_since_are_told_all_the_same() -> None:
    allocator = BlockAllocator(4, 2)
    allocator.record_events()
    allocator.free(computed(allocator, [1, 2, 3], salt="gone"))
    allocator.free(allocator.create(8))
    for salt in range(3000):
        allocator.free(allocator.create([1], salt=salt))
    digest = allocator.digests([1, 2], salt="gone")
    assert [(e.kind, e.digest) for e in allocator.events] == [("stored", *digest), ("removed", *digest)]


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "x", None])
def test_a_limit_is_a_number_of_changes(limit: Any) -> None:
    with pytest.raises((InvalidArgument, InvalidType), match="limit: got"):
        BlockAllocator(4, 2).record_events(limit=limit)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("limit", [3, 12, 1000])
def test_a_router_that_looks_now_and_then_is_right_whenever_it_looks(seed: int, limit: int) -> None:
    generator = random.Random(seed)
    world = World(16, 2, num_host_blocks=6)
    for _ in range(20):
        getattr(world, "create" if generator.random() < 0.5 else "prefill")(*(generator.randrange(4096) for _ in "abc"))
    world.drain(0, 0, 0)
    world.real.record_events(limit=limit)
    router = Router(world.real.cached_events())
    for _ in range(300):
        name = generator.choice([*(n for n in ACTIONS if n != "snapshot"), "drain", "drain", "free"])
        getattr(world, name)(*(generator.randrange(4096) for _ in "abc"))
        if generator.random() < 0.2:
            router.follow(world.real.events)
            assert router.known == cached(world.real)
    assert router.losses > 0 if limit == 3 else not router.losses or limit < 1000
