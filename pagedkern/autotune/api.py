"""`tune`: the autotuner as a Python call. The command line does the same by `plan` and `carry_out`."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pagedkern.autotune import arguments, workloads
from pagedkern.autotune import space as spaces
from pagedkern.autotune.recommend import Recommendation, cache_size
from pagedkern.autotune.runs import BUDGET, Order, TuningRun
from pagedkern.autotune.space import Workload
from pagedkern.autotune.store import device as machine
from pagedkern.autotune.store import files
from pagedkern.autotune.workloads import Model, Traffic
from pagedkern.backends.base import ITEMSIZE
from pagedkern.errors import InvalidArgument

if TYPE_CHECKING:
    from pagedkern.autotune.interrupts import Interrupts
    from pagedkern.autotune.runner import Tell
    from pagedkern.autotune.runs import MakeRunner, Outcome

Named = str | Path | Traffic  # a workload


@dataclass(frozen=True, slots=True)
class TunedChoice:
    """The kernel to use at one block size, as `backend="auto"` will take it."""

    kind: str  # "decode" or "prefill"
    block_size: int  # tokens
    sliding_window: int | None  # tokens seen, of the layers that it is for
    backend: str
    config: Mapping[str, object]  # fields of the backend's configuration
    seconds: float  # median of a call
    gain: float  # how many times as fast as the untuned choice at that block size
    gain_low: float  # lower confidence bound of that
    path: Path | None  # the file where it is stored; None if it could not be


@dataclass(frozen=True, slots=True)
class TuneResult:
    """Result of `tune`: what was stored, and what it advises."""

    device: str  # the machine, in words
    choices: tuple[TunedChoice, ...]  # of each problem and block size that was decided
    recommendations: Mapping[str, Recommendation]  # for each workload, by its name; see `recommend`
    records: Path | None  # where every measurement is, for `replay`, `report`, `export` and `resume`
    reasons: tuple[str, ...]  # why something was not measured, not decided or not stored
    interrupted: bool  # whether a signal ended it early
    complete: bool  # whether every problem was decided and stored


def tune(
    workload: Named | Sequence[Named] | None = None,
    *,
    model: str | Path | Model | None = None,
    memory: int | str | None = None,
    device: str | None = None,
    backends: str | Iterable[str] | None = None,
    block_sizes: int | str | Iterable[int] | None = None,
    budget: float | str = BUDGET,
    seed: int = 0,
    resume: bool = False,
    records: str | Path | None = None,
    quiet: bool = False,
) -> TuneResult:
    """Measure this machine and store the best kernels, as `python -m pagedkern.autotune` does.

    Candidates run in a process of its own, so that a script needs no guard around its main part; what crashes or hangs
    there costs a candidate. Ctrl-C ends the measurements, and what was found until then is stored and returned. SIGTERM
    and SIGHUP do, too; then they end the process as they would have. In other threads than the main one signals are
    left alone.

    Args:
        workload: a preset, a file or a `Traffic`, or several of these, to give recommendations for. None: all presets.
        model: as in `recommend`; its shape and dtypes are what is measured. None: the workload's, else llama-3-8b.
        memory: of the cache, in bytes or as "24GB", for the recommendations. None: by what is free.
        device: "cpu" or "cuda". None: a GPU if there is one.
        backends: names of those to measure. None: all that this machine has.
        block_sizes: tokens. None: 8, 16, 32, 64, 128 and 256.
        budget: wall time for all of it, in seconds or as "90s" or "5m".
        seed: of the data, and of the order of runs.
        resume: go on with what the last run of the same problems had measured.
        records: a file for the measurements. None: one in the cache folder.
        quiet: print no progress on standard error.

    Raises:
        InvalidArgument: an argument is not what it should be, or names what there is not; or the problem does not fit
            into the free memory.
        ImportError: torch, or what the store needs, is not installed.
    """
    planned = plan(
        workload, model=model, memory=memory, device=device, backends=backends, block_sizes=block_sizes, budget=budget,
        seed=seed, resume=resume, records=records,
    )  # fmt: skip
    from pagedkern.autotune.interrupts import Interrupts

    with ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts())
        tell = None if arguments.flag("quiet", quiet) else _progress(stack, planned)
        run = measure(planned, tell, interrupts)
    interrupts.send_again()
    return result_of(run)


@dataclass(frozen=True, slots=True)
class TunePlan:
    """What is to be measured, and what for; all arguments checked."""

    order: Order
    traffics: tuple[Traffic, ...]
    model: Model
    memory: int | None  # bytes of the cache; None: by what is free
    resume: bool
    records: Path | None
    begun: float  # when the budget began, by `time.monotonic`


class DoesNotFit(InvalidArgument):
    """A problem that needs more memory than is free."""

    def __init__(self, problem: Workload, block_sizes: Sequence[int], needed: int, free: int) -> None:
        self.problem = problem
        self.what = (
            f"{problem.kind}: {problem.num_seqs:,} sequences of up to {problem.context:,} tokens, laid out at "
            f"{len(block_sizes)} block sizes, need {needed / 1e9:,.1f} GB of memory, {free / 1e9:,.1f} GB are free"
        )
        super().__init__(f"block_sizes: {self.what}: expected fewer or smaller ones")


def plan(
    workload: Named | Sequence[Named] | None = None,
    *,
    model: str | Path | Model | None = None,
    memory: int | str | None = None,
    device: str | None = None,
    backends: str | Iterable[str] | None = None,
    block_sizes: int | str | Iterable[int] | None = None,
    budget: float | str = BUDGET,
    seed: int = 0,
    resume: bool = False,
    records: str | Path | None = None,
    exhaustive: bool = False,
    shape: Mapping[str, int | str | None] | None = None,
    batch: Mapping[str, int | None] | None = None,
    begun: float | None = None,
) -> TunePlan:
    """Check the arguments of `tune`, and those that others have besides: `shape` changes the model's (num_heads,
    num_kv_heads, head_dim, dtype, kv_dtype), `batch` sizes the problems (num_seqs, context, prompt), `begun` is when
    the budget began, by `time.monotonic` (None: now).

    Raises:
        InvalidArgument: as `tune`; `DoesNotFit` if there is too little memory.
    """
    begun, kind = time.monotonic() if begun is None else begun, _device(device)  # which imports torch
    traffics = [workloads.load(one) for one in _named(workload)]
    base = _base(model, traffics if workload else ())
    served = _changed(base, shape or {})
    sizes = list(spaces.BLOCK_SIZES) if block_sizes is None else arguments.block_sizes("block_sizes", block_sizes)
    names = [] if backends is None else arguments.backends("backends", backends)
    wall, start = arguments.seconds("budget", budget), arguments.whole("seed", seed)
    again, size = arguments.flag("resume", resume), None if memory is None else cache_size(memory, served)
    problems = spaces.problems_of(served, kind, num_block_sizes=len(sizes), **(batch or {}))
    for problem in problems:
        needed, free = spaces.memory(problem, sizes), machine.free_memory(kind)
        if needed > free:
            raise DoesNotFit(problem, sizes, needed, free)
    order = Order(problems, sizes, names, wall, start, exhaustive)
    same = tuple(replace(t, model=None) if model or t.model == base else t for t in traffics)
    journal = journal_of(order) if records is None else arguments.path("records", records)
    return TunePlan(order, same, served, size, again, journal, begun)


def measure(
    planned: TunePlan,
    tell: Tell | None = None,
    interrupts: Interrupts | None = None,
    make_runner: MakeRunner | None = None,
) -> TuningRun:
    """Carry out a plan, and rate its workloads."""
    from pagedkern.autotune.runs import carry_out, serve, serving_seconds

    order, traffics, model = planned.order, planned.traffics, planned.model

    def memory(served: Model) -> int:
        return planned.memory or cache_memory(served, order.workloads[0].device)

    run = carry_out(
        order,
        journal=planned.records,
        resume=planned.resume,
        tell=tell or (lambda *_: None),
        make_runner=make_runner,
        interrupts=interrupts,
        begun=planned.begun,
        reserve=serving_seconds(order, traffics, model, memory(traffics[0].model or model)),
    )
    serve(run, traffics, model, memory)
    return run


def result_of(run: TuningRun) -> TuneResult:
    """A run in short."""
    choices = tuple(choice for outcome in run.outcomes for choice in _choices(outcome))
    reasons = [f"not measured: {reason}" for reason in run.unusable]
    for outcome in run.outcomes:
        kind = outcome.space.workload.kind
        reasons += [f"{kind}: not at {reason}" for reason in outcome.space.refused]
        if outcome.kept_untuned or not outcome.verdict.winners:
            reasons.append(f"{kind}: {outcome.why_undecided}")
        if outcome.not_stored:
            reasons.append(f"{kind}: not stored: {outcome.not_stored}")
    reasons += run.failures
    if run.records_cut:
        reasons.append(f"records: no more could be written: {run.records_cut}")
    found = {one.traffic.name: one.advice for one in run.served}
    complete = run.exit_code == 0 and all(o.verdict.winners for o in run.outcomes)
    where = machine.describe(run.device)
    return TuneResult(where, choices, found, run.records, tuple(reasons), run.interrupted, complete)


def cache_memory(model: Model, device: str) -> int:
    """What a cache may take when nobody says: beside the weights on a GPU, half of what is free on a CPU."""
    free = machine.free_memory(device)
    return max(free // 2 if device == "cpu" else free * 9 // 10 - model.weight_bytes, 16 * model.token_bytes)


def journal_of(order: Order) -> Path | None:
    """Where a run of this order is written down: a rerun finds it there."""
    folder = files.runs()
    if folder is None:
        return None
    problems = [asdict(w) for w in order.workloads]
    text = json.dumps([problems, list(order.block_sizes), list(order.backends), order.exhaustive])
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    device = machine.slug_of(machine.identity(order.workloads[0].device))
    return folder / f"{device}-{digest}.jsonl"


def _choices(outcome: Outcome) -> Iterable[TunedChoice]:
    workload = outcome.space.workload
    for block_size, pick in sorted(outcome.verdict.winners.items()):
        candidate = pick.candidate
        yield TunedChoice(
            workload.kind, block_size, workload.sliding_window, candidate.backend, candidate.fields,
            outcome.log.seconds(candidate) or 0.0, pick.gain.ratio, pick.gain.low, outcome.stored.get(block_size),
        )  # fmt: skip


def _named(workload: Named | Sequence[Named] | None) -> Sequence[Named]:
    if isinstance(workload, list | tuple | None):
        return workload or workloads.names()
    return [workload]  # type: ignore[list-item]  # one, or what `load` refuses


def _base(model: str | Path | Model | None, traffics: Sequence[Traffic]) -> Model:
    """The model that is named, or else that of the first workload whose file names one."""
    if model is not None:
        return workloads.model(model)
    return next((traffic.model for traffic in traffics if traffic.model), None) or workloads.default_model()


def _changed(base: Model, shape: Mapping[str, int | str | None]) -> Model:
    """The model to serve, in the dtype and with the heads that are measured."""
    changes = {name: value for name, value in shape.items() if value is not None}
    made = replace(base, **changes)  # type: ignore[arg-type]
    if made.num_heads % made.num_kv_heads:
        raise InvalidArgument(f"heads: got {made.num_heads}, expected a multiple of the KV heads, {made.num_kv_heads}")
    return replace(made, weight_bytes=base.num_weights * ITEMSIZE[made.dtype]) if "dtype" in changes else made


def _device(device: str | None) -> str:
    import torch

    if device not in (None, "cpu", "cuda"):
        raise InvalidArgument(f"device: got {device!r}, expected 'cpu' or 'cuda'")
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidArgument("device: got 'cuda', expected 'cpu': torch finds no GPU")
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def _progress(stack: ExitStack, planned: TunePlan) -> Tell | None:
    """Progress on standard error, if there is what draws it."""
    from pagedkern.autotune.report import console, progress

    try:
        bar = progress.Progress(console.console(error=True), planned.order.budget, begun=planned.begun)
        return stack.enter_context(bar).tell
    except ImportError:
        return None
