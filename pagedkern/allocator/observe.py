"""What can be seen from outside: counts, and events for routers that send a prompt where its prefix is cached."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple

from pagedkern.allocator.arguments import Salt

if TYPE_CHECKING:
    from pagedkern.allocator.core import Core


def stats(core: Core) -> dict[str, int]:
    """Counts of what there is and of what has been done. Used blocks are those that are owned or fenced."""
    return {
        "blocks": core.pool.num_blocks,
        "blocks_free": core.pool.num_free,
        "blocks_idle": core.pool.num_idle,
        "blocks_cached": len(core.prefix),
        "blocks_fenced": len(core.pool.holds),
        "host_blocks": core.host.num_blocks,
        "host_blocks_free": core.host.num_free,
        "host_blocks_cached": len(core.host.prefix),
        "sequences": len(core.live),
        "plans_in_flight": len(core.in_flight),
        "plans": core.last_plan,
        "blocks_evicted": core.pool.num_evicted,
        "host_blocks_evicted": core.host.num_evicted,
        "peak_blocks_used": core.pool.num_blocks - core.pool.least_free,
        "peak_host_blocks_used": core.host.num_blocks - core.host.least_free,
        **core.counts.numbers,
    }


class BlockEvent(NamedTuple):
    """A block can be found in the prefix cache from now on ("stored"), or no more ("removed")."""

    kind: str  # "stored" or "removed"
    memory: str  # "device" or "host"
    block: int  # its id in that memory
    digest: bytes  # SHA-256 of the salt and of all tokens up to the end of the block: the same in all processes
    parent: bytes  # digest of the prefix before it; that of the salt for a first block


class _Change(NamedTuple):
    kind: str
    memory: str
    block: int
    node: int
    parent: int
    tokens: bytes


class EventLog:
    """The changes of the prefix index since the last look. Digests are computed when somebody looks."""

    def __init__(self) -> None:
        self.changes: list[_Change] = []
        self.salts: dict[int, Salt] = {}  # of each node that stands for an empty prefix
        self._digests: dict[int, bytes] = {}
        self._places: dict[int, int] = {}  # memories that have a block for the node

    def stored(self, memory: str, block: int, node: int, key: tuple[int, bytes]) -> None:
        """A block is cached under a key."""
        self.changes.append(_Change("stored", memory, block, node, *key))

    def removed(self, memory: str, block: int, node: int, key: tuple[int, bytes]) -> None:
        """A block is cached under its key no more."""
        self.changes.append(_Change("removed", memory, block, node, *key))

    def keep_salts(self, nodes: set[int]) -> None:
        """Forget the salts of other nodes, but for those that changes not looked at yet are under."""
        nodes = nodes.union(change.parent for change in self.changes)
        self.salts = {node: salt for node, salt in self.salts.items() if node in nodes}

    def cut(self, length: int) -> None:
        """Undo: the changes after the first `length` have not happened."""
        del self.changes[length:]

    def drain(self) -> list[BlockEvent]:
        """The events, and none of them again. A block behind a prefix that is gone can be found by nobody: no event."""
        events = []
        for kind, memory, block, node, parent, tokens in self.changes:
            before = salt_digest(self.salts[parent]) if parent in self.salts else self._digests.get(parent)
            if kind == "stored" and before is not None:
                self._digests[node] = digest = sha256(before + tokens).digest()
                self._places[node] = self._places.get(node, 0) + 1
            elif kind == "removed" and node in self._digests:
                digest = self._digests[node]
                self._places[node] -= 1
                if not self._places[node]:
                    del self._digests[node], self._places[node]
            else:
                continue
            events.append(BlockEvent(kind, memory, block, digest, before if before is not None else b""))
        self.changes.clear()
        return events


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
