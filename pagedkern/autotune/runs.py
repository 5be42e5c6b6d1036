"""One run from end to end: for each problem measure, decide, store; then predict what each block size gives.

The budget is wall time from the beginning of the run. Each problem has an equal share of what is left when its turn
comes; what one leaves the next one has, and the usual block size of one is decided before the next one begins. Whatever
ends a run early (Ctrl-C, a signal, a worker that cannot be kept alive), what was decided is stored, and the journal
holds the rest.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from pagedkern.autotune import profile as profiles
from pagedkern.autotune import records, store
from pagedkern.autotune import space as spaces
from pagedkern.autotune.decision import MIN_ROUNDS, Decision, decide
from pagedkern.autotune.interrupts import Interrupted, Interrupts
from pagedkern.autotune.log import Log
from pagedkern.autotune.profile import ModelShape, Profile
from pagedkern.autotune.rates import Rates, Speed
from pagedkern.autotune.rating import rates_of
from pagedkern.autotune.recommend import Recommendation, find, is_tuned, recommend_by
from pagedkern.autotune.runner import Runner, Tell
from pagedkern.autotune.search import search
from pagedkern.autotune.space import Candidate, Space, Workload
from pagedkern.autotune.store import device as machine
from pagedkern.autotune.store import files
from pagedkern.autotune.store import profiles as stored
from pagedkern.autotune.workloads import Model, Traffic
from pagedkern.environment import notices

BUDGET = 60.0  # seconds, where nobody says
CONCLUDING = 0.02  # share of the budget that is kept for deciding, storing and showing
MOST_RESERVED = 0.25  # share of it that may be kept for what comes after

MakeRunner = Callable[[Space, int], Runner]

logger = logging.getLogger("pagedkern.autotune")


@dataclass(slots=True)
class Outcome:
    """Result of one problem."""

    space: Space
    log: Log
    verdict: Decision
    stored: dict[int, Path] = field(default_factory=dict)  # file for each block size
    not_stored: str = ""  # why nothing, or not everything, was stored

    @property
    def kept_untuned(self) -> bool:
        """Whether nothing could be proved in the time there was, though the finals of the untuned choice had begun: it
        stays in use, and nothing is stored."""
        return not self.verdict.winners and any(self.space.baseline in times for times in self.log.finals)

    @property
    def why_undecided(self) -> str:
        """Why nothing was decided, in words."""
        if not self.space.candidates:
            return "no backend of this machine computes this"
        rounds = f"the finals had {len(self.log.finals)} rounds of {MIN_ROUNDS} needed"
        if self.kept_untuned:
            return f"untuned stays, and nothing is stored: in this time {rounds}"
        return f"not decided: {rounds}"

    @property
    def read_bandwidth(self) -> float | None:
        """Bytes per second of a plain read, measured after each round of the finals."""
        return median(self.log.reads) if self.log.reads else None

    def share(self, candidate: Candidate) -> float | None:
        """K and V read per second, as a part of what a plain read in the same round reached; None without rounds."""
        pairs = zip(self.log.finals, self.log.reads, strict=False)  # the last round may have been cut short
        shares = [self.space.workload.kv_bytes / times[candidate] / read for times, read in pairs if candidate in times]
        return median(shares) if shares else None


@dataclass(frozen=True, slots=True)
class Serving:
    """What the block sizes give for one workload."""

    traffic: Traffic
    model: Model
    memory: int  # bytes of the cache
    advice: Recommendation  # its tier says what the rates are of, see `recommend`: those of this run are "tuned"


@dataclass(slots=True)
class TuningRun:
    """Result of a run."""

    device: Mapping[str, str | int]
    outcomes: list[Outcome] = field(default_factory=list)
    unusable: list[str] = field(default_factory=list)  # "backend: why it was not measured"
    interrupted: bool = False
    signal: int = signal.SIGINT  # what interrupted it
    failures: list[str] = field(default_factory=list)  # why measurements ended early
    load: float | None = field(default_factory=machine.load)  # of the machine when the run began
    profile: Profile | None = None  # what is known of the machine now
    served: list[Serving] = field(default_factory=list)
    records: Path | None = None  # where the measurements are
    records_cut: str = ""  # why not all of them are there

    @property
    def exit_code(self) -> int:
        """0: decided and stored, or the untuned choice kept for want of time; 1: nothing decided, or the worker that
        measures failed; 3: decided, but not all of it stored; 128 and the number of the signal: interrupted."""
        if self.interrupted:
            return 128 + self.signal
        if any(o.not_stored for o in self.outcomes):
            return 3
        done = self.outcomes and all(o.verdict.winners or o.kept_untuned for o in self.outcomes)
        return 0 if done and not self.failures else 1


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be measured."""

    workloads: Sequence[Workload]
    block_sizes: Sequence[int]
    backends: Sequence[str] = ()  # none: all that are usable
    budget: float = BUDGET  # seconds
    seed: int = 0
    exhaustive: bool = False


def carry_out(
    order: Order,
    *,
    journal: Path | None = None,
    resume: bool = False,
    tell: Tell = lambda *_: None,
    make_runner: MakeRunner | None = None,
    run: TuningRun | None = None,
    clock: Callable[[], float] = time.monotonic,
    interrupts: Interrupts | None = None,
    begun: float | None = None,
    reserve: float = 0.0,
) -> TuningRun:
    """Tune each problem in its share of the budget and store what the measurements support.

    Args:
        journal: where to write every measurement as it comes; None writes none.
        resume: go on with what the journal holds, if it is of the same problems, candidates and code.
        make_runner: what measures; None is a worker process of its own, see `isolate`.
        run: filled in as results come, for a caller that wants them even if this function raises.
        clock: seconds; all of the budget is by it.
        interrupts: what signals are taken by; None: they are taken here, from beginning to end.
        begun: when the budget began, on the clock; None is now.
        reserve: seconds of the budget that the caller needs afterwards, as for `serve`.
    """
    begin = clock() if begun is None else begun
    kept = CONCLUDING * order.budget + min(reserve, MOST_RESERVED * order.budget)
    device = order.workloads[0].device
    run = run if run is not None else TuningRun(machine.identity(device))
    with ExitStack() as stack:
        interrupts = interrupts or stack.enter_context(Interrupts())
        if make_runner is None:
            from pagedkern.autotune.isolate import Workers

            workers = Workers()
            stack.callback(workers.close)
            make_runner = workers.runner
        try:
            usable, run.unusable = spaces.usable_backends(device, list(order.backends))
            planned = [spaces.candidates(w, order.block_sizes, usable) for w in order.workloads] if usable else []
            logs = _logs(run, planned, journal, resume)
            if journal is not None and planned:
                _write_to(journal, run, planned, logs, stack)
            end = begin + order.budget - kept
            _Measuring(run, order, make_runner, tell, clock, end, interrupts).all(planned, logs)
        except KeyboardInterrupt as stop:
            run.interrupted = True
            run.signal = getattr(stop, "number", signal.SIGINT)
        _profile(run, order)
    return run


def serving_seconds(order: Order, traffics: Sequence[Traffic], model: Model, memory: int) -> float:
    """About how long `serve` will take: as long as for the first workload with rates that are made up."""
    speeds = {block_size: Speed(1e11) for block_size in order.block_sizes}
    profile = Profile({}, ModelShape.of(model), Rates(1e11, 1e13, 1e10, speeds), {}, "", "", "")
    begin = time.monotonic()
    recommend_by(profile, "", "", traffics[0], traffics[0].model or model, memory)
    return 2 * len(traffics) * (time.monotonic() - begin)  # of some twice as long as of the first preset


def serve(run: TuningRun, traffics: Sequence[Traffic], model: Model, memory: Callable[[Model], int]) -> None:
    """Fill in what the block sizes give for workloads, each with the rates of its own model's shape: those that were
    measured now, else what `recommend` would take. `memory` gives the bytes of the cache beside a model."""
    if run.profile is None:
        return
    for traffic in traffics:
        served = traffic.model or model
        profile, tier, reason = run.profile, "tuned", "measured in this run"
        if ModelShape.of(served) != profile.shape:
            other, tier, reason = find(served, str(run.device["type"]))
            if other is None:  # nothing could be stored
                tier, reason = "tuned-nearest", "measured in this run for another shape"
            profile = other or profile
        size = memory(served)
        run.served.append(Serving(traffic, served, size, recommend_by(profile, tier, reason, traffic, served, size)))


@dataclass
class _Measuring:
    """The problems of a run, one after the other."""

    run: TuningRun
    order: Order
    make_runner: MakeRunner
    tell: Tell
    clock: Callable[[], float]
    end: float
    interrupts: Interrupts

    def all(self, planned: Sequence[Space], logs: Sequence[Log]) -> None:
        for i, (space, log) in enumerate(zip(planned, logs, strict=True)):
            outcome = Outcome(space, log, decide(space, log))
            self.run.outcomes.append(outcome)
            if space.candidates:
                self._one(outcome, 1 / (len(planned) - i))

    def _one(self, outcome: Outcome, share: float) -> None:
        log, kind = outcome.log, outcome.space.workload.kind
        stop: KeyboardInterrupt | None = None
        end = self.clock() + share * (self.end - self.clock())
        try:
            with self.interrupts.released():
                runner = self.make_runner(outcome.space, self.order.seed)
                search(
                    outcome.space, runner, log, end - self.clock(), _with_prefix(kind, self.tell), self.clock,
                    self.order.seed, self.order.exhaustive, lambda: self._conclude(outcome), self.end - self.clock(),
                )  # fmt: skip
        except KeyboardInterrupt as came:
            stop = came
        self._conclude(outcome)
        if log.ended == "failed":
            self.run.failures.append(f"{kind}: {log.failure}")
        if stop or log.ended == "interrupted":
            raise stop or Interrupted(self.interrupts.number or signal.SIGINT)

    def _conclude(self, outcome: Outcome) -> None:
        """Decide and store a problem; and what is known of the machine, where nothing was known."""
        with self.interrupts.held():
            _conclude(outcome)
            _profile(self.run, self.order, early=True)


def _logs(run: TuningRun, planned: Sequence[Space], journal: Path | None, resume: bool) -> list[Log]:
    """Logs to begin with: those of the journal if it can be resumed, else empty ones."""
    if journal is not None and resume and journal.is_file() and journal.stat().st_size:
        recorded = records.load(journal)
        taken = records.take_up(recorded, planned, [records.code_of(space) for space in planned])
        if taken is not None:
            run.load = max((load for load in (run.load, recorded.load) if load is not None), default=None)
            return taken
    return [Log() for _ in planned]


def _write_to(path: Path, run: TuningRun, planned: Sequence[Space], logs: Sequence[Log], stack: ExitStack) -> None:
    """Begin the journal with what is known. A place that cannot be written costs the records, not the run."""
    code, driver = [records.code_of(space) for space in planned], machine.driver(str(run.device["type"]))
    known = records.Recording(run.device, _now(), list(planned), list(logs), list(code), run.load, driver)
    try:
        book = stack.enter_context(records.Journal(path, known, lambda why: setattr(run, "records_cut", why)))
        if path.parent == files.runs():
            records.evict(path.parent)
    except OSError as error:
        logger.warning("%s: no records are written: %s", path, notices.reason(error))
        return
    run.records = book.path


def _conclude(outcome: Outcome) -> None:
    """Decide, and store a choice for each block size that was decided."""
    outcome.verdict, outcome.not_stored = decide(outcome.space, outcome.log), ""
    for block_size, choices in profiles.choices_of(outcome.space, outcome.log, outcome.verdict).items():
        problem = outcome.space.workload.problem(block_size)
        try:
            outcome.stored[block_size] = store.save(problem, choices)
        except OSError as error:
            outcome.not_stored = f"{type(error).__name__}: {error}"
            return


def _profile(run: TuningRun, order: Order, early: bool = False) -> None:
    """The rates of the machine, stored for `recommend`. `early`: they are not complete yet, and replace none."""
    picks = [{b: pick.candidate for b, pick in o.verdict.winners.items()} for o in run.outcomes]
    rates = rates_of([o.space for o in run.outcomes], [o.log for o in run.outcomes], picks)
    shape = ModelShape.of_problems(order.workloads)
    if rates is None or (early and is_tuned(run.device, shape)):
        return
    code = {c.backend: machine.code(c.backend) for o in run.outcomes for c in o.space.candidates}
    measured = "; ".join(f"{o.space.workload.kind}: {o.space.workload}" for o in run.outcomes)
    driver = machine.driver(str(run.device["type"]))
    run.profile = Profile(run.device, shape, rates, code, driver, _now(), measured, run.load)
    try:
        stored.save_rates(profiles.to_json(run.profile), run.profile.shape.name())
    except OSError as error:
        run.outcomes[0].not_stored = run.outcomes[0].not_stored or f"{type(error).__name__}: {error}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _with_prefix(kind: str, tell: Tell) -> Tell:
    return lambda step, best, seconds: tell(f"{kind}: {step}", best, seconds)
