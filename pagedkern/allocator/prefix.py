"""The prefix cache's index: which block holds which tokens after which prefix, compared in full."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from pagedkern.allocator.chain import Chain, Key, cut
from pagedkern.allocator.events import EventLog
from pagedkern.allocator.handles import Fill
from pagedkern.allocator.roots import Nodes
from pagedkern.allocator.tree import Tree
from pagedkern.allocator.undo import UndoLog

Gone: TypeAlias = "list[tuple[PrefixIndex, int]]"
"""Blocks that are not cached any more, each with its index."""
PLAIN: Mapping[int, bytes] = {}


class PrefixIndex(Tree):
    """Finds the block that holds given tokens after a given prefix.

    Every cached block can be reached: the node before it is that of a salt, or has a block in this memory or the other.
    A node that loses its last block takes with it all nodes behind it, in both memories.
    """

    __slots__ = ("events", "memory", "peer")

    def __init__(self, memory: str, num_blocks: int, block_size: int, undo: UndoLog, number: Nodes) -> None:
        super().__init__(num_blocks, block_size, undo, number)
        self.memory = memory  # for events: "device" or "host"
        self.events: EventLog | None = None
        self.peer: PrefixIndex | None = None  # the index of the other memory: the same prefix has the same node there

    # Looking.

    def match(self, node: int, data: bytes, special: Mapping[int, bytes] = PLAIN) -> list[int]:
        """The blocks of the longest cached prefix of packed tokens, ~b for a block of the other memory where only that
        has it. O(its length).

        Args:
            node: of the prefix before the tokens.
            special: the chunks of blocks that are known by more than their tokens, by their number.
        """
        kids, nodes, keys, stride = self._kids, self._nodes, self.keys, self._stride
        blocks: list[int] = []
        start, count, chunk = 0, len(data) // stride, data[:stride]
        if special:
            chunk = special.get(0, chunk)
        chunks: tuple[bytes, ...] = ()  # cut when the second is wanted, which is seldom
        while start < count:
            block = kids.get(node)
            if type(block) is dict:
                block = block.get(chunk)
            key = keys[block] if block is not None else None  # type: ignore[index]
            if type(key) is Chain:
                if key.key[1] == chunk:
                    common = key.common(data, start * stride, special)
                    blocks += key.blocks[:common]
                    if common < len(key.blocks):
                        return blocks  # the run goes on otherwise; were there more behind it, it would be taken apart
                    start += common
                    node = key.base + common - 1
                else:
                    key = None
            elif key is not None:
                if key[1] == chunk:  # type: ignore[index]
                    blocks.append(block)  # type: ignore[arg-type]
                    node = nodes[block]  # type: ignore[index]
                    start += 1
                else:
                    key = None
            if key is None:
                if self.peer is None:
                    return blocks
                others, node = self.peer._hits(node, chunk, data, start, special)
                if not others:
                    return blocks
                blocks += others
                start += len(others)
            if start < count:
                chunks = chunks or cut(data, stride)
                chunk = special.get(start, chunks[start]) if special else chunks[start]
        return blocks

    def _hits(
        self, node: int, chunk: bytes, data: bytes, start: int, special: Mapping[int, bytes]
    ) -> tuple[list[int], int]:
        """The complements of the next blocks for the other memory's `match`, one or those of a run, and their node."""
        block = self._kids.get(node)
        if type(block) is dict:
            block = block.get(chunk)
        if block is None or self._chunk(block) != chunk:  # type: ignore[arg-type]
            return [], 0
        run = self.keys[block]  # type: ignore[index]
        if type(run) is not Chain:
            return [~block], self._nodes[block]  # type: ignore[operator, index]
        common = run.common(data, start * self._stride, special)
        # Nothing is behind the nodes between: if the run goes on otherwise, the next look finds nothing.
        return [~b for b in run.blocks[:common]], run.base + common - 1

    def reached(self, block: int) -> int:
        """The node of a full block that a live sequence computed, 0 if it cannot be found any more."""
        node = self.node_of(block)
        return node if self.keys[block] is not None or self._alive(node) else 0

    def _alive(self, node: int) -> bool:
        return node in self._at or (self.peer is not None and node in self.peer._at)

    # Changing.

    def insert(
        self, parent: int, data: bytes, blocks: list[int], new: bool = False, special: Mapping[int, bytes] = PLAIN
    ) -> tuple[bool, list[int]]:
        """Cache computed full blocks with these packed tokens, which follow the prefix `parent`, which can be reached.

        Where a block with the same contents is cached already, that one stays and ours is not cached, only given the
        same node, so that what follows it can be.

        Args:
            new: none of the blocks is cached.
            special: as for `match`.

        Returns:
            Whether all of them are cached now, and those whose nodes the other memory had already.
        """
        one_by_one = self.events is not None or not (new or not any(map(self.keys.__getitem__, blocks)))
        start, last, stride = 0, len(blocks) - 1, self._stride
        plain = max(special) + 1 if special else 0  # from there on
        whole, shared = True, []
        while start <= last:
            chunk = data[start * stride : (start + 1) * stride]
            if special:
                chunk = special.get(start, chunk)
            if not one_by_one and plain <= start < last and self.is_new(parent, chunk):
                # Nothing can be cached behind a node that is new, so the rest goes in without looking.
                run = Chain(
                    (parent, chunk), self._number.take(last + 1 - start), blocks[start:], data[start * stride :]
                )
                self._put_run(run)
                self._undo.append((self._forget_run, (run,)))
                break
            block = blocks[start]
            if self.keys[block] is not None:  # somebody else who owns it was faster
                parent = self.node_of(block)
            elif self.insert_one(parent, chunk, block):
                shared.append(block)
                parent = self._nodes[block]
            else:
                parent = self._nodes[block]
                whole = whole and self.keys[block] is not None
            start += 1
        return whole, shared

    def is_new(self, parent: int, chunk: bytes) -> bool:
        """Whether nothing is cached behind a node with these tokens, here or in the other memory."""
        return not self._has(parent, chunk) and (self.peer is None or not self.peer._has(parent, chunk))

    def _has(self, parent: int, chunk: bytes) -> bool:
        kids = self._kids.get(parent)
        if kids is None:
            return False
        return chunk in kids if type(kids) is dict else self._chunk(kids) == chunk  # type: ignore[arg-type]

    def insert_one(self, parent: int, chunk: bytes, block: int) -> bool:
        """`insert` of a block that is not cached. Returns whether the other memory had its node already."""
        before = self._nodes[block]
        known = self.find(parent, chunk)
        if known is not None:
            self._undo.append((self._set_node, (block, before)))
            self._nodes[block] = self._nodes[known]
            return False
        other = self.peer.find(parent, chunk) if self.peer is not None else None
        node = self._number.take() if other is None else self.peer._nodes[other]  # type: ignore[union-attr]
        self._put(block, (parent, chunk), node)
        self._undo.append((self._uninsert, (block, before)))
        if self.events is not None:
            self._undo.append((self.events.cut, (len(self.events),)))
            self.events.stored(self.memory, block, node, parent, chunk)
        return other is not None

    def insert_each(self, fills: list[Fill]) -> list[Fill]:
        """`insert_one` of blocks of different sequences, if all that is before them is theirs and cached. O(blocks).

        Returns the rest: those of sequences that need a closer look, or whose contents are cached already.
        """
        keys, nodes, kids, at, number = self.keys, self._nodes, self._kids, self._at, self._number
        slow = self.events is not None or self.peer is not None
        rest: list[Fill] = []
        done: list[tuple[int, int]] = []
        self._undo.append((self._uninsert_each, (done,)))
        try:
            for fill in fills:
                seq, before, chunk, block = fill
                if seq._apart or slow:
                    rest.append(fill)
                    continue
                if before < 0:
                    parent = seq._root
                else:
                    parent = nodes[before] if type(keys[before]) is not Chain else self.node_of(before)
                if parent in kids or keys[block] is not None:
                    rest.append(fill)
                    continue
                done.append((block, nodes[block]))
                keys[block] = (parent, chunk)
                kids[parent] = block
                nodes[block] = node = number.next
                at[node] = block
                number.next = node + 1
        finally:
            self._num_cached += len(done)
        return rest

    def _uninsert_each(self, done: list[tuple[int, int]]) -> None:
        for block, node in reversed(done):
            self._uninsert(block, node)

    def _uninsert(self, block: int, node: int) -> None:
        self._drop(block)
        self._nodes[block] = node

    # Removing.

    def remove(self, blocks: list[int], reason: str) -> Gone:
        """Stop caching blocks that are cached, tails before heads: they are evicted, or about to be written.

        Returns what cannot be reached without them and is gone too. O(all of these).
        """
        if self.events is not None:
            return [x for b in blocks for x in self._remove_one(b, reason)]
        gone: Gone = []
        keys = self.keys
        start = 0
        while start < len(blocks):
            run = keys[blocks[start]]
            if type(run) is Chain:
                count = run.tail(blocks, start)
                if count:
                    last = run.base + len(run.blocks) - 1
                    if last in self._kids or (self.peer is not None and last in self.peer._kids):
                        gone += self._remove_behind(last, "orphaned")
                    self._shorten(run, count)
                    start += count
                    continue
            gone += self._remove_one(blocks[start], reason)
            start += 1
        return gone

    def _remove_one(self, block: int, reason: str) -> Gone:
        """Stop caching a block, and what is behind it if the other memory has not got the same."""
        key = self.key_of(block)
        if key is None:  # it was behind another one
            return []
        node, peer = self._nodes[block], self.peer
        gone: Gone = []
        if node in self._kids if peer is None else node not in peer._at and (node in self._kids or node in peer._kids):
            gone = self._remove_behind(node, "orphaned")
        self._leave(block, key, node, reason)
        return gone

    def _remove_behind(self, node: int, reason: str) -> Gone:
        """Stop caching all that is behind a node, in both memories, tails before heads."""
        found: Gone = []
        nodes, seen = [node], {node}
        indexes = (self,) if self.peer is None else (self, self.peer)
        while nodes:
            above = nodes.pop()
            for index in indexes:
                for b in index.behind(above):
                    index.key_of(b)
                    found.append((index, b))
                    if index._nodes[b] not in seen:
                        seen.add(index._nodes[b])
                        nodes.append(index._nodes[b])
        found.reverse()
        for index, b in found:
            index._leave(b, index.keys[b], index._nodes[b], reason)  # type: ignore[arg-type]
        return found

    def _leave(self, block: int, key: Key, node: int, reason: str) -> None:
        if self.events is not None:
            self._undo.append((self.events.cut, (len(self.events),)))
            self.events.removed(self.memory, block, node, key[0], reason)
        self._drop(block)
        self._undo.append((self._put, (block, key, node)))

    def clear(self, node: int) -> Gone:
        """Forget all that is behind the node of a salt, in both memories. O(that)."""
        return self._remove_behind(node, "cleared")
