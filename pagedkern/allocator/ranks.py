"""In which order idle blocks are evicted: by level, and within a level the least recently used first."""

from __future__ import annotations

from collections.abc import Iterable

from pagedkern.allocator.arguments import PRIORITIES
from pagedkern.allocator.idle import IdleQueue, Piece, Popped, Removed, Trail
from pagedkern.allocator.retention import Lease
from pagedkern.allocator.undo import UndoLog


class Ranks:
    """The idle blocks of one memory, a queue for each level, and the levels of all its cached blocks.

    A level never falls as long as the block is cached, but for what leases have added to it, when they end. Who calls
    sees to it that no block has a higher level than those before it in a prompt, that these have its leases too, and
    that they are used when it is: then tails are always evicted before heads.
    """

    __slots__ = ("_leased", "_levels", "_most", "_queues", "_top", "_undo", "size")

    def __init__(self, num_blocks: int, undo: UndoLog) -> None:
        self._most = num_blocks  # entries of a queue that may be there in vain
        self._queues = tuple(IdleQueue(undo) for _ in range(PRIORITIES))
        self._levels: dict[int, int] = {}  # of cached blocks, where it is not 0
        self._leased: dict[int, tuple[int, frozenset[Lease]]] = {}  # of blocks with leases: the level without, and they
        self._top = 0  # no level above it has ever been used
        self._undo = undo
        self.size = 0  # idle blocks

    def level(self, block: int) -> int:
        """The level of a cached block."""
        return self._levels.get(block, 0)

    @property
    def is_flat(self) -> bool:
        """No block has another level than 0."""
        return not self._levels

    # Idle blocks.

    def push(self, blocks: list[int]) -> None:
        """Blocks become idle, the last of them the most recently used."""
        if not self._levels:
            self._queues[0].push(blocks)
            self.size += len(blocks)
            self._undo.append((self._unpush, (self._queues[0], len(blocks))))
            return
        for queue, part in self._by_level(blocks).items():
            queue.push(part)  # type: ignore[arg-type]
            self.size += len(part)
            self._undo.append((self._unpush, (queue, len(part))))

    def _unpush(self, queue: IdleQueue, count: int) -> None:
        queue.unpush(count)
        self.size -= count

    def _by_level(self, pieces: list[int] | list[Piece]) -> dict[IdleQueue, list[Piece]]:
        """The pieces that belong into each queue, in their order."""
        parts: dict[IdleQueue, list[Piece]] = {}
        for piece in pieces:
            level = self._levels.get(piece.blocks[0] if isinstance(piece, Trail) else piece, 0)
            parts.setdefault(self._queues[level], []).append(piece)
        return parts

    def remove(self, blocks: list[int]) -> None:
        """Blocks are not idle any more, wherever they stand in the order."""
        for queue, part in self._by_level(blocks).items() if self._levels else ((self._queues[0], blocks),):
            removed = queue.remove(part)  # type: ignore[arg-type]
            self.size -= len(part)
            self._undo.append((self._unremove, (queue, removed, len(part))))

    def _unremove(self, queue: IdleQueue, removed: Removed, count: int) -> None:
        queue.unremove(removed)
        self.size += count

    def pop(self, count: int) -> list[int]:
        """The next `count` blocks to evict, taken out. There are as many."""
        blocks: list[int] = []
        for queue in self._queues:
            part = min(len(queue), count - len(blocks))
            if part:
                taken, popped = queue.pop(part)
                self.size -= part
                self._undo.append((self._unpop, (queue, popped, part)))
                blocks += taken
            if len(blocks) == count:
                break
        return blocks

    def _unpop(self, queue: IdleQueue, popped: Popped, count: int) -> None:
        queue.unpop(popped)
        self.size += count

    def piece(self, block: int) -> Piece:
        """An idle block, or the trail of idle blocks that ends with it."""
        return self._queues[self._levels.get(block, 0)].piece(block)

    def gather(self, pieces: list[Piece]) -> None:
        """Idle pieces of one prompt, tails first, become the most recently used, the last one the most recent."""
        if not self._levels:
            self._queues[0].gather(pieces)
            return
        for queue, part in self._by_level(pieces).items():
            queue.gather(part)

    # Levels.

    def lift(self, block: int, level: int, idle: bool) -> bool:
        """Let a cached block have this level at least. Returns whether that changed anything.

        If it is idle and had a lower one, it is then the most recently used of its level.
        """
        if block not in self._leased:
            return self._raise(block, level, idle)
        lasting, leases = self._leased[block]
        if lasting >= level:
            return False
        self._put_leases(block, level, leases)
        self._raise(block, level, idle)
        return True

    def lease(self, block: int, lease: Lease, idle: bool) -> bool:
        """Let a cached block have the level of a lease at least, as long as that lasts. Returns whether it had not."""
        lasting, leases = self._leased.get(block, (self._levels.get(block, 0), frozenset()))
        if lease in leases:
            return False
        self._put_leases(block, lasting, leases | {lease})
        self._raise(block, lease.priority, idle)
        return True

    def leases(self, block: int) -> frozenset[Lease]:
        """Those of a cached block."""
        return self._leased[block][1] if block in self._leased else frozenset()

    def lasting(self, block: int) -> int:
        """The level of a cached block without its leases."""
        return self._leased[block][0] if block in self._leased else self._levels.get(block, 0)

    def end(self, blocks: list[int], lease: Lease, idle: set[int]) -> None:
        """A lease of these blocks has ended, tails before heads. Idle ones of a lower level now count as used."""
        for b in blocks:
            lasting, leases = self._leased[b]
            left = leases - {lease}
            self._put_leases(b, lasting, left)
            level = max([lasting, *(other.priority for other in left)])
            if level < self._levels.get(b, 0):
                self._set_level(b, level, b in idle)

    def _raise(self, block: int, level: int, idle: bool) -> bool:
        if self._levels.get(block, 0) >= level:
            return False
        self._set_level(block, level, idle)
        return True

    def _set_level(self, block: int, level: int, idle: bool) -> None:
        if idle:
            self.remove([block])
        self._undo.append((self._put_level, (block, self._levels.get(block, 0), self._top)))
        self._put_level(block, level, max(self._top, level))
        if idle:
            self.push([block])

    def _put_leases(self, block: int, lasting: int, leases: frozenset[Lease]) -> None:
        self._undo.append((self._reput_leases, (block, self._leased.get(block))))
        self._reput_leases(block, (lasting, leases) if leases else None)

    def _reput_leases(self, block: int, leased: tuple[int, frozenset[Lease]] | None) -> None:
        before = self._leased.get(block, (0, frozenset[Lease]()))[1]
        now = frozenset[Lease]() if leased is None else leased[1]
        for lease in before - now:
            lease.blocks.discard((self, block))
        for lease in now - before:
            lease.blocks.add((self, block))
        if leased is None:
            self._leased.pop(block, None)
        else:
            self._leased[block] = leased

    def forget(self, blocks: list[int]) -> None:
        """Blocks are not cached any more, and not idle: their levels end."""
        levels = self._levels
        if self._leased:
            for b in blocks:
                if b in self._leased:
                    self._put_leases(b, 0, frozenset())
        if levels:
            for b in blocks:
                if b in levels:
                    self._undo.append((self._put_level, (b, levels[b], self._top)))
                    del levels[b]

    def _put_level(self, block: int, level: int, top: int) -> None:
        self._top = top
        if level:
            self._levels[block] = level
        else:
            self._levels.pop(block, None)

    # The whole.

    def compact(self) -> None:
        """Bound the memory of the queues. Called between operations, when nothing is left to be undone."""
        self._queues[0].compact(self._most)
        if self._top:
            for queue in self._queues[1 : self._top + 1]:
                queue.compact(self._most)

    def lists(self) -> list[list[int]]:
        """The idle blocks of each level, in the order of eviction. O(n)."""
        return [list(queue) for queue in self._queues]

    def levels(self) -> list[list[int]]:
        """[block, level without leases] where that is not 0."""
        pairs = [[b, self.lasting(b)] for b in self._levels]
        return [pair for pair in pairs if pair[1]]

    @property
    def marked(self) -> Iterable[int]:
        """The blocks with a level other than 0, or with leases."""
        return self._levels.keys() | self._leased.keys()

    def put(self, idle: list[list[int]], levels: list[tuple[int, int]]) -> None:
        """Fill in a snapshot's contents."""
        self._queues = tuple(IdleQueue(self._undo, blocks) for blocks in idle)
        self._levels = dict(levels)
        self._top = PRIORITIES - 1
        self.size = sum(map(len, self._queues))

    def put_lease(self, block: int, lease: Lease) -> None:
        """Fill in a lease of a snapshot: the block is in the queue of its level already."""
        lasting, leases = self._leased.get(block, (self._levels.get(block, 0), frozenset()))
        self._reput_leases(block, (lasting, leases | {lease}))
        if lease.priority > self._levels.get(block, 0):
            self._levels[block] = lease.priority
