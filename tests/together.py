"""Which tests one worker of pytest-xdist runs, for what they share is slow to make; all others go to whichever is free.

The mark `xdist_group` says the same, but reaches no scheduler from pytest 9.2 on (pytest-xdist issue 1386).
"""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

SHARED = {  # file: what its tests share
    "tests/backends/triton/test_aot.py": "kernels compiled for real GPUs",
    "tests/backends/triton/test_launch.py": "launches of compiled kernels",
    "tests/benchmarks/test_smoke.py": "a run of the benchmarks",
    "tests/integrations/test_example.py": "the real model",
    "tests/integrations/test_real_memory.py": "the real model",
    "tests/integrations/test_real_model.py": "the real model",
}


class Together(LoadScopeScheduling):
    """Hands out tests one by one, and those that share something as one; what is most tests at once comes first."""

    def _split_scope(self, nodeid: str) -> str:
        return SHARED.get(nodeid.partition("::")[0], nodeid)

    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:
        """What is done is forgotten: else every test's end counts all the tests before it."""
        super().mark_test_complete(node, item_index, duration)
        work = self.assigned_work[node]
        scope = self._split_scope(self.registered_collections[node][item_index])
        if all(work[scope].values()):
            del work[scope]
