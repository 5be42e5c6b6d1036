"""What is counted: of what there is, and of what has been done."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagedkern.allocator.core import Core


def stats(core: Core) -> dict[str, int]:
    """Counts of what there is and of what has been done. Used blocks are those that are owned or fenced."""
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
