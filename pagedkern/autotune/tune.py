"""One run from end to end: for each problem measure, decide, store; then foretell what each block size gives."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from pagedkern.autotune import profile as profiles
from pagedkern.autotune import records, store
from pagedkern.autotune import space as spaces
from pagedkern.autotune.decision import Verdict, decide
from pagedkern.autotune.log import Log
from pagedkern.autotune.objective import Score, score
from pagedkern.autotune.profile import Profile, Shape
from pagedkern.autotune.recommend import find
from pagedkern.autotune.search import LAYING_OUT, Runner, Tell, search, sweep_lengths
from pagedkern.autotune.space import Candidate, Space, Workload
from pagedkern.autotune.store import device as machine
from pagedkern.autotune.store import files
from pagedkern.autotune.store import profiles as stored
from pagedkern.autotune.workloads import Model, Traffic

MakeRunner = Callable[[Space, int], Runner]

logger = logging.getLogger("pagedkern.autotune")


@dataclass(slots=True)
class Outcome:
    """What one problem came to."""

    space: Space
    log: Log
    verdict: Verdict
    stored: dict[int, Path] = field(default_factory=dict)  # file for each block size
    not_stored: str = ""  # why nothing, or not everything, was stored

    @property
    def kept_untuned(self) -> bool:
        """Whether nothing could be proved in the time there was, though the finals of the untuned choice had begun: it
        stays in use, and nothing is stored."""
        return not self.verdict.winners and any(self.space.baseline in times for times in self.log.finals)

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
class Served:
    """What the block sizes come to for one workload."""

    traffic: Traffic
    model: Model
    memory: int  # bytes of the cache
    scores: tuple[Score, ...]
    tier: str  # what the rates are of, see `recommend`: those of this run are "tuned"
    reason: str


@dataclass(slots=True)
class Run:
    """What a run came to."""

    device: Mapping[str, str | int]
    outcomes: list[Outcome] = field(default_factory=list)
    unusable: list[str] = field(default_factory=list)  # "backend: why it was not measured"
    interrupted: bool = False
    load: float | None = field(default_factory=machine.load)  # of the machine when the run began
    profile: Profile | None = None  # what is known of the machine now
    served: list[Served] = field(default_factory=list)
    records: Path | None = None  # where the measurements are

    @property
    def exit_code(self) -> int:
        """0: decided and stored, or the untuned choice kept for want of time; 1: nothing decided; 3: decided, but not
        all of it stored; 130: interrupted."""
        if self.interrupted:
            return 130
        if any(o.not_stored for o in self.outcomes):
            return 3
        return 0 if self.outcomes and all(o.verdict.winners or o.kept_untuned for o in self.outcomes) else 1


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be measured."""

    workloads: Sequence[Workload]
    block_sizes: Sequence[int]
    backends: Sequence[str] = ()  # none: all that are usable
    budget: float = 60.0  # seconds
    seed: int = 0
    exhaustive: bool = False


def tune(
    order: Order,
    *,
    journal: Path | None = None,
    resume: bool = False,
    tell: Tell = lambda *_: None,
    make_runner: MakeRunner | None = None,
    run: Run | None = None,
) -> Run:
    """Tune each problem in its share of the budget and store what the measurements support.

    Laying out the caches and compiling the kernels is not counted. What one problem leaves of its time the next one
    has. KeyboardInterrupt ends the run and keeps what was measured.

    Args:
        journal: where to write every measurement as it comes; None writes none.
        resume: go on with what the journal holds, if it is of the same problems, candidates and code.
        make_runner: what measures; None is a worker process of its own, see `isolate`.
        run: filled in as results come, for a caller that wants them even if this function raises.
    """
    device = order.workloads[0].device
    run = run if run is not None else Run(machine.identity(device))
    if make_runner is None:
        from pagedkern.autotune.isolate import Workers

        workers = Workers()
        make_runner = workers.runner
    else:
        workers = None
    with ExitStack() as stack:
        if workers is not None:
            stack.callback(workers.close)
        try:
            usable, run.unusable = spaces.usable_backends(device, list(order.backends))
            planned = [spaces.candidates(w, order.block_sizes, usable) for w in order.workloads] if usable else []
            logs = _logs(run, planned, journal, resume)
            if journal is not None and planned:
                _write_to(journal, run, planned, logs, stack)
            _measure(run, order, planned, logs, make_runner, tell)
        except KeyboardInterrupt:
            run.interrupted = True
    _profile(run)
    return run


def serve(run: Run, traffics: Sequence[Traffic], model: Model, memory: Callable[[Model], int]) -> None:
    """Fill in what the block sizes come to for workloads, each with the rates of its own model's shape: those that were
    measured now, else what `recommend` would take. `memory` gives the bytes of the cache beside a model."""
    if run.profile is None:
        return
    for traffic in traffics:
        of = traffic.model or model
        profile, tier, reason = run.profile, "tuned", "measured in this run"
        if Shape.of(of) != profile.shape:
            stored_, tier, reason = find(of, str(run.device["type"]))
            if stored_ is None:  # nothing could be stored
                tier, reason = "tuned-nearest", "measured in this run for another shape"
            profile = stored_ or profile
        scores = score(traffic, of, profile.rates, memory(of))
        run.served.append(Served(traffic, of, memory(of), tuple(scores), tier, reason))


def _measure(
    run: Run, order: Order, planned: Sequence[Space], logs: Sequence[Log], make_runner: MakeRunner, tell: Tell
) -> None:
    left = order.budget
    for i, (space, log) in enumerate(zip(planned, logs, strict=True)):
        outcome = Outcome(space, log, decide(space, log))
        run.outcomes.append(outcome)
        if not space.candidates:
            continue
        say = _with_prefix(space.workload.kind, tell)
        say(LAYING_OUT, None, None)
        runner = make_runner(space, order.seed)
        share = left / (len(planned) - i)
        left -= search(space, runner, log, share, say, seed=order.seed, exhaustive=order.exhaustive)
        _conclude(outcome)
        if log.ended == "interrupted":
            raise KeyboardInterrupt
        if space.workload.kind == "decode" and (picks := outcome.verdict.picks.get(space.baseline.block_size)):
            sweep_lengths(space, runner, log, [pick.candidate for pick in picks.values()], say)


def _logs(run: Run, planned: Sequence[Space], journal: Path | None, resume: bool) -> list[Log]:
    """Logs to begin with: those of the journal if it can be gone on with, else empty ones."""
    if journal is not None and resume and journal.is_file() and journal.stat().st_size:
        recorded = records.load(journal)
        taken = records.take_up(recorded, planned, [records.code_of(space) for space in planned])
        if taken is not None:
            run.load = max((load for load in (run.load, recorded.load) if load is not None), default=None)
            return taken
    return [Log() for _ in planned]


def _write_to(path: Path, run: Run, planned: Sequence[Space], logs: Sequence[Log], stack: ExitStack) -> None:
    """Begin the journal with what is known. A place that cannot be written costs the records, not the run."""
    code, driver = [records.code_of(space) for space in planned], machine.driver(str(run.device["type"]))
    known = records.Recorded(run.device, _now(), list(planned), list(logs), list(code), run.load, driver)
    try:
        book = stack.enter_context(records.Journal(path, known))
        if path.parent == files.runs():
            records.evict(path.parent)
    except OSError as error:
        logger.warning("%s: no records are written: %s", path, error)
        return
    run.records = book.path


def _conclude(outcome: Outcome) -> None:
    """Decide, and store a choice for each block size that was decided."""
    outcome.verdict = decide(outcome.space, outcome.log)
    for block_size, choices in profiles.choices_of(outcome.space, outcome.log, outcome.verdict).items():
        problem = outcome.space.workload.problem(block_size)
        try:
            outcome.stored[block_size] = store.save(problem, choices)
        except OSError as error:
            outcome.not_stored = f"{type(error).__name__}: {error}"
            return


def _profile(run: Run) -> None:
    """The rates of the machine, stored for `recommend`."""
    picks = [{b: pick.candidate for b, pick in o.verdict.winners.items()} for o in run.outcomes]
    rates = profiles.rates_of([o.space for o in run.outcomes], [o.log for o in run.outcomes], picks)
    if rates is None:
        return
    workloads = [o.space.workload for o in run.outcomes]
    code = {c.backend: machine.code(c.backend) for o in run.outcomes for c in o.space.candidates}
    measured = "; ".join(f"{w.kind}: {w}" for w in workloads)
    shape, driver = Shape.of_problems(workloads), machine.driver(str(run.device["type"]))
    run.profile = Profile(run.device, shape, rates, code, driver, _now(), measured, run.load)
    try:
        stored.save_rates(profiles.to_json(run.profile), run.profile.shape.name())
    except OSError as error:
        run.outcomes[0].not_stored = run.outcomes[0].not_stored or f"{type(error).__name__}: {error}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _with_prefix(kind: str, tell: Tell) -> Tell:
    return lambda step, best, seconds: tell(f"{kind}: {step}", best, seconds)
