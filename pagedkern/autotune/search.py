"""Which candidate runs next, within a time. Knows no kernel: it is given something that measures.

The time is wall time, and everything counts: laying out, compiling, checks, measurements. So that there is a result as
early as can be, block sizes are taken up one after the other, the usual one first. *Entering* one (`entry`) compiles
its candidates, those first that promise most, checks each, and times it once (*screening*). Those near the best of
their backend are on the *shortlist*: each is timed three times, in turn, and two are left beside each default. In the
*finals*, which start from nothing, every finalist runs once in each round, in an order drawn anew, so that what
disturbs the machine disturbs all alike. What they prove is for `decision` to say. If it takes long to enter the usual
block size, there are first finals for it alone, so that it is decided before the others are entered.

Nothing is begun that is expected to end too late, and what takes longer than expected is cut short: see `Race.until`.

A log that holds measurements already is resumed: what was screened is not screened again, shortlist and finals
continue. That is how an interrupted run is resumed.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from pagedkern.autotune.decision import MIN_ROUNDS, decide, rounds_needed
from pagedkern.autotune.entry import Entry
from pagedkern.autotune.log import Log
from pagedkern.autotune.objective import unusual
from pagedkern.autotune.race import NO_TIME, TOO_LONG, Race
from pagedkern.autotune.runner import LAYING_OUT, CandidateLost, OutOfTime, Runner, RunnerFailed, Tell
from pagedkern.autotune.space import Candidate, Space
from pagedkern.autotune.store import MIN_GAIN

MAX_ROUNDS = 41  # of the finals of all block sizes
FIRST_SHARE, ENTRY_SHARE = 0.6, 0.5  # of the time, to enter the usual block size; of what is left then, the others
SHORTLIST_SHARE, FIRST_FINALS_SHARE, SWEEP_SHARE = 0.25, 0.5, 0.1  # of the time that is left when the stage begins
SOON = 0.05  # share of the time: if the usual block size was entered in less, its decision can wait for the others
SHORTLIST_ROUNDS, PER_BACKEND = 3, 2  # candidates that each backend sends to the finals beside its default
NEAR = 1.5  # a candidate slower than the best of its backend by this does not reach the shortlist
BOUND_ROUNDS = 8  # measurements of what the machine can do at the most
LENGTHS, LENGTH_ROUNDS = (16, 4, 1), 3  # parts of the context at which backends are timed in the end, and how often


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

    Nothing is begun after their end, and what has begun is cut short a second later. KeyboardInterrupt and a runner
    that fails end the search, too: the log says so, and keeps what there is.

    Args:
        exhaustive: let everybody into the finals that is not too slow.
        decided: called when the first finals are over: what they prove can be used.
        most: seconds after which the usual block size is to be decided at the latest, if that is more than `budget`:
            one problem that is decided is worth more than several that are begun.
    """
    begin = clock()
    last = begin + max(budget, most)
    race = Race(space, runner, log, tell, clock, begin + budget, last)
    log.ended = log.failure = ""
    try:
        with race.until(last):
            _Search(race, exhaustive, decided, random.Random(seed)).run()
    except OutOfTime:
        log.ended = "time"
    except RunnerFailed as failure:
        log.ended, log.failure = "failed", str(failure)
    except KeyboardInterrupt:
        log.ended = "interrupted"
    why = {"interrupted": "interrupted", "failed": "not measured"}.get(log.ended, NO_TIME)
    for candidate in space.candidates:  # nobody is forgotten
        if candidate not in log.screened and candidate not in log.left_out:
            log.leave(candidate, why)
    return clock() - begin


@dataclass
class _Search:
    race: Race
    exhaustive: bool
    decided: Callable[[], None]
    rng: random.Random
    _best_rate: float | None = None
    _round_cost: float = 0.0  # seconds of what is measured after each round

    def run(self) -> None:
        race, log = self.race, self.race.log
        candidates = race.space.candidates
        sizes = sorted(race.space.block_sizes, key=unusual)
        begin = race.clock()
        if not sizes or begin >= race.last:
            return
        known = (c for c in candidates if c in log.screened and c in log.lasting)
        race.too_slow = {(c.backend, c.config): c.block_size for c in known}
        self.begin(sizes[0])
        entry = Entry(race)
        entry.enter(sizes[0], race.at(FIRST_SHARE), race.last)
        if race.clock() - begin > SOON * (race.deadline - begin):
            self.first_finals()
        with race.until(race.deadline):
            end = race.at(ENTRY_SHARE)
            for block_size in sizes[1:]:
                if race.clock() < end and self.lay_out(block_size, end):
                    entry.enter(block_size, end, race.deadline)
            if race.clock() >= race.deadline:
                raise OutOfTime
            finalists = self.shortlist(race.at(SHORTLIST_SHARE))
            ones = self._rounds_of_one()
            self.finals(finalists, race.deadline - self._sweep_cost(), ones, ones + MAX_ROUNDS)
            self.sweep_lengths()

    def begin(self, block_size: int) -> None:
        """Lay out the block size that all depends on. Raises `RunnerFailed` if that cannot be done."""
        race, begin = self.race, self.race.clock()
        race.tell(LAYING_OUT)
        race.runner.open()
        try:
            race.runner.lay_out(block_size)
        except CandidateLost as lost:
            raise RunnerFailed(str(lost)) from lost
        race.restart = race.clock() - begin

    def lay_out(self, block_size: int, end: float) -> bool:
        """Any other block size: whether it was laid out until `end`."""
        self.race.tell(f"{LAYING_OUT} - block size {block_size}")
        try:
            with self.race.until(end):
                self.race.runner.lay_out(block_size)
                return True
        except OutOfTime:
            why = TOO_LONG
        except CandidateLost as lost:
            why = str(lost)
        for candidate in self.race.space.candidates:
            if candidate.block_size == block_size:
                self.race.log.leave(candidate, why)
        return False

    def first_finals(self) -> None:
        """Decide the block size that was entered first, by the untuned choice alone if there is no time for more."""
        race, log = self.race, self.race.log
        if self._rounds_of_one() < len(log.finals):  # of a run that is resumed
            return
        finalists = self.shortlist(race.at(SHORTLIST_SHARE), bounded=False)
        self.finals(finalists, race.at(FIRST_FINALS_SHARE), 0, max(MIN_ROUNDS, rounds_needed(len(finalists) - 1)))
        baseline = race.space.baseline
        missing = MIN_ROUNDS - sum(baseline in times for times in log.finals)
        if baseline in finalists and baseline not in log.left_out and missing > 0:
            self.finals([baseline], race.last, 0, len(log.finals) + missing)
        log.ended = ""
        if log.finals:
            self.decided()
        for candidate in [c for c in log.left_out if c not in log.lasting and c in log.screened]:
            del log.left_out[candidate]  # for want of time, or of a place: the race goes on

    def shortlist(self, end: float, bounded: bool = True) -> list[Candidate]:
        """The candidates for the finals, those that must not be missing first. `bounded`: none beside a default that is
        at the limit of what the machine can do."""
        race, space, log = self.race, self.race.space, self.race.log
        near, per_backend = (math.inf, len(space.candidates)) if self.exhaustive else (NEAR, PER_BACKEND)
        entered: list[Candidate] = []
        for group in self._groups():
            best = min(log.screened[c] for c in group)
            entered += [c for c in group if c.is_default or log.screened[c] <= near * best]
        for i in range(SHORTLIST_ROUNDS):
            race.tell(f"shortlist - {i + 1} of {SHORTLIST_ROUNDS}")
            for candidate in entered:
                timed = i < len(log.shortlist) and candidate in log.shortlist[i]
                if timed or candidate in log.left_out or race.clock() + race.cost(candidate) > end:
                    continue
                if (seconds := race.sample(candidate)) is not None:
                    log.shortlisted(i, candidate, seconds)
        finalists: list[Candidate] = []
        for group in self._groups():
            ranked = sorted((c for c in group if c in entered and not c.is_default), key=lambda c: log.seconds(c) or 0)
            if ranked and bounded and not self.exhaustive and self._at_the_limit([c for c in group if c.is_default]):
                for candidate in ranked:
                    log.leave(candidate, "the default is within 2 % of what the machine can do")
                ranked = []
            finalists += [*(c for c in group if c.is_default), *ranked[:per_backend]]
        for candidate in log.screened:
            if candidate not in finalists and candidate not in log.left_out:
                log.leave(candidate, "out after the shortlist" if candidate in entered else "out after screening")
        first = {space.untuned(b) for b in space.block_sizes}

        def rank(c: Candidate) -> tuple[bool, bool, bool, float]:
            return c != space.baseline, c not in first, not c.is_default, log.seconds(c) or 0

        return sorted(finalists, key=rank)

    def finals(self, among: Sequence[Candidate], end: float, first: int, last: int) -> None:
        """Rounds of all of these, as those from number `first` on are, until number `last`, or until `end`. Who would
        leave too little time for the others stays out."""
        race, log, finalists = self.race, self.race.log, list(among)
        needed = max(MIN_ROUNDS, rounds_needed(len(finalists) - 1)) - (len(log.finals) - first)
        costs = [race.cost(c) for c in finalists]
        while len(costs) > 1 and needed * (sum(costs) + self._round_cost) > end - race.clock():
            costs.pop()
            log.leave(finalists.pop(), "no time for the finals")
        order = list(finalists)
        for i in range(len(log.finals), last if finalists else 0):
            race.tell(f"finals - round {i + 1} of at most {last}")
            self.rng.shuffle(order)
            for candidate in order:
                if race.clock() + race.cost(candidate) > end:
                    log.ended = "time"
                    return
                if candidate not in log.left_out and (seconds := race.sample(candidate)) is not None:
                    log.final(i, candidate, seconds)
            begin = race.clock()
            log.read(race.runner.read_bandwidth())
            log.product(race.runner.product_rate())
            self._round_cost = race.clock() - begin

    def sweep_lengths(self) -> None:
        """Time what was decided for the usual block size at parts of the context too, a few calls each: what a call
        costs however little it reads."""
        race, workload, lengths = self.race, self.race.space.workload, self.race.log.lengths
        if workload.kind != "decode":
            return
        for i in range(LENGTH_ROUNDS):
            race.tell(f"lengths - {i + 1} of {LENGTH_ROUNDS}")
            for candidate in self._swept():
                if race.clock() + len(LENGTHS) * race.cost(candidate) > race.deadline:
                    continue
                for part in LENGTHS:
                    context = max(1, workload.context // part)
                    if len(lengths.get(candidate, {}).get(context, ())) > i:  # of a run that is resumed
                        continue
                    repeats = min(32, part * race.repeats(candidate))
                    if (seconds := race.sample(candidate, repeats, context)) is not None:
                        race.log.length(candidate, context, seconds)

    def _swept(self) -> list[Candidate]:
        """What was decided for the usual block size, the fastest first."""
        space, log = self.race.space, self.race.log
        picks = decide(space, log).picks.get(space.baseline.block_size, {})
        chosen = dict.fromkeys(pick.candidate for pick in picks.values())
        return sorted((c for c in chosen if c not in log.lasting), key=lambda c: log.seconds(c) or 0)

    def _sweep_cost(self) -> float:
        """Seconds to keep for it: of the untuned choice, if that is no more than a share of what is left."""
        race = self.race
        if race.space.workload.kind != "decode":
            return 0.0
        cost = 1.5 * LENGTH_ROUNDS * len(LENGTHS) * race.cost(race.space.baseline)
        return min(cost, SWEEP_SHARE * max(0.0, race.deadline - race.clock()))

    def _rounds_of_one(self) -> int:
        """Rounds of first finals, which only the usual block size was in."""
        usual = self.race.space.baseline.block_size
        if len(self.race.space.block_sizes) == 1:
            return 0
        alone = (all(c.block_size == usual for c in times) for times in self.race.log.finals)
        return sum(1 for _ in takewhile(bool, alone))

    def _at_the_limit(self, defaults: list[Candidate]) -> bool:
        """Whether a default is so near to the analytic bound that nothing could be proved to be faster."""
        times = [seconds for c in defaults if (seconds := self.race.log.seconds(c)) is not None]
        return bool(times) and min(times) < self._bound() * MIN_GAIN

    def _bound(self) -> float:
        """Seconds that no candidate goes below: bytes over the bandwidth of a plain read, or the operations of the
        matrix products over their rate. The best of some measurements, for others may use the machine."""
        workload, runner, log = self.race.space.workload, self.race.runner, self.race.log
        work, rate, known = (
            (workload.kv_bytes, runner.read_bandwidth, log.reads)
            if workload.kind == "decode"
            else (workload.flops, runner.product_rate, log.products)
        )
        if self._best_rate is None:
            self._best_rate = max([*known, *(rate() for _ in range(BOUND_ROUNDS - len(known)))])
        return work / self._best_rate

    def _groups(self) -> list[list[Candidate]]:
        """The candidates that are still in the race, one list for each block size and backend."""
        log = self.race.log
        groups: dict[tuple[int, str], list[Candidate]] = {}
        for candidate in self.race.space.candidates:
            if candidate in log.screened and candidate not in log.left_out:
                groups.setdefault((candidate.block_size, candidate.backend), []).append(candidate)
        return list(groups.values())
