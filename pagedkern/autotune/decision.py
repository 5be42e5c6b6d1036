"""What the measurements of a log support.

Decisions rest on the finals alone. Two candidates are compared by the ratio of their times within each round; the
median ratio has a lower bound that holds whatever its distribution (the order statistic that the median of n values
exceeds with the confidence asked for, by the binomial distribution). The confidence is 95 % for all comparisons at one
block size together (Bonferroni), and again for those between block sizes. A default is left only for a candidate whose
bound is at least `MIN_GAIN`, and a smaller block only for a larger one that is as much faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from pagedkern.autotune.log import Log
from pagedkern.autotune.space import Candidate, Space
from pagedkern.autotune.store import MIN_GAIN

ERROR_RATE = 0.05  # chance that anything at one block size is preferred that is not faster
MIN_ROUNDS = 5  # of the finals; below this nothing is decided


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
class Decision:
    """What the finals support."""

    picks: Mapping[int, Mapping[str, Pick]]  # for each block size and backend the configuration to use
    winners: Mapping[int, Pick]  # for each block size the backend and configuration to use
    best: Pick | None  # the block size to use with them; None if nothing was decided
    gain: Gain | None  # of `best` over the baseline


def decide(space: Space, log: Log) -> Decision:
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
        return Decision(picks, winners, None, None)
    error_rate = ERROR_RATE / max(1, len(winners) - 1)
    best = usual
    for block_size in sorted(winners):  # ascending: a larger block must prove itself against every smaller one
        if _proven(compare(log, winners[block_size].candidate, best.candidate, error_rate)):
            best = winners[block_size]
    return Decision(picks, winners, best, compare(log, best.candidate, space.baseline, error_rate))


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


def interval(values: Iterable[float], error_rate: float) -> tuple[float, float]:
    """Bounds of the median that the values are drawn around, which it leaves with a chance of `error_rate` at most.

    Too few values for that are given twice the room that the least and the greatest of them take.
    """
    ordered = sorted(values)
    middle = median(ordered)
    low = lower_bound(ordered, error_rate / 2)
    high = -lower_bound([-value for value in ordered], error_rate / 2)
    return low or middle - 2 * (middle - ordered[0]), high or middle + 2 * (ordered[-1] - middle)


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
