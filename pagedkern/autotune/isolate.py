"""Candidates run in a worker process of their own: what crashes, hangs or eats memory costs one candidate, not the run.

One worker serves all candidates of a problem, so that they are timed in the same process on the same tensors. When it
is lost it is started anew, and the candidate that did it, with its configuration at other block sizes, is quarantined;
after `MOST_LOSSES` its whole backend is. A worker that somebody else kills, as a system does that is short of memory,
is nobody's fault: what it was asked is asked again, once. A worker that cannot be started, or is killed again and
again, ends the measurements of the problem: see `RunnerFailed`.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pagedkern.backends as registry
from pagedkern.autotune import process
from pagedkern.autotune.compiling import Compilers
from pagedkern.autotune.process import CannotStart, Process, WorkerEnded
from pagedkern.autotune.runner import CandidateLost, OutOfTime, RunnerFailed
from pagedkern.autotune.space import Candidate, Space
from pagedkern.autotune.store import device as machine

MOST_LOSSES, MOST_KILLS, ATTEMPTS = 3, 3, 2
WORKER_BYTES = 2 << 30  # of host memory that a process which compiles takes, with torch and a GPU's driver in it


@dataclass(frozen=True, slots=True)
class Limits:
    """What a call may take."""

    prepare: float = 300.0  # seconds: it compiles
    check: float = 120.0
    sample: float = 60.0
    start: float = 600.0  # to make a problem, or to lay out a block size
    memory: int | None = None  # bytes beyond what the tensors of the problem took; None: by device

    def allowance(self, device: str) -> int:
        return self.memory or (2 << 30 if device == "cpu" else 16 << 30)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of asking a worker: "ok", "error", "lost" or "late" (it was given no more time)."""

    kind: str
    result: Any  # of "ok"; else why
    outside: bool = False  # whether it was lost because somebody killed it, or could not be started

    @property
    def ok(self) -> bool:
        return self.kind == "ok"


class Workers:
    """The worker of a run: started when needed, given one problem after the other; and those that compile for it.

    Args:
        limits: what calls may take.
        command: what is started, where it is not the worker.
        compilers: how many processes compile at a time; None: as many as there are cores, for a GPU. On a CPU all
            configurations of a backend are one kernel, so that nothing would be gained.
    """

    def __init__(self, limits: Limits | None = None, command: Sequence[str] = (), compilers: int | None = None) -> None:
        self.limits = limits or Limits()
        self.started = 0
        self._command, self._num_compilers = command or process.COMMAND, compilers
        self._process: Process | None = None
        self._compilers: Compilers | None = None

    def runner(self, space: Space, seed: int) -> IsolatedRunner:
        """Measures a problem in the worker, which is started when the problem is opened."""
        return IsolatedRunner(self, space, seed)

    def close(self) -> None:
        """End all of them, whatever they do."""
        compilers, self._compilers = self._compilers, None
        self.lose()
        if compilers is not None:
            compilers.close()

    def lose(self) -> None:
        """End the worker that measures."""
        worker, self._process = self._process, None
        if worker is not None:
            worker.end()

    def ask(self, message: tuple[Any, ...], limit: float, most: float = math.inf) -> Answer:
        """Ask the worker, which is started if there is none. It is ended if it takes more than `limit` seconds
        ("lost"), or `most`, if that is less ("late")."""
        try:
            if self._process is None:
                self._process = Process(self._command)
                self.started += 1
            kind, result = self._process.exchange(message, min(limit, max(0.0, most)))
        except CannotStart as why:
            return Answer("lost", str(why), outside=True)
        except WorkerEnded as ended:
            self.lose()
            return Answer("lost", str(ended), ended.outside)
        except TimeoutError:
            self.lose()
            return Answer("lost", f"took more than {limit:.0f} s, ended") if limit <= most else Answer("late", "")
        except BaseException:  # an answer would come that nobody waits for
            self.lose()
            raise
        if kind == "lost":
            self.lose()
        return Answer(kind, result)

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.alive

    def compilers(self, device: str) -> Compilers | None:
        """Those that compile ahead; None where nothing is gained by it."""
        count = self._num_compilers
        if count is None:
            count = 0 if device == "cpu" else min(machine.cpu_threads(), machine.free_memory("cpu") // WORKER_BYTES)
        if count and self._compilers is None:
            self._compilers = Compilers(count, self.limits.prepare, self._command)
        return self._compilers


class IsolatedRunner:
    """A `search.Runner` whose candidates run in the worker."""

    def __init__(self, workers: Workers, space: Space, seed: int) -> None:
        self._workers, self._space, self._seed = workers, space, seed
        self._losses: Counter[str] = Counter()  # by backend
        self._quarantine: dict[tuple[str, str], str] = {}  # backend and configuration: why
        self._killed = 0  # times that somebody else ended the worker
        self._opened = 0  # the worker that holds the problem, by its number
        self._laid_out: list[int] = []
        self._warm: set[Candidate] = set()  # those that this worker has run
        self._end = math.inf

    def open(self) -> None:
        compilers = self._workers.compilers(self._space.workload.device)
        if compilers is not None:
            compilers.begin(self._space.workload, self._seed)  # at the same time as the worker
        self._ensure()

    def end_at(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def lay_out(self, block_size: int) -> None:
        """Raises `CandidateLost` if that cannot be done, and nothing else is lost by it."""
        if block_size in self._laid_out:
            self._ensure()
            return
        for message in [("lay_out", block_size), *([] if self._laid_out else [("reserve",)])]:
            answer = self._ask_twice(message, self._workers.limits.start)
            if not answer.ok:
                raise CandidateLost(f"block size {block_size} cannot be laid out: {answer.result}")
        self._laid_out.append(block_size)

    def compile_ahead(self, candidates: Sequence[Candidate], seconds: float) -> Mapping[Candidate, str]:
        compilers = self._workers.compilers(self._space.workload.device)
        if compilers is None:
            return {}
        lost = compilers.compile(candidates, min(seconds, self._end - time.monotonic()))
        for candidate, why in lost.items():
            self._blame(candidate, why)
        return lost

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
        answer = self._ask_twice((name,), self._workers.limits.sample)
        if not answer.ok:
            raise RunnerFailed(f"the worker that measures, {name}: {answer.result}")
        return float(answer.result)

    def _ask(self, candidate: Candidate, message: tuple[Any, ...], limit: float) -> Any:
        name = (candidate.backend, candidate.config)
        for attempt in range(ATTEMPTS):
            if name in self._quarantine:
                raise CandidateLost(self._quarantine[name])
            if self._losses[candidate.backend] >= MOST_LOSSES:
                raise CandidateLost(f"{candidate.backend} was lost {MOST_LOSSES} times: no more of it")
            self._ensure()
            answer = Answer("ok", None)
            if message[0] == "sample" and candidate not in self._warm:  # what is timed was compiled before
                answer = self._request(("prepare", candidate), self._workers.limits.prepare)
            if answer.ok:
                answer = self._request(message, limit)
            if answer.ok:
                self._warm.add(candidate)
                return answer.result
            if answer.kind == "lost" and not (answer.outside and attempt + 1 < ATTEMPTS):
                self._blame(candidate, answer.result)
            if answer.kind == "error" or name in self._quarantine:
                break
        raise CandidateLost(str(answer.result))

    def _blame(self, candidate: Candidate, why: str) -> None:
        self._losses[candidate.backend] += 1
        self._quarantine[candidate.backend, candidate.config] = f"{why}, at block size {candidate.block_size}"

    def _ask_twice(self, message: tuple[Any, ...], limit: float) -> Answer:
        """What is nobody's own: asked again if the worker was lost."""
        answer = Answer("lost", "")
        for _ in range(ATTEMPTS):
            self._ensure()
            answer = self._request(message, limit)
            if answer.kind != "lost":
                break
        return answer

    def _request(self, message: tuple[Any, ...], limit: float) -> Answer:
        """Ask the worker. Raises `OutOfTime`; and `RunnerFailed` if it was killed too often."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise OutOfTime
        answer = self._workers.ask(message, limit, left)
        if answer.kind == "late":
            raise OutOfTime
        if answer.outside:
            self._killed += 1
            if self._killed >= MOST_KILLS:
                raise RunnerFailed(f"the worker that measures {answer.result}; that was {self._killed} times")
        return answer

    def _ensure(self) -> None:
        """Have a worker that holds the problem, as far as it was laid out. Raises `RunnerFailed`, `OutOfTime`."""
        if self._workers.alive and self._opened == self._workers.started:
            return
        answer = Answer("lost", "")
        for _ in range(ATTEMPTS):
            if self._opened == self._workers.started:
                self._workers.lose()
            answer = self._open_once()
            if answer.kind != "lost":
                break
        if not answer.ok:
            raise RunnerFailed(f"the worker that measures: {answer.result}")

    def _open_once(self) -> Answer:
        limits = self._workers.limits
        allowance = limits.allowance(self._space.workload.device)
        messages: list[tuple[Any, ...]] = [("open", self._space, self._seed, dict(registry._LOCATIONS), allowance)]
        messages += [("lay_out", block_size) for block_size in self._laid_out]
        messages += [("reserve",)] if self._laid_out else []
        self._warm.clear()
        answer = Answer("ok", None)
        for message in messages:
            answer = self._request(message, limits.start)
            if not answer.ok:
                return answer
        self._opened = self._workers.started
        return answer
