"""Threads: how many, after a fork, and what becomes of errors."""

from __future__ import annotations

import gc
import itertools
import os
import random
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


@pytest.mark.skipif(os.geteuid() != 0, reason="the limit of processes binds all but root, who can become another user")
def test_no_more_threads() -> None:
    """The limit appears midway and goes again: who is there computes, and later more join. The same in a child."""
    code = """
import logging, resource
logging.getLogger("pagedkern").addHandler(heard := logging.Handler())
heard.emit = lambda record: "compil" in record.getMessage() or print(record.getMessage())
torch.set_num_threads(2)
want = attend(call).out
os.setuid(54321)
torch.set_num_threads(4)
child = os.fork()
resource.setrlimit(resource.RLIMIT_NPROC, (1, 50))
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
for _ in range(2):
    assert torch.equal(attend(call).out, want)
    print(helpers())
if child:
    resource.setrlimit(resource.RLIMIT_NPROC, (50, 50))
    for _ in range(200):
        attend(call)
    print(helpers())
os._exit(0)
"""
    in_child, *in_parent = run(code, NUMBA_NUM_THREADS="8", PYTHONUNBUFFERED="1").split("pagedkern: ")[1:]
    refused = "no more threads can be started (see ulimit -u): computing with {} of 4 threads"
    assert in_child.splitlines() == [refused.format(1), "0", "0"]
    assert [each.splitlines() for each in in_parent] == [[refused.format(2), "1", "1", "3"]]


def test_no_memory_for_the_stack_of_a_thread() -> None:
    """`ulimit -v`: the address space is nearly used up."""
    code = """
import re, resource
torch.set_num_threads(2)
want = attend(call).out
size = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
resource.setrlimit(resource.RLIMIT_AS, (size + (4 << 20), resource.RLIM_INFINITY))
torch.set_num_threads(12)
assert torch.equal(attend(call).out, want)
print(helpers())
"""
    assert 1 <= int(run(code, NUMBA_NUM_THREADS="16")) < 11  # stacks of threads that ended are used again


@pytest.mark.parametrize("seed", range(5))
def test_threads_refused_at_random(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the work is done once, whichever threads the system refuses."""
    rng, start = random.Random(seed), threading.Thread.start

    def moody(thread: threading.Thread) -> None:
        if thread.name.startswith("pagedkern") and rng.random() < 0.7:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", moody)
    pool = Pool()
    for _ in range(300):
        work, done = itertools.count(), []

        def task(work: Iterator[int] = work, done: list[int] = done) -> None:
            while (item := next(work)) < 20:
                done.append(item)

        pool.run(task, rng.randrange(1, 6))
        assert sorted(done) == list(range(20))


def test_a_large_slot_mapping_after_a_fork() -> None:
    """torch would copy it with threads that the child does not have, and wait for them for ever."""
    code = """
import signal
from pagedkern.backends.base import WriteCall
torch.set_num_threads(4)
torch.ones(1 << 20).add(1)  # with torch's threads
n = 100_001
k = torch.rand(n, 1, 8)
cache = torch.zeros(2, n, 1, 1, 8)
write = WriteCall(k, -k, *cache, torch.arange(2 * n)[::2].flip(0) // 2, None, None)
launch.write_kv(write)
assert torch.equal(cache[0].flip(0).view_as(k), k)
child = os.fork()
if not child:
    signal.alarm(60)
    launch.write_kv(write)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run(code).split() == ["0"]


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
