"""The tensors that hold keys and values, and the carrying out of the allocator's plans on them.

Where things are:

- `kvcache`: the public class. `moves`: what a plan says, checked.
- `transfers`: which work may overlap, and the fences that keep it right. `queues`: the streams that do the work.
- `inputs`: the arrays of a step on the device.
"""

from pagedkern.cache.inputs import StepInputs
from pagedkern.cache.kvcache import KVCache

__all__ = ["KVCache", "StepInputs"]
