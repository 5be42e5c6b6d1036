"""The prefix cache's index: which block holds which tokens after which prefix, compared in full."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from pagedkern.allocator.arguments import Salt
from pagedkern.allocator.observe import EventLog
from pagedkern.allocator.run import Key, Run, cut
from pagedkern.allocator.undo import UndoLog

Fill: TypeAlias = tuple[int, int, bytes, int]
"""A block that is full: (node of the empty prefix, block before it or -1, its packed tokens, the block)."""


class Nodes:
    """Hands out numbers of nodes, none of them twice."""

    __slots__ = ("next",)

    def __init__(self, first: int = 1) -> None:
        self.next = first

    def take(self, count: int = 1) -> int:
        """The first of so many consecutive numbers."""
        first = self.next
        self.next += count
        return first


class PrefixIndex:
    """Finds the block that holds given tokens after a given prefix.

    A *node* is a number that stands for one exact prefix: the salt and all tokens up to the end of a block. Numbers are
    never used twice, so a key (node of the parent, the block's own tokens) names a prefix exactly: dictionaries compare
    keys in full, and a hash collision costs time, never correctness. When a block is evicted, its node dies with it
    and the blocks behind it can be found no more; they leave in their turn.

    Blocks that came together may be listed together, as a `Run`.
    """

    __slots__ = (
        "_by_key",
        "_nodes",
        "_num_cached",
        "_number",
        "_roots",
        "_stride",
        "_undo",
        "events",
        "keys",
        "memory",
        "peer",
    )

    def __init__(self, memory: str, num_blocks: int, block_size: int, undo: UndoLog, number: Nodes) -> None:
        self.memory = memory  # for events: "device" or "host"
        self.events: EventLog | None = None
        self.peer: PrefixIndex | None = None  # the index of the other memory: the same prefix has the same node there
        self.keys: list[Key | Run | None] = [None] * num_blocks  # of each block, None if its contents are not cached
        self._nodes = [
            0
        ] * num_blocks  # of each full block that a live sequence computed or that is cached, without runs
        self._by_key: dict[Key, int] = {}  # of a run, the first block only
        self._num_cached = 0
        self._roots: dict[Salt | tuple[bytes], int] = {}  # under (salt,) if that is bytes: never compared with a str
        self._stride = 8 * block_size
        self._number = number
        self._undo = undo

    def __len__(self) -> int:
        """Cached blocks, owned or not."""
        return self._num_cached

    # Salts.

    def root(self, salt: Salt) -> int:
        """The node of the empty prefix under a salt: tenants with different salts share nothing. Amortised O(1)."""
        key = (salt,) if type(salt) is bytes else salt
        node = self._roots.get(key)
        if node is None:
            if len(self._roots) > 1024 + 2 * len(self.keys):  # forget the salts that no cached block is under
                used = {parent for index in (self, self.peer) if index is not None for parent, _ in index._by_key}
                self._roots = {s: n for s, n in self._roots.items() if n in used}
                if self.events is not None:
                    self.events.keep_salts(used)
            self._roots[key] = node = self._number.take()
            if self.events is not None:
                self.events.salts[node] = salt
        return node

    def peek_root(self, salt: Salt) -> int:
        """The node of the empty prefix under a salt, 0 if nothing can be cached under it. Changes nothing."""
        return self._roots.get((salt,) if type(salt) is bytes else salt, 0)

    def salts(self) -> list[tuple[Salt, int]]:
        """Each salt with the node of its empty prefix."""
        return [(key[0] if isinstance(key, tuple) else key, node) for key, node in self._roots.items()]

    # Looking.

    def chunks(self, data: bytes) -> tuple[bytes, ...]:
        """Packed tokens cut into full blocks; a partial last block is left out."""
        return cut(data, self._stride)

    def match(self, node: int, data: bytes) -> list[int]:
        """The blocks of the longest cached prefix of packed tokens, ~b for a block of the other memory where only that
        has it. O(its length).
        """
        get, nodes, keys, stride = self._by_key.get, self._nodes, self.keys, self._stride
        blocks: list[int] = []
        start, count, chunk = 0, len(data) // stride, data[:stride]
        chunks: tuple[bytes, ...] = ()  # cut when the second is wanted, which is seldom
        while True:
            block = get((node, chunk))
            if block is None:
                if self.peer is None or (other := self.peer.find((node, chunk))) is None:
                    return blocks
                node = self.peer._nodes[other]
                blocks.append(~other)
                start += 1
            elif type(run := keys[block]) is Run:
                common = run.common(data, start * stride)
                blocks += run.blocks[:common]
                node = run.base + common - 1
                start += common
                if common < len(run.blocks):
                    return blocks  # the run goes on otherwise; were there more behind it, it would be taken apart
            else:
                blocks.append(block)
                node = nodes[block]
                start += 1
            if start == count:
                return blocks
            chunks = chunks or cut(data, stride)
            chunk = chunks[start]

    def find(self, key: Key) -> int | None:
        """The block cached under a key; a run is taken apart for it."""
        block = self._by_key.get(key)
        if block is not None and type(run := self.keys[block]) is Run:
            self._take_apart(run)
        return block

    def key_of(self, block: int) -> Key | None:
        """The key under which a block is cached; a run is taken apart for it."""
        key = self.keys[block]
        if type(key) is Run:
            self._take_apart(key)
            key = self.keys[block]
        return key  # type: ignore[return-value]

    def node_of(self, block: int) -> int:
        """The node of a full block that a live sequence computed, or that is cached."""
        run = self.keys[block]
        if type(run) is Run:
            if run.blocks[-1] == block:
                return run.base + len(run.blocks) - 1
            self._take_apart(run)
        return self._nodes[block]

    # Changing.

    def insert(self, parent: int, data: bytes, blocks: list[int], new: bool = False) -> None:
        """Cache computed full blocks with these packed tokens, which follow the prefix `parent`. `new`: none of them is
        cached.

        Where a block with the same contents is cached already, that one stays and ours is not cached, only given the
        same node, so that what follows it can be.
        """
        one_by_one = self.events is not None or not (new or not any(map(self.keys.__getitem__, blocks)))
        start, last, stride = 0, len(blocks) - 1, self._stride
        while start <= last:
            key = (parent, data[start * stride : (start + 1) * stride])
            if (
                not one_by_one
                and start < last
                and key not in self._by_key
                and (self.peer is None or key not in self.peer._by_key)
            ):
                break
            self.insert_one(parent, key[1], blocks[start])
            parent = self._nodes[blocks[start]] if start < last else 0
            start += 1
        if start > last:
            return
        # Nothing can be cached behind a node that is new, so the rest goes in without looking.
        run = Run(key, self._number.take(last + 1 - start), blocks[start:], data[start * stride :])
        self._put_run(run)
        self._undo.append((self._forget_run, (run,)))

    def insert_one(self, parent: int, chunk: bytes, block: int) -> None:
        """`insert` of a single block."""
        if self.keys[block] is not None:  # somebody else who owns it was faster
            self.key_of(block)
            return
        key = (parent, chunk)
        before = self._nodes[block]
        known = self.find(key) if key in self._by_key else None
        if known is not None:
            self._undo.append((self._set_node, (block, before)))
            self._nodes[block] = self._nodes[known]
            return
        other = self.peer.find(key) if self.peer is not None else None
        if other is None:
            node = self._number.next
            self._number.next = node + 1
        else:
            node = self.peer._nodes[other]  # type: ignore[union-attr]
        self._nodes[block] = node
        self.keys[block] = key
        self._by_key[key] = block
        self._num_cached += 1
        self._undo.append((self._uninsert, (block, before)))
        if self.events is not None:
            self._tell(self.events.stored, [block])

    def insert_each(self, fills: list[Fill]) -> None:
        """`insert_one` of blocks of different sequences. O(blocks)."""
        if self.events is not None or self.peer is not None:
            for root, before, chunk, block in fills:
                self.insert_one(self.node_of(before) if before >= 0 else root, chunk, block)
            return
        keys, nodes, by_key, number = self.keys, self._nodes, self._by_key, self._number
        for root, before, chunk, block in fills:
            if before < 0:
                parent = root
            else:
                parent = nodes[before] if type(keys[before]) is not Run else self.node_of(before)
            key = (parent, chunk)
            if key in by_key or keys[block] is not None:
                self.insert_one(parent, chunk, block)
                continue
            self._undo.append((self._uninsert, (block, nodes[block])))
            keys[block] = key
            by_key[key] = block
            nodes[block] = number.next
            number.next += 1
            self._num_cached += 1

    def _uninsert(self, block: int, node: int) -> None:
        self._forget(block)
        self._nodes[block] = node

    def remove(self, blocks: list[int]) -> None:
        """Stop caching blocks that are cached: they are evicted, or about to be written. O(blocks)."""
        if self.events is not None:
            self._tell(self.events.removed, blocks)
        keys = self.keys
        start = 0
        while start < len(blocks):
            block = blocks[start]
            run = keys[block]
            if type(run) is Run:
                count = run.tail(blocks, start)
                if count:
                    self._shorten(run, count)
                    start += count
                    continue
            key = self.key_of(block)
            assert key is not None
            self._forget(block)
            self._undo.append((self._reinsert, (block, key, self._nodes[block])))
            start += 1

    def clear(self) -> None:
        """Forget everything, and with which node each salt begins."""
        self.remove([b for _, b, _ in self.items()])
        self._undo.append((self._set_roots, (self._roots,)))
        self._roots = {}

    def _tell(self, what: Callable[[str, int, int, Key], None], blocks: list[int]) -> None:
        """Record an event for each of these cached blocks."""
        assert self.events is not None
        self._undo.append((self.events.cut, (len(self.events.changes),)))
        for b in blocks:
            key = self.key_of(b)
            assert key is not None
            what(self.memory, b, self._nodes[b], key)

    def _set_roots(self, roots: dict[Salt | tuple[bytes], int]) -> None:
        self._roots = roots

    def _set_node(self, block: int, node: int) -> None:
        self._nodes[block] = node

    def _forget(self, block: int) -> None:
        del self._by_key[self.keys[block]]  # type: ignore[arg-type]
        self.keys[block] = None
        self._num_cached -= 1

    def _reinsert(self, block: int, key: Key, node: int) -> None:
        self._by_key[key] = block
        self.keys[block] = key
        self._nodes[block] = node
        self._num_cached += 1

    # Runs.

    def _put_run(self, run: Run) -> None:
        keys = self.keys
        for b in run.blocks:
            keys[b] = run
        self._by_key[run.key] = run.blocks[0]
        self._num_cached += len(run.blocks)

    def _forget_run(self, run: Run) -> None:
        keys = self.keys
        for b in run.blocks:
            keys[b] = None
        del self._by_key[run.key]
        self._num_cached -= len(run.blocks)

    def _shorten(self, run: Run, count: int) -> None:
        """Forget the last blocks of a run. Its data stay as they are, for undoing."""
        if count == len(run.blocks):
            self._forget_run(run)
            self._undo.append((self._put_run, (run,)))
            return
        blocks = run.blocks[-count:]
        self._undo.append((self._lengthen, (run, blocks)))
        keys = self.keys
        for b in blocks:
            keys[b] = None
        del run.blocks[-count:]
        self._num_cached -= count

    def _lengthen(self, run: Run, blocks: list[int]) -> None:
        run.blocks += blocks
        self._num_cached -= len(run.blocks) - len(blocks)
        self._put_run(run)

    def _take_apart(self, run: Run) -> None:
        """List each block of a run by itself. O(its length), once for each run."""
        blocks, keys = run.blocks, run.keys()
        self._undo.append((self._put_together, (run, [self._nodes[b] for b in blocks])))
        for number, (b, key) in enumerate(zip(blocks, keys, strict=True), run.base):
            self.keys[b] = key
            self._nodes[b] = number
            self._by_key[key] = b

    def _put_together(self, run: Run, nodes: list[int]) -> None:
        for b, key, node in zip(run.blocks, run.keys(), nodes, strict=True):
            self._nodes[b] = node
            del self._by_key[key]
        self._num_cached -= len(run.blocks)
        self._put_run(run)

    # For audits and snapshots.

    @property
    def next_node(self) -> int:
        """All nodes are below."""
        return self._number.next

    def items(self) -> Iterator[tuple[Key, int, int]]:
        """(key, block, node) of each cached block. Changes nothing."""
        for key, block in self._by_key.items():
            run = self.keys[block]
            if type(run) is Run:
                yield from zip(run.keys(), run.blocks, range(run.base, run.base + len(run.blocks)), strict=True)
            else:
                yield key, block, self._nodes[block]

    def state(self) -> dict[str, Any]:
        """The contents, for `put`."""
        cached = [[b, parent, array("q", ids).tolist(), node] for (parent, ids), b, node in self.items()]
        return {"cached": cached, "nodes": self._nodes[:], "next_node": self._number.next}

    @property
    def stride(self) -> int:
        """Bytes of a full block's packed tokens."""
        return self._stride

    def put(self, next_node: int, nodes: list[int], cached: list[tuple[int, int, bytes, int]]) -> None:
        """Fill a new index with the contents of another one: (block, parent, packed tokens, node) of each block."""
        self._number.next = next_node
        self._nodes[:] = nodes
        for b, parent, chunk, node in cached:
            self._reinsert(b, (parent, chunk), node)

    def put_roots(self, salts: list[tuple[Salt, int]]) -> None:
        """The node of each salt."""
        self._roots = {(salt,) if type(salt) is bytes else salt: node for salt, node in salts}
