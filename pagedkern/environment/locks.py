"""Locks that several processes share, for as long as the file system has them.

They save work, or keep two writers from undoing each other's; that a file is whole rests on replacing it in one step,
never on a lock. So whoever cannot have one goes on without.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from pagedkern.environment import notices, threads

PAUSE = 0.02  # seconds between two tries
GRACE = 3.0  # seconds for a try itself: over a network the answer may be late or never come


@contextmanager
def held(file: int, name: str, seconds: float, grace: float = GRACE) -> Iterator[bool]:
    """Exclude other processes that lock the same file, until the end of the context or of this process.

    Yields whether it could be locked; if not within `seconds`, or not at all, a warning says why, once for a file.
    `name` is its path, for the warning; `grace` is for a single try that is not answered.
    """
    why = acquire(file, seconds, grace)
    if why is not None:
        notices.warn_once(("lock", name), f"{name} cannot be locked ({why}): going on without a lock")
    try:
        yield why is None
    finally:
        release(file)


def acquire(file: int, seconds: float, grace: float) -> str | None:
    """Lock an open file, its descriptor, against other processes; None if that worked, else why not.

    A thread tries, on a descriptor of its own: a file system that never answers does not keep the caller.
    """
    try:
        own = os.dup(file)
    except OSError as error:
        return notices.reason(error)
    attempt = _Attempt(own, seconds)
    if threads.start(threading.Thread(target=attempt.run, name="pagedkern-lock", daemon=True)):
        tries = 1
        while not attempt.done.wait(grace):
            if attempt.tries == tries:
                attempt.given_up = True
                return "no answer"
            tries = attempt.tries
    else:
        attempt.run()
    return attempt.why


def release(file: int) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_UN)
    except OSError:  # it was not locked: there are no locks here
        return


class _Attempt:
    def __init__(self, file: int, seconds: float) -> None:
        self._file = file
        self._end = time.monotonic() + seconds
        self.why: str | None = "no answer"
        self.tries = 0
        self.given_up = False
        self.done = threading.Event()

    def run(self) -> None:
        try:
            self.why = self._try()
            if self.given_up:
                release(self._file)
        finally:
            os.close(self._file)  # the caller's descriptor keeps the lock
            self.done.set()

    def _try(self) -> str | None:
        while not self.given_up:
            self.tries += 1
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return None
            except BlockingIOError:
                if time.monotonic() >= self._end:
                    return "another process holds it"
            except OSError as error:
                return notices.reason(error)
            time.sleep(PAUSE)
        return "no answer"
