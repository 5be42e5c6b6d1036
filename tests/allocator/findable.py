"""A model of what could be found in the prefix cache, that knows nothing of how the allocator works.

It follows `events` and reads the block tables, and demands of every answer what must follow:

- every cached block can be reached from its salt, and holds, in the simulated memory, what its digest says;
- as many blocks are cached as are counted; a prompt finds the longest chain of full blocks that is there;
- what was computed can be found, after each commit that fills a block and after a sequence is freed;
- blocks leave for a reason that can be true, and are evicted in order: tails before heads, lower levels first, and in a
  level the least recently used first.

Where it cannot be sure, as of a use that no block table shows, it keeps a lower and an upper bound, and demands only
what holds for both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pagedkern.allocator import BlockAllocator, BlockEvent, Step
from pagedkern.errors import OutOfBlocks
from tests.allocator.actions import World
from tests.allocator.shadow import Salt, Shadow, Span, Undo

MEMORIES = ("device", "host")
REASONS = ("evicted", "rewritten", "cleared", "orphaned")
Place = tuple[str, int, bytes]


class Index:
    """What a router knows that follows events: which prefix is cached in which memory, and in which block."""

    def __init__(self, events: Iterable[BlockEvent] = ()) -> None:
        self.blocks: dict[str, dict[bytes, int]] = {memory: {} for memory in MEMORIES}
        self.parents: dict[bytes, bytes] = {}
        self.follow(events)

    def follow(self, events: Iterable[BlockEvent]) -> None:
        for number, event in enumerate(events):
            if event.kind == "lost":
                assert number == 0, "what was lost is said first"
                self.blocks = {memory: {} for memory in MEMORIES}
                continue
            blocks = self.blocks[event.memory]
            if event.kind == "stored":
                assert event.digest not in blocks, "it is stored already"
                assert event.block not in blocks.values(), "the block has contents already"
                assert self.parents.setdefault(event.digest, event.parent) == event.parent
                assert event.reason == ""
                blocks[event.digest] = event.block
            else:
                assert event.kind == "removed"
                assert event.reason in REASONS, event
                assert blocks.pop(event.digest, None) == event.block, "it is removed from where it was not"

    def __contains__(self, digest: bytes) -> bool:
        return any(digest in blocks for blocks in self.blocks.values())

    def places(self) -> set[Place]:
        return {(memory, b, digest) for memory, blocks in self.blocks.items() for digest, b in blocks.items()}

    def found(self, digests: list[bytes]) -> int:
        """How many leading blocks of a prompt can be found."""
        return next((i for i, digest in enumerate(digests) if digest not in self), len(digests))

    def behind(self, digest: bytes) -> Iterator[bytes]:
        """What it is cached behind, nearest first; ends at the salt."""
        while (digest := self.parents.get(digest, b"")) in self.parents:
            yield digest

    def orphans(self) -> list[bytes]:
        """What is cached, but cannot be reached."""
        cached = {digest for blocks in self.blocks.values() for digest in blocks}
        return [
            digest for digest in cached if self.parents[digest] in self.parents and self.parents[digest] not in cached
        ]


@dataclass
class Use:
    """What is known of a cached block since it was stored: each with a lower and an upper bound."""

    least_level: int = 0
    most_level: int = 0
    least_time: int = 0  # when it was last used or released, for sure
    most_time: int = 0  # or possibly
    kept: list[tuple[int, Shadow, float | None, bool]] = field(default_factory=list)  # retention, and whether for sure

    def levels(self, now: float) -> tuple[int, int]:
        least, most = self.least_level, self.most_level
        for priority, shadow, seconds, sure in self.kept:
            if lasts(shadow, seconds, now):
                least, most = max(least, priority if sure else 0), max(most, priority)
        return least, most

    def expire(self, now: float, time: int) -> None:
        """What a retention kept that has ended counts as used, if it did."""
        lasting = [kept for kept in self.kept if lasts(kept[1], kept[2], now)]
        if len(lasting) < len(self.kept):
            self.kept, self.most_time = lasting, time


def lasts(shadow: Shadow, seconds: float | None, now: float) -> bool:
    """Whether a retention of a sequence has not ended."""
    return seconds is None or shadow.freed_at is None or now < shadow.freed_at + seconds


@dataclass
class Content:
    """What a digest stands for."""

    place: tuple[type, Salt]
    parent: bytes | None  # None: that of the salt
    values: dict[int, list[int]] = field(default_factory=dict)  # of a block's slots, by the origin of the sequence


class Clock:
    """The time, as the test says."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Watched(World):
    """A world whose prefix cache is watched."""

    telling: Mapping[str, int] | None = {}
    reads = True  # the events of each action, when it is done

    def __init__(self, *args: Any, **options: Any) -> None:
        self.clock = Clock()
        super().__init__(*args, clock=self.clock, **options)
        if self.telling is not None:
            self.real.record_events(**self.telling)
        self.index = Index()
        self.roots: dict[tuple[type, Salt], bytes] = {}
        self.contents: dict[bytes, Content] = {}
        self.prefixes: dict[tuple[int, tuple[int, ...]], list[bytes]] = {}  # digests, by origin and values
        self.fenced: dict[str, set[bytes]] = {
            memory: set() for memory in MEMORIES
        }  # released while plans are in flight
        self.uses: dict[str, dict[bytes, Use]] = {memory: {} for memory in MEMORIES}
        self.time = 0
        self.owners: dict[str, dict[int, list[Shadow]]] = {memory: {} for memory in MEMORIES}  # before the action
        self.quiet = True  # nothing was in flight before the action
        self.was_open = False
        self.within: set[Shadow] = set()  # the sequences that the transaction has had so far, those it freed too
        self.filled: dict[int, int] = {}  # full computed blocks of each sequence before the action
        self.evicted = dict.fromkeys(MEMORIES, 0)

    # What prompts are made of.

    def digests(self, shadow: Shadow) -> list[bytes]:
        """Of each full block whose ids the allocator knows; what they stand for is noted."""
        length = shadow.known - shadow.known % self.size
        tokens, keys = shadow.tokens[:length], [(s, min(e, length), d) for s, e, d in shadow.keys if s < length]
        prefix = shadow.origin, tuple(shadow.values[:length])
        if prefix not in self.prefixes:
            self.prefixes[prefix] = digests = self.digests_of(tokens, shadow.salt, keys)
            place = type(shadow.salt), shadow.salt
            for i, digest in enumerate(digests):
                parent = digests[i - 1] if i else None
                content = self.contents.setdefault(digest, Content(place, parent))
                assert (content.place, content.parent) == (place, parent), "two prefixes share a digest"
                values = shadow.values[i * self.size : (i + 1) * self.size]
                assert content.values.setdefault(shadow.origin, values) == values, "two prefixes share a digest"
        return self.prefixes[prefix]

    def digests_of(self, tokens: list[int], salt: Salt, keys: list[Span]) -> list[bytes]:
        return self.real.digests(tokens, salt=salt, keys=keys)

    # Actions.

    def perform(self, name: str, a: int, b: int, c: int) -> None:
        super().perform(name, a, b, c)
        if c % 4 == 0 and not self.open:
            self.probe(a, b, c)

    def find(self, shadow: Shadow) -> None:
        """A prompt finds what the index has, no more and no less."""
        super().find(shadow)
        if not self.open and self.options.get("prefix_caching", True):
            found = self.index.found(self.digests(shadow)) * self.size
            expected = max(0, min(found, len(shadow.tokens) - 1))
            assert shadow.cached == expected, f"{shadow.handle}: {shadow.cached} tokens found, expected {expected}"

    def probe(self, a: int, b: int, c: int) -> None:
        """Ask for some prompt, and take it back."""
        tokens, salt = self.prompt(a // 3, b // 5), (None, "tenant")[a % 2]
        keys: list[Span] = self.spans(len(tokens), c // 4)
        more: dict[str, Any] = {"keys": keys} if keys else {}
        expected = max(0, min(self.index.found(self.digests_of(tokens, salt, keys)) * self.size, len(tokens) - 1))
        try:
            with self.real.transaction():
                found = self.real.create(tokens, salt=salt, **more).num_cached_tokens
                raise Undo
        except Undo:
            assert found == expected * self.options.get("prefix_caching", True), f"{found} tokens found"
        except OutOfBlocks:
            pass
        if self.reads:
            assert self.real.events == []

    def restored(self, state: dict[str, Any]) -> BlockAllocator:
        restored = self.restore(state)
        if self.telling is not None:
            restored.record_events(**self.telling)
        index = Index(restored.cached_events())
        assert index.places() == self.index.places()
        return restored

    def restore(self, state: dict[str, Any]) -> BlockAllocator:
        return BlockAllocator.restore(state, clock=self.clock)

    # After each action.

    def compare(self) -> None:
        super().compare()
        self.time += 1
        events = self.changes()
        assert not (self.open and events), "nothing is told inside a transaction"
        if self.open:
            self.was_open = True
            self.within.update(self.shadows)
            return
        owners = self.owners_now()
        if self.quiet and not self.was_open:
            self.check_evictions(events, owners)
        before = {memory: dict(blocks) for memory, blocks in self.index.blocks.items()}
        self.index.follow(events)
        self.check_index()
        self.check_reasons(events)
        self.note_uses(before, owners)
        self.check_filled()
        self.owners, self.quiet, self.was_open = owners, not self.flights, False
        self.within.clear()

    def changes(self) -> list[BlockEvent]:
        return self.real.events

    def owners_now(self) -> dict[str, dict[int, list[Shadow]]]:
        owners: dict[str, dict[int, list[Shadow]]] = {memory: {} for memory in MEMORIES}
        for shadow in self.shadows:
            memory = owners["device" if shadow.state == "live" else "host"]
            for b in shadow.handle.block_ids:
                if b >= 0:
                    memory.setdefault(b, []).append(shadow)
        return owners

    def check_index(self) -> None:
        index, real = self.index, self.real
        assert not index.orphans(), f"{len(index.orphans())} cached blocks cannot be reached"
        sizes = len(index.blocks["device"]), len(index.blocks["host"])
        assert (real.num_cached_blocks, real.stats["host_blocks_cached"]) == sizes
        assert {(e.memory, e.block, e.digest) for e in real.cached_events()} == index.places()
        for shadow in self.shadows:
            self.digests(shadow)
        size = self.size
        for memory, b, digest in index.places():
            content, parent = self.contents[digest], index.parents[digest]
            expected = self.roots.setdefault(content.place, parent) if content.parent is None else content.parent
            assert parent == expected, f"{memory} block {b}: its parent is another"
            slots = (self.device if memory == "device" else self.host)[b * size : (b + 1) * size]
            values = content.values.get(self.origins.get(content.place, 0))
            assert slots == values, f"{memory} block {b} does not hold what its digest says"

    def check_reasons(self, events: list[BlockEvent]) -> None:
        """Each reason is possible."""
        removed = [e for e in events if e.kind == "removed"]
        lost = {e.digest for e in removed}
        for event in removed:
            if event.reason == "orphaned":
                ways = [d for d in self.index.behind(event.digest) if d in lost or d not in self.index]
                assert self.was_open or ways, f"{event}: all blocks before it are there"
            if event.reason == "evicted":
                self.evicted[event.memory] += 1
        assert (self.evicted["device"], self.evicted["host"]) == (
            self.real.stats["blocks_evicted"],
            self.real.stats["host_blocks_evicted"],
        )
        cleared = [e for e in removed if e.reason == "cleared"]
        if not self.was_open and self.action != "clear_cache":
            assert not cleared
        if self.action in ("free", "free_all", "fork", "pin", "release_window", "truncate") and not self.was_open:
            assert not removed, f"{removed[0]}: nothing was taken and nothing rewritten"

    # The order of eviction.

    def bounds(self, memory: str) -> dict[bytes, tuple[int, int, int, int]]:
        """For each cached block its level and the time of its last use, each at least and at most, with what is behind
        it.
        """
        now = self.clock()
        for uses in self.uses.values():
            for use in uses.values():
                use.expire(now, self.time)
        result: dict[bytes, list[int]] = {}
        for other in MEMORIES:
            for digest, use in self.uses[other].items():
                least, most = use.levels(now)
                for node in (digest, *self.index.behind(digest)):
                    if node in self.uses[memory]:
                        mine = result.setdefault(node, [0, 0, 0, 0])
                        mine[1], mine[3] = max(mine[1], most), max(mine[3], use.most_time)
                        if other == memory:
                            mine[0], mine[2] = max(mine[0], least), max(mine[2], use.least_time)
        return {digest: (a, b, c, d) for digest, (a, b, c, d) in result.items()}

    def check_evictions(self, events: list[BlockEvent], owners: dict[str, dict[int, list[Shadow]]]) -> None:
        for memory in MEMORIES:
            gone = [e.digest for e in events if e.reason == "evicted" and e.memory == memory]
            if not gone:
                continue
            removed = {e.digest for e in events if e.kind == "removed" and e.memory == memory}
            blocks, bounds = self.index.blocks[memory], self.bounds(memory)
            stays = [d for d, b in blocks.items() if d not in removed and self.idle(memory, b, d, owners)]
            for out in gone:
                least_level, most_level, least_time, _ = bounds[out]
                for stay in stays:
                    assert out not in self.index.behind(stay), f"{memory}: evicted before what is behind it"
                    assert least_level <= bounds[stay][1], (
                        f"{memory} block {blocks[out]} of level {least_level} is evicted, "
                        f"block {blocks[stay]} of level {bounds[stay][1]} stays"
                    )
                    if least_level == most_level == bounds[stay][0] == bounds[stay][1]:
                        assert least_time <= bounds[stay][3], (
                            f"{memory} block {blocks[out]} used at {least_time} is evicted, "
                            f"block {blocks[stay]} used at {bounds[stay][3]} stays"
                        )
            self.count_compared += len(gone) * len(stays)

    count_compared = 0

    def idle(self, memory: str, b: int, digest: bytes, owners: dict[str, dict[int, list[Shadow]]]) -> bool:
        """Whether nobody owned the block before the action and nobody does now."""
        if b in self.owners[memory] or b in owners[memory]:
            return False
        if memory == "device":
            return True
        return all(s.begun or digest not in self.digests(s) for s in self.those())  # it may be about to be moved in

    def note_uses(self, before: dict[str, dict[bytes, int]], owners: dict[str, dict[int, list[Shadow]]]) -> None:
        passing: dict[bytes, int] = {}  # the highest priority of the sequences whose tokens begin so
        keeping: dict[bytes, list[tuple[int, Shadow, float | None]]] = {}
        rows = [row.shadow for flight in self.flights for row in flight.rows]
        owned = (s for memory in self.owners.values() for those in memory.values() for s in those)
        for shadow in {*self.shadows, *rows, *self.within, *owned}:
            for i, digest in enumerate(self.digests(shadow)):
                passing[digest] = max(passing.get(digest, 0), shadow.priority)
                for start, end, priority, seconds in shadow.retention:
                    if start < (i + 1) * self.size and end > i * self.size:
                        keeping.setdefault(digest, []).append((priority, shadow, seconds))
        for memory in MEMORIES:
            blocks, uses = self.index.blocks[memory], self.uses[memory]
            for digest in [d for d in uses if blocks.get(d) != before[memory].get(d) or d not in blocks]:
                del uses[digest]
            for digest, b in blocks.items():
                use = uses.get(digest)
                if use is None:
                    use = uses[digest] = Use(least_time=self.time, most_time=self.time)
                was, now = self.owners[memory].get(b, []), owners[memory].get(b, [])
                for shadow in (*was, *now):
                    use.least_level = max(use.least_level, shadow.priority)
                use.most_level = max(use.most_level, use.least_level, passing.get(digest, 0))
                if set(was) != set(now):
                    use.least_time = use.most_time = self.time
                    if self.flights or not self.quiet:
                        self.fenced[memory].add(digest)
                if digest in passing or digest in self.fenced[memory] or self.was_open:  # then uses are not all seen
                    use.most_time = self.time
                for priority, shadow, seconds in [
                    k for k in keeping.get(digest, ()) if lasts(k[1], k[2], self.clock())
                ]:
                    sure = memory == "device" and shadow in (*was, *now) and not shadow.shared
                    if (priority, shadow, seconds, sure) not in use.kept:
                        use.kept.append((priority, shadow, seconds, sure))
            if not self.flights:
                self.fenced[memory].clear()
        self.lift()

    def lift(self) -> None:
        """What is behind a block lifts it and counts as a use of it, also when it has left before the block does."""
        for digest, use in [pair for uses in self.uses.values() for pair in uses.items()]:
            for node in (digest, *self.index.behind(digest)):
                for mine in [uses[node] for uses in self.uses.values() if node in uses]:
                    mine.most_level = max(mine.most_level, use.most_level)
                    mine.most_time = max(mine.most_time, use.most_time)
                    had = [kept[:3] for kept in mine.kept]
                    mine.kept += [(*kept[:3], False) for kept in use.kept if kept[:3] not in had]

    # What was computed can be found.

    def check_filled(self) -> None:
        filled = {}
        for shadow in self.shadows:
            full = min(shadow.computed, shadow.known) // self.size
            filled[shadow.handle.id] = full
            table = shadow.handle.block_ids
            away = shadow.arriving or not all(isinstance(flight.plan, Step) for flight in shadow.pending)
            if shadow.state != "live" or away or not shadow.begun or self.stopped(shadow):
                continue
            if (
                full > self.filled.get(shadow.handle.id, full)
                and min(table[:full], default=-1) >= 0
                and not self.was_open
            ):
                digests = self.digests(shadow)[:full]
                assert self.index.found(digests) == full, (
                    f"{shadow.handle}: {self.index.found(digests)} of {full} computed blocks can be found"
                )
        self.filled = filled

    def stopped(self, shadow: Shadow) -> bool:
        """Whether it is from before its salt was cleared, or lost its beginning, or nothing is cached at all."""
        place = type(shadow.salt), shadow.salt
        return (
            shadow.windowed or self.origins.get(place) != shadow.origin or not self.options.get("prefix_caching", True)
        )

    def drop(self, shadow: Shadow) -> None:
        full = min(shadow.computed, shadow.known) // self.size
        table = shadow.handle.block_ids[:full]
        sure = shadow.state == "live" and shadow.begun and not shadow.pending and not shadow.arriving
        super().drop(shadow)
        shadow.freed_at = self.clock()
        if sure and table and min(table) >= 0 and not self.stopped(shadow) and not self.open:
            digests = [e.digest for e in self.real.cached_events()]
            assert all(digest in digests for digest in self.digests(shadow)[:full]), "freed, and not to be found"
