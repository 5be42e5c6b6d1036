"""Blocks, sequences, prefix cache: the bookkeeping of a paged KV cache. Standard library only; moves no memory.

Where things are:

- `allocator`: the public class, with its `facts`. `operation`: what surrounds each of its methods, and the log that
`replay` does again.
- `sequence`, `step`: what callers hold. `sequences`, `stepper`, `swap`: what is done to them. `cohort`: the fast path
of a batch that only decodes.
- `core`: the shared state; `pool`: owners of blocks; `prefix`: cached contents, with its `tree`, `roots` and `run`;
`ranks`: the order of eviction, with `retention`; `spans`: block keys; `idle`, `undo`: the data structures.
- `audit`: `check()`. `observe`: counts and events. `snapshot`: the state as JSON. `arguments`: checks of what comes in.
"""

from pagedkern.allocator.allocator import BlockAllocator
from pagedkern.allocator.buffers import Copies
from pagedkern.allocator.events import BlockEvent
from pagedkern.allocator.handles import Plan, Sequence, Step, Verdict
from pagedkern.allocator.retention import Retention

__all__ = ["BlockAllocator", "BlockEvent", "Copies", "Plan", "Retention", "Sequence", "Step", "Verdict"]
