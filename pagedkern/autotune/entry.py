"""Entering candidates into the race: each is compiled, checked, and timed once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pagedkern.autotune.race import NO_TIME, TOO_LONG, TOO_SLOW, Race
from pagedkern.autotune.runner import COMPILING, CandidateLost, OutOfTime
from pagedkern.autotune.space import Candidate

AHEAD_SHARE = 0.6  # of the time to enter a block size, that may be spent on compiling in several processes
DEAR = 0.02  # share of the time: a candidate that is too slow is not even checked if that would cost more


@dataclass
class Entry:
    """Enters one block size after the other."""

    race: Race
    _yardstick: float = math.inf  # seconds in which the first candidate is prepared, once it is compiled
    _given_up: set[tuple[str, str]] = field(default_factory=set)  # backend and config that took too long

    def enter(self, block_size: int, end: float, last: float) -> None:
        """Compile, check and screen the candidates of a block size that is laid out. The untuned choice has until
        `last`, the others until `end`: none is begun after it, and one that takes half of the time that is left is
        given up, at other block sizes too. A backend of which nothing has run yet must leave the time to start again
        if it is given up."""
        race, log = self.race, self.race.log
        own, untuned = self._promising(block_size), race.space.untuned(block_size)
        todo = [c for c in own if c not in log.screened and c not in log.lasting]
        race.tell(f"{COMPILING} - block size {block_size}")
        if (ahead := AHEAD_SHARE * (end - race.clock())) > 0:
            for candidate, why in race.runner.compile_ahead(todo, ahead).items():
                log.leave(candidate, why, lasting=True)
        for candidate in own:
            if candidate in log.lasting:
                continue
            now, name = race.clock(), (candidate.backend, candidate.config)
            known = candidate.backend == untuned.backend or any(c.backend == candidate.backend for c in log.screened)
            limit = last if candidate == untuned else end if known else min(end, race.deadline - 2 * race.restart)
            if now >= limit or (name in self._given_up and candidate != untuned):
                log.leave(candidate, NO_TIME if now >= limit else TOO_LONG)
                continue
            try:
                with race.until(limit if candidate == untuned else now + (limit - now) / 2):
                    self._enter_one(candidate, untuned, limit)
            except OutOfTime:
                log.leave(candidate, TOO_LONG)
                self._given_up.add(name)
                if race.clock() >= last:
                    raise

    def _enter_one(self, candidate: Candidate, untuned: Candidate, end: float) -> None:
        try:
            dear = self._compile(candidate, untuned, end)
        except CandidateLost as lost:
            self.race.log.leave(candidate, str(lost), lasting=True)
            return
        if candidate not in self.race.log.screened and not dear:
            self._screen(candidate, untuned, end)

    def _compile(self, candidate: Candidate, untuned: Candidate, end: float) -> bool:
        """Run a candidate on a part of the problem, so that the first call that is timed compiles nothing. Whether it
        was left out, for it is too slow already there, and running it on all of the problem would cost too much."""
        race, log, name = self.race, self.race.log, (candidate.backend, candidate.config)
        if name in race.too_slow and candidate != untuned:
            log.leave(candidate, f"too slow at block size {race.too_slow[name]}", lasting=True)
            return True
        race.tell(f"{COMPILING} - {self._number(candidate)}")
        first = self._prepare(candidate)
        if self._yardstick == math.inf:
            self._yardstick = self._prepare(candidate)
        elif candidate != untuned and first > TOO_SLOW * self._yardstick and candidate not in log.screened:
            slowness = self._prepare(candidate) / self._yardstick
            reference = log.seconds(race.space.untuned(candidate.block_size))
            if slowness > TOO_SLOW and reference and 2 * slowness * reference > DEAR * (end - race.clock()):
                log.leave(candidate, f"too slow: {slowness:.0f} times the time of one sequence", lasting=True)
                race.too_slow[name] = candidate.block_size
                return True
        return False

    def _prepare(self, candidate: Candidate) -> float:
        start = self.race.clock()
        self.race.runner.prepare(candidate)
        return self.race.clock() - start

    def _screen(self, candidate: Candidate, untuned: Candidate, end: float) -> None:
        race, log, name = self.race, self.race.log, (candidate.backend, candidate.config)
        if (begin := race.clock()) >= end:
            log.leave(candidate, NO_TIME)
            return
        best, _ = race.best()
        race.tell(f"screening - {self._number(candidate)}")
        if (wrong := race.runner.check(candidate)) is not None:
            log.leave(candidate, wrong, lasting=True)
            return
        first_call = race.clock() - begin
        if best and candidate != untuned and first_call > max(end - race.clock(), TOO_SLOW * log.screened[best]):
            log.leave(candidate, f"first call took {first_call:.1f} s: no time for another")
            race.too_slow[name] = candidate.block_size
            return
        if (seconds := race.sample(candidate, 1)) is None:
            return
        log.screen(candidate, seconds)
        if best and candidate != untuned and seconds > TOO_SLOW * log.screened[best]:
            log.leave(candidate, "timed once: too slow", lasting=True)
            race.too_slow[name] = candidate.block_size

    def _promising(self, block_size: int) -> list[Candidate]:
        """The candidates of a block size, those first that promise most: the untuned choice, the other defaults, then
        by their times at the block sizes that were entered before; without any in the order of the space."""
        own = [c for c in self.race.space.candidates if c.block_size == block_size]
        times: dict[tuple[str, str], float] = {}
        for candidate, seconds in self.race.log.screened.items():
            name = (candidate.backend, candidate.config)
            times[name] = min(seconds, times.get(name, math.inf))
        untuned = self.race.space.untuned(block_size)

        def rank(c: Candidate) -> tuple[bool, bool, float]:
            return c != untuned, not c.is_default, times.get((c.backend, c.config), math.inf)

        return sorted(own, key=rank)

    def _number(self, candidate: Candidate) -> str:
        number = self.race.space.candidates.index(candidate) + 1
        return f"{number} of {len(self.race.space.candidates)}: {candidate} at block size {candidate.block_size}"
