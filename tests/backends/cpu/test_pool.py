"""Threads: how many, after a fork, and what becomes of errors."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from pagedkern.backends.cpu.pool import Pool

PRELUDE = """
import os, threading, torch
from pagedkern.backends.cpu import launch
from tests.backends.cpu.helpers import attend
from tests.contract.problems import Spec, build
launch.WORTH_A_THREAD = 1
call = build(Spec(seq_lens=(3000, 5)))
def helpers(): return sum(t.name.startswith("pagedkern") for t in threading.enumerate())
"""


def run(code: str, **env: str) -> str:
    """The output of a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code], env={**os.environ, **env}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_everybody_takes_part() -> None:
    pool, everybody = Pool(), threading.Barrier(3, timeout=60)
    seen: set[str] = set()

    def task() -> None:
        everybody.wait()
        seen.add(threading.current_thread().name)

    pool.run(task, 3)
    assert len(seen) == 3


def test_a_late_helper_is_not_waited_for() -> None:
    """A helper that is still busy elsewhere keeps nobody waiting, and does nothing when it comes."""
    pool, release, runs = Pool(), threading.Event(), []
    blocker = threading.Thread(target=pool.run, args=(lambda: release.wait(60), 2))
    blocker.start()
    for _ in range(20):
        pool.run(lambda: runs.append(1), 2)
    release.set()
    blocker.join()
    assert len(runs) >= 20


@pytest.mark.parametrize("where", ["caller", "helper"])
def test_errors_reach_the_caller(where: str) -> None:
    pool, everybody = Pool(), threading.Barrier(2, timeout=60)
    caller = threading.current_thread()

    def task() -> None:
        everybody.wait()
        if (threading.current_thread() is caller) == (where == "caller"):
            raise ZeroDivisionError(where)

    with pytest.raises(ZeroDivisionError, match=where):
        pool.run(task, 2)
    pool.run(everybody.reset, 1)


def test_torch_sets_the_number_of_threads() -> None:
    code = """
torch.set_num_threads(1); attend(call); print(helpers())
torch.set_num_threads(3); attend(call); print(helpers())
torch.set_num_threads(2); attend(call); print(helpers())
"""
    assert run(code, NUMBA_NUM_THREADS="8").split() == ["0", "2", "2"]


def test_numba_bounds_the_number_of_threads() -> None:
    assert run("torch.set_num_threads(8); attend(call); print(helpers())", NUMBA_NUM_THREADS="2").split() == ["1"]


def test_fork() -> None:
    """The child has none of its parent's threads; it makes its own and gets the same bits, and the parent goes on."""
    code = """
torch.set_num_threads(3)
want = attend(call).out
for _ in range(3):
    child = os.fork()
    if not child:
        try:
            before = helpers()
            same = torch.equal(attend(call).out, want)
            os._exit(0 if same and not before and helpers() == 2 else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(attend(call).out, want)
print(helpers())
"""
    assert run(code, NUMBA_NUM_THREADS="8").split() == ["2"]
