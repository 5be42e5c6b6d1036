"""Physical blocks: who owns them, which are free, which must not be handed out yet. Knows nothing of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pagedkern.allocator.idle import IdleQueue
from pagedkern.allocator.prefix import PrefixIndex
from pagedkern.allocator.run import Key, Run
from pagedkern.allocator.undo import UndoLog
from pagedkern.errors import OutOfBlocks

if TYPE_CHECKING:
    from pagedkern.allocator.step import Plan

PRIORITIES = 4
"""Levels of eviction: cached blocks of level 0 are evicted before those of level 1, and so on."""


class BlockPool:
    """Reference counts and free blocks of one memory (device or host).

    A block is in exactly one of four states:

    - owned: `refs[b] > 0` tables hold it;
    - held: nobody owns it, but a step or plan in flight reads or writes it (`holds[b] > 0`), so it is not free yet;
    - idle: free, and its contents are cached: it stays until the least recently used have to go;
    - blank: free, and its contents are worth nothing.

    Each operation is O(1) for each block that it touches, whatever the size of the pool, and goes into the undo log.
    """

    __slots__ = (
        "_blank",
        "_idle",
        "_level",
        "_top",
        "_undo",
        "arriving",
        "holds",
        "incoming",
        "least_free",
        "name",
        "num_evicted",
        "num_idle",
        "peer",
        "prefix",
        "refs",
        "seals",
        "twins",
    )

    def __init__(self, name: str, num_blocks: int, prefix: PrefixIndex, undo: UndoLog) -> None:
        self.name = name  # for messages: "device" or "host"
        self.prefix = prefix
        self.refs = [0] * num_blocks
        self.holds: dict[int, int] = {}
        self.seals: dict[int, tuple[int, ...]] = {}  # leading tokens of a fenced block that nobody may overwrite
        self.peer = self  # the other memory
        self.twins: dict[int, int] = {}  # owned block: owned block of the peer with the same contents
        self.incoming: dict[int, int] = {}  # owned block: the peer's block whose contents the next step moves into it
        self.arriving: dict[int, Plan] = {}  # block: the plan in flight that moves the peer's contents into it
        self._blank = list(range(num_blocks - 1, -1, -1))  # a stack: the lowest ids come out first
        self._idle = tuple(IdleQueue() for _ in range(PRIORITIES))
        self._level: dict[int, int] = {}  # level of the blocks that were released at another level than 0
        self._undo = undo
        self._top = 0  # no level above it has ever been used
        self.num_idle = 0  # free blocks whose contents are cached
        self.num_evicted = 0  # so far
        self.least_free = num_blocks  # so far

    @property
    def num_blocks(self) -> int:
        return len(self.refs)

    @property
    def num_free(self) -> int:
        """Blocks that `take` can hand out now: blank and idle ones."""
        return len(self._blank) + self.num_idle

    @property
    def held(self) -> str:
        """For the message of a shortage: how many blocks only steps in flight keep. O(blocks in those steps)."""
        count = sum(not self.refs[b] for b in self.holds)
        return f", {count} more once steps in flight are committed" if count else ""

    def num_idle_of(self, blocks: Iterable[int]) -> int:
        """How many of these cached blocks are idle: sharing them takes so many from the free ones."""
        refs, holds = self.refs, self.holds
        return sum(not refs[b] and b not in holds for b in blocks)

    def take(self, count: int) -> list[int]:
        """Hand out `count` blocks with one owner each: blank ones first, then the least recently used idle ones.

        Raises `OutOfBlocks`, and changes nothing, if fewer are free.
        """
        if not count:
            return []
        blank = self._blank
        if count > len(blank) and count > self.num_free:
            free = f"{self.num_free} of {self.num_blocks} free{self.held}"
            raise OutOfBlocks(f"{self.name} blocks: {count} needed, {free}")
        blocks: list[int] = []
        if blank:
            kept = max(0, len(blank) - count)
            blocks = blank[kept:]
            blocks.reverse()
            del blank[kept:]
            for b in blocks:
                self.refs[b] = 1
            self._undo.append((self._untake, (blocks,)))
        if len(blocks) < count:
            blocks = blocks + self._evict(count - len(blocks))
        if len(blank) + self.num_idle < self.least_free:
            self._undo.append((setattr, (self, "least_free", self.least_free)))
            self.least_free = len(blank) + self.num_idle
        return blocks

    def _untake(self, blocks: list[int]) -> None:
        for b in blocks:
            self.refs[b] = 0
        self._blank.extend(reversed(blocks))

    def _evict(self, count: int) -> list[int]:
        taken: list[int] = []
        for queue in self._idle:
            part = min(len(queue), count - len(taken))
            if part:
                taken += self._pop(queue, part)
            if len(taken) == count:
                break
        refs = self.refs
        for b in taken:
            refs[b] = 1
        self.num_evicted += len(taken)
        self._undo.append((self._unevict, (taken,)))
        self.prefix.remove(taken)
        return taken

    def _unevict(self, blocks: list[int]) -> None:
        self.num_evicted -= len(blocks)
        for b in blocks:
            self.refs[b] = 0

    def _pop(self, queue: IdleQueue, count: int) -> list[int]:
        blocks, raw = queue.pop(count)
        self.num_idle -= count
        self._undo.append((self._unpop, (queue, raw, count)))
        return blocks

    def _unpop(self, queue: IdleQueue, raw: list[int], count: int) -> None:
        queue.unpop(raw)
        self.num_idle += count

    def retain(self, blocks: Iterable[int]) -> None:
        """Add one owner to each block. Idle blocks come back to life; the caller never retains blank ones."""
        refs, holds = self.refs, self.holds
        blocks = list(blocks)
        idle = [b for b in dict.fromkeys(blocks) if not refs[b] and b not in holds]
        if idle:
            self._revive(idle)
        for b in blocks:
            refs[b] += 1
        self._undo.append((self._unretain, (blocks,)))

    def _unretain(self, blocks: list[int]) -> None:
        for b in blocks:
            self.refs[b] -= 1

    def _revive(self, blocks: list[int]) -> None:
        """Take blocks out of the queues of idle ones."""
        levels = self._level
        queues: dict[int, list[int]] = {0: blocks}
        if levels:
            queues = {}
            for b in blocks:
                queues.setdefault(levels.get(b, 0), []).append(b)
        for level, part in queues.items():
            self._idle[level].remove(part)
            self.num_idle -= len(part)
            self._undo.append((self._unrevive, (level, part)))

    def _unrevive(self, level: int, blocks: list[int]) -> None:
        self._idle[level].unremove(blocks)
        self.num_idle += len(blocks)

    def release(self, blocks: list[int], level: int = 0) -> None:
        """Take one owner from each block, in the order of a table: entries of -1 are passed over.

        Blocks that nobody owns any more become free, the last of them the least recently used: tails before heads.
        """
        refs, keys, holds = self.refs, self.prefix.keys, self.holds
        owned = blocks[::-1]
        if owned and owned[-1] < 0:  # only the first entries of a table can be
            owned = [b for b in owned if b >= 0]
        if not holds and [refs[b] for b in owned].count(1) == len(owned):  # nobody else owns any: in bulk
            for b in owned:
                refs[b] = 0
            self._undo.append((self._unrelease, (owned,)))
            free = owned
        else:
            for b in owned:
                refs[b] -= 1
            self._undo.append((self._unrelease, (owned,)))
            free = [b for b in dict.fromkeys(owned) if not refs[b] and b not in holds]
        run = keys[free[-1]] if free else None
        if type(run) is Run and run.blocks == blocks:  # as a prompt that nobody shared
            idle, blank = free, []
        else:
            idle = [b for b in free if keys[b] is not None]
            blank = [b for b in free if keys[b] is None] if len(idle) < len(free) else []
        if level or self._level:
            for b in owned:
                if not refs[b]:
                    self._set_level(b, level)
        self._give(blank, idle, level)
        if self.twins or self.incoming:
            self._part(owned)

    def _part(self, blocks: list[int]) -> None:
        """Blocks that nobody owns any more have no twin, and need no contents."""
        for b in blocks:
            if not self.refs[b]:
                if b in self.twins:
                    self.untwin(b)
                if b in self.incoming:
                    other = self.incoming[b]
                    self._undo.append((self.incoming.__setitem__, (b, other)))
                    del self.incoming[b]
                    self.peer.release([other])

    def expect(self, b: int, other: int) -> None:
        """The next step that uses block b moves the peer's block into it, which has an owner more until then."""
        self.peer.retain([other])
        self._undo.append((self.incoming.pop, (b, None)))
        self.incoming[b] = other

    def receive(self, b: int, other: int) -> None:
        """The move that `expect` announced is part of a plan now, which fences the peer's block."""
        self._undo.append((self.incoming.__setitem__, (b, other)))
        del self.incoming[b]
        self.peer.release([other])

    def twin(self, b: int, other: int) -> None:
        """Both blocks are owned and hold the same, unless they have twins already."""
        if b not in self.twins and other not in self.peer.twins:
            self._undo.append((self._drop_twin, (b, other)))
            self._put_twin(b, other)

    def untwin(self, b: int) -> None:
        """The block is given up or about to be written: it has no twin any more."""
        other = self.twins[b]
        self._undo.append((self._put_twin, (b, other)))
        self._drop_twin(b, other)

    def _put_twin(self, b: int, other: int) -> None:
        self.twins[b] = other
        self.peer.twins[other] = b

    def _drop_twin(self, b: int, other: int) -> None:
        del self.twins[b]
        del self.peer.twins[other]

    def seal(self, b: int, num_tokens: int) -> None:
        """Nobody may write the first tokens of a fenced block: `abort` or a move in flight needs them."""
        self.seals[b] = (*self.seals.get(b, ()), num_tokens)
        self._undo.append((self._unseal, (b, num_tokens)))

    def unseal(self, b: int, num_tokens: int) -> None:
        """Take back a `seal`."""
        self._unseal(b, num_tokens)
        self._undo.append((self._reseal, (b, num_tokens)))

    def _unseal(self, b: int, num_tokens: int) -> None:
        levels = list(self.seals.pop(b))
        levels.remove(num_tokens)
        if levels:
            self.seals[b] = tuple(levels)

    def _reseal(self, b: int, num_tokens: int) -> None:
        self.seals[b] = (*self.seals.get(b, ()), num_tokens)

    def _unrelease(self, blocks: list[int]) -> None:
        for b in blocks:
            self.refs[b] += 1

    def _give(self, blank: list[int], idle: list[int], level: int) -> None:
        """Make blocks free: blank ones, and idle ones of one level from the least to the most recently used."""
        if blank:
            self._blank.extend(blank)
            self._undo.append((self._ungive, (len(blank),)))
        if idle:
            self._top = max(self._top, level)
            self._idle[level].push(idle)
            self.num_idle += len(idle)
            self._undo.append((self._unpush, (level, len(idle))))

    def _unpush(self, level: int, count: int) -> None:
        self._idle[level].unpush(count)
        self.num_idle -= count

    def _ungive(self, count: int) -> None:
        del self._blank[len(self._blank) - count :]

    def _set_level(self, b: int, level: int) -> None:
        before = self._level.get(b, 0)
        if before != level:
            self._undo.append((self._put_level, (b, before)))
            self._put_level(b, level)

    def _put_level(self, b: int, level: int) -> None:
        if level:
            self._level[b] = level
        else:
            del self._level[b]

    def hold(self, blocks: Iterable[int]) -> None:
        """Fence owned blocks: until `unhold`, they are not handed out to anybody else, even when nobody owns them."""
        for b in blocks:
            self.holds[b] = self.holds.get(b, 0) + 1
            self._undo.append((self._unhold, (b,)))

    def _unhold(self, b: int) -> None:
        if self.holds[b] == 1:
            del self.holds[b]
        else:
            self.holds[b] -= 1

    def unhold(self, blocks: Iterable[int]) -> None:
        """Take one fence from each block; those that nobody owns or fences any more become free, in this order."""
        for b in blocks:
            self._unhold(b)
            self._undo.append((self._rehold, (b,)))
            if b not in self.holds and not self.refs[b]:
                if self.prefix.keys[b] is None:
                    self._give([b], [], 0)
                else:
                    self._give([], [b], self._level.get(b, 0))

    def _rehold(self, b: int) -> None:
        self.holds[b] = self.holds.get(b, 0) + 1

    def compact(self) -> None:
        """Bound the memory of the idle queues. Called between operations, when nothing is left to be undone."""
        limit = len(self.refs)
        if not self._top:
            self._idle[0].compact(limit)
            return
        for queue in self._idle:
            queue.compact(limit)

    def cached(self, key: Key | None) -> int | None:
        """The block that is cached under a key."""
        return self.prefix.find(key) if key is not None else None

    def forget_idle(self) -> None:
        """Idle blocks become blank ones: nobody will look for their contents."""
        for queue in self._idle:
            self._give(self._pop(queue, len(queue)), [], 0)

    def levels(self) -> list[list[int]]:
        """[block, level] where the level is not 0."""
        return [list(pair) for pair in self._level.items()]

    def put(self, blank: list[int], idle: list[list[int]], levels: list[tuple[int, int]]) -> None:
        """Fill a new pool with a snapshot's contents; owners are counted by the caller."""
        self._blank = list(blank)
        self._idle = tuple(map(IdleQueue, idle))
        self._level = dict(levels)
        self._top = PRIORITIES - 1
        self.num_idle = sum(map(len, self._idle))

    def free_blocks(self) -> tuple[list[int], list[list[int]]]:
        """The blank blocks, and for each level the idle ones, least recently used first. O(n), for audits."""
        return list(self._blank), [list(queue) for queue in self._idle]
