"""Which of several machines says most about this one: itself, itself with other threads, then the one most like it.

A process may be given fewer threads than the one that tuned (`OMP_NUM_THREADS`, `taskset`, a container's quota). It
runs on the same processor all the same, and what was measured there counts before anything of another machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from pagedkern.autotune.store import device as machine

Identity = Mapping[str, str | int]
PROCESSOR = ("type", "name", "arch", "cores", "features")  # what a CPU is, however much of it a process is given


def same_machine(device: Mapping[str, object], other: Mapping[str, object]) -> bool:
    """Whether two identities, see `device.identity`, are of one machine, perhaps with other numbers of threads."""
    if device == other:
        return True
    return device.get("type") == "cpu" and all(device.get(field) == other.get(field) for field in PROCESSOR)


def threads_apart(device: Mapping[str, object], other: Mapping[str, object]) -> float:
    """How many times one must be doubled to have as many threads as the other; infinite where they are not known."""
    counts = [d.get("threads") for d in (device, other)]
    known = [count for count in counts if isinstance(count, int) and count > 0]
    if device == other:
        return 0.0
    return abs(math.log2(known[0] / known[1])) if len(known) == 2 else math.inf


def order(device: Identity, other: Mapping[str, object]) -> tuple[bool, float, float]:
    """A key to sort other machines by, those first that say most about this one. See `device.likeness` for whether one
    says anything."""
    own = same_machine(device, other)
    return not own, threads_apart(device, other) if own else 0.0, -machine.likeness(device, other)


def describe(device: Identity, other: Mapping[str, object]) -> str:
    """Another machine than the one at hand, in words: "this machine with 2 threads" if it is the same one."""
    if not same_machine(device, other):
        return machine.describe(other)  # type: ignore[arg-type]
    threads = other.get("threads")
    if device == other or threads == device.get("threads"):
        return "this machine"
    return f"this machine with {threads} thread{'s' * (threads != 1)}"
