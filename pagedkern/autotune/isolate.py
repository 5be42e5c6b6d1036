"""Candidates run in a worker process of their own: what crashes, hangs or eats memory costs one candidate, not the run.

One worker serves all candidates of a problem, so that they are timed in the same process on the same tensors. When it
is lost it is started anew, and the candidate that did it, with its configuration at other block sizes, is quarantined;
after `MOST_LOSSES` its whole backend is.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

import pagedkern.backends as registry
from pagedkern.autotune.search import CandidateLost
from pagedkern.autotune.space import Candidate, Space
from pagedkern.autotune.worker import receive, send

MOST_LOSSES = 3


@dataclass(frozen=True, slots=True)
class Limits:
    """What a call may take."""

    prepare: float = 300.0  # seconds: it compiles
    check: float = 120.0
    sample: float = 60.0
    start: float = 600.0  # to lay out a problem
    memory: int | None = None  # bytes beyond what the tensors of the problem took; None: by device

    def allowance(self, device: str) -> int:
        return self.memory or (2 << 30 if device == "cpu" else 16 << 30)


class WorkerFailed(RuntimeError):
    """The worker cannot be started, or cannot lay out the problem."""


class Workers:
    """The worker of a run: started when needed, given one problem after the other."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.started = 0
        self._process: subprocess.Popen[bytes] | None = None

    def runner(self, space: Space, seed: int) -> Isolated:
        """Lays a problem out in the worker. Raises `WorkerFailed`."""
        runner = Isolated(self, space, seed)
        runner.open()
        return runner

    def close(self) -> None:
        """End the worker, whatever it does."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with suppress(OSError):  # what could not be sent before it died
                        stream.close()

    def ask(self, message: tuple[Any, ...], limit: float) -> tuple[str, Any]:
        """The reply to a message: ("ok", result), ("error", why), or ("lost", why): then the worker is gone."""
        process = self._running()
        try:
            send(process.stdin, message)  # type: ignore[arg-type]
            reply = _wait(process.stdout, limit)  # type: ignore[arg-type]
        except TimeoutError:
            self.close()
            return "lost", f"took more than {limit:.0f} s, ended"
        except OSError:  # it was gone before it could be asked
            reply = None
        if reply is None:
            code = process.wait()
            self.close()
            return "lost", f"crashed: {_signal(-code)}" if code < 0 else f"ended its process, exit status {code}"
        if reply[0] == "lost":
            self.close()
        return reply[0], reply[1]

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self.started += 1
            path = os.pathsep.join(p for p in sys.path if p)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pagedkern.autotune.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": path},
            )
        return self._process


class Isolated:
    """A `search.Runner` whose candidates run in the worker."""

    def __init__(self, workers: Workers, space: Space, seed: int) -> None:
        self._workers, self._space, self._seed = workers, space, seed
        self._losses: Counter[str] = Counter()  # by backend
        self._quarantine: dict[tuple[str, str], str] = {}  # backend and configuration: why
        self._opened = 0  # the worker that holds the problem, by its number

    def open(self) -> None:
        """Raises `WorkerFailed`."""
        limits = self._workers.limits
        allowance = limits.allowance(self._space.workload.device)
        locations = dict(registry._LOCATIONS)
        kind, why = self._workers.ask(("open", self._space, self._seed, locations, allowance), limits.start)
        if kind != "ok":
            raise WorkerFailed(f"the worker that measures: {why}")
        self._opened = self._workers.started

    def prepare(self, candidate: Candidate) -> None:
        self._ask(candidate, ("prepare", candidate), self._workers.limits.prepare)

    def check(self, candidate: Candidate) -> str | None:
        try:
            result = self._ask(candidate, ("check", candidate), self._workers.limits.check)
        except CandidateLost as lost:
            return str(lost)
        return None if result is None else str(result)

    def sample(self, candidate: Candidate, repeats: int, context: int | None = None) -> float:
        limit = self._workers.limits.sample
        return float(self._ask(candidate, ("sample", candidate, repeats, context), limit))

    def read_bandwidth(self) -> float:
        return self._measure("read_bandwidth")

    def product_rate(self) -> float:
        return self._measure("product_rate")

    def _measure(self, name: str) -> float:
        self._reopen()
        kind, result = self._workers.ask((name,), self._workers.limits.sample)
        if kind != "ok":
            raise WorkerFailed(f"the worker that measures, {name}: {result}")
        return float(result)

    def _ask(self, candidate: Candidate, message: tuple[Any, ...], limit: float) -> Any:
        name = (candidate.backend, candidate.config)
        if name in self._quarantine:
            raise CandidateLost(self._quarantine[name])
        if self._losses[candidate.backend] >= MOST_LOSSES:
            raise CandidateLost(f"{candidate.backend} was lost {MOST_LOSSES} times: no more of it")
        self._reopen()
        kind, result = self._workers.ask(message, limit)
        if kind == "ok":
            return result
        if kind == "lost":
            self._losses[candidate.backend] += 1
            self._quarantine[name] = f"{result}, at block size {candidate.block_size}"
        raise CandidateLost(str(result))

    def _reopen(self) -> None:
        if not self._workers.alive or self._opened != self._workers.started:
            self._workers.close()
            self.open()


def _wait(stream: IO[bytes], limit: float) -> tuple[Any, ...] | None:
    """The next reply; None if the worker ended. Raises `TimeoutError`. A reply that has begun comes to its end."""
    end = time.monotonic() + limit
    while (left := end - time.monotonic()) > 0:
        if select.select([stream], [], [], min(left, 1.0))[0]:
            return receive(stream)
    raise TimeoutError


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
