"""Blocks, sequences, prefix cache: the bookkeeping of a paged KV cache. Standard library only; moves no memory.

Where to look, from what callers see down to the data structures. Imports go downward only:

- `allocator`: `BlockAllocator`, the public class, with its `facts`. `atomic`: every method changes all or nothing;
  `log`, `replay`: the operations as a record that can be run again.
- What is done to sequences: `sequences` (create, fork, truncate, free), `stepper` (prefill, append, commit, abort),
  `swap`, `lockstep` (the fast path of a batch that only decodes), `caching` (registering blocks that are full).
- `audit`, `audit_cache`: `check()`. `snapshot`: the state as JSON. `counts`, `events`: statistics and what happened.
- `ledger`: the state that all of these share.
- Blocks: `pool` (who owns which), `ranks` (the order of eviction, with `retention`),
  `idle` (those without an owner), `links` (what device and host memory know of each other).
- Cached contents: `prefix`, a `tree` with its `roots`, and a `run` for each chain; `spans`: keys, as those of images.
- `handles`: `Sequence`, `Plan`, `Step`, what callers hold; `buffers`: the tables and slots that they get.
- `arguments`: checks of what comes in. `undo`: what makes an operation all or nothing.
"""

from pagedkern.allocator.allocator import BlockAllocator
from pagedkern.allocator.buffers import Copies
from pagedkern.allocator.events import BlockEvent
from pagedkern.allocator.handles import Plan, Sequence, Step, Verdict
from pagedkern.allocator.retention import Retention

__all__ = ["BlockAllocator", "BlockEvent", "Copies", "Plan", "Retention", "Sequence", "Step", "Verdict"]
