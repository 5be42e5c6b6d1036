"""Which candidate runs next. Knows no kernel: it is given something that measures.

First everything is compiled, which no budget counts. Then three stages share the time. *Screening* checks every
candidate and times it once. *Heats* time those that are near the best of their backend three times, in turn, and leave
two beside each default. The *finals* start from nothing: in each round every finalist runs once, in an order drawn
anew, so that what disturbs the machine disturbs all alike. What they prove is for `decision` to say.

A log that holds measurements already is gone on with: what was screened is not screened again, heats and finals
continue. That is how an interrupted run is resumed.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from pagedkern.autotune.decision import MIN_ROUNDS, rounds_needed
from pagedkern.autotune.log import Log
from pagedkern.autotune.space import Candidate, Space
from pagedkern.autotune.store import MIN_GAIN

MAX_ROUNDS = 41  # of the finals
SCREEN_SHARE, HEATS_SHARE = 0.4, 0.25  # of the time that is left when the stage begins
HEAT_ROUNDS, PER_BACKEND = 3, 2  # candidates that each backend sends to the finals beside its default
NEAR = 1.5  # a candidate slower than the best of its backend by this runs in no heat
HOPELESS = 5.0  # a candidate slower than the best of all by this is not run again, at no block size
BOUND_ROUNDS = 8  # measurements of what the machine can do at the most
SAMPLE_SECONDS = 2e-3  # calls are repeated until a sample lasts as long
LENGTHS, LENGTH_ROUNDS = (16, 4, 1), 3  # parts of the context at which backends are timed in the end, and how often


class Runner(Protocol):
    """What a search measures with: `isolate.Isolated`, `measure.Bench`, or recorded times."""

    def prepare(self, candidate: Candidate) -> None:
        """Compile what the candidate needs, by running it on a part of the problem; whether it is right comes later."""

    def check(self, candidate: Candidate) -> str | None:
        """Run on hostile and on the whole problem for the first time; None if right, else what is wrong."""

    def sample(self, candidate: Candidate, repeats: int, context: int | None = None) -> float:
        """Seconds of a call, the mean of `repeats`; with sequences of at most `context` tokens. Raises
        `CandidateLost` if the candidate is to be run no more."""

    def read_bandwidth(self) -> float:
        """Bytes per second of a plain read."""

    def product_rate(self) -> float:
        """Floating-point operations per second of a matrix product."""


class CandidateLost(Exception):
    """A candidate crashed, hung or took too much memory. The message says which."""


LAYING_OUT, COMPILING = "laying out the caches", "compiling"  # the stages that no budget counts
Tell = Callable[[str, Candidate | None, float | None], None]  # "stage - step" now, the best so far and its seconds


def search(
    space: Space,
    runner: Runner,
    log: Log,
    budget: float,
    tell: Tell = lambda *_: None,
    clock: Callable[[], float] = time.perf_counter,
    seed: int = 0,
    exhaustive: bool = False,
) -> float:
    """Measure the candidates of a space into a log for `budget` seconds, and return the seconds that it took.

    The time begins when all is compiled, and no measurement is begun after its end. KeyboardInterrupt ends the search;
    the log keeps what there is. `exhaustive` lets everybody into the finals that is not hopeless.
    """
    run = _Search(space, runner, log, tell, clock, exhaustive)
    begin = clock()
    try:
        run.compile()
        begin = clock()
        deadline = begin + budget
        run.screen(deadline)
        finalists = run.heats(clock() + HEATS_SHARE * (deadline - clock()))
        run.finals(finalists, deadline, random.Random(seed))
    except KeyboardInterrupt:
        log.ended = "interrupted"
    return clock() - begin


def sweep_lengths(space: Space, runner: Runner, log: Log, candidates: Iterable[Candidate], tell: Tell) -> None:
    """Time candidates at parts of the context too, a few calls each: what a call costs however little it reads."""
    chosen = [c for c in dict.fromkeys(candidates) if c not in log.lengths]
    for i in range(LENGTH_ROUNDS):
        tell(f"lengths - {i + 1} of {LENGTH_ROUNDS}", None, None)
        for part in LENGTHS:
            context = max(1, space.workload.context // part)
            for candidate in chosen:
                try:
                    repeats = min(32, part * _repeats(log, candidate))
                    log.length(candidate, context, runner.sample(candidate, repeats, context))
                except CandidateLost:
                    continue


@dataclass
class _Search:
    space: Space
    runner: Runner
    log: Log
    tell: Tell
    clock: Callable[[], float]
    exhaustive: bool
    _best_rate: float | None = None

    def compile(self) -> None:
        """Run each candidate on a part of the problem, so that the first call that is timed compiles nothing.

        A configuration that is hopeless when compiled is not compiled for other block sizes: screening will drop it.
        """

        def seconds(candidate: Candidate) -> float:
            start = self.clock()
            self.runner.prepare(candidate)
            return self.clock() - start

        hopeless: set[tuple[str, str]] = set()
        yardstick = math.inf
        for i, candidate in enumerate(self.space.candidates):
            name = (candidate.backend, candidate.config)
            if name in hopeless or candidate in self.log.lasting:
                continue
            self.tell(f"{COMPILING} - {i + 1} of {len(self.space.candidates)}: {candidate}", None, None)
            try:
                first = seconds(candidate)
                if i == 0:
                    yardstick = seconds(candidate)
                elif first > HOPELESS * yardstick and seconds(candidate) > HOPELESS * yardstick:
                    hopeless.add(name)
            except CandidateLost as lost:
                self.log.leave(candidate, str(lost), lasting=True)

    def screen(self, deadline: float) -> None:
        space, log, clock = self.space, self.log, self.clock
        end = deadline
        hopeless = {  # backend and config: the block size where that was seen
            (c.backend, c.config): c.block_size for c in space.candidates if c in log.screened and c in log.lasting
        }
        for i, candidate in enumerate(space.candidates):
            name = (candidate.backend, candidate.config)
            untuned = space.untuned(candidate.block_size)  # what all others are compared with
            if candidate in log.screened or candidate in log.lasting:
                continue
            if name in hopeless and candidate != untuned:
                log.leave(candidate, f"too slow at block size {hopeless[name]}", lasting=True)
                continue
            begin = clock()
            if begin > end and log.screened:
                log.leave(candidate, "no time left")
                continue
            best = log.fastest(space.candidates)
            step = f"screening - {i + 1} of {len(space.candidates)}: {candidate} at block size {candidate.block_size}"
            self.tell(step, best, log.seconds(best) if best else None)
            if (wrong := self.runner.check(candidate)) is not None:
                log.leave(candidate, wrong, lasting=True)
                continue
            first_call = clock() - begin
            if best and candidate != untuned and first_call > max(end - clock(), HOPELESS * log.screened[best]):
                log.leave(candidate, f"first call took {first_call:.1f} s: no time for another")
                hopeless[name] = candidate.block_size
                continue
            if not log.screened:  # compiled: what comes now is quick, so that its share of the time begins here
                end = clock() + SCREEN_SHARE * (deadline - clock())
            if (seconds := self._sample(candidate, 1)) is None:
                continue
            log.screen(candidate, seconds)
            if best and candidate != untuned and seconds > HOPELESS * log.screened[best]:
                log.leave(candidate, "timed once: too slow", lasting=True)
                hopeless[name] = candidate.block_size

    def heats(self, end: float) -> list[Candidate]:
        """The candidates for the finals, those that must not be missing first."""
        space, log = self.space, self.log
        near, per_backend = (math.inf, len(space.candidates)) if self.exhaustive else (NEAR, PER_BACKEND)
        entered: list[Candidate] = []
        for group in self._groups():
            best = min(log.screened[c] for c in group)
            entered += [c for c in group if c.is_default or log.screened[c] <= near * best]
        for i in range(HEAT_ROUNDS):
            fastest = log.fastest(entered)
            self.tell(f"heats - {i + 1} of {HEAT_ROUNDS}", fastest, log.seconds(fastest) if fastest else None)
            for candidate in entered:
                if i < len(log.heats) and candidate in log.heats[i]:
                    continue
                if self.clock() > end:
                    break
                if candidate not in log.left_out and (seconds := self._sample(candidate)) is not None:
                    log.heat(i, candidate, seconds)
        finalists: list[Candidate] = []
        for group in self._groups():
            ranked = sorted((c for c in group if c in entered and not c.is_default), key=lambda c: log.seconds(c) or 0)
            if ranked and not self.exhaustive and self._at_the_limit([c for c in group if c.is_default]):
                for candidate in ranked:
                    log.leave(candidate, "the default is within 2 % of what the machine can do")
                ranked = []
            finalists += [*(c for c in group if c.is_default), *ranked[:per_backend]]
        for candidate in log.screened:
            if candidate not in finalists and candidate not in log.left_out:
                log.leave(candidate, "out after the heats" if candidate in entered else "out after screening")
        first = {space.untuned(b) for b in space.block_sizes}

        def rank(c: Candidate) -> tuple[bool, bool, bool, float]:
            return c != space.baseline, c not in first, not c.is_default, log.seconds(c) or 0

        return sorted(finalists, key=rank)

    def finals(self, finalists: list[Candidate], deadline: float, rng: random.Random) -> None:
        log = self.log
        needed = max(MIN_ROUNDS, rounds_needed(len(finalists) - 1)) - len(log.finals)
        cost = [(log.seconds(c) or 0) * _repeats(log, c) for c in finalists]
        while len(cost) > 1 and needed * sum(cost) > deadline - self.clock():
            cost.pop()
            log.leave(finalists.pop(), "no time for the finals")
        order = list(finalists)
        for i in range(len(log.finals), MAX_ROUNDS if finalists else 0):
            best = log.fastest(finalists)
            self.tell(f"finals - round {i + 1} of at most {MAX_ROUNDS}", best, log.seconds(best) if best else None)
            rng.shuffle(order)
            for candidate in order:
                if self.clock() > deadline:
                    log.ended = "time"
                    return
                if candidate not in log.left_out and (seconds := self._sample(candidate)) is not None:
                    log.final(i, candidate, seconds)
            log.read(self.runner.read_bandwidth())
            log.product(self.runner.product_rate())

    def _at_the_limit(self, defaults: list[Candidate]) -> bool:
        """Whether a default is so near to the analytic bound that nothing could be proved to be faster."""
        times = [seconds for c in defaults if (seconds := self.log.seconds(c)) is not None]
        return bool(times) and min(times) < self._bound() * MIN_GAIN

    def _bound(self) -> float:
        """Seconds that no candidate goes below: bytes over the bandwidth of a plain read, or the operations of the
        matrix products over their rate. The best of some measurements, for others may use the machine."""
        workload, runner = self.space.workload, self.runner
        work, rate = (
            (workload.kv_bytes, runner.read_bandwidth)
            if workload.kind == "decode"
            else (workload.flops, runner.product_rate)
        )
        if self._best_rate is None:
            self._best_rate = max(rate() for _ in range(BOUND_ROUNDS))
        return work / self._best_rate

    def _sample(self, candidate: Candidate, repeats: int = 0) -> float | None:
        try:
            return self.runner.sample(candidate, repeats or _repeats(self.log, candidate))
        except CandidateLost as lost:
            self.log.leave(candidate, str(lost), lasting=True)
            return None

    def _groups(self) -> list[list[Candidate]]:
        """The candidates that are still in the race, one list for each block size and backend."""
        groups: dict[tuple[int, str], list[Candidate]] = {}
        for candidate in self.space.candidates:
            if candidate in self.log.screened and candidate not in self.log.left_out:
                groups.setdefault((candidate.block_size, candidate.backend), []).append(candidate)
        return list(groups.values())


def _repeats(log: Log, candidate: Candidate) -> int:
    return max(1, min(32, math.ceil(SAMPLE_SECONDS / max(log.seconds(candidate) or 1.0, 1e-9))))
