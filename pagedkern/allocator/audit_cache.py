"""The part of `check()` that is about the prefix cache: every cached block is found, and leaves in its turn."""

from __future__ import annotations

from pagedkern.allocator import spans
from pagedkern.allocator.chain import Chain
from pagedkern.allocator.handles import Expect, Sequence, State
from pagedkern.allocator.ledger import Ledger
from pagedkern.allocator.pool import BlockPool

_LAST = 1 << 62
"""Behind all places in an order of eviction."""


def check(ledger: Ledger, expect: Expect) -> None:
    """Raise `AuditError` with the first invariant found broken. O(cached blocks + tokens)."""
    walk = _Walk(ledger, expect)
    walk.down()
    for pool in (ledger.pool, ledger.host):
        prefix = pool.prefix
        expect(
            walk.found[pool.name] == len(prefix),
            f"{pool.name}: {walk.found[pool.name]} cached blocks can be reached, {len(prefix)} are counted",
        )
        cached = len(prefix.keys) - prefix.keys.count(None)
        expect(cached == len(prefix), f"{pool.name}: {cached} blocks are cached, {len(prefix)} are counted")
        levels = [b for b in pool.idle.marked if prefix.keys[b] is None]
        expect(not levels, f"{pool.name} blocks {levels}: not cached, yet with a level")
        _check_leases(pool, expect)
    for seq in ledger.live.values():
        if seq._lockstep is None and seq._root and seq._state is State.LIVE:
            _check_sequence(ledger, seq, expect)


def _check_leases(pool: BlockPool, expect: Expect) -> None:
    """Leases and the blocks that have them know each other, and a block has the highest level of all."""
    ranks = pool.idle
    for b in ranks.marked:
        leases = ranks.leases(b)
        highest = max([ranks.lasting(b), *(lease.priority for lease in leases)])
        expect(ranks.level(b) == highest, f"{pool.name} block {b}: level {ranks.level(b)}, leases make it {highest}")
        expect(all((ranks, b) in lease.blocks for lease in leases), f"{pool.name} block {b}: a lease does not know it")


class _Walk:
    """Visits every cached block once, from the salts down."""

    def __init__(self, ledger: Ledger, expect: Expect) -> None:
        self._ledger = ledger
        self._expect = expect
        self._pools = (ledger.pool, ledger.host)
        self.found = {pool.name: 0 for pool in self._pools}
        self._place: list[dict[int, int]] = []  # of each idle block in the order of eviction, for each memory
        for pool in self._pools:
            order = [b for level in pool.idle.lists() for b in level]
            self._place.append(dict(zip(order, range(len(order)), strict=True)))

    def down(self) -> None:
        nodes: set[int] = set()
        # (node, for each memory the place of the nearest idle block up to there, the least level up to there)
        stack = [(node, (_LAST, _LAST), 3) for _, node in self._ledger.roots.items()]
        while stack:
            node, places, level = stack.pop()
            self._expect(node not in nodes, f"node {node}: stands for two prefixes")
            nodes.add(node)
            below: dict[int, tuple[list[int], int]] = {}
            for i, pool in enumerate(self._pools):
                for first in pool.prefix.behind(node):
                    last, place, least = self._look(i, pool, node, first, places[i], level)
                    reached, lowest = below.setdefault(last, (list(places), least))
                    reached[i] = place
                    below[last] = reached, min(lowest, least)
            stack += [(last, (reached[0], reached[1]), least) for last, (reached, least) in below.items()]

    def _look(self, i: int, pool: BlockPool, node: int, first: int, place: int, level: int) -> tuple[int, int, int]:
        """A block or run behind a node: its last node, the place of its nearest idle block, its least level."""
        prefix, key = pool.prefix, pool.prefix.keys[first]
        name = f"{pool.name} block {first}"
        if isinstance(key, Chain):
            blocks, last = key.blocks, key.base + len(key.blocks) - 1
            self._expect(key.key[0] == node and blocks[0] == first, f"{name}: its run begins elsewhere")
            own = [prefix.keys[b] for b in blocks].count(key)
            self._expect(own == len(blocks), f"{name}: {len(blocks) - own} blocks of its run are not its own")
        else:
            blocks, last = [first], prefix.node_of(first)
            self._expect(key is not None and key[0] == node, f"{name}: listed behind node {node}, cached elsewhere")
        self._expect(prefix.at(last) == blocks[-1], f"{name}: another stands for the same prefix")
        self._expect(node < last < prefix.next_node, f"{name}: node {last} behind node {node}")
        self.found[pool.name] += len(blocks)
        places = self._place[i]
        idle = [places[b] for b in blocks if b in places]
        if idle:
            ordered = all(a > b for a, b in zip([place, *idle], idle, strict=False))
            self._expect(ordered, f"{name}: it, or what is behind it, stays longer than what is before it")
            place = idle[-1]
        if not pool.idle.is_flat or level < 3:
            levels = [pool.idle.level(b) for b in blocks]
            expected = sorted([level, *levels], reverse=True) == [level, *levels]
            self._expect(expected, f"{name}: levels {levels} behind a block of level {level}")
            level = levels[-1]
        else:
            level = 0
        return last, place, level


def _check_sequence(ledger: Ledger, seq: Sequence, expect: Expect) -> None:
    """Its blocks are cached behind the prefix and with the tokens that it has, and all are if it says so."""
    full, keys, blocks = seq._registered, ledger.prefix.keys, seq._blocks
    data = memoryview(seq._tokens)[: full * ledger.block_size].tobytes()
    found = ledger.prefix.match(seq._root, data, spans.special(seq._keys, data, ledger.prefix.stride))
    pairs = [(i, b) for i, b in enumerate(blocks[:full]) if b >= 0 and keys[b] is not None]
    wrong = [b for i, b in pairs if i >= len(found) or found[i] != b]
    expect(not wrong, f"sequence {seq.id}: blocks {wrong} are cached with other tokens or behind another prefix")
    if seq._owns_all:
        expect(len(pairs) == full, f"sequence {seq.id}: {full - len(pairs)} of its first {full} blocks are not cached")
    expect(seq._apart or (seq._owns_all or seq._arriving), f"sequence {seq.id}: needs a closer look, and says not")
