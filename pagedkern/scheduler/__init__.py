"""Continuous batching over the block allocator: who runs in the next step, and who makes room. Standard library only.

Where things are:

- `scheduler`: the public class. `state`: what it keeps, in the queues of `queue`.
- `planner`: making a batch: `growth` of samples that decode, `room` that others make for it, `admission` of those in
line; `draft` is the batch until it is certain. `standstill`: requests that have no room beside foreign sequences.
- `outcome`: completing, aborting and cancelling.
- `request`, `batch`: what callers hold.
- `costs`: is a preempted request cheaper to swap or to recompute? `audit`: `check()`.
"""

from pagedkern.scheduler.batch import Batch, BatchCopy, Row
from pagedkern.scheduler.costs import Costs
from pagedkern.scheduler.request import Request, Sample
from pagedkern.scheduler.scheduler import Scheduler

__all__ = ["Batch", "BatchCopy", "Costs", "Request", "Row", "Sample", "Scheduler"]
