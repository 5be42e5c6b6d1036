"""The state that the parts of the allocator share, and the changes that more than one of them makes."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import TypeAlias

from pagedkern.allocator.arguments import Salt
from pagedkern.allocator.buffers import Table
from pagedkern.allocator.counts import Counts
from pagedkern.allocator.events import Cached, EventLog, cached_now
from pagedkern.allocator.handles import LIVE, Lockstep, Origin, Phase, Plan, PlanRow, Sequence, State
from pagedkern.allocator.pool import BlockPool
from pagedkern.allocator.prefix import PrefixIndex
from pagedkern.allocator.retention import Deadlines
from pagedkern.allocator.roots import Nodes, Roots
from pagedkern.allocator.undo import UndoLog
from pagedkern.errors import InvalidArgument, InvalidType, StaleSequence

IDLE, RUNNING, BROKEN_OFF = range(3)
"""No operation runs; one does; the last one was ended by an asynchronous exception, and nobody has looked since."""

Mark: TypeAlias = tuple[int, dict[str, int]]
"""Where a transaction began: entries in the undo log, and the counts."""


class Ledger:
    """Pools, prefix index, live sequences, plans in flight, undo log of one allocator."""

    def __init__(
        self,
        num_blocks: int,
        num_host_blocks: int,
        block_size: int,
        caching: bool,
        clock: Callable[[], float],
    ) -> None:
        self.origin = Origin(block_size, num_blocks)
        self.block_size = block_size
        self.caching = caching
        self.undo = UndoLog()
        nodes = Nodes()
        self.roots = Roots(nodes, self.undo, 1024 + 2 * (num_blocks + num_host_blocks))
        self.prefix = PrefixIndex("device", num_blocks, block_size, self.undo, nodes)
        self.pool = BlockPool("device", num_blocks, self.prefix, self.undo)
        self.host = BlockPool(
            "host", num_host_blocks, PrefixIndex("host", num_host_blocks, block_size, self.undo, nodes), self.undo
        )
        self.pool.peer, self.host.peer = self.host, self.pool
        if num_host_blocks:
            self.prefix.peer, self.host.prefix.peer = self.host.prefix, self.prefix
        self.live: dict[int, Sequence] = {}  # by id, swapped-out ones included
        self.in_flight: dict[int, Plan] = {}  # by id
        self.lockstep_batches: dict[int, Lockstep] = {}  # the active ones
        self.table: Table | None = None  # of the last `append` that was not the work of a lockstep batch
        self.last_seq = 0
        self.last_plan = 0
        self.transactions: list[Mark] = []  # open ones, outermost first
        self.busy = IDLE
        self.age = 0  # operations so far: after some of them, what grows is made smaller
        self.counts = Counts(self.undo)
        self.deadlines = Deadlines(clock, self.undo)
        self.events: EventLog | None = None

    @property
    def in_transaction(self) -> bool:
        return bool(self.transactions)

    def record(self, limit: int) -> None:
        """Tell of every change of the prefix index from now on."""
        events = EventLog(limit, self.roots, self.cached())
        self.events = self.prefix.events = self.host.prefix.events = events

    def cached(self) -> Cached:
        """What is cached now. O(that)."""
        return cached_now({"device": self.prefix, "host": self.host.prefix}, self.roots)

    def compact(self) -> None:
        """Bound the memory of what grows. Called between operations, when there is nothing to be undone."""
        self.pool.idle.compact()
        if self.host.refs:
            self.host.idle.compact()
        if self.events is not None:
            self.events.trim()
        self.deadlines.compact()

    def expire(self) -> None:
        """End the leases whose time is over."""
        for lease in self.deadlines.expire():
            for pool in (self.pool, self.host):
                pool.end(lease)

    def new_root(self, salt: Salt) -> int:
        """A node for a salt that has none. Amortised O(1): now and then salts are forgotten."""
        if len(self.roots) >= self.roots.limit:  # those that no cached block is under, and no sequence
            used = {node for pool in (self.pool, self.host) for node in pool.prefix.parents()}
            self.roots.keep(used.union(seq._root for seq in self.live.values()))
        return self.roots.add(salt)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def add(
        self, blocks: list[int], tokens: array[int], length: int, root: int = 0, salt: Salt = None, asked: int = 0
    ) -> Sequence:
        """A new live sequence. Its blocks have been taken or retained for it."""
        self.last_seq += 1
        seq = Sequence(self.origin, self.last_seq, blocks, tokens, length, root, salt, asked)
        self.undo.append((self._unadd, ([seq],)))
        self.live[seq.id] = seq
        return seq

    def add_all(self, prompts: list[tuple[array[int], int, Salt]], blocks: list[int]) -> list[Sequence]:
        """New live sequences of prompts (ids, length, salt) of which nothing is cached, in bulk. Their blocks have been
        taken for them, in this order.
        """
        size, owner, live, peek = self.block_size, self.origin, self.live, self.roots.peek
        seqs: list[Sequence] = []
        self.undo.append((self._unadd, (seqs,)))  # those that are in it then
        end, root = 0, 0
        for ident, (tokens, length, salt) in enumerate(prompts, self.last_seq + 1):
            start, end = end, end - -length // size
            if self.caching:
                root = peek(salt) or self.new_root(salt)
            self.last_seq = ident
            seq = Sequence(owner, ident, blocks[start:end], tokens, length, root, salt, length if root else 0)
            seqs.append(seq)
            live[ident] = seq
        return seqs

    def _unadd(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            seq._state = State.FREED
            self.live.pop(seq.id, None)

    def remove(self, seq: Sequence) -> None:
        """A sequence has been freed. Its blocks have been released."""
        self.undo.append((self.live.__setitem__, (seq.id, seq)))
        seq._state = State.FREED
        del self.live[seq.id]

    def settle_lockstep_batches(self) -> None:
        """End the fast path of every batch."""
        for lockstep in list(self.lockstep_batches.values()):
            lockstep.stop()
            for seq in lockstep.seqs:
                seq._sync()

    def own(self, seq: object, states: tuple[State, ...] = (LIVE,)) -> Sequence:
        """The sequence, taken out of its lockstep batch and ready to be changed, or the error that its handle is stale.

        Changes made to it from now on are undone by the undo log.
        """
        if not isinstance(seq, Sequence) or seq._owner is not self.origin or seq._state not in states:
            raise _stale(seq, self.origin, states, "seq")
        if seq._lockstep is not None:
            self.detach(seq)
        self.undo.append((seq._restore, seq._saved()))
        return seq

    def detach(self, seq: Sequence) -> None:
        """Take a sequence out of its lockstep batch, which thereby ends: its own record is what counts now."""
        lockstep = seq._lockstep
        if lockstep is not None:
            if lockstep.active:
                lockstep.stop()
            seq._sync()

    def each(self, seqs: object, name: str = "seqs") -> list[object]:
        """What is given as several sequences, if one can iterate over it, as a list of its own."""
        if type(seqs) is list or hasattr(seqs, "__iter__"):
            return list(seqs)
        raise InvalidType(f"{name}: got {type(seqs).__name__}, expected a list of Sequence")

    def own_all(self, seqs: object, state: State = LIVE, saved: int | None = None) -> list[Sequence]:
        """`own` for each sequence of a batch, which must not name one twice.

        `saved`: changes made to so many of the first are undone by the undo log; the caller does it for the others.
        """
        batch, owner = [], self.origin
        for i, seq in enumerate(self.each(seqs)):
            if not isinstance(seq, Sequence) or seq._owner is not owner or seq._state is not state:
                raise _stale(seq, owner, (state,), f"seqs[{i}]")
            if seq._lockstep is not None:
                self.detach(seq)
            batch.append(seq)
        self.undo += [(seq._restore, seq._saved()) for seq in batch[:saved]]
        if len(batch) > 1 and len(set(batch)) != len(batch):
            twice = next(s.id for i, s in enumerate(batch) if s in batch[:i])
            raise InvalidArgument(f"seqs: sequence {twice} is named twice")
        return batch

    def launch(self, plan: Plan) -> None:
        """The plan is in flight from now on."""
        self.undo.append((self._unlaunch, (plan,)))
        self.in_flight[plan.id] = plan

    def _unlaunch(self, plan: Plan) -> None:
        plan._phase = Phase.ABORTED
        self.in_flight.pop(plan.id, None)

    def land(self, plan: Plan) -> None:
        """The plan is committed or aborted: its fences go."""
        self.undo.append((self.in_flight.__setitem__, (plan.id, plan)))
        del self.in_flight[plan.id]
        for b, num_tokens in plan._seals:
            self.pool.unseal(b, num_tokens)
        if plan._held:
            self.pool.unhold(plan._held)
        if plan._held_host:
            self.host.unhold(plan._held_host)
        for pool in (self.pool, self.host) if self.pool.arriving or self.host.arriving else ():
            for b in [b for b, arrival in pool.arriving.items() if arrival == plan.id]:
                self.undo.append((pool.arriving.__setitem__, (b, plan.id)))
                del pool.arriving[b]

    def arrive(self, pool: BlockPool, plan: Plan, blocks: list[int]) -> None:
        """The plan moves contents into these blocks: whoever shares them before its commit depends on it."""
        for b in blocks:
            self.undo.append((pool.arriving.pop, (b, None)))
            pool.arriving[b] = plan.id

    def ride(self, plan: Plan, seq: Sequence, row: PlanRow | None = None) -> None:
        """Let a sequence depend on a plan in flight: it is committed before later ones and aborted after them."""
        if plan in seq._pending:
            return
        if row is None:
            row = PlanRow(seq, 0, 0, seq._length, len(seq._blocks))
            row.rides = True
        if plan._rows is not None:
            plan._rows.append(row)
            self.undo.append((plan._rows.remove, (row,)))
        seq._pending = tuple(sorted((*seq._pending, plan), key=lambda p: p.id))

    def awaits(self, seq: Sequence) -> bool:
        """Whether contents of its blocks are still to come from the host. O(its blocks)."""
        return any(plan._brings for plan in seq._pending) or not self.pool.incoming.keys().isdisjoint(seq._blocks)

    def next_plan(self) -> int:
        self.last_plan += 1
        return self.last_plan

    def pool_of(self, seq: Sequence) -> BlockPool:
        """The memory where the sequence's blocks are."""
        return self.host if seq._state is State.SWAPPED else self.pool

    def fence(self, plan: Plan, blocks: Iterable[int], pool: BlockPool) -> None:
        """Keep owned blocks from being handed out until the plan has landed."""
        self.undo.append((plan._restore, plan._saved()))
        fenced = [b for b in blocks if b >= 0]
        pool.hold(fenced)
        if pool is self.pool:
            plan._held += fenced
        else:
            plan._held_host += fenced

    def seal(self, plan: Plan, b: int, num_tokens: int) -> None:
        """Keep the first tokens of a fenced block as they are until the plan has landed."""
        self.undo.append((plan._restore, plan._saved()))
        self.pool.seal(b, num_tokens)
        plan._seals.append((b, num_tokens))

    def give_up(self, seq: Sequence, blocks: list[int], *plans: Plan) -> None:
        """Release blocks of a sequence, behind the fences of the plans that read or write them."""
        pool = self.pool_of(seq)
        for plan in (*seq._pending, *plans) if plans else seq._pending:
            self.fence(plan, reversed(blocks), pool)
        if seq._dear:
            self.release(seq, blocks)
        else:
            pool.release(blocks, not seq._apart or seq._owns_all)

    def release(self, seq: Sequence, blocks: list[int]) -> None:
        """A sequence has these blocks of its table no more."""
        pool = self.pool_of(seq)
        if seq._dear:
            self.lift(seq, blocks)
        pool.release(blocks, seq._owns_all)

    def lift(self, seq: Sequence, blocks: list[int]) -> None:
        """Let what is cached of these blocks of a sequence have the levels that it asks for. O(blocks)."""
        pool, size = self.pool_of(seq), self.block_size
        if seq._priority:
            last = pool.last_cached(blocks)
            if last >= 0:
                pool.lift(last, seq._priority)
        for kept, lease in zip(seq._retention, seq._leases, strict=True):
            last = pool.last_cached(seq._blocks[kept.start // size : -(-kept.end // size)])
            if last >= 0:
                pool.lift(last, kept.priority, lease)

    def rewrite(self, blocks: list[int]) -> None:
        """Blocks are about to be written by their only owner: they are not cached and have no twin any more."""
        cached = [b for b in reversed(blocks) if self.prefix.keys[b] is not None]
        if cached:
            self.pool.uncache(cached, "rewritten")
        for b in blocks:
            if b in self.pool.twins:
                self.pool.untwin(b)


def _stale(seq: object, origin: Origin, states: tuple[State, ...], name: str) -> Exception:
    """Why a handle cannot be used."""
    if not isinstance(seq, Sequence):
        return InvalidType(f"{name}: got {type(seq).__name__}, expected a Sequence")
    if seq._owner is None:
        return StaleSequence(f"{name}: sequence {seq.id} is a copy, which belongs to no allocator")
    if seq._owner is not origin:
        return StaleSequence(f"{name}: sequence {seq.id} belongs to another allocator")
    accepted = " or ".join(state.value for state in states)
    return StaleSequence(f"{name}: sequence {seq.id} is {seq.state}, expected one that is {accepted}")
