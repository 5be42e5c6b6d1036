"""The threads that share one call's work.

The thread that calls always works itself; helpers come in when they wake, and what they find is a counter to draw from,
so nothing waits for a helper that is late, and any number of callers may run at once: they share the same few helpers.
Compiled kernels release the GIL. Numba's own threading layers are not used: "workqueue" aborts when two threads call at
once, "omp" does after fork(), and Numba's mask of threads is not torch's.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

from pagedkern.environment import notices
from pagedkern.environment import threads as environment

# The interpreter's own locks, past the `threading` module: a signal handler that raises (Ctrl-C) breaks the wait for a
# `threading.Lock`, never that in this C function. `CDLL` lets go of the GIL meanwhile, `ctypes.pythonapi` would not.
_python = ctypes.CDLL(None)
_new, _free = _python.PyThread_allocate_lock, _python.PyThread_free_lock
_acquire, _release = _python.PyThread_acquire_lock, _python.PyThread_release_lock
_new.restype, _new.argtypes = ctypes.c_void_p, ()
_acquire.restype, _acquire.argtypes = ctypes.c_int, (ctypes.c_void_p, ctypes.c_int)  # lock, whether to wait
_release.restype, _release.argtypes = None, (ctypes.c_void_p,)
_free.restype, _free.argtypes = None, (ctypes.c_void_p,)


CALLS_BEFORE_ANOTHER_TRY = 100  # a refused thread costs about as much as a small call


class _Job:
    """A task that helpers may join until the caller has the gate, which it gets when nobody is inside."""

    def __init__(self, task: Callable[[], None]) -> None:
        self._task = task
        self._lock = threading.Lock()
        self._inside = 0
        self.error: BaseException | None = None  # the first that a helper met
        self.gate: int = _new()  # held by the helpers inside, as one; then by the caller, for good
        if not self.gate:
            raise MemoryError("no memory for a lock")

    def retire(self) -> None:
        """Free the gate. Called by the caller when it has it; a helper that comes later finds none.

        An interrupted caller may not get here, and loses some bytes. A `__del__` would lose the interrupt instead.
        """
        with self._lock:
            gate, self.gate = self.gate, 0
        _release(gate)  # not every platform frees a lock that is held
        _free(gate)

    def join(self) -> None:
        """Run the task, unless the caller has left or is about to. Called by helpers."""
        with self._lock:
            if not self.gate or (not self._inside and not _acquire(self.gate, 0)):
                return
            self._inside += 1
        error = None
        try:
            self._task()
        except BaseException as caught:  # handed to the caller, who waits for us
            error = caught
        with self._lock:
            self.error = self.error or error
            self._inside -= 1
            if not self._inside:
                _release(self.gate)


class Pool:
    """Daemon threads that wait for jobs. They are made when first needed, and anew after a fork."""

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._offers: SimpleQueue[_Job] = SimpleQueue()
        self._threads = 0
        self._patience = 0  # calls that ask for no further thread

    def run(self, task: Callable[[], None], threads: int) -> None:
        """Run `task` in the calling thread and in up to `threads - 1` others, and return when all have returned.

        The task must draw its work from a shared counter: a helper may come when everything is done, or not at all.
        Whatever the calling thread is interrupted by, no helper runs the task any more when this returns or raises.
        """
        if threads <= 1:
            task()
            return
        job = _Job(task)
        self._grow(threads - 1)
        try:
            for _ in range(threads - 1):
                self._offers.put(job)
            task()
        finally:
            # Signal handlers run when a call returns, a Python function begins or a loop goes round: none of that
            # lies between the `try` and this wait, and the wait lets no handler run before it is over.
            _acquire(job.gate, 1)
            job.retire()
        if job.error is not None:
            raise job.error

    def _grow(self, helpers: int) -> None:
        """Start threads until there are so many, or as many as the system gives. A refusal is believed for a while."""
        with self._lock:
            while self._threads < helpers:
                if self._patience:
                    self._patience -= 1
                    return
                name = f"pagedkern-cpu-{self._threads}"
                helper = threading.Thread(target=_serve, args=(self._offers,), name=name, daemon=True)
                if not environment.start(helper):
                    self._patience = CALLS_BEFORE_ANOTHER_TRY
                    have = f"with {self._threads + 1} of {helpers + 1} threads"
                    notices.warn_once("threads", f"no more threads can be started (see ulimit -u): computing {have}")
                    return
                self._threads += 1


def _serve(offers: SimpleQueue[_Job]) -> None:
    while True:
        offers.get().join()


POOL = Pool()
