"""How many requests the same memory holds, paged and contiguous, on the lengths of public traces.

What is timed is the whole simulation; what matters is in extra_info, and is the same on every machine.
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

import pytest

from benchmarks.memory_waste import BLOCK_SIZE, ROOT, compare
from benchmarks.meter import Measure
from reference.contiguous import Usage

REQUESTS = {"tiny": 60, "small": 500, "full": 2000}
BUDGET = 16384  # tokens a step


@pytest.mark.parametrize("path", sorted((ROOT / "autotune" / "workloads").glob("*.toml")), ids=lambda path: path.stem)
def test_memory(path: Path, measure: Measure) -> None:
    requests, contexts = REQUESTS[measure.size], 1 if measure.size == "tiny" else 4
    start = perf_counter()
    found = compare(path, requests, contexts, BUDGET)
    seconds = perf_counter() - start
    usages = {"paged": found.paged, "paged, prefixes shared": found.shared}
    usages |= {f"contiguous, {policy}": usage for policy, usage in found.contiguous.items()}
    measure.benchmark.group = "memory"
    measure.benchmark.extra_info |= {
        "row": f"{path.stem}, {requests:,} requests",
        "slots": found.paged.num_slots,
        "block_size": BLOCK_SIZE,
        "usage": {name: described(usage) for name, usage in usages.items() if usage is not None},
    }
    measure(lambda: seconds, cold=False, rounds=1)


def described(usage: Usage) -> dict[str, float]:
    """Requests in memory (mean over steps), and the shares of all memory by what it is used for."""
    shares = {name: usage.share(getattr(usage, name)) for name in ("tokens", "later", "never", "holes")}
    return {"resident": round(usage.mean_resident, 2), **{name: round(value, 4) for name, value in shares.items()}}
