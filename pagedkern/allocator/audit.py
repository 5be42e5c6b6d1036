"""`check()`: every invariant of the allocator, looked at in full. Linear: what is usual is compared in C."""

from __future__ import annotations

from collections import Counter

from pagedkern.allocator import audit_cache
from pagedkern.allocator.handles import Sequence, State, Step
from pagedkern.allocator.ledger import RUNNING, Ledger
from pagedkern.allocator.pool import BlockPool
from pagedkern.errors import AuditError


def check(ledger: Ledger) -> None:
    """Raise `AuditError` with the first invariant found broken. O(blocks + tokens)."""
    _expect(ledger.busy != RUNNING, "an operation is running, or its end was broken off twice")
    _expect(ledger.in_transaction or not ledger.undo, f"{len(ledger.undo)} entries left in the undo log")
    for lockstep in ledger.lockstep_batches.values():
        lockstep.check(_expect)
    for seq in ledger.live.values():
        _check_sequence(ledger, seq)
    _check_plans(ledger)
    _check_aliasing(ledger)
    _check_counts(ledger)
    plans = ledger.in_flight.values()
    for pool, state in ((ledger.pool, State.LIVE), (ledger.host, State.SWAPPED)):
        owners = [0] * pool.num_blocks
        for seq in ledger.live.values():
            if seq._state is state:
                for b in seq._blocks[max(0, seq._blocks.count(-1)) :]:
                    owners[b] += 1
        if pool is ledger.host:
            for h in ledger.pool.incoming.values():
                owners[h] += 1
        fences = Counter(b for p in plans for b in (p._held if pool is ledger.pool else p._held_host))
        _check_pool(pool, owners, fences)
    seals = Counter(pair for p in plans for pair in p._seals)
    _expect(seals == Counter((b, n) for b, all in ledger.pool.seals.items() for n in all), "seals: not the plans' own")
    _check_moves(ledger)
    audit_cache.check(ledger, _expect)


def _expect(holds: bool, message: str) -> None:
    if not holds:
        raise AuditError(message)


def _check_aliasing(ledger: Ledger) -> None:
    """Nothing that can change is held by two sequences, or by a sequence and a plan."""
    holders: dict[int, str] = {}

    def hold(what: object, name: str) -> None:
        other = holders.setdefault(id(what), name)
        _expect(other == name, f"{name} and {other} hold one {type(what).__name__}")

    for seq in ledger.live.values():
        hold(seq._blocks, f"sequence {seq.id}")
        hold(seq._tokens, f"sequence {seq.id}")
    for plan in ledger.in_flight.values():
        for i, row in enumerate(plan._rows or ()):
            if row.cows is not None:
                hold(row.cows, f"row {i} of plan {plan.id}")
            if row.before is not None and not isinstance(row.before[1], tuple):
                hold(row.before[1], f"row {i} of plan {plan.id}")
        if isinstance(plan, Step):
            for i, (blocks, *_) in enumerate(plan._source):
                hold(blocks, f"row {i} of plan {plan.id}")


def _check_counts(ledger: Ledger) -> None:
    """What is counted and not answered yet belongs to somebody."""
    asking = [seq for seq in ledger.live.values() if seq._asked]
    sharing = Counter(seq._question for seq in asking if seq._question in ledger.counts.sharing)
    _expect(
        ledger.counts.sharing == dict(sharing), f"counts: {ledger.counts.sharing} share questions, {dict(sharing)} do"
    )
    asked = sum(seq._asked for seq in asking if not seq._question)
    counted = ledger.counts.numbers["prefix_tokens_asked"]
    _expect(asked <= counted, f"counts: {asked} tokens may be taken back, only {counted} are counted")


def _check_moves(ledger: Ledger) -> None:
    """Twins are mutual and owned; contents are expected for owned blocks only, by plans in flight or to come."""
    for pool in (ledger.pool, ledger.host):
        for b, other in pool.twins.items():
            _expect(pool.peer.twins.get(other) == b, f"{pool.name} block {b}: its twin {other} has another")
            _expect(pool.refs[b] > 0 and pool.peer.refs[other] > 0, f"{pool.name} block {b}: twins that nobody owns")
        for b, plan in pool.arriving.items():
            _expect(plan in ledger.in_flight, f"{pool.name} block {b}: waits for a plan that is not in flight")
    for b in ledger.pool.incoming:
        _expect(ledger.pool.refs[b] > 0, f"device block {b}: contents expected, but nobody owns it")
        _expect(ledger.prefix.keys[b] is None, f"device block {b}: cached before its contents have come")


def _check_pool(pool: BlockPool, owners: list[int], fences: Counter[int]) -> None:
    keys, refs = pool.prefix.keys, pool.refs
    if refs != owners:
        b = next(b for b, count in enumerate(refs) if count != owners[b])
        raise AuditError(f"{pool.name} block {b}: {refs[b]} owners counted, {owners[b]} tables hold it")
    _expect(pool.holds == dict(fences), f"{pool.name} fences: {pool.holds} counted, plans have {dict(fences)}")
    blank, levels = pool.free_blocks()
    idle = [b for level in levels for b in level]
    listed = set(blank + idle)
    _expect(len(listed) == len(blank) + len(idle), f"{pool.name}: a block is free twice")
    free = {b for b, count in enumerate(refs) if not count}.difference(pool.holds)
    _expect(free == listed, f"{pool.name}: lost or stray free blocks {free ^ listed}")
    _expect(pool.num_free == len(free), f"{pool.name}: {pool.num_free} free blocks counted, {len(free)} are")
    for b in [b for b in blank if keys[b] is not None]:
        raise AuditError(f"{pool.name} block {b}: blank, yet cached")
    for b in [b for b in idle if keys[b] is None]:
        raise AuditError(f"{pool.name} block {b}: idle, yet not cached")


def _check_sequence(ledger: Ledger, seq: Sequence) -> None:
    name, size, blocks = f"sequence {seq.id}", ledger.block_size, seq._blocks
    _expect(seq._owner is ledger.origin and seq._state is not State.FREED, f"{name}: listed as live, but {seq.state}")
    passed = blocks.count(-1)
    _expect(blocks[:passed].count(-1) == passed, f"{name}: a block is lacking in the middle of its table")
    _expect(len(set(blocks[passed:])) == len(blocks) - passed, f"{name}: a block stands twice in its table")
    _expect(passed == seq._passed, f"{name}: {seq._passed} blocks given back, {passed} are lacking")
    held_tokens = seq._scheduled if seq._state is State.SWAPPED else seq.num_tokens
    _expect(len(blocks) >= ledger.num_blocks_for(held_tokens), f"{name}: fewer blocks than its tokens need")
    _expect(0 <= seq._cached <= seq.num_computed_tokens <= seq.num_tokens, f"{name}: counts out of order: {seq}")
    _expect(all(p.id in ledger.in_flight for p in seq._pending), f"{name}: waits for a plan that is not in flight")
    ids = [p.id for p in seq._pending]
    _expect(ids == sorted(set(ids)), f"{name}: plans in flight out of order: {ids}")
    if seq._lockstep is not None:
        return
    _expect(seq._computed <= seq._scheduled <= seq._length, f"{name}: scheduled {seq._scheduled} out of order: {seq}")
    _expect(len(seq._tokens) <= seq._length, f"{name}: more token ids than tokens")
    _expect(seq._registered * size <= seq._computed or seq._present > seq._computed, f"{name}: caches too much")
    if seq._state is State.LIVE:
        _check_private(ledger, seq)


def _check_private(ledger: Ledger, seq: Sequence) -> None:
    """Blocks said to be private are."""
    keys, refs, twins, start = ledger.prefix.keys, ledger.pool.refs, ledger.pool.twins, seq._private
    _expect(start <= len(seq._blocks), f"sequence {seq.id}: private from {start} on, beyond its blocks")
    for b in [b for b in seq._blocks[start:] if refs[b] != 1 or keys[b] is not None or b in twins]:
        _expect(refs[b] == 1, f"sequence {seq.id}: block {b} should be its own alone")
        _expect(keys[b] is None, f"sequence {seq.id}: block {b} should not be cached")
        _expect(b not in twins, f"sequence {seq.id}: block {b} may be written, but has a twin")


def _check_plans(ledger: Ledger) -> None:
    for plan in ledger.in_flight.values():
        _expect(plan.state == "in flight", f"plan {plan.id}: listed as in flight, but {plan.state}")
        lockstep = plan._lockstep if isinstance(plan, Step) else None
        if lockstep is not None:
            _expect(lockstep.active and lockstep.has(plan), f"plan {plan.id}: its lockstep does not know it")
        _expect((plan._rows is None) == (lockstep is not None), f"plan {plan.id}: nobody accounts for it")
        for row in plan._rows or ():
            if row.seq._state is not State.FREED:
                _expect(plan in row.seq._pending, f"plan {plan.id}: sequence {row.seq.id} does not wait for it")
                _expect(row.start <= row.end <= row.seq.num_tokens, f"plan {plan.id}: computes tokens that are gone")
