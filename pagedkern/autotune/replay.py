"""Searching recorded measurements: the same search and decisions, without a kernel and without a clock.

`ReplayRunner` hands out recorded times in place of a machine. `exhaustive` is what a search could have found at best:
the candidate with the least recorded time at each block size. The difference in tokens per second is the regret.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pagedkern.autotune.advice import advise
from pagedkern.autotune.decision import Decision, decide
from pagedkern.autotune.log import Log
from pagedkern.autotune.objective import Score, best, score
from pagedkern.autotune.rating import rates_of
from pagedkern.autotune.records import Recording
from pagedkern.autotune.search import search
from pagedkern.autotune.space import Candidate, Space
from pagedkern.autotune.workloads import Model, Traffic


class ReplayRunner:
    """A runner that gives back what was recorded, round by round, on a clock that goes by it.

    Times recorded in one round stay together: a round begins when a candidate is asked for again that was in the last
    one, and all that are in it get what was recorded in the same one. They come round again when there are no more.
    """

    def __init__(self, space: Space, log: Log) -> None:
        self._log = log
        self._rounds = [times for times in (*log.shortlist, *log.finals) if times]
        self._first: dict[Candidate, float] = {}
        for candidate in space.candidates:
            times = [log.screened.get(candidate), *(times.get(candidate) for times in self._rounds)]
            if known := [seconds for seconds in times if seconds is not None]:
                self._first[candidate] = known[0]
        self._round, self._asked = 0, set[Candidate]()
        self._turn: Counter[object] = Counter()
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def open(self) -> None:
        """Nothing is to be made."""

    def end_at(self, seconds: float) -> None:
        """What was recorded takes as long as it took."""

    def lay_out(self, block_size: int) -> None:
        """Nothing is to be laid out."""

    def compile_ahead(self, candidates: Sequence[Candidate], seconds: float) -> Mapping[Candidate, str]:
        """Nothing is to be compiled."""
        return {}

    def prepare(self, candidate: Candidate) -> None:
        """Nothing is to be compiled."""

    def check(self, candidate: Candidate) -> str | None:
        if candidate not in self._first:
            return self._log.left_out.get(candidate, "not recorded")
        self.now += self._first[candidate]
        return None

    def sample(self, candidate: Candidate, repeats: int, context: int | None = None) -> float:
        lengths = self._log.lengths.get(candidate, {}).get(context, []) if context is not None else []
        if lengths:
            self._turn[candidate] += 1
            seconds = lengths[(self._turn[candidate] - 1) % len(lengths)]
        else:
            seconds = self._in_round(candidate)
        self.now += repeats * seconds
        return seconds

    def _in_round(self, candidate: Candidate) -> float:
        if candidate in self._asked:
            self._asked.clear()
            self._round += 1
        self._asked.add(candidate)
        for i in range(len(self._rounds)):  # the next one that it was in
            if candidate in (times := self._rounds[(self._round + i) % len(self._rounds)]):
                return times[candidate]
        return self._first[candidate]

    def read_bandwidth(self) -> float:
        return self._next("read", self._log.reads)

    def product_rate(self) -> float:
        return self._next("product", self._log.products)

    def _next(self, what: str, values: list[float]) -> float:
        self._turn[what] += 1
        return values[(self._turn[what] - 1) % len(values)] if values else 1e12


@dataclass(slots=True)
class SearchResult:
    """A search of recorded problems."""

    recorded: Recording
    logs: list[Log]
    verdicts: list[Decision]


def replay(recorded: Recording, budget: float = 60.0, seed: int = 0) -> SearchResult:
    """Search the records as `tune` would have searched the machine, with so many seconds of its time."""
    searched = SearchResult(recorded, [], [])
    left = budget
    for i, (space, log) in enumerate(zip(recorded.spaces, recorded.logs, strict=True)):
        runner, found = ReplayRunner(space, log), Log()
        share = left / (len(recorded.spaces) - i)
        left -= search(space, runner, found, share, clock=runner.clock, seed=seed)
        searched.logs.append(found)
        searched.verdicts.append(decide(space, found))
    return searched


@dataclass(frozen=True, slots=True)
class Regret:
    """What a search chose for one workload, beside what all records together say is best."""

    workload: str
    chosen: Score  # by what the search measured, its value by all records
    optimum: Score

    @property
    def share(self) -> float:
        """Tokens per second that the choice gives away, as a share of the best."""
        return 1 - self.chosen.tokens_per_second / self.optimum.tokens_per_second


def regret(searched: SearchResult, traffic: Traffic, model: Model, memory: int) -> Regret | None:
    """None if nothing was decided, or nothing fits the memory.

    Both sides are valued by the medians of all records: the search knows some of them only.
    """
    recorded = searched.recorded
    found = rates_of(recorded.spaces, searched.logs, [_picks(v) for v in searched.verdicts])
    true = rates_of(recorded.spaces, recorded.logs, [_picks(v) for v in searched.verdicts])
    optima = [exhaustive(space, log) for space, log in zip(recorded.spaces, recorded.logs, strict=True)]
    ideal = rates_of(recorded.spaces, recorded.logs, optima)
    if found is None or true is None or ideal is None:
        return None
    advice = advise(score(traffic, model, found, memory))
    optimum = best(score(traffic, model, ideal, memory))
    if advice is None or optimum is None:
        return None
    (valued,) = score(traffic, model, true, memory, [advice.score.block_size])
    return Regret(traffic.name, valued, optimum)


def exhaustive(space: Space, log: Log) -> dict[int, Candidate]:
    """The candidate with the least recorded time at each block size."""
    found: dict[int, Candidate] = {}
    for block_size in space.block_sizes:
        own = [c for c in space.candidates if c.block_size == block_size]
        timed = [(s, i) for i, c in enumerate(own) if (s := log.paired_seconds(c, space.baseline)) is not None]
        if timed:
            found[block_size] = own[min(timed)[1]]
    return found


def _picks(verdict: Decision) -> dict[int, Candidate]:
    return {block_size: pick.candidate for block_size, pick in verdict.winners.items()}
