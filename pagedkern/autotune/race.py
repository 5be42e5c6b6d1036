"""`Race`: what the stages of a search share: the candidates, what measures them, what is known of them, the time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pagedkern.autotune.log import Log
from pagedkern.autotune.runner import CandidateLost, OutOfTime, Runner, Tell
from pagedkern.autotune.space import Candidate, Space

GRACE = 1.0  # seconds that what has begun may last beyond the end
SAMPLE_SECONDS = 2e-3  # calls are repeated until a sample lasts as long
LEAST_PATIENCE, PATIENCE = 5.0, 50.0  # seconds, and times of what is expected, after which a sample hangs
TOO_SLOW = 5.0  # a candidate slower than the best of all by this is not run again, at no block size
NO_TIME, TOO_LONG = "no time left", "took longer than there was time"


@dataclass
class Race:
    """One problem: its candidates and what came of them until now."""

    space: Space
    runner: Runner
    log: Log
    tell_all: Tell
    clock: Callable[[], float]
    deadline: float
    last: float  # for the untuned choice at the usual block size
    too_slow: dict[tuple[str, str], int] = field(default_factory=dict)  # backend and config: where that was seen
    ends: float = math.inf  # when calls are cut short
    restart: float = 0.0  # seconds that it took to open the problem: what cutting a call short may cost

    def tell(self, step: str) -> None:
        """Say what happens now, with the best until now."""
        self.tell_all(step, *self.best())

    def best(self) -> tuple[Candidate | None, float | None]:
        """The fastest candidate until now, and its seconds."""
        found = self.log.fastest(self.space.candidates)
        return found, self.log.seconds(found) if found else None

    def at(self, share: float) -> float:
        """When a share of the time that is left will have passed."""
        return self.clock() + share * max(0.0, self.deadline - self.clock())

    @contextmanager
    def until(self, end: float) -> Iterator[None]:
        """What is called in here is cut short soon after `end`, if the runner can do that."""
        before, self.ends = self.ends, min(end, self.ends)
        self._set_end()
        try:
            yield
        finally:
            self.ends = before
            self._set_end()

    def _set_end(self) -> None:
        self.runner.end_at(max(0.0, self.ends - self.clock()) + GRACE)

    def cost(self, candidate: Candidate) -> float:
        """Seconds that a sample is expected to take."""
        return (self.log.seconds(candidate) or 0.0) * self.repeats(candidate)

    def repeats(self, candidate: Candidate) -> int:
        """Calls of a sample."""
        return max(1, min(32, math.ceil(SAMPLE_SECONDS / max(self.log.seconds(candidate) or 1.0, 1e-9))))

    def sample(self, candidate: Candidate, repeats: int = 0, context: int | None = None) -> float | None:
        """Seconds of a call; None if the candidate was lost, or takes so much longer than before that it hangs."""
        patience = math.inf
        if candidate in self.log.screened:
            patience = max(LEAST_PATIENCE, PATIENCE * self.cost(candidate))
        end = self.clock() + patience
        try:
            with self.until(end):
                return self.runner.sample(candidate, repeats or self.repeats(candidate), context)
        except CandidateLost as lost:
            self.log.leave(candidate, str(lost), lasting=True)
        except OutOfTime:
            if end >= self.ends:
                raise
            for other in self.space.candidates:
                if (other.backend, other.config) == (candidate.backend, candidate.config):
                    self.log.leave(other, f"took more than {patience:.0f} s at block size {candidate.block_size}", True)
        return None
