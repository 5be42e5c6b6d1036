"""What a `BlockAllocator` says of itself."""

from __future__ import annotations

from pagedkern.allocator import observe
from pagedkern.allocator.core import Core
from pagedkern.allocator.sequence import Sequence


class Facts:
    """The properties of `BlockAllocator` that only look. O(1), but for `sequences`."""

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
        """Counts of what there is and of what has been done, and high-water marks. O(1)."""
        return observe.stats(self._core)

    def __repr__(self) -> str:
        return (
            f"<BlockAllocator of {self.num_blocks} blocks of {self.block_size} tokens: {self.num_free_blocks} free, "
            f"{self.num_cached_blocks} cached, {len(self._core.live)} sequences>"
        )
