"""What a `BlockAllocator` says of itself."""

from __future__ import annotations

from pagedkern.allocator import audit, spans
from pagedkern.allocator.arguments import Salt, Tokens, tenant, token_ids
from pagedkern.allocator.chain import cut
from pagedkern.allocator.events import BlockEvent, digests
from pagedkern.allocator.handles import Sequence
from pagedkern.allocator.ledger import Ledger
from pagedkern.allocator.spans import Keys


class Facts:
    """The part of `BlockAllocator` that only looks. Properties are O(1), but for `sequences` and `events`."""

    _ledger: Ledger

    @property
    def num_blocks(self) -> int:
        """Blocks on the device."""
        return self._ledger.pool.num_blocks

    @property
    def block_size(self) -> int:
        """B, tokens a block."""
        return self._ledger.block_size

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out now, cached ones that nobody uses included."""
        return self._ledger.pool.num_free

    @property
    def num_host_blocks(self) -> int:
        """Blocks in host memory."""
        return self._ledger.host.num_blocks

    @property
    def num_free_host_blocks(self) -> int:
        """Host blocks that can be handed out now, cached ones that nobody uses included."""
        return self._ledger.host.num_free

    @property
    def num_cached_blocks(self) -> int:
        """Blocks whose contents the prefix cache knows, in use or not."""
        return len(self._ledger.prefix)

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences that have not been freed, in the order of their creation."""
        return [seq for _, seq in sorted(self._ledger.live.items())]

    @property
    def stats(self) -> dict[str, int]:
        """Counts of what there is and of what has been done, and high-water marks. Used blocks are
        those that are owned or fenced. O(1)."""
        ledger = self._ledger
        return {
            "blocks": ledger.pool.num_blocks,
            "blocks_free": ledger.pool.num_free,
            "blocks_idle": ledger.pool.idle.size,
            "blocks_cached": len(ledger.prefix),
            "blocks_fenced": len(ledger.pool.holds),
            "host_blocks": ledger.host.num_blocks,
            "host_blocks_free": ledger.host.num_free,
            "host_blocks_cached": len(ledger.host.prefix),
            "sequences": len(ledger.live),
            "plans_in_flight": len(ledger.in_flight),
            "plans": ledger.last_plan,
            "blocks_evicted": ledger.pool.num_evicted,
            "host_blocks_evicted": ledger.host.num_evicted,
            "peak_blocks_used": ledger.pool.num_blocks - ledger.pool.least_free,
            "peak_host_blocks_used": ledger.host.num_blocks - ledger.host.least_free,
            **ledger.counts.numbers,
        }

    @property
    def events(self) -> list[BlockEvent]:
        """What has been stored and removed since the last look, in order. Empty without `record_events`.

        Empty also inside a transaction, which may yet be taken back: its events come after the outermost one has ended.
        """
        ledger = self._ledger
        if ledger.events is None or ledger.transactions or ledger.busy:
            return []
        ledger.events.trim()
        return ledger.events.restart(ledger.cached()) if ledger.events.lost else ledger.events.drain()

    def cached_events(self) -> list[BlockEvent]:
        """The "stored" events of all that can be found in the prefix cache now, parents first. O(cached).

        To start a router with, as after `restore`: what it is told here it is not to be told by `events` once more, so
        call `record_events` first, or look at `events`, and then this.
        """
        return self._ledger.cached().events

    def digests(self, tokens: Tokens, *, salt: Salt = None, keys: Keys = ()) -> list[bytes]:
        """The SHA-256 of each full block of a prompt under a salt, as `BlockEvent.digest` has it: equal in all
        processes. `tokens`, `salt`, `keys`: as in `BlockAllocator.create`. O(tokens).
        """
        ids, stride = token_ids("tokens", tokens), self._ledger.prefix.stride
        data = ids.tobytes()
        special = spans.special(spans.read(keys, len(ids)), data, stride)
        chunks = [special.get(i, chunk) for i, chunk in enumerate(cut(data, stride))]
        return digests(chunks, tenant(salt))

    def check(self) -> None:
        """Audit every invariant. Raises `AuditError` with what is wrong. O(blocks + tokens)."""
        audit.check(self._ledger)

    def __repr__(self) -> str:
        return (
            f"<BlockAllocator of {self.num_blocks} blocks of {self.block_size} tokens: {self.num_free_blocks} free, "
            f"{self.num_cached_blocks} cached, {len(self._ledger.live)} sequences>"
        )
