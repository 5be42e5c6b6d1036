"""Which candidate runs next, within a time. Knows no kernel: it is given something that measures.

The time is wall time, and everything counts: laying out, compiling, checks, measurements. So that there is a result as
early as can be, block sizes are taken up one after the other, the usual one first. *Entering* one lays it out, compiles
its candidates, those first that promise most, checks each, and times it once (*screening*). What is near the best of its
backend is timed three times, in turn (*heats*), and two are left beside each default. In the *finals*, which start from
nothing, every finalist runs once in each round, in an order drawn anew, so that what disturbs the machine disturbs all
alike. What they prove is for `decision` to say. If it takes long to enter the usual block size, there are first finals
for it alone, so that it is decided before the others are entered.

Nothing is begun that is expected to end too late, and what takes longer than expected is cut short: see `runner.Runner.end_at`.

A log that holds measurements already is gone on with: what was screened is not screened again, heats and finals
continue. That is how an interrupted run is resumed.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pagedkern.autotune.decision import MIN_ROUNDS, decide, rounds_needed
from pagedkern.autotune.log import Log
from pagedkern.autotune.runner import COMPILING, LAYING_OUT, CandidateLost, OutOfTime, Runner, RunnerFailed, Tell
from pagedkern.autotune.space import Candidate, Space
from pagedkern.autotune.store import MIN_GAIN

MAX_ROUNDS = 41  # of the finals of all block sizes
FIRST_SHARE, ENTRY_SHARE = 0.6, 0.5  # of the time, to enter the usual block size; of what is left then, the others
AHEAD_SHARE, HEATS_SHARE, SWEEP_SHARE = 0.6, 0.25, 0.1  # of the time that is left when the stage begins
SOON = 0.05  # share of the time: if the usual block size was entered in less, its decision can wait for the others
HEAT_ROUNDS, PER_BACKEND = 3, 2  # candidates that each backend sends to the finals beside its default
NEAR = 1.5  # a candidate slower than the best of its backend by this runs in no heat
HOPELESS = 5.0  # a candidate slower than the best of all by this is not run again, at no block size
DEAR = 0.02  # share of the time: a candidate that is that slow is not even checked if that would cost more
BOUND_ROUNDS = 8  # measurements of what the machine can do at the most
SAMPLE_SECONDS = 2e-3  # calls are repeated until a sample lasts as long
LENGTHS, LENGTH_ROUNDS = (16, 4, 1), 3  # parts of the context at which backends are timed in the end, and how often
GRACE = 1.0  # seconds that what has begun may last beyond the end
NO_TIME, TOO_LONG = "no time left", "took longer than there was time"


def search(
    space: Space,
    runner: Runner,
    log: Log,
    budget: float,
    tell: Tell = lambda *_: None,
    clock: Callable[[], float] = time.perf_counter,
    seed: int = 0,
    exhaustive: bool = False,
    decided: Callable[[], None] = lambda: None,
    most: float = 0.0,
) -> float:
    """Measure the candidates of a space into a log for `budget` seconds, and return the seconds that it took.

    Nothing is begun after their end, and what has begun is cut short `GRACE` later. KeyboardInterrupt and a runner that
    fails end the search, too: the log says so, and keeps what there is.

    Args:
        exhaustive: let everybody into the finals that is not hopeless.
        decided: called when the first finals are over: what they prove can be used.
        most: seconds after which the usual block size is to be decided at the latest, if that is more than `budget`: one
            problem that is decided is worth more than several that are begun.
    """
    begin = clock()
    last = begin + max(budget, most)
    run = _Search(space, runner, log, tell, clock, exhaustive, begin + budget, last, decided, random.Random(seed))
    log.ended = log.failure = ""
    try:
        run.run()
    except OutOfTime:
        log.ended = "time"
    except RunnerFailed as failure:
        log.ended, log.failure = "failed", str(failure)
    except KeyboardInterrupt:
        log.ended = "interrupted"
    run.leave_the_rest()
    return clock() - begin


@dataclass
class _Search:
    space: Space
    runner: Runner
    log: Log
    tell: Tell
    clock: Callable[[], float]
    exhaustive: bool
    deadline: float
    last: float  # for the untuned choice at the usual block size
    decided: Callable[[], None]
    rng: random.Random
    too_slow: dict[tuple[str, str], int] = field(default_factory=dict)  # backend and config: where that was seen
    _best_rate: float | None = None
    _yardstick: float = math.inf  # seconds in which the first candidate is prepared, compiled
    _round_cost: float = 0.0  # seconds of what is measured after each round

    def run(self) -> None:
        sizes = list(dict.fromkeys(c.block_size for c in self.space.candidates))  # in their order: the usual one first
        begin = self.clock()
        if not sizes or begin >= self.last:
            return
        self.too_slow = {
            (c.backend, c.config): c.block_size
            for c in self.space.candidates
            if c in self.log.screened and c in self.log.lasting
        }
        self.tell(LAYING_OUT, None, None)
        with self._until(self.last):
            self.runner.open()
            self.lay_out(sizes[0])
        self.enter(sizes[0], self._at(FIRST_SHARE), self.last)
        late = self.clock() - begin > SOON * (self.deadline - begin)
        if late and (len(sizes) > 1 or self.clock() > self.deadline):
            self.first_finals()
        end = self._at(ENTRY_SHARE)
        for block_size in sizes[1:]:
            if self.clock() < end and self.lay_out_by(block_size, end):
                self.enter(block_size, end, self.deadline)
        if self.clock() >= self.deadline:
            self.log.ended = "time"
            return
        finalists = self.heats(self._at(HEATS_SHARE))
        ones = self._rounds_of_one()
        self.finals(finalists, self.deadline - self._sweep_cost(), ones, ones + MAX_ROUNDS)
        self.sweep_lengths()

    def lay_out(self, block_size: int) -> None:
        """The block size that all depends on: raises if it cannot be laid out."""
        try:
            self.runner.lay_out(block_size)
        except CandidateLost as lost:
            raise RunnerFailed(str(lost)) from lost

    def lay_out_by(self, block_size: int, end: float) -> bool:
        """Any other block size: whether it was laid out until `end`."""
        self.tell(f"{LAYING_OUT} - block size {block_size}", *self._best())
        try:
            with self._until(end):
                self.runner.lay_out(block_size)
                return True
        except OutOfTime:
            why = TOO_LONG
        except CandidateLost as lost:
            why = str(lost)
        for candidate in (c for c in self.space.candidates if c.block_size == block_size):
            self.log.leave(candidate, why)
        return False

    def enter(self, block_size: int, end: float, last: float) -> None:
        """Compile, check and screen the candidates of a block size that is laid out. The untuned choice has until
        `last`, the others until `end`: none is begun after it, and one that takes too long is left out."""
        own, untuned = self._promising(block_size), self.space.untuned(block_size)
        todo = [c for c in own if c not in self.log.screened and c not in self.log.lasting]
        self.tell(f"{COMPILING} - block size {block_size}", *self._best())
        ahead = AHEAD_SHARE * (end - self.clock())
        for candidate, why in self.runner.compile_ahead(todo, ahead).items() if ahead > 0 else ():
            self.log.leave(candidate, why, lasting=True)
        for candidate in own:
            if candidate in self.log.lasting:
                continue
            limit = last if candidate == untuned else end
            if self.clock() >= limit:
                self.log.leave(candidate, NO_TIME)
                continue
            try:
                with self._until(limit):
                    self._enter_one(candidate, untuned, limit)
            except OutOfTime:
                self.log.leave(candidate, TOO_LONG)
                if self.clock() >= last:
                    raise

    def _enter_one(self, candidate: Candidate, untuned: Candidate, end: float) -> None:
        try:
            dear = self._compile(candidate, untuned, end)
        except CandidateLost as lost:
            self.log.leave(candidate, str(lost), lasting=True)
            return
        if candidate not in self.log.screened and not dear:
            self._screen(candidate, untuned, end)

    def _compile(self, candidate: Candidate, untuned: Candidate, end: float) -> bool:
        """Run a candidate on a part of the problem, so that the first call that is timed compiles nothing. Whether it
        was left out, for it is too slow already there, and running it on all of the problem would cost too much."""
        name = (candidate.backend, candidate.config)
        if name in self.too_slow and candidate != untuned:
            self.log.leave(candidate, f"too slow at block size {self.too_slow[name]}", lasting=True)
            return True
        self.tell(f"{COMPILING} - {self._number(candidate)}", *self._best())
        first = self._prepare(candidate)
        if self._yardstick == math.inf:
            self._yardstick = self._prepare(candidate)
        elif candidate != untuned and first > HOPELESS * self._yardstick and candidate not in self.log.screened:
            slowness = self._prepare(candidate) / self._yardstick
            reference = self.log.seconds(self.space.untuned(candidate.block_size))
            if slowness > HOPELESS and reference and 2 * slowness * reference > DEAR * (end - self.clock()):
                self.log.leave(candidate, f"too slow: {slowness:.0f} times the time of one sequence", lasting=True)
                self.too_slow[name] = candidate.block_size
                return True
        return False

    def _prepare(self, candidate: Candidate) -> float:
        start = self.clock()
        self.runner.prepare(candidate)
        return self.clock() - start

    def _screen(self, candidate: Candidate, untuned: Candidate, end: float) -> None:
        log, clock, name = self.log, self.clock, (candidate.backend, candidate.config)
        if clock() >= end:
            self.log.leave(candidate, NO_TIME)
            return
        best, _ = self._best()
        self.tell(f"screening - {self._number(candidate)}", *self._best())
        begin = clock()
        if (wrong := self.runner.check(candidate)) is not None:
            log.leave(candidate, wrong, lasting=True)
            return
        first_call = clock() - begin
        if best and candidate != untuned and first_call > max(end - clock(), HOPELESS * log.screened[best]):
            self.log.leave(candidate, f"first call took {first_call:.1f} s: no time for another")
            self.too_slow[name] = candidate.block_size
            return
        if (seconds := self._sample(candidate, 1)) is None:
            return
        log.screen(candidate, seconds)
        if best and candidate != untuned and seconds > HOPELESS * log.screened[best]:
            log.leave(candidate, "timed once: too slow", lasting=True)
            self.too_slow[name] = candidate.block_size

    def first_finals(self) -> None:
        """Decide the block size that was entered first."""
        if self._rounds_of_one() < len(self.log.finals):  # of a run that is gone on with
            return
        late = self.clock() >= self.deadline
        finalists = self.heats(self._at(HEATS_SHARE), bounded=False)
        end = self.last if late else self._at(0.5)
        self.finals(finalists[: 1 if late else None], end, 0, max(MIN_ROUNDS, rounds_needed(len(finalists) - 1)))
        self.log.ended = ""
        if self.log.finals:
            self.decided()
        for candidate in [c for c in self.log.left_out if c not in self.log.lasting and c in self.log.screened]:
            del self.log.left_out[candidate]  # for want of time, or of a place: the race goes on

    def heats(self, end: float, bounded: bool = True) -> list[Candidate]:
        """The candidates for the finals, those that must not be missing first. `bounded`: none beside a default that is
        at the limit of what the machine can do."""
        space, log = self.space, self.log
        near, per_backend = (math.inf, len(space.candidates)) if self.exhaustive else (NEAR, PER_BACKEND)
        entered: list[Candidate] = []
        for group in self._groups():
            best = min(log.screened[c] for c in group)
            entered += [c for c in group if c.is_default or log.screened[c] <= near * best]
        for i in range(HEAT_ROUNDS):
            self.tell(f"heats - {i + 1} of {HEAT_ROUNDS}", *self._best())
            for candidate in entered:
                if i < len(log.heats) and candidate in log.heats[i]:
                    continue
                if self.clock() + self._cost(candidate) > end:
                    continue
                if candidate not in log.left_out and (seconds := self._sample(candidate)) is not None:
                    log.heat(i, candidate, seconds)
        finalists: list[Candidate] = []
        for group in self._groups():
            ranked = sorted((c for c in group if c in entered and not c.is_default), key=lambda c: log.seconds(c) or 0)
            if ranked and bounded and not self.exhaustive and self._at_the_limit([c for c in group if c.is_default]):
                for candidate in ranked:
                    self.log.leave(candidate, "the default is within 2 % of what the machine can do")
                ranked = []
            finalists += [*(c for c in group if c.is_default), *ranked[:per_backend]]
        for candidate in log.screened:
            if candidate not in finalists and candidate not in log.left_out:
                self.log.leave(candidate, "out after the heats" if candidate in entered else "out after screening")
        first = {space.untuned(b) for b in space.block_sizes}

        def rank(c: Candidate) -> tuple[bool, bool, bool, float]:
            return c != space.baseline, c not in first, not c.is_default, log.seconds(c) or 0

        return sorted(finalists, key=rank)

    def finals(self, finalists: list[Candidate], end: float, first: int, last: int) -> None:
        """Rounds of all of these, as those from number `first` on are, until number `last`, or until `end`."""
        log = self.log
        needed = max(MIN_ROUNDS, rounds_needed(len(finalists) - 1)) - (len(log.finals) - first)
        costs = [self._cost(c) for c in finalists]
        while len(costs) > 1 and needed * (sum(costs) + self._round_cost) > end - self.clock():
            costs.pop()
            self.log.leave(finalists.pop(), "no time for the finals")
        order = list(finalists)
        for i in range(len(log.finals), last if finalists else 0):
            self.tell(f"finals - round {i + 1} of at most {last}", *self._best())
            self.rng.shuffle(order)
            for candidate in order:
                if self.clock() + self._cost(candidate) > end:
                    log.ended = "time"
                    return
                if candidate not in log.left_out and (seconds := self._sample(candidate)) is not None:
                    log.final(i, candidate, seconds)
            begin = self.clock()
            log.read(self.runner.read_bandwidth())
            log.product(self.runner.product_rate())
            self._round_cost = self.clock() - begin

    def sweep_lengths(self) -> None:
        """Time what was decided for the usual block size at parts of the context too, a few calls each: what a call
        costs however little it reads."""
        if self.space.workload.kind != "decode":
            return
        for i in range(LENGTH_ROUNDS):
            self.tell(f"lengths - {i + 1} of {LENGTH_ROUNDS}", *self._best())
            for candidate in self._swept():
                repeats = _repeats(self.log, candidate)
                if self.clock() + len(LENGTHS) * self._cost(candidate) > self.deadline:
                    continue
                for part in LENGTHS:
                    context = max(1, self.space.workload.context // part)
                    if len(self.log.lengths.get(candidate, {}).get(context, ())) > i:  # of a run that is gone on with
                        continue
                    if (seconds := self._sample(candidate, min(32, part * repeats), context)) is not None:
                        self.log.length(candidate, context, seconds)

    def _swept(self) -> list[Candidate]:
        """What was decided for the usual block size, the fastest first."""
        picks = decide(self.space, self.log).picks.get(self.space.baseline.block_size, {})
        chosen = dict.fromkeys(pick.candidate for pick in picks.values())
        return sorted((c for c in chosen if c not in self.log.lasting), key=lambda c: self.log.seconds(c) or 0)

    def _sweep_cost(self) -> float:
        """Seconds to keep for it: of the untuned choice, if that is no more than a share of what is left."""
        if self.space.workload.kind != "decode":
            return 0.0
        cost = 1.5 * LENGTH_ROUNDS * len(LENGTHS) * self._cost(self.space.baseline)
        return min(cost, SWEEP_SHARE * max(0.0, self.deadline - self.clock()))

    def leave_the_rest(self) -> None:
        """Nobody is forgotten: who did not come to be screened is left out."""
        why = {"interrupted": "interrupted", "failed": "not measured"}.get(self.log.ended, NO_TIME)
        for candidate in self.space.candidates:
            if candidate not in self.log.screened and candidate not in self.log.left_out:
                self.log.leave(candidate, why)

    def _rounds_of_one(self) -> int:
        """Rounds of first finals, which only one block size was in."""
        if len(self.space.block_sizes) == 1:
            return 0
        return sum(len({c.block_size for c in times}) == 1 for times in self.log.finals)

    def _promising(self, block_size: int) -> list[Candidate]:
        """The candidates of a block size, those first that promise most: the untuned choice, the other defaults, then
        by their times at the block sizes that were entered before; without any in the order of the space."""
        own = [c for c in self.space.candidates if c.block_size == block_size]
        times: dict[tuple[str, str], float] = {}
        for candidate, seconds in self.log.screened.items():
            name = (candidate.backend, candidate.config)
            times[name] = min(seconds, times.get(name, math.inf))
        untuned = self.space.untuned(block_size)

        def rank(c: Candidate) -> tuple[bool, bool, float]:
            return c != untuned, not c.is_default, times.get((c.backend, c.config), math.inf)

        return sorted(own, key=rank)

    def _at(self, share: float) -> float:
        """When a share of the time that is left will have passed."""
        return self.clock() + share * max(0.0, self.deadline - self.clock())

    @contextmanager
    def _until(self, end: float) -> Iterator[None]:
        """What is called in here is cut short soon after `end`, if the runner can do that."""
        self.runner.end_at(max(0.0, end - self.clock()) + GRACE)
        try:
            yield
        finally:
            self.runner.end_at(max(0.0, self.last - self.clock()) + GRACE)

    def _number(self, candidate: Candidate) -> str:
        number = self.space.candidates.index(candidate) + 1
        return f"{number} of {len(self.space.candidates)}: {candidate} at block size {candidate.block_size}"

    def _best(self) -> tuple[Candidate | None, float | None]:
        best = self.log.fastest(self.space.candidates)
        return best, self.log.seconds(best) if best else None

    def _cost(self, candidate: Candidate) -> float:
        """Seconds that a sample is expected to take."""
        return (self.log.seconds(candidate) or 0.0) * _repeats(self.log, candidate)

    def _at_the_limit(self, defaults: list[Candidate]) -> bool:
        """Whether a default is so near to the analytic bound that nothing could be proved to be faster."""
        times = [seconds for c in defaults if (seconds := self.log.seconds(c)) is not None]
        return bool(times) and min(times) < self._bound() * MIN_GAIN

    def _bound(self) -> float:
        """Seconds that no candidate goes below: bytes over the bandwidth of a plain read, or the operations of the
        matrix products over their rate. The best of some measurements, for others may use the machine."""
        workload, runner = self.space.workload, self.runner
        work, rate, known = (
            (workload.kv_bytes, runner.read_bandwidth, self.log.reads)
            if workload.kind == "decode"
            else (workload.flops, runner.product_rate, self.log.products)
        )
        if self._best_rate is None:
            self._best_rate = max([*known, *(rate() for _ in range(BOUND_ROUNDS - len(known)))])
        return work / self._best_rate

    def _sample(self, candidate: Candidate, repeats: int = 0, context: int | None = None) -> float | None:
        try:
            return self.runner.sample(candidate, repeats or _repeats(self.log, candidate), context)
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
