"""Blocks, sequences, prefix cache: the bookkeeping of a paged KV cache. Standard library only; moves no memory.

`undo` and `idle` are the data structures, `pool` counts owners of blocks, `prefix` finds cached blocks, `sequence`
and `step` are what callers hold, `core` is the shared state, `stepper` makes steps for any batch and `cohort` fast
for one that only decodes, `allocator` is the public class and `audit` its `check()`.
"""

from pagedkern.allocator.allocator import BlockAllocator
from pagedkern.allocator.sequence import Sequence
from pagedkern.allocator.step import Copies, Plan, Step, Verdict

__all__ = ["BlockAllocator", "Copies", "Plan", "Sequence", "Step", "Verdict"]
