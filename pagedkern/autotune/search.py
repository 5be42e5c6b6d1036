"""Which candidate runs next, and what the measurements support. Knows no kernel: it is given something that measures.

First everything is compiled, which no budget counts. Then three stages share the time. *Screening* checks every
candidate and times it once. *Heats* time those that are near the best of their backend three times, in turn, and leave
two beside each default. The *finals* start from nothing: in each round every finalist runs once, in an order drawn
anew, so that what disturbs the machine disturbs all alike.

Decisions rest on the finals alone. Two candidates are compared by the ratio of their times within each round; the
median ratio has a lower bound that holds whatever its distribution (the order statistic that the median of n values
exceeds with the confidence asked for, by the binomial distribution). The confidence is 95 % for all comparisons at one
block size together (Bonferroni), and again for those between block sizes. A default is left only for a candidate whose
bound is at least `MIN_GAIN`, and a smaller block only for a larger one that is as much faster.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

from pagedkern.autotune.space import Candidate, Space
from pagedkern.autotune.store import MIN_GAIN

ERROR_RATE = 0.05  # chance that anything at one block size is preferred that is not faster
MIN_ROUNDS, MAX_ROUNDS = 5, 41  # of the finals; below the least nothing is decided
SCREEN_SHARE, HEATS_SHARE = 0.4, 0.25  # of the time that is left when the stage begins
HEAT_ROUNDS, PER_BACKEND = 3, 2  # candidates that each backend sends to the finals beside its default
NEAR = 1.5  # a candidate slower than the best of its backend by this runs in no heat
HOPELESS = 5.0  # a candidate slower than the best of all by this is not run again, at no block size
SAMPLE_SECONDS = 2e-3  # calls are repeated until a sample lasts as long


class Runner(Protocol):
    """What a search measures with: `measure.Bench`, or recorded times in tests."""

    def prepare(self, candidate: Candidate) -> None:
        """Compile what the candidate needs, by running it on a part of the problem; whether it is right comes later."""

    def check(self, candidate: Candidate) -> str | None:
        """Run on the whole problem for the first time; None if right, else what is wrong."""

    def sample(self, candidate: Candidate, repeats: int) -> float:
        """Seconds of a call, the mean of `repeats`."""

    def read_bandwidth(self) -> float:
        """Bytes per second of a plain read."""


@dataclass(slots=True)
class Log:
    """Everything measured for one workload."""

    screened: dict[Candidate, float] = field(default_factory=dict)  # seconds of the first timed call
    heats: list[dict[Candidate, float]] = field(default_factory=list)
    finals: list[dict[Candidate, float]] = field(default_factory=list)
    left_out: dict[Candidate, str] = field(default_factory=dict)  # why it has no time, or only that of screening
    reads: list[float] = field(default_factory=list)  # bytes per second
    ended: str = ""  # why the finals ended before MAX_ROUNDS: "time" or "interrupted"

    def seconds(self, candidate: Candidate) -> float | None:
        """The best estimate there is of a call's time."""
        for rounds in (self.finals, self.heats):
            if times := [times[candidate] for times in rounds if candidate in times]:
                return median(times)
        return self.screened.get(candidate)

    def fastest(self, among: Iterable[Candidate]) -> Candidate | None:
        timed = [(seconds, i, c) for i, c in enumerate(among) if (seconds := self.seconds(c)) is not None]
        return min(timed)[2] if timed else None


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
) -> float:
    """Measure the candidates of a space into a log for `budget` seconds, and return the seconds that it took.

    The time begins when all is compiled, and no measurement is begun after its end. KeyboardInterrupt ends the search;
    the log keeps what there is.
    """
    begin = clock()
    try:
        _compile(space, runner, clock, tell)
        begin = clock()
        deadline = begin + budget
        _screen(space, runner, log, deadline, clock, tell)
        finalists = _heats(space, runner, log, clock() + HEATS_SHARE * (deadline - clock()), clock, tell)
        _finals(space, runner, log, finalists, deadline, tell, clock, random.Random(seed))
    except KeyboardInterrupt:
        log.ended = "interrupted"
    return clock() - begin


def _compile(space: Space, runner: Runner, clock: Callable[[], float], tell: Tell) -> None:
    """Run each candidate on a part of the problem, so that the first call that is timed compiles nothing.

    A configuration that is hopeless when compiled is not compiled for other block sizes: screening will drop it.
    """

    def seconds(candidate: Candidate) -> float:
        start = clock()
        runner.prepare(candidate)
        return clock() - start

    hopeless: set[tuple[str, str]] = set()
    yardstick = math.inf
    for i, candidate in enumerate(space.candidates):
        name = (candidate.backend, candidate.config)
        if name in hopeless:
            continue
        tell(f"{COMPILING} - {i + 1} of {len(space.candidates)}: {candidate}", None, None)
        first = seconds(candidate)
        if i == 0:
            yardstick = seconds(candidate)
        elif first > HOPELESS * yardstick and seconds(candidate) > HOPELESS * yardstick:
            hopeless.add(name)


def _screen(space: Space, runner: Runner, log: Log, deadline: float, clock: Callable[[], float], tell: Tell) -> None:
    end = deadline
    hopeless: dict[tuple[str, str], int] = {}  # backend and config: the block size where that was seen
    for i, candidate in enumerate(space.candidates):
        name = (candidate.backend, candidate.config)
        untuned = candidate == space.untuned(candidate.block_size)  # what all others are compared with
        if name in hopeless and not untuned:
            log.left_out[candidate] = f"too slow at block size {hopeless[name]}"
            continue
        begin = clock()
        if begin > end and log.screened:
            log.left_out[candidate] = "no time left"
            continue
        best = log.fastest(space.candidates)
        step = f"screening - {i + 1} of {len(space.candidates)}: {candidate} at block size {candidate.block_size}"
        tell(step, best, log.seconds(best) if best else None)
        if (wrong := runner.check(candidate)) is not None:
            log.left_out[candidate] = wrong
            continue
        first_call = clock() - begin
        if best and not untuned and first_call > max(end - clock(), HOPELESS * log.screened[best]):
            log.left_out[candidate] = f"first call took {first_call:.1f} s: no time for another"
            hopeless[name] = candidate.block_size
            continue
        if not log.screened:  # compiled: what comes now is quick, so that its share of the time begins here
            end = clock() + SCREEN_SHARE * (deadline - clock())
        log.screened[candidate] = seconds = runner.sample(candidate, 1)
        if best and not untuned and seconds > HOPELESS * log.screened[best]:
            log.left_out[candidate] = "timed once: too slow"
            hopeless[name] = candidate.block_size


def _heats(
    space: Space, runner: Runner, log: Log, end: float, clock: Callable[[], float], tell: Tell
) -> list[Candidate]:
    """The candidates for the finals, those that must not be missing first."""
    entered: list[Candidate] = []
    for group in _groups(space, log):
        best = min(log.screened[c] for c in group)
        entered += [c for c in group if c.is_default or log.screened[c] <= NEAR * best]
    for i in range(HEAT_ROUNDS):
        fastest = log.fastest(entered)
        tell(f"heats - {i + 1} of {HEAT_ROUNDS}", fastest, log.seconds(fastest) if fastest else None)
        log.heats.append({})
        for candidate in entered:
            if clock() > end:
                break
            log.heats[-1][candidate] = runner.sample(candidate, _repeats(log, candidate))
    finalists: list[Candidate] = []
    for group in _groups(space, log):
        ranked = sorted((c for c in group if c in entered and not c.is_default), key=lambda c: log.seconds(c) or 0)
        finalists += [*(c for c in group if c.is_default), *ranked[:PER_BACKEND]]
    for candidate in log.screened:
        if candidate not in finalists:
            log.left_out.setdefault(candidate, "out after the heats" if candidate in entered else "out after screening")
    first = {space.untuned(b) for b in space.block_sizes}

    def rank(c: Candidate) -> tuple[bool, bool, bool, float]:
        return c != space.baseline, c not in first, not c.is_default, log.seconds(c) or 0

    return sorted(finalists, key=rank)


def _finals(
    space: Space,
    runner: Runner,
    log: Log,
    finalists: list[Candidate],
    deadline: float,
    tell: Tell,
    clock: Callable[[], float],
    rng: random.Random,
) -> None:
    needed = max(MIN_ROUNDS, rounds_needed(len(finalists) - 1))
    cost = [(log.seconds(c) or 0) * _repeats(log, c) for c in finalists]
    while len(cost) > 1 and needed * sum(cost) > deadline - clock():
        cost.pop()
        log.left_out[finalists.pop()] = "no time for the finals"
    order = list(finalists)
    for i in range(MAX_ROUNDS if finalists else 0):
        best = log.fastest(finalists)
        tell(f"finals - round {i + 1} of at most {MAX_ROUNDS}", best, log.seconds(best) if best else None)
        rng.shuffle(order)
        log.finals.append({})
        for candidate in order:
            if clock() > deadline:
                log.ended = "time"
                return
            log.finals[-1][candidate] = runner.sample(candidate, _repeats(log, candidate))
        log.reads.append(runner.read_bandwidth())


def _groups(space: Space, log: Log) -> list[list[Candidate]]:
    """The candidates that are still in the race, one list for each block size and backend."""
    groups: dict[tuple[int, str], list[Candidate]] = {}
    for candidate in space.candidates:
        if candidate in log.screened and candidate not in log.left_out:
            groups.setdefault((candidate.block_size, candidate.backend), []).append(candidate)
    return list(groups.values())


def _repeats(log: Log, candidate: Candidate) -> int:
    return max(1, min(32, math.ceil(SAMPLE_SECONDS / max(log.screened[candidate], 1e-9))))


@dataclass(frozen=True, slots=True)
class Gain:
    """How much faster one candidate is than another."""

    ratio: float  # median over rounds of the other's time divided by this one's
    low: float  # lower confidence bound of that median; 0 if there are too few rounds for one
    rounds: int


@dataclass(frozen=True, slots=True)
class Pick:
    """A candidate that was chosen, and its gain over the untuned choice at its block size."""

    candidate: Candidate
    gain: Gain


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the finals support."""

    picks: Mapping[int, Mapping[str, Pick]]  # for each block size and backend the configuration to use
    winners: Mapping[int, Pick]  # for each block size the backend and configuration to use
    best: Pick | None  # the block size to use with them; None if nothing was decided
    gain: Gain | None  # of `best` over the baseline


def decide(space: Space, log: Log) -> Verdict:
    """Choose from the finals of a log. What took part in fewer than `MIN_ROUNDS` rounds together is not decided."""
    picks: dict[int, dict[str, Pick]] = {}
    winners: dict[int, Pick] = {}
    in_finals = [c for c in space.candidates if any(c in times for times in log.finals)]
    for block_size in space.block_sizes:
        untuned = space.untuned(block_size)
        rivals = [c for c in in_finals if c.block_size == block_size]
        others = [c for c in rivals if c.backend != untuned.backend and not c.is_default]
        error_rate = ERROR_RATE / max(1, len(rivals) - 1 + len(others))  # each with the untuned, these with their own
        here: dict[str, Pick] = {}
        for default in (c for c in rivals if c.is_default):
            own = [c for c in rivals if c.backend == default.backend]
            chosen = _prefer(log, default, own, error_rate)
            gain = compare(log, chosen, untuned, error_rate)
            if gain.rounds >= MIN_ROUNDS:
                here[default.backend] = Pick(chosen, gain)
        if untuned.backend in here:
            picks[block_size] = here
            ranked = sorted((p for p in here.values() if _proven(p.gain)), key=lambda p: -p.gain.low)
            winners[block_size] = ranked[0] if ranked else here[untuned.backend]
    usual = winners.get(space.baseline.block_size) if space.candidates else None
    if usual is None:
        return Verdict(picks, winners, None, None)
    error_rate = ERROR_RATE / max(1, len(winners) - 1)
    best = usual
    for block_size in sorted(winners):  # ascending: a larger block must prove itself against every smaller one
        if _proven(compare(log, winners[block_size].candidate, best.candidate, error_rate)):
            best = winners[block_size]
    return Verdict(picks, winners, best, compare(log, best.candidate, space.baseline, error_rate))


def compare(log: Log, candidate: Candidate, other: Candidate, error_rate: float) -> Gain:
    """The gain of a candidate over another in the rounds of the finals that both ran in."""
    if candidate == other:
        return Gain(1.0, 1.0, sum(candidate in times for times in log.finals))
    ratios = [times[other] / times[candidate] for times in log.finals if candidate in times and other in times]
    if not ratios:
        return Gain(math.nan, 0.0, 0)
    return Gain(median(ratios), lower_bound(ratios, error_rate), len(ratios))


def lower_bound(values: Iterable[float], error_rate: float) -> float:
    """The greatest of the values that the median they are drawn around exceeds with confidence 1 - error_rate; else 0.

    The k-th smallest of n is above the median with probability P(X < k), X binomial (n, 1/2).
    """
    ordered = sorted(values)
    below, bound = 0.0, 0.0
    for k, value in enumerate(ordered):
        below += math.comb(len(ordered), k) * 0.5 ** len(ordered)
        if below > error_rate:
            break
        bound = value
    return bound


def rounds_needed(comparisons: int) -> int:
    """The least number of rounds that can decide anything among so many comparisons."""
    return math.ceil(math.log2(max(1, comparisons) / ERROR_RATE))


def _prefer(log: Log, default: Candidate, rivals: Iterable[Candidate], error_rate: float) -> Candidate:
    """The rival with the greatest proven gain over a default, or the default."""
    gains = [(compare(log, c, default, error_rate), c) for c in rivals if c != default]
    proven = [(gain, c) for gain, c in gains if _proven(gain)]
    return max(proven, key=lambda p: p[0].low)[1] if proven else default


def _proven(gain: Gain) -> bool:
    return gain.rounds >= MIN_ROUNDS and gain.low >= MIN_GAIN
