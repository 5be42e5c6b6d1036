"""After fork() torch's threads are gone in the child: every call still returns, with the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "4", "PYTHONPATH": str(ROOT)}


def run(*arguments: str) -> list[str]:
    """The lines that a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env=ENVIRONMENT,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=570,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_every_call_returns_in_a_forked_child(backend: str) -> None:
    lines = dict(line.split(": ") for line in run("-m", "tests.forked_calls", backend))
    assert len(lines) >= 40
    assert {name: how for name, how in lines.items() if how != "same"} == {}


CHILD = """
import os, signal, torch
{before}
torch.set_num_threads(4)
memory = torch.stack([torch.ones(1 << 18), torch.zeros(1 << 18)])
ids = torch.tensor([0]), torch.tensor([1])
child = os.fork()
if not child:
    signal.alarm(60)  # ends what waits for ever
    import pagedkern
    pagedkern.copy_blocks([memory], *ids, backend="{backend}")
    print(torch.get_num_threads(), memory[1, -1].item(), flush=True)
    os._exit(0)
print(os.waitpid(child, 0)[1])
"""


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("before", ["", "import pagedkern.backends.reference"])
def test_a_child_is_known_whether_or_not_the_library_was_there_before(backend: str, before: str) -> None:
    """And torch keeps the number of threads that it was set to."""
    (threads, copied), (status,) = map(str.split, run("-c", CHILD.format(backend=backend, before=before)))
    assert (threads, copied, status) == ("4", "1.0", "0")
