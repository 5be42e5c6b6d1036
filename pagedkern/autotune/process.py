"""`Process`: a worker and the pipes to it, on which nothing waits for longer than is said.

Messages are pickled tuples behind their length, see `worker`. A worker that hangs, is stopped or is killed in the
middle of a message is as good as one that does not answer: the pipes are read and written without blocking.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from pagedkern.autotune.worker import LENGTH

COMMAND = (sys.executable, "-P", "-m", "pagedkern.autotune.worker")  # -P: nothing from where we happen to be
LEAVING = 10.0  # seconds that a process may take to end after it has closed its pipes
OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT}  # not by a kernel's own fault


class CannotStart(Exception):
    """No process can be made: the message says why."""


class WorkerEnded(Exception):
    """The process is gone. `outside`: somebody killed it; else it is what it ran that did."""

    def __init__(self, why: str, outside: bool) -> None:
        super().__init__(why)
        self.outside = outside


class Process:
    """A worker process. It ends with this one, whatever happens. Raises `CannotStart`."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        path = os.pathsep.join(_here() if p == "" else p for p in sys.path)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                env={**os.environ, "PYTHONPATH": path},
            )
        except (OSError, MemoryError, ValueError, subprocess.SubprocessError) as error:
            raise CannotStart(f"cannot be started: {error or type(error).__name__}") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin.fileno(), self._process.stdout.fileno()
        for descriptor in (self._to, self._from):
            os.set_blocking(descriptor, False)
        self._received = bytearray()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def fileno(self) -> int:
        """What becomes readable when there is a reply, or the process ended."""
        return self._from

    def exchange(self, message: tuple[Any, ...], limit: float) -> tuple[Any, ...]:
        """The reply to a message. Raises `TimeoutError` after `limit` seconds, and `WorkerEnded`."""
        end = time.monotonic() + limit
        self.send(message, end)
        while (reply := self.reply()) is None:
            _wait(self._from, select.POLLIN, end)
        return reply

    def send(self, message: tuple[Any, ...], end: float) -> None:
        """Give it a message. Raises `TimeoutError` if it is not taken until `end`, and `WorkerEnded`."""
        data = pickle.dumps(message)
        left = memoryview(LENGTH.pack(len(data)) + data)
        while left:
            try:
                left = left[os.write(self._to, left) :]
            except BlockingIOError:
                _wait(self._to, select.POLLOUT, end)
            except OSError:
                raise self._ended() from None

    def reply(self) -> tuple[Any, ...] | None:
        """The next reply, None if it is not there yet. Raises `WorkerEnded`."""
        while True:
            if len(self._received) >= LENGTH.size:
                (count,) = LENGTH.unpack_from(self._received)
                if len(self._received) >= LENGTH.size + count:
                    data = bytes(self._received[LENGTH.size : LENGTH.size + count])
                    del self._received[: LENGTH.size + count]
                    found: tuple[Any, ...] = pickle.loads(data)
                    return found
            try:
                piece = os.read(self._from, 1 << 16)
            except BlockingIOError:
                return None
            except OSError:
                piece = b""
            if not piece:
                raise self._ended()
            self._received += piece

    def end(self) -> None:
        """Kill it, whatever it does."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                stream.close()  # type: ignore[union-attr]

    def _ended(self) -> WorkerEnded:
        """Why it is gone."""
        try:
            code = self._process.wait(LEAVING)
        except subprocess.TimeoutExpired:
            self.end()
            return WorkerEnded("closed its pipes and did not end", False)
        if code >= 0:
            return WorkerEnded(f"ended its process, exit status {code}", False)
        name = _name(-code)
        if -code == signal.SIGKILL:
            return WorkerEnded(f"was killed ({name}): the system may be out of memory", True)
        return WorkerEnded(f"was ended ({name})", True) if -code in OUTSIDE else WorkerEnded(f"crashed: {name}", False)


def _here() -> str:
    """The current folder, which "" stands for in `sys.path`."""
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return os.devnull


def _wait(descriptor: int, event: int, end: float) -> None:
    """Until a pipe can be read or written. Raises `TimeoutError` at `end`."""
    poll = select.poll()
    poll.register(descriptor, event)
    left = end - time.monotonic()
    if left <= 0 or not poll.poll(min(left, 3600.0) * 1e3):
        raise TimeoutError


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
