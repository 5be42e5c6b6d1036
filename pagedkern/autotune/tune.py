"""One run from end to end: for each problem measure, decide, store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from pagedkern.autotune import space as spaces
from pagedkern.autotune import store
from pagedkern.autotune.search import LAYING_OUT, Log, Pick, Runner, Tell, Verdict, decide, search
from pagedkern.autotune.space import Candidate, Space, Workload
from pagedkern.autotune.store import device as machine

MakeRunner = Callable[[Space, int], Runner]


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


@dataclass(slots=True)
class Run:
    """What a run came to."""

    device: Mapping[str, str | int]
    outcomes: list[Outcome] = field(default_factory=list)
    unusable: list[str] = field(default_factory=list)  # "backend: why it was not measured"
    interrupted: bool = False

    @property
    def exit_code(self) -> int:
        """0: decided and stored, or the untuned choice kept for want of time; 1: nothing decided; 3: decided, but not
        all of it stored; 130: interrupted."""
        if self.interrupted:
            return 130
        if any(o.not_stored for o in self.outcomes):
            return 3
        return 0 if self.outcomes and all(o.verdict.winners or o.kept_untuned for o in self.outcomes) else 1


def tune(
    workloads: list[Workload],
    block_sizes: list[int],
    backends: list[str],
    budget: float,
    seed: int = 0,
    tell: Tell = lambda *_: None,
    make_runner: MakeRunner | None = None,
    run: Run | None = None,
) -> Run:
    """Tune each workload in its share of `budget` seconds and store what the measurements support.

    Laying out the caches and compiling the kernels is not counted. What one problem leaves of its time the next one
    has. KeyboardInterrupt ends the run and keeps what was measured.
    `run` is filled in as results come, for a caller that wants them even if this function raises.
    """
    make_runner = make_runner or _bench
    if run is None:
        run = Run(machine.identity(workloads[0].device))
    left = budget
    try:
        usable, run.unusable = spaces.usable_backends(workloads[0].device, backends)
        for i, workload in enumerate(workloads if usable else ()):
            space = spaces.candidates(workload, block_sizes, usable)
            log = Log()
            run.outcomes.append(Outcome(space, log, decide(space, log)))
            if not space.candidates:
                continue
            say = _with_prefix(workload.kind, tell)
            say(LAYING_OUT, None, None)
            left -= search(space, make_runner(space, seed), log, left / (len(workloads) - i), say, seed=seed)
            _conclude(run.outcomes[-1])
            if log.ended == "interrupted":
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        run.interrupted = True
    return run


def _conclude(outcome: Outcome) -> None:
    """Decide, and store a choice for each block size that was decided."""
    outcome.verdict = decide(outcome.space, outcome.log)
    for block_size, picks in outcome.verdict.picks.items():
        problem = outcome.space.workload.problem(block_size)
        choices = {name: _tuned(outcome, block_size, pick) for name, pick in picks.items()}
        try:
            outcome.stored[block_size] = store.save(problem, choices)
        except OSError as error:
            outcome.not_stored = f"{type(error).__name__}: {error}"
            return


def _tuned(outcome: Outcome, block_size: int, pick: Pick) -> store.Tuned:
    workload = outcome.space.workload
    problem = workload.problem(block_size)
    untuned = outcome.space.untuned(block_size)
    return store.Tuned(
        config=pick.candidate.fields,
        seconds=outcome.log.seconds(pick.candidate) or 0.0,
        untuned=pick.candidate == untuned,
        gain=pick.gain.ratio,
        gain_low=pick.gain.low,
        rounds=pick.gain.rounds,
        default=str(untuned),
        num_seqs=problem.num_seqs,
        num_tokens=problem.num_tokens,
        max_seqlen_q=problem.max_seqlen_q,
        max_seqlen_k=problem.max_seqlen_k,
        context=workload.context,
    )


def _bench(space: Space, seed: int) -> Runner:
    from pagedkern.autotune.measure import Bench  # imports torch

    return Bench(space, seed)


def _with_prefix(kind: str, tell: Tell) -> Tell:
    return lambda step, best, seconds: tell(f"{kind}: {step}", best, seconds)
