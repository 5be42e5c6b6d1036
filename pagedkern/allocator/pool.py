"""Physical blocks: who owns them, which are free, which must not be handed out yet. Knows nothing of tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from pagedkern.allocator.chain import Chain
from pagedkern.allocator.idle import Piece, Trail
from pagedkern.allocator.links import Links
from pagedkern.allocator.prefix import Gone, PrefixIndex
from pagedkern.allocator.ranks import Ranks
from pagedkern.allocator.retention import Lease
from pagedkern.allocator.undo import UndoLog
from pagedkern.errors import OutOfBlocks


class BlockPool(Links):
    """Reference counts and free blocks of one memory (device or host).

    A block is in exactly one of four states:

    - owned: `refs[b] > 0` tables hold it;
    - held: nobody owns it, but a step or plan in flight reads or writes it (`holds[b] > 0`), so it is not free yet;
    - idle: free, and its contents are cached: it stays until the least recently used have to go;
    - blank: free, and its contents are worth nothing.

    Each operation is O(1) for each block that it touches, whatever the size of the pool, and goes into the undo log.
    """

    __slots__ = ("_blank", "holds", "idle", "least_free", "name", "num_evicted", "prefix", "refs")

    peer: BlockPool

    def __init__(self, name: str, num_blocks: int, prefix: PrefixIndex, undo: UndoLog) -> None:
        super().__init__(undo)
        self.name = name  # for messages: "device" or "host"
        self.prefix = prefix
        self.refs = [0] * num_blocks
        self.holds: dict[int, int] = {}
        self.idle = Ranks(num_blocks, undo)
        self._blank = list(range(num_blocks - 1, -1, -1))  # a stack: the lowest ids come out first
        self.num_evicted = 0  # so far
        self.least_free = num_blocks  # so far

    @property
    def num_blocks(self) -> int:
        return len(self.refs)

    @property
    def num_free(self) -> int:
        """Blocks that `take` can hand out now: blank and idle ones."""
        return len(self._blank) + self.idle.size

    @property
    def held(self) -> str:
        """How many blocks only steps in flight keep, for the message of a shortage. O(blocks in those steps)."""
        count = sum(not self.refs[b] for b in self.holds)
        return f", {count} more once steps in flight are committed" if count else ""

    def is_idle(self, block: int) -> bool:
        """Whether nobody owns or fences this cached block."""
        return not self.refs[block] and block not in self.holds

    def num_idle_of(self, blocks: Iterable[int]) -> int:
        """How many of these cached blocks are idle: sharing them takes so many from the free ones."""
        refs, holds = self.refs, self.holds
        return sum(not refs[b] and b not in holds for b in blocks)

    # Owners.

    def take(self, count: int) -> list[int]:
        """Hand out `count` blocks with one owner each: blank ones first, then idle ones in the order of eviction.

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
            refs = self.refs
            for b in blocks:
                refs[b] = 1
            self._undo.append((self._untake, (blocks,)))
        if len(blocks) < count:
            blocks = blocks + self._evict(count - len(blocks))
        if len(blank) + self.idle.size < self.least_free:
            self._undo.append((setattr, (self, "least_free", self.least_free)))
            self.least_free = len(blank) + self.idle.size
        return blocks

    def _untake(self, blocks: list[int]) -> None:
        for b in blocks:
            self.refs[b] = 0
        self._blank.extend(reversed(blocks))

    def _evict(self, count: int) -> list[int]:
        taken = self.idle.pop(count)
        refs = self.refs
        for b in taken:
            refs[b] = 1
        self.num_evicted += len(taken)
        self._undo.append((self._unevict, (taken,)))
        self.uncache(taken, "evicted")
        return taken

    def _unevict(self, blocks: list[int]) -> None:
        self.num_evicted -= len(blocks)
        for b in blocks:
            self.refs[b] = 0

    def retain(self, blocks: Iterable[int]) -> None:
        """Add one owner to each block. Idle blocks come back to life; the caller never retains blank ones."""
        refs, holds = self.refs, self.holds
        blocks = list(blocks)
        idle = [b for b in dict.fromkeys(blocks) if not refs[b] and b not in holds]
        if idle:
            self.idle.remove(idle)
        for b in blocks:
            refs[b] += 1
        self._undo.append((self._unretain, (blocks,)))

    def _unretain(self, blocks: list[int]) -> None:
        for b in blocks:
            self.refs[b] -= 1

    def release(self, blocks: list[int], whole: bool) -> None:
        """Take one owner from each block, in the order of a table: entries of -1 are passed over.

        Blocks that nobody owns any more become free, the last of them the least recently used: tails before heads.

        Args:
            whole: nothing can be idle that is before any of them, but for what is among them.
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
        if whole and type(run) is Chain and run.blocks == blocks:  # as a prompt that nobody shared
            self.idle.push(free)
        else:
            used = [b for b in (free if whole else owned) if keys[b] is not None]
            if not whole or len(used) < len(free):
                self._give([b for b in free if keys[b] is None])
            if whole:
                if used:
                    self.idle.push(used)
            elif used:
                self._settle(used, set(free))
        if self.twins or self.incoming:
            self.part([b for b in owned if not refs[b]])

    def _unrelease(self, blocks: list[int]) -> None:
        for b in blocks:
            self.refs[b] += 1

    def _give(self, blank: list[int]) -> None:
        """Make blocks free that are not cached."""
        if blank:
            self._blank.extend(blank)
            self._undo.append((self._ungive, (len(blank),)))

    def _ungive(self, count: int) -> None:
        del self._blank[len(self._blank) - count :]

    # Fences.

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
        free: list[int] = []
        for b in blocks:
            self._unhold(b)
            self._undo.append((self._rehold, (b,)))
            if b not in self.holds and not self.refs[b]:
                free.append(b)
        keys = self.prefix.keys
        self._give([b for b in free if keys[b] is None])
        used = [b for b in free if keys[b] is not None]
        if used:
            self._settle(used, set(used))

    def _rehold(self, b: int) -> None:
        self.holds[b] = self.holds.get(b, 0) + 1

    # The prefix cache.

    def _settle(self, used: list[int], fresh: Collection[int]) -> None:
        """Cached blocks have been released, tails before heads; those in `fresh` become idle now.

        What is idle before them counts as used, too: behind them in the order of eviction.
        """
        later = dict.fromkeys(used)
        batch: list[int] = []
        for b in used:
            del later[b]
            if b in fresh:
                batch.append(b)
            pieces, other = self._before(b, later, batch)
            if batch and pieces:
                self.idle.push(batch)
                batch = []
            self._gather(pieces, other)
        if batch:
            self.idle.push(batch)

    def last_cached(self, blocks: list[int]) -> int:
        """The last cached block of a table, -1 if there is none."""
        keys = self.prefix.keys
        return next((b for b in reversed(blocks) if b >= 0 and keys[b] is not None), -1)

    def use(self, block: int) -> None:
        """A cached block that somebody owns is used, and with it all that is before it."""
        self._gather(*self._before(block, (), ()))

    def _gather(self, pieces: list[Piece], other: int) -> None:
        """Pieces before a block are used; so is the other memory's block `other`, if any, and what is before that."""
        if pieces:
            self.idle.gather(pieces)
        if other >= 0:
            peer = self.peer
            pieces, _ = peer._before(other, (), ())
            pieces[:0] = [peer.idle.piece(other)] if peer.is_idle(other) else []
            if pieces:
                peer.idle.gather(pieces)

    def _before(self, block: int, until: Collection[int], coming: Collection[int]) -> tuple[list[Piece], int]:
        """What is idle in this memory before a cached block, nearest first, up to the first block in `until`.

        Those in `coming` are not in a queue yet, but are on their way. Also the nearest block of the other memory that
        is needed to reach the block, since this memory has not got the same; -1 if there is none.
        """
        pieces: list[Piece] = []
        other, prefix, foreign = -1, self.prefix, self.peer.prefix
        node = prefix.parent_of(block)
        while True:
            b = prefix.at(node)
            if b is None:
                b = foreign.at(node)
                if b is None:
                    return pieces, other
                other = b if other < 0 else other
                node = foreign.parent_of(b)
                continue
            if b in until:
                return pieces, other
            if self.is_idle(b):
                piece = b if b in coming else self.idle.piece(b)
                pieces.append(piece)
                if isinstance(piece, Trail):
                    b = piece.blocks[0]
            node = prefix.parent_of(b)

    def lift(self, block: int, level: int, lease: Lease | None = None) -> None:
        """Let a cached block, and all that is before it on either memory, have this level at least.

        With a lease, the level of the lease, as long as it lasts.
        """
        idle = self.is_idle(block)
        if not (self.idle.lift(block, level, idle) if lease is None else self.idle.lease(block, lease, idle)):
            return
        moved: dict[str, tuple[BlockPool, int]] = {self.name: (self, block)} if idle else {}
        node, prefix = self.prefix.parent_of(block), self.prefix
        lifted = True
        while lifted:
            lifted = False
            for pool in (self, self.peer):
                b = pool.prefix.at(node)
                if b is not None:
                    prefix, block, idle, ranks = pool.prefix, b, pool.is_idle(b), pool.idle
                    if ranks.lift(b, level, idle) if lease is None else ranks.lease(b, lease, idle):
                        lifted = True
                        if idle:
                            moved.setdefault(pool.name, (pool, b))
            if lifted:
                node = prefix.parent_of(block)
        for pool, b in moved.values():  # it was put behind what is before it and had the level already
            pool.use(b)

    def inherit(self, block: int) -> None:
        """A block is cached now whose node the other memory had already: it is as dear as what is behind it."""
        node = self.prefix.node_of(block)
        behind = [(pool.idle, b) for pool in (self, self.peer) for b in pool.prefix.behind(node)]
        level = max((ranks.lasting(b) for ranks, b in behind), default=0)
        if level:
            self.lift(block, level)
        for lease in {lease for ranks, b in behind for lease in ranks.leases(b)}:
            self.lift(block, lease.priority, lease)

    def end(self, lease: Lease) -> None:
        """A lease has ended for this memory's blocks: those that have it are those behind, too."""
        blocks = [b for ranks, b in lease.blocks if ranks is self.idle]
        if blocks:
            blocks.sort(key=self.prefix.node_of, reverse=True)  # what is behind a node has a higher number
            self.idle.end(blocks, lease, {b for b in blocks if self.is_idle(b)})

    def uncache(self, blocks: list[int], reason: str) -> None:
        """Stop caching blocks that nobody can be given any more, tails before heads, and what is behind them."""
        self.abandon(self.prefix.remove(blocks, reason))
        self.idle.forget(blocks)

    def abandon(self, gone: Gone) -> None:
        """Blocks of both memories are not cached any more: idle ones become blank."""
        if gone:
            for pool in (self, self.peer):
                blocks = [b for index, b in gone if index is pool.prefix]
                idle = [b for b in blocks if pool.is_idle(b)]
                if idle:
                    pool.idle.remove(idle)
                    pool._give(idle)
                pool.idle.forget(blocks)

    # The whole.

    def cached(self, block: int) -> int | None:
        """This memory's block with the contents of a cached one of the other memory."""
        key = self.peer.prefix.key_of(block)
        return self.prefix.find(*key) if key is not None else None

    def put(self, blank: list[int]) -> None:
        """Fill a new pool with a snapshot's contents; owners are counted by the caller."""
        self._blank = list(blank)

    def free_blocks(self) -> tuple[list[int], list[list[int]]]:
        """The blank blocks, and for each level the idle ones in the order of eviction. O(n), for audits."""
        return list(self._blank), self.idle.lists()
