"""What a `BlockAllocator` says of itself."""

from __future__ import annotations

from pagedkern.allocator import audit, spans
from pagedkern.allocator.arguments import Salt, Tokens, tenant, token_ids
from pagedkern.allocator.core import Core
from pagedkern.allocator.events import BlockEvent, digests
from pagedkern.allocator.handles import Sequence
from pagedkern.allocator.run import cut
from pagedkern.allocator.spans import Keys


class Facts:
    """The part of `BlockAllocator` that only looks. Properties are O(1), but for `sequences` and `events`."""

    _core: Core

    @property
    def num_blocks(self) -> int:
        """Blocks on the device."""
        return self._core.pool.num_blocks

    @property
    def block_size(self) -> int:
        """B, tokens a block."""
        return self._core.block_size

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out now, cached ones that nobody uses included."""
        return self._core.pool.num_free

    @property
    def num_host_blocks(self) -> int:
        """Blocks in host memory."""
        return self._core.host.num_blocks

    @property
    def num_free_host_blocks(self) -> int:
        """Host blocks that can be handed out now, cached ones that nobody uses included."""
        return self._core.host.num_free

    @property
    def num_cached_blocks(self) -> int:
        """Blocks whose contents the prefix cache knows, in use or not."""
        return len(self._core.prefix)

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences that have not been freed, in the order of their creation."""
        return [seq for _, seq in sorted(self._core.live.items())]

    @property
    def stats(self) -> dict[str, int]:
        """Counts of what there is and of what has been done, and high-water marks. Used blocks are
        those that are owned or fenced. O(1)."""
        core = self._core
        return {
            "blocks": core.pool.num_blocks,
            "blocks_free": core.pool.num_free,
            "blocks_idle": core.pool.idle.size,
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

    @property
    def events(self) -> list[BlockEvent]:
        """What has been stored and removed since the last look, in order. Empty without `record_events`.

        Empty also inside a transaction, which may yet be taken back: its events come after the outermost one has ended.
        """
        core = self._core
        if core.events is None or core.transactions or core.busy:
            return []
        core.events.trim()
        return core.events.restart(core.cached()) if core.events.lost else core.events.drain()

    def cached_events(self) -> list[BlockEvent]:
        """The "stored" events of all that can be found in the prefix cache now, parents first. O(cached).

        To start a router with, as after `restore`: what it is told here it is not to be told by `events` once more, so
        call `record_events` first, or look at `events`, and then this.
        """
        return self._core.cached().events

    def digests(self, tokens: Tokens, *, salt: Salt = None, keys: Keys = ()) -> list[bytes]:
        """The SHA-256 of each full block of a prompt under a salt, as `BlockEvent.digest` has it: equal in all
        processes. `tokens`, `salt`, `keys`: as in `BlockAllocator.create`. O(tokens).
        """
        ids, stride = token_ids("tokens", tokens), self._core.prefix.stride
        data = ids.tobytes()
        special = spans.special(spans.read(keys, len(ids)), data, stride)
        chunks = [special.get(i, chunk) for i, chunk in enumerate(cut(data, stride))]
        return digests(chunks, tenant(salt))

    def check(self) -> None:
        """Audit every invariant. Raises `AuditError` with what is wrong. O(blocks + tokens)."""
        audit.check(self._core)

    def __repr__(self) -> str:
        return (
            f"<BlockAllocator of {self.num_blocks} blocks of {self.block_size} tokens: {self.num_free_blocks} free, "
            f"{self.num_cached_blocks} cached, {len(self._core.live)} sequences>"
        )
