"""Threads: how many, after a fork, and what becomes of errors."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def signals_that_can_be_waited_for() -> Iterator[socket.socket]:
    """A socket from which a byte can be read once the interpreter has noted a signal."""
    ours, its = socket.socketpair()
    its.setblocking(False)
    ours.settimeout(60)
    before = signal.set_wakeup_fd(its.fileno())
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield ours
    finally:
        signal.signal(signal.SIGINT, handler)
        signal.set_wakeup_fd(before)
        ours.close()
        its.close()


def test_interrupts_wait_for_the_helpers() -> None:
    """Ctrl-C, again and again, while a helper still works: the caller gets it when the helper is out, not before."""
    pool, both = Pool(), threading.Barrier(2, timeout=60)
    caller = threading.main_thread()
    done: list[bool] = []
    assert threading.current_thread() is caller, "signals are handled in the main thread only"

    def task() -> None:
        both.wait()
        if threading.current_thread() is caller:
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("the interrupt is due before this line")
        noted.recv(1)
        for _ in range(100):  # by the end the caller has been waiting for us for long
            signal.pthread_kill(caller.ident or 0, signal.SIGINT)
            noted.recv(1)
        done.append(True)

    with signals_that_can_be_waited_for() as noted:
        for n in range(1, 11):
            with pytest.raises(KeyboardInterrupt):
                pool.run(task, 2)
            assert len(done) == n, "the caller left while a helper was inside"


def test_interrupts_at_any_moment() -> None:
    """One interrupt a call, wherever a timer happens to put it; no helper is inside when it arrives."""
    pool, caller, lock = Pool(), threading.main_thread(), threading.Lock()
    inside, armed, hits = 0, False, 0

    def task() -> None:
        nonlocal inside
        if threading.current_thread() is caller:
            sum(range(2000))
            return
        with lock:
            inside += 1
        time.sleep(3e-4)  # without the GIL, as a kernel works: the caller is free to run away
        with lock:
            inside -= 1

    def interrupt(_signal: int, _frame: object) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    gc.disable()  # what is raised inside of a callback of the collector, and other tests leave such, is swallowed there
    try:
        for n in itertools.count():
            signal.setitimer(signal.ITIMER_REAL, 1e-6 * (1 + n * 37 % 1500))
            try:
                armed = True
                pool.run(task, 3)
                armed = False
            except KeyboardInterrupt:
                hits += 1
            assert not inside, "the caller left while a helper was inside"
            if hits == 300:
                break
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()


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
