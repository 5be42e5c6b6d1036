"""What can be found in the prefix cache, for routers that send a prompt where its prefix is cached."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from hashlib import sha256
from typing import NamedTuple

from pagedkern.allocator.arguments import Salt
from pagedkern.allocator.chain import Chain
from pagedkern.allocator.roots import Roots
from pagedkern.allocator.tree import Tree

LIMIT = 65_536
"""Changes kept unread, unless the caller says otherwise: some tens of megabytes at the most for blocks of 16 tokens."""


class BlockEvent(NamedTuple):
    """A block can be found in the prefix cache from now on ("stored"), or no more ("removed").

    "lost": there were more changes than are kept. Forget all that earlier events told: "stored" events of all that can
    be found now follow. The other fields say nothing then.
    """

    kind: str  # "stored", "removed" or "lost"
    memory: str  # "device" or "host"
    block: int  # its id in that memory
    digest: bytes  # SHA-256 of the salt and of all tokens up to the end of the block: the same in all processes
    parent: bytes  # digest of the prefix before it; that of the salt for a first block
    reason: str = ""  # of a removal: "evicted", "rewritten", "cleared", or "orphaned": a block before it left


LOST = BlockEvent("lost", "", -1, b"", b"")


class _Change(NamedTuple):
    kind: str
    memory: str
    block: int
    node: int
    parent: int
    before: bytes | None  # digest of the salt, if the parent stands for one
    tokens: bytes
    reason: str


class Cached(NamedTuple):
    """All that is cached at one time."""

    events: list[BlockEvent]  # "stored", parents first
    digests: dict[int, bytes]  # of each node
    places: dict[int, int]  # of each node, how many memories have it


class EventLog:
    """The changes of the prefix index since the last look. Digests are computed when somebody looks."""

    def __init__(self, limit: int, roots: Roots, cached: Cached) -> None:
        self._limit = limit
        self._roots = roots
        self._changes: list[_Change] = []
        self._digests, self._places = cached.digests, cached.places
        self.lost = False  # there were more changes than the limit; none are kept any more

    def __len__(self) -> int:
        """Changes that are kept."""
        return len(self._changes)

    def stored(self, memory: str, block: int, node: int, parent: int, tokens: bytes) -> None:
        """A block is cached under a node."""
        if not self.lost:
            before = salt_digest(self._roots.salt_of(parent)) if parent in self._roots else None
            self._changes.append(_Change("stored", memory, block, node, parent, before, tokens, ""))

    def removed(self, memory: str, block: int, node: int, parent: int, reason: str) -> None:
        """A block is cached under its node no more."""
        if not self.lost:
            before = salt_digest(self._roots.salt_of(parent)) if parent in self._roots else None
            self._changes.append(_Change("removed", memory, block, node, parent, before, b"", reason))

    def cut(self, length: int) -> None:
        """Undo: the changes after the first `length` have not happened."""
        del self._changes[length:]

    def trim(self) -> None:
        """Keep no more than the limit. Called when nothing is left to be undone."""
        if len(self._changes) > self._limit:
            self.lost = True
            self._changes.clear()
            self._digests, self._places = {}, {}

    def restart(self, cached: Cached) -> list[BlockEvent]:
        """After a loss: what is there now."""
        self.lost = False
        self._digests, self._places = cached.digests, cached.places
        return [LOST, *cached.events]

    def drain(self) -> list[BlockEvent]:
        """The events, and none of them again."""
        events = []
        digests, places = self._digests, self._places
        for kind, memory, block, node, parent, before, tokens, reason in self._changes:
            if before is None:
                before = digests[parent]
            if kind == "stored":
                digests[node] = digest = sha256(before + tokens).digest()
                places[node] = places.get(node, 0) + 1
            else:
                digest = digests[node]
                places[node] -= 1
                if not places[node]:
                    del digests[node], places[node]
            events.append(BlockEvent(kind, memory, block, digest, before, reason))
        self._changes.clear()
        return events


def cached_now(trees: dict[str, Tree], roots: Roots) -> Cached:
    """What each memory has. O(that)."""
    result = Cached([], {}, {})
    nodes = deque((node, salt_digest(salt)) for salt, node in roots.items())
    while nodes:
        above, parent = nodes.popleft()
        for memory, tree in trees.items():
            for first in tree.behind(above):
                key, before = tree.keys[first], parent
                if isinstance(key, Chain):
                    chain = list(zip(key.keys(), key.blocks, range(key.base, key.base + len(key.blocks)), strict=True))
                else:
                    assert key is not None
                    chain = [(key, first, tree.node_of(first))]
                for (_, tokens), block, node in chain:
                    digest = result.digests.get(node) or sha256(before + tokens).digest()
                    result.events.append(BlockEvent("stored", memory, block, digest, before))
                    before = digest
                    new = node not in result.digests
                    result.digests[node] = digest
                    result.places[node] = result.places.get(node, 0) + 1
                if new:
                    nodes.append((node, digest))
    return result


def salt_digest(salt: Salt) -> bytes:
    """SHA-256 of a salt: its type and its value."""
    return sha256(f"{type(salt).__name__}:{salt!r}".encode()).digest()


def digests(chunks: Iterable[bytes], salt: Salt) -> list[bytes]:
    """The digest of each block of a prefix, cut into packed full blocks."""
    result = []
    digest = salt_digest(salt)
    for chunk in chunks:
        digest = sha256(digest + chunk).digest()
        result.append(digest)
    return result
