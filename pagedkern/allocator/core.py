"""The state that the parts of the allocator share, and the changes that more than one of them makes."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

from pagedkern.allocator.counts import Counts
from pagedkern.allocator.observe import EventLog
from pagedkern.allocator.pool import BlockPool
from pagedkern.allocator.prefix import Nodes, PrefixIndex
from pagedkern.allocator.sequence import Sequence, State
from pagedkern.allocator.step import Phase, Plan, Row, Table
from pagedkern.allocator.undo import UndoLog
from pagedkern.errors import InvalidArgument, InvalidType, StaleSequence

if TYPE_CHECKING:
    from pagedkern.allocator.allocator import BlockAllocator
    from pagedkern.allocator.cohort import Cohort

IDLE, RUNNING, BROKEN_OFF = range(3)
"""No operation runs; one does; the last one was ended by an exception from outside, and nobody has looked since."""

Mark: TypeAlias = tuple[int, dict[str, int]]
"""Where a transaction began: entries in the undo log, and the counts."""


class Core:
    """Pools, prefix index, live sequences, plans in flight, undo log of one allocator."""

    def __init__(
        self, owner: BlockAllocator, num_blocks: int, num_host_blocks: int, block_size: int, caching: bool
    ) -> None:
        self.owner = owner
        self.block_size = block_size
        self.caching = caching
        self.undo = UndoLog()
        nodes = Nodes()
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
        self.cohorts: dict[int, Cohort] = {}  # the active ones
        self.table: Table | None = None  # of the last `append` that was not the work of a cohort
        self.last_seq = 0
        self.last_plan = 0
        self.transactions: list[Mark] = []  # open ones, outermost first
        self.busy = IDLE
        self.counts = Counts(self.undo)
        self.events: EventLog | None = None

    @property
    def in_transaction(self) -> bool:
        return bool(self.transactions)

    def record(self, events: EventLog) -> None:
        """Tell of every change of the prefix index from now on."""
        self.events = self.prefix.events = self.host.prefix.events = events
        events.salts.update((node, salt) for salt, node in self.prefix.salts())

    def compact(self) -> None:
        """Bound the memory of what grows. Called before operations, when there is nothing to be undone."""
        self.pool.compact()
        if self.host.refs:
            self.host.compact()

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def add(self, blocks: list[int], tokens: array[int], length: int) -> Sequence:
        """A new live sequence. Its blocks have been taken or retained for it."""
        self.last_seq += 1
        seq = Sequence(self.owner, self.last_seq, blocks, tokens, length)
        self.undo.append((self._unadd, (seq,)))
        self.live[seq.id] = seq
        return seq

    def _unadd(self, seq: Sequence) -> None:
        seq._state = State.FREED
        self.live.pop(seq.id, None)

    def remove(self, seq: Sequence) -> None:
        """A sequence has been freed. Its blocks have been released."""
        self.undo.append((self.live.__setitem__, (seq.id, seq)))
        seq._state = State.FREED
        del self.live[seq.id]

    def settle_cohorts(self) -> None:
        """End the fast path of every batch."""
        for cohort in list(self.cohorts.values()):
            cohort.stop()
            for seq in cohort.seqs:
                seq._sync()

    def own(self, seq: object, states: tuple[State, ...] = (State.LIVE,), at: int | None = None) -> Sequence:
        """The sequence, taken out of its cohort and ready to be changed, or the error that its handle is stale.

        Changes made to it from now on are undone by the undo log. `at`: its index in the argument `seqs`.
        """
        if not isinstance(seq, Sequence) or seq._owner is not self.owner or seq._state not in states:
            raise _stale(seq, self.owner, states, "seq" if at is None else f"seqs[{at}]")
        if seq._cohort is not None:
            self.detach(seq)
        self.undo.append((seq._restore, seq._saved()))
        return seq

    def detach(self, seq: Sequence) -> None:
        """Take a sequence out of its cohort, which thereby ends: its own record is what counts now."""
        cohort = seq._cohort
        if cohort is not None:
            if cohort.active:
                cohort.stop()
            seq._sync()

    def each(self, seqs: object, name: str = "seqs") -> list[object]:
        """What is given as several sequences, if one can iterate over it, as a list of its own."""
        if type(seqs) is list or hasattr(seqs, "__iter__"):
            return list(seqs)
        raise InvalidType(f"{name}: got {type(seqs).__name__}, a list of Sequence is accepted")

    def own_all(self, seqs: object, state: State = State.LIVE) -> list[Sequence]:
        """`own` for each sequence of a batch, which must not name one twice."""
        states = (state,)
        batch = [self.own(s, states, i) for i, s in enumerate(self.each(seqs))]
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
            for b in [b for b, arrival in pool.arriving.items() if arrival is plan]:
                self.undo.append((pool.arriving.__setitem__, (b, plan)))
                del pool.arriving[b]

    def arrive(self, pool: BlockPool, plan: Plan, blocks: list[int]) -> None:
        """The plan moves contents into these blocks: whoever shares them before its commit depends on it."""
        for b in blocks:
            self.undo.append((pool.arriving.pop, (b, None)))
            pool.arriving[b] = plan

    def ride(self, plan: Plan, seq: Sequence, row: Row | None = None) -> None:
        """Let a sequence depend on a plan in flight: it is committed before later ones and aborted after them."""
        if plan in seq._pending:
            return
        if row is None:
            row = Row(seq, 0, 0, seq._length, len(seq._blocks))
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
        for plan in (*seq._pending, *plans):
            self.fence(plan, reversed(blocks), pool)
        pool.release(blocks, seq._priority)

    def rewrite(self, blocks: list[int]) -> None:
        """Blocks are about to be written by their only owner: they are not cached and have no twin any more."""
        cached = [b for b in blocks if self.prefix.keys[b] is not None]
        if cached:
            self.prefix.remove(cached)
        for b in blocks:
            if b in self.pool.twins:
                self.pool.untwin(b)

    def cache_on_host(self, seq: Sequence) -> None:
        """Enter the full, computed blocks of a sequence that has been swapped out into the host's index."""
        size = self.block_size
        full = min(seq._computed, len(seq._tokens)) // size
        blocks = seq._blocks[:full]
        if full and seq._root and min(blocks) >= 0:
            self.host.prefix.insert(seq._root, seq._tokens[: full * size].tobytes(), blocks)

    def cache(self, seq: Sequence) -> None:
        """Enter the full, computed blocks that the prefix cache does not know yet. O(those blocks)."""
        size, start = self.block_size, seq._registered
        full = min(seq._computed, len(seq._tokens)) // size
        if full <= start or not seq._root or seq._arriving:
            return
        blocks = seq._blocks[start:full]
        behind = seq._blocks[start - 1] if start else blocks[0]
        if behind < 0:  # the window has passed: nobody can say any more what these blocks follow
            seq._root = 0
            return
        parent = self.prefix.node_of(behind) if start else seq._root
        data = seq._tokens[start * size : full * size].tobytes()
        self.prefix.insert(parent, data, blocks, new=start >= seq._private)
        seq._registered = full
        seq._private = max(seq._private, full)


def _stale(seq: object, owner: object, states: tuple[State, ...], name: str) -> Exception:
    """Why a handle cannot be used."""
    if not isinstance(seq, Sequence):
        return InvalidType(f"{name}: got {type(seq).__name__}, a Sequence is accepted")
    if seq._owner is None:
        return StaleSequence(f"{name}: sequence {seq.id} is a copy, which belongs to no allocator")
    if seq._owner is not owner:
        return StaleSequence(f"{name}: sequence {seq.id} belongs to another allocator")
    accepted = " or ".join(state.value for state in states)
    return StaleSequence(f"{name}: sequence {seq.id} is {seq.state}, accepted is one that is {accepted}")
