"""The threads that share one call's work.

The thread that calls always works itself; helpers come in when they wake, and what they find is a counter to draw from,
so nothing waits for a helper that is late, and any number of callers may run at once: they share the same few helpers.
Compiled kernels release the GIL. Numba's own threading layers are not used: "workqueue" aborts when two threads call at
once, "omp" does after fork(), and Numba's mask of threads is not torch's.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue


class _Job:
    """A task that any number of threads may join until it is closed."""

    def __init__(self, task: Callable[[], None]) -> None:
        self._task = task
        self._lock = threading.Lock()
        self._idle = threading.Event()
        self._idle.set()
        self._inside = 0
        self._closed = False
        self._error: BaseException | None = None

    def join(self) -> None:
        """Run the task, unless the job is closed. Called by helpers."""
        with self._lock:
            if self._closed:
                return
            self._inside += 1
            self._idle.clear()
        error = None
        try:
            self._task()
        except BaseException as caught:  # handed to the caller, who waits for us
            error = caught
        with self._lock:
            self._error = self._error or error
            self._inside -= 1
            if not self._inside:
                self._idle.set()

    def close(self) -> None:
        """Let nobody in any more, wait for those inside, and raise what they raised. Called by the caller."""
        with self._lock:
            self._closed = True
        self._idle.wait()
        if self._error is not None:
            raise self._error


class Pool:
    """Daemon threads that wait for jobs. They are made when first needed, and anew after a fork."""

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._offers: SimpleQueue[_Job] = SimpleQueue()
        self._threads = 0

    def run(self, task: Callable[[], None], threads: int) -> None:
        """Run `task` in the calling thread and in up to `threads - 1` others, and return when all have returned.

        The task must draw its work from a shared counter: a helper may come when everything is done, or not at all.
        """
        if threads <= 1:
            task()
            return
        job = _Job(task)
        self._grow(threads - 1)
        for _ in range(threads - 1):
            self._offers.put(job)
        try:
            task()
        finally:
            job.close()

    def _grow(self, helpers: int) -> None:
        with self._lock:
            while self._threads < helpers:
                name = f"pagedkern-cpu-{self._threads}"
                threading.Thread(target=_serve, args=(self._offers,), name=name, daemon=True).start()
                self._threads += 1


def _serve(offers: SimpleQueue[_Job]) -> None:
    while True:
        offers.get().join()


POOL = Pool()
