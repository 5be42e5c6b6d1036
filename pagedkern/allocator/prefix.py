"""The prefix cache's index: which block holds which tokens after which prefix, compared in full."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from itertools import count
from typing import TypeAlias

from pagedkern.allocator.arguments import Salt
from pagedkern.allocator.observe import EventLog
from pagedkern.allocator.undo import UndoLog

Key: TypeAlias = tuple[int, bytes]
"""The node of the parent block, and the block's token ids as packed 64-bit integers."""


class PrefixIndex:
    """Finds the block that holds given tokens after a given prefix.

    A *node* is a number that stands for one exact prefix: the salt and all tokens up to the end of a block. Numbers are
    never used twice, so a key (node of the parent, the block's own tokens) names a prefix exactly: dictionaries compare
    keys in full, and a hash collision costs time, never correctness. When a block is evicted, its node dies with it
    and the blocks behind it can be found no more; they leave in their turn.
    """

    __slots__ = ("_by_key", "_next_node", "_roots", "_stride", "_undo", "events", "keys", "memory", "nodes", "peer")

    def __init__(self, memory: str, num_blocks: int, block_size: int, undo: UndoLog, nodes: count[int]) -> None:
        self.memory = memory  # for events: "device" or "host"
        self.events: EventLog | None = None
        self._by_key: dict[Key, int] = {}
        self._roots: dict[Salt, int] = {}
        self._stride = 8 * block_size
        self._next_node = nodes
        self._undo = undo
        self.peer: PrefixIndex | None = None  # the index of the other memory: the same prefix has the same node there
        self.keys: list[Key | None] = [None] * num_blocks  # of each block, None if its contents are not cached
        self.nodes = [0] * num_blocks  # of each full block that a live sequence computed, or that is cached

    def __len__(self) -> int:
        """Cached blocks, owned or not."""
        return len(self._by_key)

    def root(self, salt: Salt) -> int:
        """The node of the empty prefix under a salt: tenants with different salts share nothing. Amortised O(1)."""
        node = self._roots.get(salt)
        if node is None:
            if len(self._roots) > 1024 + 2 * len(self.keys):  # forget the salts that no cached block is under
                used = {parent for parent, _ in self._by_key}
                self._roots = {s: n for s, n in self._roots.items() if n in used}
            self._roots[salt] = node = next(self._next_node)
            if self.events is not None:
                self.events.salts[node] = salt
        return node

    def salts(self) -> list[tuple[Salt, int]]:
        """Each salt with the node of its empty prefix."""
        return list(self._roots.items())

    def set_salts(self, salts: list[tuple[Salt, int]]) -> None:
        """For a snapshot's return."""
        self._roots = dict(salts)

    def next_node(self) -> int:
        """A number that no node has."""
        return next(self._next_node)

    def put(self, cached: list[tuple[int, Key]], nodes: list[int], next_node: count[int]) -> None:
        """Fill a new index with a snapshot's contents."""
        self.nodes[:] = nodes
        self._next_node = next_node
        for b, key in cached:
            self.keys[b] = key
            self._by_key[key] = b

    def roots(self) -> Iterable[int]:
        """The nodes of the empty prefixes, for audits."""
        return self._roots.values()

    def peek_root(self, salt: Salt) -> int:
        """The node of the empty prefix under a salt, 0 if nothing can be cached under it. Changes nothing."""
        return self._roots.get(salt, 0)

    def chunks(self, data: bytes) -> tuple[bytes, ...]:
        """Packed tokens cut into full blocks; a partial last block is left out."""
        return _cutter(self._stride, len(data) // self._stride).unpack_from(data)

    def get(self, key: Key) -> int | None:
        """The block cached under a key."""
        return self._by_key.get(key)

    def match(self, node: int, chunks: Iterable[bytes]) -> list[int]:
        """The blocks of the longest cached prefix, ~b for a block of the other memory where only that has it.

        O(its length).
        """
        get, nodes, peer = self._by_key.get, self.nodes, self.peer
        blocks: list[int] = []
        for chunk in chunks:
            block = get((node, chunk))
            if block is None:
                other = peer._by_key.get((node, chunk)) if peer is not None else None
                if other is None:
                    break
                node = peer.nodes[other]  # type: ignore[union-attr]
                blocks.append(~other)
                continue
            blocks.append(block)
            node = nodes[block]
        return blocks

    def insert(self, parent: int, chunks: tuple[bytes, ...], blocks: list[int]) -> None:
        """Cache computed full blocks that follow the prefix `parent`.

        Where a block with the same contents is cached already, that one stays and ours is not cached, only given the
        same node, so that what follows it can be.
        """
        nodes, keys = self.nodes, self.keys
        start, mixed = 0, any(map(keys.__getitem__, blocks))
        while start < len(blocks):
            key = (parent, chunks[start])
            if not mixed and key not in self._by_key and not self._in_peer(key):
                break
            self.insert_one(parent, chunks[start], blocks[start])
            parent = nodes[blocks[start]]
            start += 1
        fresh = blocks[start:]
        if not fresh:
            return
        # Nothing can be cached behind a node that is new, so the rest goes in without looking.
        numbers = [next(self._next_node) for _ in fresh]
        new = list(zip([parent, *numbers], chunks[start:], strict=False))
        self._undo.append((self._set_nodes, (fresh, [nodes[b] for b in fresh])))
        self._undo.append((self._forget, (fresh,)))
        for b, key, node in zip(fresh, new, numbers, strict=True):
            keys[b] = key
            nodes[b] = node
        self._by_key.update(zip(new, fresh, strict=True))
        if self.events is not None:
            self._tell(self.events.stored, fresh)

    def _in_peer(self, key: Key) -> bool:
        return self.peer is not None and key in self.peer._by_key

    def insert_one(self, parent: int, chunk: bytes, block: int) -> None:
        """`insert` of a single block."""
        if self.keys[block] is not None:  # somebody else who owns it was faster
            return
        key = (parent, chunk)
        known = self._by_key.get(key)
        self._undo.append((self._set_nodes, ([block], [self.nodes[block]])))
        if known is not None:
            self.nodes[block] = self.nodes[known]
            return
        peer = self.peer
        other = peer._by_key.get(key) if peer is not None else None
        self._undo.append((self._forget, ([block],)))
        self.nodes[block] = next(self._next_node) if other is None else peer.nodes[other]  # type: ignore[union-attr]
        self.keys[block] = key
        self._by_key[key] = block
        if self.events is not None:
            self._tell(self.events.stored, [block])

    def _tell(self, what: Callable[[str, int, int, Key], None], blocks: list[int]) -> None:
        """Record an event for each of these cached blocks."""
        assert self.events is not None
        self._undo.append((self.events.cut, (len(self.events.changes),)))
        for b in blocks:
            key = self.keys[b]
            assert key is not None
            what(self.memory, b, self.nodes[b], key)

    def clear(self) -> None:
        """Forget everything, and with which node each salt begins."""
        self.remove([b for b, key in enumerate(self.keys) if key is not None])
        self._undo.append((self._set_roots, (self._roots,)))
        self._roots = {}

    def _set_roots(self, roots: dict[Salt, int]) -> None:
        self._roots = roots

    def _set_nodes(self, blocks: list[int], nodes: list[int]) -> None:
        for b, node in zip(blocks, nodes, strict=True):
            self.nodes[b] = node

    def _forget(self, blocks: list[int]) -> None:
        for b in blocks:
            key = self.keys[b]
            if key is not None:
                self._by_key.pop(key, None)
                self.keys[b] = None

    def remove(self, blocks: list[int]) -> None:
        """Stop caching blocks that are cached: they are evicted, or about to be written."""
        keys, by_key = self.keys, self._by_key
        if self.events is not None:
            self._tell(self.events.removed, blocks)
        removed = [keys[b] for b in blocks]
        self._undo.append((self._reinsert, (blocks, removed)))
        for b, key in zip(blocks, removed, strict=True):
            del by_key[key]  # type: ignore[arg-type]
            keys[b] = None

    def _reinsert(self, blocks: list[int], removed: list[Key | None]) -> None:
        for b, key in zip(blocks, removed, strict=True):
            if key is not None:
                self._by_key[key] = b
                self.keys[b] = key

    def items(self) -> Iterable[tuple[Key, int]]:
        """Every key with its block, for audits."""
        return self._by_key.items()


_CUTTERS: dict[tuple[int, int], struct.Struct] = {}


def _cutter(stride: int, num: int) -> struct.Struct:
    """Cuts bytes into `num` pieces of `stride`, in C."""
    cutter = _CUTTERS.get((stride, num))
    if cutter is None:
        if len(_CUTTERS) >= 1024:
            _CUTTERS.clear()
        cutter = _CUTTERS[stride, num] = struct.Struct(f"{stride}s" * num)
    return cutter
