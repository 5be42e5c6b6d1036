"""`Log`: everything measured for one workload, told to whoever keeps records as it comes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median

from pagedkern.autotune.space import Candidate

Record = dict[str, object]
Sink = Callable[[Record, Candidate | None], None]


@dataclass(slots=True)
class Log:
    """Measurements in the order of the search. `sink` is told each one; see `records`."""

    screened: dict[Candidate, float] = field(default_factory=dict)  # seconds of the first timed call
    shortlist: list[dict[Candidate, float]] = field(default_factory=list)
    finals: list[dict[Candidate, float]] = field(default_factory=list)
    left_out: dict[Candidate, str] = field(default_factory=dict)  # why it has no time, or only that of screening
    lasting: set[Candidate] = field(default_factory=set)  # of those, what more time would not change
    reads: list[float] = field(default_factory=list)  # bytes per second, after each round of the finals
    products: list[float] = field(default_factory=list)  # floating-point operations per second of a matrix product
    lengths: dict[Candidate, dict[int, list[float]]] = field(default_factory=dict)  # seconds at shorter contexts
    ended: str = ""  # why the finals ended before MAX_ROUNDS: "time", "interrupted" or "failed"
    failure: str = ""  # what failed
    sink: Sink = lambda record, candidate: None

    def screen(self, candidate: Candidate, seconds: float) -> None:
        self.screened[candidate] = seconds
        self.sink({"record": "screened", "seconds": seconds}, candidate)

    def shortlisted(self, round_: int, candidate: Candidate, seconds: float) -> None:
        _at(self.shortlist, round_)[candidate] = seconds
        self.sink({"record": "shortlist", "round": round_, "seconds": seconds}, candidate)

    def final(self, round_: int, candidate: Candidate, seconds: float) -> None:
        _at(self.finals, round_)[candidate] = seconds
        self.sink({"record": "final", "round": round_, "seconds": seconds}, candidate)

    def leave(self, candidate: Candidate, reason: str, lasting: bool = False) -> None:
        """A candidate goes no further. `lasting`: for what was seen of it, not for want of time or of a place."""
        self.left_out[candidate] = reason
        if lasting:
            self.lasting.add(candidate)
            self.sink({"record": "left out", "reason": reason}, candidate)

    def read(self, bytes_per_second: float) -> None:
        self.reads.append(bytes_per_second)
        self.sink({"record": "read", "bytes_per_second": bytes_per_second}, None)

    def product(self, flops_per_second: float) -> None:
        self.products.append(flops_per_second)
        self.sink({"record": "product", "flops_per_second": flops_per_second}, None)

    def length(self, candidate: Candidate, context: int, seconds: float) -> None:
        """Timed with sequences of at most `context` tokens."""
        self.lengths.setdefault(candidate, {}).setdefault(context, []).append(seconds)
        self.sink({"record": "length", "context": context, "seconds": seconds}, candidate)

    def seconds(self, candidate: Candidate) -> float | None:
        """The best estimate there is of a call's time."""
        for rounds in (self.finals, self.shortlist):
            if times := [times[candidate] for times in rounds if candidate in times]:
                return median(times)
        return self.screened.get(candidate)

    def paired_seconds(self, candidate: Candidate, baseline: Candidate) -> float | None:
        """The time of a call from its ratio to that of a baseline within the rounds of the finals: a load that comes
        and goes takes its part of both. `seconds` where there are no such rounds."""
        ratios = [times[candidate] / times[baseline] for times in self.finals if {candidate, baseline} <= times.keys()]
        whole = self.seconds(baseline)
        return median(ratios) * whole if ratios and whole else self.seconds(candidate)

    def fastest(self, among: Iterable[Candidate]) -> Candidate | None:
        timed = [(seconds, i, c) for i, c in enumerate(among) if (seconds := self.seconds(c)) is not None]
        return min(timed)[2] if timed else None


def _at(rounds: list[dict[Candidate, float]], index: int) -> dict[Candidate, float]:
    while len(rounds) <= index:
        rounds.append({})
    return rounds[index]
