"""Swapping: plans that move sequences between device and host, each shared block once."""

from __future__ import annotations

from array import array

from pagedkern.allocator import caching
from pagedkern.allocator.handles import Plan, PlanRow, Sequence, State
from pagedkern.allocator.ledger import Ledger
from pagedkern.allocator.pool import BlockPool
from pagedkern.errors import OutOfBlocks


def swap_out(ledger: Ledger, seqs: list[Sequence]) -> Plan:
    """Move `own`ed sequences to the host. O(blocks)."""
    tables = [seq._blocks[: ledger.num_blocks_for(seq._scheduled)] for seq in seqs]
    plan, places = _plan(ledger, ledger.pool, ledger.host, "swap_out", seqs, tables, 0)
    for seq, table in zip(seqs, tables, strict=True):
        for index, b in enumerate(table):
            if b >= 0:
                ledger.seal(plan, b, min(ledger.block_size, seq._scheduled - index * ledger.block_size))
        arrivals = [(b, ledger.pool.incoming[b]) for b in table if b in ledger.pool.incoming]
        plan._arrivals += [pair for pair in arrivals if pair not in plan._arrivals]
        _change_place(ledger, plan, seq, [places.get(b, -1) for b in table], State.SWAPPED)
        seq._arriving = False
        # The last token of a prompt that was cached whole is to be written then: its block may stay behind.
        seq._present = min(seq._present, seq._scheduled)
        seq._registered = min(seq._registered, seq._scheduled // ledger.block_size)
    for b, h in places.items():
        if ledger.pool.refs[b] and b not in ledger.pool.incoming:
            ledger.pool.twin(b, h)
    ledger.counts.moves(plan, swap=True)
    return plan


def swap_in(ledger: Ledger, seqs: list[Sequence]) -> Plan:
    """Move `own`ed sequences back to the device. O(blocks)."""
    tables = [seq._blocks for seq in seqs]
    rest = [ledger.num_blocks_for(seq._length) - len(seq._blocks) for seq in seqs]
    plan, places = _plan(ledger, ledger.host, ledger.pool, "swap_in", seqs, tables, sum(rest))
    for seq, table, count in zip(seqs, tables, rest, strict=True):
        blocks = [places.get(h, -1) for h in table] + ledger.pool.take(count)
        _change_place(ledger, plan, seq, blocks, State.LIVE)
        seq._private = len(table)
        seq._registered = 0
        seq._arriving = plan._brings = True
    for h, b in places.items():
        if ledger.host.refs[h]:
            ledger.pool.twin(b, h)
    ledger.counts.moves(plan, swap=True)
    return plan


def _plan(
    ledger: Ledger,
    source: BlockPool,
    target: BlockPool,
    kind: str,
    seqs: list[Sequence],
    tables: list[list[int]],
    rest: int,
) -> tuple[Plan, dict[int, int]]:
    """The plan, and where each block goes. The target's blocks have been taken, with an owner for each table.

    `rest`: blocks that must remain free in the target for the caller to take. Nothing has changed if this raises.
    """
    places: dict[int, int | None] = {}
    for b in (b for table in tables for b in table if b >= 0):
        if b not in places:
            known = source.twins.get(b, source.incoming.get(b))
            places[b] = known if known is not None else target.cached(b)
    found = {b: place for b, place in places.items() if place is not None}
    missing = [b for b in places if b not in found]
    free = target.num_free - target.num_idle_of(found.values())
    if len(missing) + rest > free:
        raise OutOfBlocks(f"{kind}: {len(missing) + rest} {target.name} blocks needed, {free} free{target.held}")
    plan = Plan(ledger.origin, ledger.next_plan(), tuple(seqs))
    ledger.launch(plan)
    target.retain(found.values())
    fresh = target.take(len(missing))
    found |= zip(missing, fresh, strict=True)
    counted: set[int] = set()
    for seq, table in zip(seqs, tables, strict=True):
        for b in (b for b in table if b >= 0):
            if b in counted:
                target.retain([found[b]])
            counted.add(b)
            if found[b] in target.arriving:
                ledger.ride(ledger.in_flight[target.arriving[found[b]]], seq)
    if missing:
        plan.moves = ((kind, array("q", missing), array("q", fresh)),)
        ledger.arrive(target, plan, fresh)
    return plan, found


def _change_place(ledger: Ledger, plan: Plan, seq: Sequence, blocks: list[int], state: State) -> None:
    """The sequence's blocks are elsewhere from now on; the old ones are fenced for the plan, which reads them."""
    row = PlanRow(seq, 0, 0, seq._length, len(seq._blocks))
    row.before = (seq._state, tuple(seq._blocks))  # forks of the sequence share it: nothing that changes
    row.moved = blocks
    ledger.give_up(seq, seq._blocks, plan)
    seq._blocks, seq._state, seq._dirty = blocks, state, True
    seq._whole, seq._apart = False, True
    ledger.ride(plan, seq, row)
    caching.use(ledger, seq)


def unswap(ledger: Ledger, plan: Plan, row: PlanRow) -> None:
    """A plan in flight is not carried out: the sequence is where it was."""
    seq = row.seq
    assert row.before is not None
    state, before = row.before
    table, moved, now = list(before), seq._blocks, ledger.pool_of(seq)
    if state is State.SWAPPED:
        table = table[: ledger.num_blocks_for(seq._scheduled)]
    arrivals = [(b, h) for b, h in plan._arrivals if b in table]
    lost = [pair for pair in arrivals if not ledger.pool.refs[pair[0]]]
    now.peer.retain([b for b in table if b >= 0])
    if arrivals:
        _await(ledger, seq, arrivals, lost)
    seq._whole, seq._apart = False, True
    ledger.release(seq, moved)
    seq._blocks, seq._state, seq._dirty = table, state, True
    seq._private, seq._passed = len(table), table.count(-1)
    seq._arriving = state is State.LIVE and ledger.awaits(seq)
    caching.use(ledger, seq)
    if state is State.LIVE:
        caching.enter_computed(ledger, seq)


def _await(ledger: Ledger, seq: Sequence, arrivals: list[tuple[int, int]], lost: list[tuple[int, int]]) -> None:
    """A sequence comes back to blocks whose contents were still to come from the host when it left them.

    What another step has moved in since has come, or comes with that step. `lost`: the blocks that nobody had kept.
    """
    pool = ledger.pool
    flying = [plan for plan in ledger.in_flight.values() if plan._brings and plan._arrivals]
    for pair in arrivals:
        bringing = [plan for plan in flying if pair in plan._arrivals]
        if bringing:
            ledger.ride(bringing[-1], seq)
        elif pair in lost and pair[0] not in pool.incoming and pool.prefix.keys[pair[0]] is None:
            pool.expect(*pair)
