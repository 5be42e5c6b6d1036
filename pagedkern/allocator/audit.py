"""`check()`: every invariant of the allocator, looked at in full."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import TYPE_CHECKING

from pagedkern.allocator.sequence import Sequence, State
from pagedkern.errors import AuditError

if TYPE_CHECKING:
    from pagedkern.allocator.cohort import Cohort
    from pagedkern.allocator.core import Core
    from pagedkern.allocator.pool import BlockPool


def check(core: Core) -> None:
    """Raise `AuditError` with the first invariant found broken. O(blocks + tokens)."""
    _expect(core.in_transaction or not core.undo, f"{len(core.undo)} entries left in the undo log")
    for cohort in core.cohorts.values():
        _check_cohort(cohort)
    for seq in core.live.values():
        _check_sequence(core, seq)
    _check_plans(core)
    owners = Counter(b for s in core.live.values() if s._state is State.LIVE for b in s._blocks if b >= 0)
    fences = Counter(b for plan in core.in_flight.values() for b in plan._held)
    _check_pool(core.pool, owners, fences)


def _expect(holds: bool, message: str) -> None:
    if not holds:
        raise AuditError(message)


def _check_pool(pool: BlockPool, owners: Counter[int], fences: Counter[int]) -> None:
    keys, by_key = pool.prefix.keys, dict(pool.prefix.items())
    for b, refs in enumerate(pool.refs):
        _expect(refs == owners[b], f"{pool.name} block {b}: {refs} owners counted, {owners[b]} tables hold it")
    _expect(pool.holds == dict(fences), f"{pool.name} fences: {pool.holds} counted, plans have {dict(fences)}")
    blank, levels = pool.free_blocks()
    idle = [b for level in levels for b in level]
    _expect(len(set(blank + idle)) == len(blank) + len(idle), f"{pool.name}: a block is free twice")
    free = {b for b, refs in enumerate(pool.refs) if not refs and b not in pool.holds}
    _expect(free == set(blank + idle), f"{pool.name}: lost or stray free blocks {free ^ set(blank + idle)}")
    _expect(pool.num_free == len(free), f"{pool.name}: {pool.num_free} free blocks counted, {len(free)} are")
    for b in blank:
        _expect(keys[b] is None, f"{pool.name} block {b}: blank, yet cached")
    for b in idle:
        _expect(keys[b] is not None, f"{pool.name} block {b}: idle, yet not cached")
    for b, key in enumerate(keys):
        _expect(
            key is None or by_key.get(key) == b,
            f"{pool.name} block {b}: its key leads elsewhere",
        )
    for key, b in by_key.items():
        _expect(keys[b] == key, f"{pool.name} block {b}: cached under a key that is not its own")
    nodes = [pool.prefix.nodes[b] for b in by_key.values()]
    _expect(len(set(nodes)) == len(nodes), f"{pool.name}: two cached blocks stand for the same prefix")


def _check_sequence(core: Core, seq: Sequence) -> None:
    name, size = f"sequence {seq.id}", core.block_size
    _expect(seq._owner is core.owner and seq._state is not State.FREED, f"{name}: listed as live, but {seq.state}")
    held = [b for b in seq._blocks if b >= 0]
    _expect(len(set(held)) == len(held), f"{name}: a block stands twice in its table")
    _expect(len(seq._blocks) >= core.num_blocks_for(seq.num_tokens), f"{name}: fewer blocks than its tokens need")
    _expect(0 <= seq._cached <= seq.num_computed_tokens <= seq.num_tokens, f"{name}: counts out of order: {seq}")
    _expect(all(p.id in core.in_flight for p in seq._pending), f"{name}: waits for a plan that is not in flight")
    ids = [p.id for p in seq._pending]
    _expect(ids == sorted(set(ids)), f"{name}: plans in flight out of order: {ids}")
    if seq._cohort is not None:
        return
    _expect(seq._computed <= seq._scheduled <= seq._length, f"{name}: scheduled {seq._scheduled} out of order: {seq}")
    _expect(len(seq._tokens) <= seq._length, f"{name}: more token ids than tokens")
    _expect(seq._registered * size <= seq._computed or seq._present > seq._computed, f"{name}: caches too much")
    _expect(seq._private <= len(seq._blocks), f"{name}: private blocks from {seq._private} on, has {len(seq._blocks)}")
    _check_blocks(core, seq)


def _check_blocks(core: Core, seq: Sequence) -> None:
    """Blocks said to be private are, and cached blocks lie under the tokens and the prefix that the sequence has."""
    size, prefix = core.block_size, core.prefix
    for b in seq._blocks[seq._private :]:
        _expect(core.pool.refs[b] == 1, f"sequence {seq.id}: block {b} should be its own alone")
        _expect(prefix.keys[b] is None, f"sequence {seq.id}: block {b} should not be cached")
    node = seq._root
    for i in range(seq._registered if seq._root else 0):
        b = seq._blocks[i]
        if b < 0:
            return
        key = prefix.keys[b]
        if key is not None and (i == 0 or seq._blocks[i - 1] >= 0):
            _expect(key[0] == node, f"sequence {seq.id}: block {b} is cached behind another prefix")
            tokens = array("q", seq._tokens[i * size : (i + 1) * size])
            _expect(key[1] == tokens.tobytes(), f"sequence {seq.id}: block {b} is cached with other tokens")
        node = prefix.nodes[b]


def _check_cohort(cohort: Cohort) -> None:
    _expect(cohort.active, "a cohort that has ended is listed as active")
    table, slots = cohort._table, cohort._slots
    size = cohort._core.block_size
    for row, seq in enumerate(cohort.seqs):
        name = f"row {row} of a cohort, sequence {seq.id}"
        length = cohort.length(row)
        _expect(seq._cohort is cohort and seq._row == row, f"{name}: is not in this cohort")
        _expect(len(seq._blocks) == -(-length // size), f"{name}: {len(seq._blocks)} blocks for {length} tokens")
        entries = table.entries[row * table.width : (row + 1) * table.width]
        _expect(entries[: len(seq._blocks)] == seq._blocks, f"{name}: the block table is not up to date")
        _expect(set(entries[len(seq._blocks) :]) <= {-1}, f"{name}: garbage in the block table")
        last = seq._blocks[-1]
        _expect(slots[row] == last * size + (length - 1) % size, f"{name}: slot {slots[row]} is not in block {last}")
        _expect(not length % size or cohort._core.pool.refs[last] == 1, f"{name}: its last block {last} is shared")


def _check_plans(core: Core) -> None:
    for plan in core.in_flight.values():
        _expect(plan.state == "in flight", f"plan {plan.id}: listed as in flight, but {plan.state}")
        for row in plan._rows or ():
            if row.seq._state is not State.FREED:
                _expect(plan in row.seq._pending, f"plan {plan.id}: sequence {row.seq.id} does not wait for it")
                _expect(row.start <= row.end <= row.seq.num_tokens, f"plan {plan.id}: computes tokens that are gone")
