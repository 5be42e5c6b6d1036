"""`Compilers`: processes that compile candidates at the same time, before the worker that measures asks for them.

A backend keeps what it compiled on the disk (Triton, CuPy and Numba all do), where the worker finds it. Each process
holds one short sequence of the problem, runs a candidate on it, and takes the next: the most promising first, as they
come. Nothing is measured meanwhile, and whoever still compiles when the time is over is ended.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pagedkern.backends as registry
from pagedkern.autotune.process import CannotStart, Process, WorkerEnded
from pagedkern.autotune.space import Candidate, Space, Workload

SENDING = 5.0  # seconds in which a process that waits takes a message
MOST_RESTARTS = 8  # of processes that were lost


@dataclass(slots=True)
class _Seat:
    """A process and what it does: opens the problem (no candidate), or compiles one until `end`."""

    process: Process
    candidate: Candidate | None
    end: float


class Compilers:
    """So many processes, each of which may take so many seconds for a candidate."""

    def __init__(self, count: int, limit: float, command: Sequence[str]) -> None:
        self.count = count
        self._limit, self._command = limit, command
        self._problem: tuple[Workload, int] | None = None
        self._busy: list[_Seat] = []
        self._idle: list[Process] = []
        self._restarts = 0

    def begin(self, workload: Workload, seed: int) -> None:
        """Start the processes, and let them open a problem: one sequence of a workload."""
        self._problem = replace(workload, num_seqs=1), seed
        for seat in self._busy:
            seat.process.end()
        self._busy = []
        idle, self._idle = self._idle, []
        for process in idle:
            self._open(process)
        while len(self._busy) < self.count and self._start():
            pass

    def compile(self, candidates: Sequence[Candidate], seconds: float) -> dict[Candidate, str]:
        """Compile candidates for at most so many seconds. Returns those that crashed or hung, and why."""
        end = time.monotonic() + seconds
        waiting, lost = deque(candidates), dict[Candidate, str]()
        while (waiting or any(seat.candidate for seat in self._busy)) and (now := time.monotonic()) < end:
            while waiting and self._idle:
                if self._send(self._idle.pop(), ("prepare", waiting[0]), waiting[0]):
                    waiting.popleft()
            if not self._busy and not (waiting and self._start()):
                break  # none is left: the worker compiles for itself
            self._collect(min([end, *(seat.end for seat in self._busy)]) - now, lost)
        for seat in [seat for seat in self._busy if seat.candidate is not None]:  # they would disturb what is measured
            self._lose(seat)
        return lost

    def close(self) -> None:
        for process in [*self._idle, *(seat.process for seat in self._busy)]:
            process.end()
        self._idle, self._busy = [], []

    def _start(self) -> bool:
        """One more process, if that can be."""
        if self._restarts > MOST_RESTARTS:
            return False
        try:
            process = Process(self._command)
        except CannotStart:
            return False
        return self._open(process)

    def _open(self, process: Process) -> bool:
        assert self._problem is not None
        workload, seed = self._problem
        message = ("open", Space(workload, (), ()), seed, dict(registry._LOCATIONS), None)
        return self._send(process, message, None)

    def _send(self, process: Process, message: tuple[object, ...], candidate: Candidate | None) -> bool:
        now = time.monotonic()
        try:
            process.send(message, now + SENDING)
        except (WorkerEnded, TimeoutError):
            self._restarts += 1
            process.end()
            return False
        self._busy.append(_Seat(process, candidate, now + self._limit))
        return True

    def _collect(self, seconds: float, lost: dict[Candidate, str]) -> None:
        """Wait for an answer, at most so long, and take what there is."""
        poll = select.poll()
        for seat in self._busy:
            poll.register(seat.process.fileno(), select.POLLIN)
        poll.poll(max(0.0, seconds) * 1e3)
        for seat in list(self._busy):
            try:
                reply, why = seat.process.reply(), ""
            except WorkerEnded as ended:
                reply, why = None, "" if ended.outside else str(ended)
            else:
                if reply is None and time.monotonic() < seat.end:
                    continue
                if reply is None:
                    why = f"compiling took more than {self._limit:.0f} s"
                elif reply[0] == "lost":
                    why = str(reply[1])
                elif reply[0] == "ok" or seat.candidate is not None:  # what is wrong with it, `check` says
                    self._busy.remove(seat)
                    self._idle.append(seat.process)
                    continue
            if why and seat.candidate is not None:
                lost[seat.candidate] = why
            self._lose(seat)

    def _lose(self, seat: _Seat) -> None:
        """End a process, and start another in its place."""
        self._busy.remove(seat)
        seat.process.end()
        self._restarts += 1
        self._start()
