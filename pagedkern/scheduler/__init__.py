"""Continuous batching over the block allocator: who runs in the next step, and who makes room. Standard library only.

Where things are:

- `scheduler`: the public class. `state`: what it keeps. `planner`: making a batch, `room`: preempting and resuming,
`outcome`: completing, aborting and cancelling.
- `request`, `batch`: what callers hold.
- `costs`: is a preempted request cheaper to swap or to recompute? `journal`: taking changes back. `audit`: `check()`.
"""

from pagedkern.scheduler.batch import Batch, Row
from pagedkern.scheduler.costs import Costs
from pagedkern.scheduler.request import Request, Sample
from pagedkern.scheduler.scheduler import Scheduler

__all__ = ["Batch", "Costs", "Request", "Row", "Sample", "Scheduler"]
