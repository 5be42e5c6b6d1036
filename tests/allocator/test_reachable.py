"""What the prefix cache says, gives and gives up, against a model of what could be found: see `findable`.

First the cases that were found wrong, with their numbers, then random loads. By default these do 18,000 operations, the
same ones in every run. With HYPOTHESIS_PROFILE=fuzz they differ from run to run, and there are 50 times FUZZ_EXAMPLES
of them.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from pagedkern.allocator import BlockAllocator, BlockEvent, Retention, Sequence
from pagedkern.errors import InvalidArgument
from tests.allocator.actions import ACTIONS
from tests.allocator.findable import Clock, Index, Watched
from tests.allocator.test_oracle_machine import Action, play

FUZZ = os.environ.get("HYPOTHESIS_PROFILE") == "fuzz"
STEPS = 50 * int(os.environ.get("FUZZ_EXAMPLES", "2000")) if FUZZ else 18_000
FIRST_SEED = random.randrange(10**9) if FUZZ else 0
LENGTH = 100
PARTS = 6


def computed(allocator: BlockAllocator, tokens: list[int], **how: Any) -> Sequence:
    seq = allocator.create(tokens, **how)
    if seq.num_computed_tokens < len(tokens):
        allocator.commit(allocator.prefill([seq]))
    return seq


def used(allocator: BlockAllocator, tokens: list[int], **how: Any) -> None:
    """A prompt that is computed and freed."""
    allocator.free(computed(allocator, tokens, **how))


def hits(allocator: BlockAllocator, tokens: list[int], **how: Any) -> int:
    """How many tokens a prompt finds; it is not kept."""
    seq = allocator.create(tokens, **how)
    allocator.free(seq)
    return seq.num_cached_tokens


def evict(allocator: BlockAllocator, count: int) -> None:
    """Take so many blocks from the cache."""
    blank = allocator.stats["blocks_free"] - allocator.stats["blocks_idle"]
    allocator.free(allocator.create((blank + count) * allocator.block_size))


def windowed(allocator: BlockAllocator, tokens: list[int], chunk: int, window: int) -> Sequence:
    seq = allocator.create(tokens)
    while seq.num_computed_tokens < len(tokens):
        allocator.commit(allocator.prefill([seq], chunk))
        allocator.release_window(seq, max(0, seq.num_computed_tokens - window))
    return seq


# The cases.


def test_a_windowed_prompt_loses_its_tail_first() -> None:
    allocator = BlockAllocator(12, 4)
    prompt = list(range(33))
    allocator.free(windowed(allocator, prompt, 4, 8))
    assert allocator.num_cached_blocks == 8
    evict(allocator, 1)
    assert allocator.num_cached_blocks == 7
    assert hits(allocator, prompt) == 28
    allocator.check()


def test_what_is_behind_a_rewritten_block_is_gone() -> None:
    allocator = BlockAllocator(16, 2)
    allocator.record_events()
    prompt = list(range(9))
    seq = computed(allocator, prompt)
    index = Index(allocator.events)
    assert len(index.places()) == allocator.num_cached_blocks == 4
    allocator.truncate(seq, 1)
    step = allocator.append([seq], [99])
    removed = allocator.events
    assert sorted(event.reason for event in removed) == ["orphaned"] * 3 + ["rewritten"]
    index.follow(removed)
    assert len(index.places()) == allocator.num_cached_blocks == 0
    allocator.commit(step)
    again = allocator.create(prompt)
    assert again.num_cached_tokens == 0
    allocator.commit(allocator.prefill([again], 2))
    index.follow(allocator.events)
    assert len(index.places()) == allocator.num_cached_blocks == 2, "what took its place, and the first block anew"
    assert allocator.digests(prompt)[0] in index
    allocator.check()


def test_a_block_is_as_dear_as_the_dearest_of_its_users() -> None:
    allocator = BlockAllocator(32, 4)
    allocator.record_events()
    dear = list(range(16))
    used(allocator, dear, priority=3)
    used(allocator, dear, priority=0)
    others = [[100 * i + j for j in range(16)] for i in range(1, 6)]
    for other in others:
        used(allocator, other, priority=1)
    assert len(Index(allocator.events).places()) == 24
    evict(allocator, 4)
    gone = allocator.events
    assert [event.reason for event in gone] == ["evicted"] * 4
    assert [event.digest for event in gone] == allocator.digests(others[0])[::-1], (
        "of level 1 the oldest, its tail first"
    )
    assert hits(allocator, dear) == 15


def test_a_block_is_as_dear_as_what_is_behind_it() -> None:
    allocator = BlockAllocator(8, 4)
    first, second = allocator.create([1, 2, 3, 4]), allocator.create([1, 2, 3, 4, 5, 6, 7, 8], priority=3)
    allocator.commit(
        allocator.prefill([first, second])
    )  # the first block is the first sequence's, the second one's not
    allocator.free(second)
    allocator.free(first)
    used(allocator, [9] * 4, priority=1)
    evict(allocator, 1)
    assert hits(allocator, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 8, "the block of level 1 has gone"
    assert hits(allocator, [9] * 5) == 0
    allocator.check()


def test_a_level_ends_when_the_block_leaves() -> None:
    allocator = BlockAllocator(8, 4)
    used(allocator, [1] * 4, priority=3)
    allocator.clear_cache()
    used(allocator, [1] * 4)
    used(allocator, [2] * 4, priority=1)
    evict(allocator, 1)
    assert (hits(allocator, [1] * 5), hits(allocator, [2] * 5)) == (0, 4)


def test_evicted_from_the_host_what_only_hangs_on_it_goes_too() -> None:
    """The first block is only on the host, what follows it on the device: both are found, and both go together."""
    allocator = BlockAllocator(8, 2, num_host_blocks=2)
    allocator.record_events()
    prompt = [1, 2, 3, 4, 5]
    seq = computed(allocator, prompt)
    (short,) = allocator.fork(seq)
    allocator.truncate(short, 2)
    allocator.commit(allocator.swap_out([short]))
    allocator.free(short)  # its first block is idle on the host, and owned on the device
    allocator.free(seq)
    index = Index(allocator.events)
    first, second = allocator.digests(prompt)
    assert {(m, d) for m, _, d in index.places()} == {("device", first), ("device", second), ("host", first)}
    again = computed(allocator, prompt)
    allocator.truncate(again, 1)
    step = allocator.append([again], [9])  # rewrites the first block on the device; the second one is idle
    index.follow(allocator.events)
    assert {(m, d) for m, _, d in index.places()} == {("device", second), ("host", first)}
    allocator.commit(step)
    assert hits(allocator, prompt) == 4
    other = computed(allocator, [7, 7, 7])
    allocator.commit(allocator.swap_out([other]))  # takes the block of the host
    gone = [event for event in allocator.events if event.kind == "removed"]
    assert {(e.memory, e.digest, e.reason) for e in gone} == {
        ("host", first, "evicted"),
        ("device", second, "orphaned"),
    }
    assert hits(allocator, prompt) == 0
    allocator.check()


def test_a_sequence_whose_chain_broke_is_cached_anew() -> None:
    """Two sequences compute the same at the same time. The blocks of the one are cached; when they have gone, the other
    enters the cache with its own.
    """
    allocator = BlockAllocator(6, 2)
    allocator.record_events()
    first, second = allocator.create([1, 2, 3]), allocator.create([1, 2, 3])
    allocator.commit(allocator.prefill([first, second]))
    allocator.free(first)
    evict(allocator, 1)
    assert allocator.num_cached_blocks == 0
    allocator.commit(allocator.append([second], [4]))  # fills its second block
    index = Index()
    index.follow(allocator.events)
    assert index.places() == {
        ("device", b, d) for b, d in zip(second.block_ids, allocator.digests([1, 2, 3, 4]), strict=True)
    }
    assert hits(allocator, [1, 2, 3, 4, 5]) == 4


def test_freed_it_is_cached_anew_too() -> None:
    allocator = BlockAllocator(6, 2)
    first, second = allocator.create([1, 2, 3]), allocator.create([1, 2, 3])
    allocator.commit(allocator.prefill([first, second]))
    allocator.free(first)
    evict(allocator, 1)
    allocator.free(second)
    assert hits(allocator, [1, 2, 3]) == 2
    allocator.check()


def test_behind_a_window_it_is_not() -> None:
    allocator = BlockAllocator(8, 2)
    first, second = allocator.create([1, 2, 3, 4, 5]), allocator.create([1, 2, 3, 4, 5])
    allocator.commit(allocator.prefill([first, second]))
    allocator.release_window(second, 2)
    allocator.free(first)
    evict(allocator, 2)
    assert allocator.num_cached_blocks == 0
    allocator.commit(allocator.append([second], [6]))
    allocator.free(second)
    assert allocator.num_cached_blocks == 0, "its first block is not its own any more"
    allocator.check()


def test_an_audit_is_linear() -> None:
    """CPU time of `check` for prompts of 4,000 and of 32,000 blocks: 8 times as much, where it was 64."""

    def cost(num_blocks: int) -> float:
        allocator = BlockAllocator(num_blocks, 4)
        computed(allocator, list(range(4 * num_blocks)))
        best = 1e9
        for _ in range(5):
            start = time.process_time()
            allocator.check()
            best = min(best, time.process_time() - start)
        return best

    assert cost(32_000) < 24 * cost(4_000)


def test_aborted_batches_ask_once() -> None:
    allocator = BlockAllocator(16, 2)
    prompt = list(range(9))
    for _ in range(5):
        seq = allocator.create(prompt)
        allocator.abort(allocator.prefill([seq]))
        allocator.free(seq)
    used(allocator, prompt)
    stats = allocator.stats
    assert (stats["prefix_tokens_asked"], stats["prefix_tokens_found"]) == (9, 0)
    used(allocator, prompt)
    stats = allocator.stats
    assert (stats["prefix_tokens_asked"], stats["prefix_tokens_found"]) == (18, 8)


def test_what_is_computed_again_was_asked_before() -> None:
    allocator = BlockAllocator(16, 2)
    seq = computed(allocator, list(range(9)))
    allocator.commit(allocator.append([seq], [[9, 10, 11]]))
    allocator.free(seq)
    used(allocator, list(range(12)), again=True)
    stats = allocator.stats
    assert (stats["prefix_tokens_asked"], stats["prefix_tokens_found"]) == (9, 0)


def test_what_is_aborted_is_not_counted() -> None:
    allocator = BlockAllocator(16, 4, num_host_blocks=8)
    seq = computed(allocator, list(range(6)))
    (fork,) = allocator.fork(seq)
    allocator.abort(allocator.append([seq, fork], [1, 2]))
    out = allocator.swap_out([seq])
    back = allocator.swap_in([seq])
    allocator.abort(back)
    allocator.abort(out)
    names = "blocks_copied", "blocks_swapped_out", "blocks_swapped_in", "forks"
    assert [allocator.stats[name] for name in names] == [0, 0, 0, 1]
    allocator.commit(allocator.append([seq, fork], [1, 2]))
    allocator.commit(allocator.swap_out([seq]))
    allocator.commit(allocator.swap_in([seq]))
    assert [allocator.stats[name] for name in names] == [1, 2, 1, 1], "the block that both have is still there"


# Events.


def test_unread_events_are_bounded() -> None:
    """6,000 requests, and nobody looks: the next look says that something was lost, and what there is."""
    allocator = BlockAllocator(16, 2)
    allocator.record_events(limit=50)
    for i in range(6000):
        used(allocator, [i, i, i, i, i])
    events = allocator.events
    assert events[0].kind == "lost"
    assert {event.kind for event in events[1:]} == {"stored"}
    assert len(events) == 1 + allocator.num_cached_blocks
    assert allocator.events == []
    used(allocator, [1, 2, 3])
    assert [event.kind for event in allocator.events] == ["removed", "stored"], "from now on all is told again"


@pytest.mark.parametrize("limit", [1, 4, 7])
def test_only_what_is_beyond_the_limit_is_lost(limit: int) -> None:
    allocator = BlockAllocator(128, 2)
    allocator.record_events(limit=limit)
    for number, count in enumerate((*range(1, 12), 3)):
        for i in range(count):
            used(allocator, [number, i])
        events = allocator.events
        assert (events[0].kind == "lost") == (count > limit)
        if count <= limit:
            assert [event.kind for event in events] == ["stored"] * count


def test_events_begin_at_any_time() -> None:
    allocator = BlockAllocator(8, 2)
    used(allocator, [1, 2, 3, 4, 5])
    allocator.record_events()
    router = Index(allocator.cached_events())
    used(allocator, [6, 7, 8])
    router.follow(
        event for event in allocator.events if (event.memory, event.block, event.digest) not in router.places()
    )
    assert router.places() == Index(allocator.cached_events()).places()
    evict(allocator, 3)
    router.follow(allocator.events)
    assert router.places() == set()


def test_a_dump_is_parents_first() -> None:
    allocator = BlockAllocator(32, 2, num_host_blocks=8)
    for i in range(4):
        seq = computed(allocator, [0, 0, i // 2, i, 4, 5, 6])
        if i == 2:
            allocator.commit(allocator.swap_out([seq]))
        allocator.free(seq)
    told = set()
    dump = allocator.cached_events()
    for event in dump:
        assert (event.kind, event.reason) == ("stored", "")
        assert event.parent in told or event.digest == allocator.digests([0, 0])[0]
        told.add(event.digest)
    assert len(dump) == allocator.num_cached_blocks + allocator.stats["host_blocks_cached"]
    restored = BlockAllocator.restore(json.loads(json.dumps(allocator.snapshot())))
    assert set(restored.cached_events()) == set(dump)


def test_reasons() -> None:
    allocator = BlockAllocator(4, 2)
    allocator.record_events()

    def reasons() -> list[tuple[str, str]]:
        return [(event.kind, event.reason) for event in allocator.events]

    used(allocator, [1, 2, 3, 4, 5])
    assert reasons() == [("stored", "")] * 2
    evict(allocator, 1)
    assert reasons() == [("removed", "evicted")]
    allocator.clear_cache()
    assert reasons() == [("removed", "cleared")]


# Salts, keys, retention.


def test_one_salt_is_cleared() -> None:
    allocator = BlockAllocator(32, 2, num_host_blocks=16)
    allocator.record_events()
    salts = (None, "None", b"None", 0)
    for salt in salts:
        seq = computed(allocator, [1, 2, 3, 4, 5], salt=salt)
        allocator.commit(allocator.swap_out([seq]))
        allocator.free(seq)
    live = computed(allocator, [1, 2, 3], salt=None)
    allocator.events  # noqa: B018
    allocator.clear_cache(salt=None)
    gone = allocator.events
    assert {(event.kind, event.reason) for event in gone} == {("removed", "cleared")}
    assert len(gone) == 4, "two blocks on each memory"
    assert [hits(allocator, [1, 2, 3, 4, 5], salt=salt) for salt in salts] == [0, 4, 4, 4]
    allocator.commit(allocator.append([live], [[4, 5, 6]]))
    allocator.free(live)
    assert hits(allocator, [1, 2, 3, 4, 5]) == 0, "what it computed is from before"
    allocator.clear_cache(salt="nobody's")
    assert allocator.events == []
    allocator.clear_cache()
    assert (allocator.num_cached_blocks, allocator.stats["host_blocks_cached"]) == (0, 0)
    allocator.check()


IMAGE = 9
"""The id of a place that an image takes."""


@pytest.mark.parametrize(
    ("tokens", "keys", "expected"),
    [
        ([1, IMAGE, IMAGE, IMAGE, 2, 3, 4, 5], [(1, 4, "a")], 7),
        ([1, IMAGE, IMAGE, IMAGE, 2, 3, 4, 5], [(1, 4, "b")], 0),
        ([1, IMAGE, IMAGE, IMAGE, 2, 3, 4, 5], [(1, 4, b"a")], 0),
        ([1, IMAGE, IMAGE, IMAGE, 2, 3, 4, 5], [], 0),
        ([1, IMAGE, IMAGE, IMAGE, 2, 3, 4, 5], [(1, 3, "a"), (3, 4, "b")], 2),
        ([1, IMAGE, IMAGE, IMAGE, 2, 3, 4, 5], [(1, 2, "a"), (2, 4, "a")], 2),
        ([IMAGE, IMAGE, IMAGE, 1, 2, 3, 4, 5], [(0, 3, "a")], 0),
        ([1, IMAGE, IMAGE, IMAGE, IMAGE, 3, 4, 5], [(1, 5, "a")], 4),
        ([1, IMAGE, IMAGE, IMAGE, 2, 3, 4, 5], [(1, 4, "a"), (5, 6, "a")], 4),
    ],
)
def test_an_image_is_told_from_another(tokens: list[int], keys: list[Any], expected: int) -> None:
    allocator = BlockAllocator(16, 2)
    prompt = [1, IMAGE, IMAGE, IMAGE, 2, 3, 4, 5]
    used(allocator, prompt, keys=[(1, 4, "a")])
    assert hits(allocator, tokens, keys=keys) == expected
    same = [
        a == b
        for a, b in zip(
            allocator.digests(prompt, keys=[(1, 4, "a")]), allocator.digests(tokens, keys=keys), strict=True
        )
    ]
    assert min(7, 2 * sum(same)) == expected
    assert same == sorted(same, reverse=True)


def test_keys_follow_their_sequence() -> None:
    """Into forks, snapshots, host memory; truncation cuts them."""
    prompt, keys = [1, IMAGE, IMAGE, IMAGE, IMAGE, 2], [(1, 5, "a")]
    allocator = BlockAllocator(32, 2, num_host_blocks=8)
    seq = computed(allocator, prompt, keys=keys)
    fork, cut = allocator.fork(seq, 2)
    allocator.truncate(cut, 3)
    allocator.commit(allocator.swap_out([seq]))
    allocator = BlockAllocator.restore(json.loads(json.dumps(allocator.snapshot())))
    seq, fork, cut = allocator.sequences
    allocator.commit(allocator.swap_in([seq]))
    allocator.commit(allocator.append([seq, fork, cut], [[3, 4], [5, 6], [IMAGE, IMAGE, 2]]))
    for old in (seq, fork, cut):
        allocator.free(old)
    assert hits(allocator, [*prompt, 3, 4, 0], keys=keys) == 8
    assert hits(allocator, [*prompt, 5, 6, 0], keys=keys) == 8
    assert hits(allocator, [*prompt, 0], keys=[(1, 3, "a")]) == 6
    assert hits(allocator, [*prompt, 3, 4, 0]) == 0
    allocator.check()


@pytest.mark.parametrize(
    "keys",
    [[(3, 2, "a")], [(0, 2, "a"), (1, 3, "b")], [(2, 3, "a"), (0, 1, "a")], [(-1, 2, "a")], [(0, 1, 1.5)], [(1,)], 7],
)
def test_keys_that_are_none(keys: Any) -> None:
    allocator = BlockAllocator(8, 2)
    for call in (allocator.create, allocator.can_allocate, allocator.digests):
        with pytest.raises(InvalidArgument, match="keys"):
            call([1, 2, 3, 4], keys=keys)  # type: ignore[operator]
    allocator.check()
    assert allocator.num_free_blocks == 8


def test_retention_for_some_time() -> None:
    clock = Clock()
    allocator = BlockAllocator(8, 4, clock=clock)
    kept, other = list(range(16)), [7] * 16
    used(allocator, kept, retention=[Retention(0, 8, 2, 10.0)])
    used(allocator, other, priority=1)
    clock.now = 9.5
    evict(allocator, 4)
    assert (hits(allocator, [*kept, 0]), hits(allocator, [*other, 0])) == (8, 8), "by level: 2 of 0, then 2 of 1"
    clock.now = 10.5  # it falls back to 0, which is below the others'
    evict(allocator, 2)
    assert (hits(allocator, [*kept, 0]), hits(allocator, [*other, 0])) == (0, 8)


def test_retention_for_good() -> None:
    clock = Clock()
    allocator = BlockAllocator(8, 4, clock=clock)
    seq = computed(allocator, list(range(16)), retention=[Retention(0, 1, 3)])
    clock.now = 1e9
    allocator.free(seq)
    used(allocator, [7] * 16, priority=2)
    clock.now = 2e9
    evict(allocator, 7)
    assert hits(allocator, list(range(17))) == 4


# Random loads.


WEIGHTS = {
    "create": 12, "prefill_all": 8, "prefill": 6, "drain": 20, "append_known": 5, "append_block": 6, "append_again": 2,
    "append": 2, "append_ahead": 1, "mixed": 3, "fork": 3, "pin": 1, "truncate": 5, "free": 10, "free_all": 1,
    "release_window": 4, "swap_out": 4, "swap_in": 4, "create_long": 4, "snapshot": 1, "clear_cache": 1, "abort": 1,
    "end_transaction": 2, "append_unknown": 0, "create_count": 1, "stale": 0, "work_off": 0,
}  # fmt: skip


class Timed(Watched):
    """Time passes between the actions."""

    def perform(self, name: str, a: int, b: int, c: int) -> None:
        if a % 7 == 0:
            self.clock.now += b % 4 + 0.25  # never just when a retention ends
        super().perform(name, a, b, c)


class Silent(Watched):
    """Nothing is told: what has changed is seen from the dumps. Blocks of one prompt may then be kept as one."""

    telling = None

    def changes(self) -> list[BlockEvent]:
        if self.open:
            return []
        before, dump = self.index.places(), self.real.cached_events()
        after = {(event.memory, event.block, event.digest) for event in dump}
        gone = {digest for _, _, digest in before} - {digest for _, _, digest in after}
        removed = []
        for memory, b, digest in before - after:
            first = gone.isdisjoint(self.index.behind(digest))
            taken = first and b not in self.owners[memory] and self.action != "clear_cache"
            reason = "evicted" if taken else "rewritten"  # or anything else
            removed.append(BlockEvent("removed", memory, b, digest, self.index.parents[digest], reason))
        return removed + [event for event in dump if (event.memory, event.block, event.digest) not in before]

    def check_reasons(self, events: list[BlockEvent]) -> None:
        for event in events:
            self.evicted[event.memory] += event.reason == "evicted"


class Routed(Watched):
    """A router looks at the events now and then; only few are kept."""

    telling: ClassVar[dict[str, int]] = {"limit": 6}
    reads = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.count = 0
        self.router = Index()
        self.num_lost = 0

    def restored(self, state: dict[str, Any]) -> BlockAllocator:
        restored = super().restored(state)
        self.router = Index(restored.cached_events())
        return restored

    def compare(self) -> None:
        super(Watched, self).compare()
        if self.open:
            assert self.real.events == []
            return
        self.index = Index(self.real.cached_events())
        self.check_index()
        self.count += 1
        if self.count % 9 == 0:
            events = self.real.events
            self.num_lost += bool(events) and events[0].kind == "lost"
            self.router.follow(events)
            assert self.router.places() == self.index.places()


def a_load(seed: int) -> tuple[dict[str, Any], list[Action]]:
    generator = random.Random(seed)
    drained = generator.random() < 0.75  # little is left in flight
    weights = {**dict.fromkeys(ACTIONS, 1), **WEIGHTS}
    names = [n for n in ACTIONS if n == "create" or generator.random() < 0.8 for _ in range(weights[n])]
    shape = {
        "mode": generator.choice(["late", "eager"]),
        "num_blocks": generator.choice([8, 12, 16, 24]),
        "block_size": generator.choice([1, 2, 2, 3]),
        "num_host_blocks": generator.choice([0, 0, 4, 6, 12]),
    }
    actions: list[Action] = []
    while len(actions) < LENGTH:
        actions.append((generator.choice(names), *(generator.randrange(4096) for _ in range(3))))  # type: ignore[arg-type]
        if drained and generator.random() < 0.8:
            actions.append(("drain", 1, 0, 2))
    return shape, actions


def run_loads(make: Callable[..., Any], part: int, steps: int) -> list[Any]:
    worlds = []
    runs = -(-steps // LENGTH // PARTS)
    for seed in range(FIRST_SEED + part, FIRST_SEED + part + PARTS * runs, PARTS):
        shape, actions = a_load(seed)

        def world() -> Any:
            worlds.append(make(**shape))  # noqa: B023
            return worlds[-1]

        play(world, actions, f"seed {seed}, {make.__name__}(**{shape})")
    return worlds


@pytest.mark.timeout(0 if FUZZ else 180)
@pytest.mark.parametrize("part", range(PARTS))
def test_machine_of_what_can_be_found(part: int) -> None:
    worlds = run_loads((Watched, Timed, Silent)[part % 3], part, 2 * STEPS)
    assert sum(world.evicted["device"] for world in worlds) > len(worlds)
    assert sum(world.count_compared for world in worlds) > 10 * len(worlds), "the order of eviction was looked at"


@pytest.mark.timeout(0 if FUZZ else 180)
def test_machine_of_a_router_that_looks_seldom() -> None:
    worlds = run_loads(Routed, 0, STEPS // 4)
    assert sum(world.num_lost for world in worlds) > 0
