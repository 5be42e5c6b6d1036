"""The prefixes that blocks are cached under, as a tree of nodes in one memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import Any

from pagedkern.allocator.chain import Chain, Key
from pagedkern.allocator.roots import Nodes
from pagedkern.allocator.undo import UndoLog


class Tree:
    """Which block holds which tokens behind which node.

    A *node* is a number that stands for one exact prefix: the salt and all tokens up to the end of a block. Numbers are
    never used twice, so a key (node of the parent, the block's own tokens) names a prefix exactly: it is compared in
    full, and a hash collision costs time, never correctness.

    Blocks that came together may be listed together, as a `Chain`: then only its first block hangs on a node, and only
    its last one can be found by its node, since nothing can be cached behind the nodes between. The run is taken apart
    as soon as anybody asks for one of them.
    """

    __slots__ = ("_at", "_kids", "_nodes", "_num_cached", "_number", "_stride", "_undo", "keys")

    def __init__(self, num_blocks: int, block_size: int, undo: UndoLog, number: Nodes) -> None:
        self.keys: list[Key | Chain | None] = [None] * num_blocks  # of each block, None if its contents are not cached
        # Of each block that is cached by itself, or whose sequence computed what another block is cached with; else 0.
        # For blocks of runs it means nothing.
        self._nodes = [0] * num_blocks
        self._at: dict[int, int] = {}  # node: its block; of a run, the last one only
        self._kids: dict[int, int | dict[bytes, int]] = {}  # node: the block behind it, or several by their tokens
        self._num_cached = 0
        self._stride = 8 * block_size
        self._number = number
        self._undo = undo

    def __len__(self) -> int:
        """Cached blocks, owned or not."""
        return self._num_cached

    @property
    def stride(self) -> int:
        """Bytes of a full block's packed tokens."""
        return self._stride

    # Looking.

    def find(self, parent: int, chunk: bytes) -> int | None:
        """The block cached behind a node with these tokens; a run is taken apart for it."""
        block = self._kids.get(parent)
        if type(block) is dict:
            block = block.get(chunk)
        if block is None or self._chunk(block) != chunk:  # type: ignore[arg-type]
            return None
        if type(run := self.keys[block]) is Chain:  # type: ignore[index]
            self._take_apart(run)
        return block  # type: ignore[return-value]

    def _chunk(self, block: int) -> bytes:
        """The tokens of a block that is cached by itself, or that is the first of a run."""
        key = self.keys[block]
        return key.key[1] if type(key) is Chain else key[1]  # type: ignore[index]

    def key_of(self, block: int) -> Key | None:
        """The key under which a block is cached; a run is taken apart for it."""
        key = self.keys[block]
        if type(key) is Chain:
            self._take_apart(key)
            key = self.keys[block]
        return key  # type: ignore[return-value]

    def node_of(self, block: int) -> int:
        """The node of a cached block, or of a full one that a live sequence computed."""
        run = self.keys[block]
        if type(run) is Chain:
            if run.blocks[-1] == block:
                return run.base + len(run.blocks) - 1
            self._take_apart(run)
        return self._nodes[block]

    def parents(self) -> Iterable[int]:
        """The nodes that something is cached behind, but for those inside runs."""
        return self._kids

    def parent_of(self, block: int) -> int:
        """The node before a cached block."""
        return self.key_of(block)[0]  # type: ignore[index]

    def at(self, node: int) -> int | None:
        """The block of a node that is not inside a run."""
        return self._at.get(node)

    def behind(self, node: int) -> list[int]:
        """The blocks cached right behind a node that is not inside a run."""
        kids = self._kids.get(node)
        return [] if kids is None else list(kids.values()) if type(kids) is dict else [kids]  # type: ignore[list-item]

    # Changing.

    def _put(self, block: int, key: Key, node: int) -> None:
        self._link(key[0], key[1], block)
        self.keys[block] = key
        self._nodes[block] = node
        self._at[node] = block
        self._num_cached += 1

    def _link(self, parent: int, chunk: bytes, block: int) -> None:
        kids = self._kids.get(parent)
        if kids is None:
            self._kids[parent] = block
        elif type(kids) is dict:
            kids[chunk] = block
        else:
            self._kids[parent] = {self._chunk(kids): kids, chunk: block}  # type: ignore[arg-type, dict-item]

    def _unlink(self, parent: int, chunk: bytes) -> None:
        kids = self._kids[parent]
        if type(kids) is dict and len(kids) > 1:
            del kids[chunk]
        else:
            del self._kids[parent]

    def _drop(self, block: int) -> None:
        """Forget a block that is cached by itself."""
        parent, chunk = self.keys[block]  # type: ignore[misc]
        self._unlink(parent, chunk)
        del self._at[self._nodes[block]]
        self.keys[block] = None
        self._nodes[block] = 0
        self._num_cached -= 1

    def _set_node(self, block: int, node: int) -> None:
        self._nodes[block] = node

    # Runs.

    def _put_run(self, run: Chain) -> None:
        blocks, keys = run.blocks, self.keys
        self._link(*run.key, blocks[0])
        for b in blocks:
            keys[b] = run
        self._at[run.base + len(blocks) - 1] = blocks[-1]
        self._num_cached += len(blocks)

    def _forget_run(self, run: Chain) -> None:
        self._unlink(*run.key)
        keys = self.keys
        for b in run.blocks:
            keys[b] = None
        del self._at[run.base + len(run.blocks) - 1]
        self._num_cached -= len(run.blocks)

    def _shorten(self, run: Chain, count: int) -> None:
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
        last = run.base + len(run.blocks) - 1
        del self._at[last]
        del run.blocks[-count:]
        self._at[last - count] = run.blocks[-1]
        self._num_cached -= count

    def _lengthen(self, run: Chain, blocks: list[int]) -> None:
        last = run.base + len(run.blocks) - 1
        del self._at[last]
        run.blocks += blocks
        for b in blocks:
            self.keys[b] = run
        self._at[last + len(blocks)] = blocks[-1]
        self._num_cached += len(blocks)

    def _take_apart(self, run: Chain) -> None:
        """List each block of a run by itself. O(its length), once for each run."""
        blocks, keys = run.blocks, run.keys()
        self._undo.append((self._put_together, (run, [self._nodes[b] for b in blocks])))
        for number, (b, key) in enumerate(zip(blocks, keys, strict=True), run.base):
            self.keys[b] = key
            self._nodes[b] = number
            self._at[number] = b
            if number > run.base:
                self._kids[key[0]] = b

    def _put_together(self, run: Chain, nodes: list[int]) -> None:
        for number, (b, node) in enumerate(zip(run.blocks, nodes, strict=True), run.base):
            self.keys[b] = run
            self._nodes[b] = node
            if b != run.blocks[-1]:
                del self._at[number], self._kids[number]

    # For audits and snapshots.

    @property
    def next_node(self) -> int:
        """All nodes are below."""
        return self._number.next

    def items(self) -> Iterator[tuple[Key, int, int]]:
        """(key, block, node) of each cached block. Changes nothing. O(blocks)."""
        for block, key in enumerate(self.keys):
            if type(key) is Chain:
                if key.blocks[0] == block:
                    yield from zip(key.keys(), key.blocks, range(key.base, key.base + len(key.blocks)), strict=True)
            elif key is not None:
                yield key, block, self._nodes[block]  # type: ignore[misc]

    def state(self) -> dict[str, Any]:
        """The contents, for `put`: of each block its id, the node before it, its tokens, its node, what it is known by
        beside its tokens.
        """
        size = self._stride
        cached = [
            [b, parent, array("q", chunk[:size]).tolist(), node, chunk[size:].hex()]
            for (parent, chunk), b, node in self.items()
        ]
        return {"cached": cached, "nodes": self._nodes[:], "next_node": self._number.next}

    def put(self, next_node: int, nodes: list[int], cached: list[tuple[int, int, bytes, int]]) -> None:
        """Fill a new index with the contents of another one: (block, parent, packed tokens, node) of each block."""
        self._number.next = next_node
        self._nodes[:] = nodes
        for b, parent, chunk, node in cached:
            self._put(b, (parent, chunk), node)
