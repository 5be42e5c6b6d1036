"""How a run is shown: tables for people (rich, 80 columns wide or more), a document for programs, progress."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING

from pagedkern.autotune.decision import ERROR_RATE, MIN_ROUNDS, compare
from pagedkern.autotune.search import COMPILING, LAYING_OUT
from pagedkern.autotune.store import MIN_GAIN, Stored
from pagedkern.autotune.store import device as machine
from pagedkern.autotune.tune import Outcome, Run

BEST, CHOSEN = "*", "+"

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from pagedkern.autotune.space import Candidate, Space


def show_run(console: Console, run: Run, every: bool = False) -> None:
    """Print the table of each problem and what became of it. `every`: also candidates that left early."""
    _say(console, machine.describe(run.device), "bold")
    for outcome in run.outcomes:
        _say(console, f"\n{_headline(outcome)}")
        if outcome.log.screened or outcome.log.left_out:
            console.print(_table(outcome, every))
        for line in _notes(outcome, every):
            _say(console, line, "bold" if line.startswith("Best") else "")
    _say(console, "")
    for line in [*(f"Not measured: {reason}." for reason in run.unusable), *_conclusion(run)]:
        _say(console, line, "bold red" if line.startswith("Not stored") else "")


def document(run: Run) -> dict[str, object]:
    """Everything that was measured and decided, as a JSON object."""
    return {
        "device": dict(run.device),
        "interrupted": run.interrupted,
        "unusable_backends": run.unusable,
        "problems": [_outcome_document(outcome) for outcome in run.outcomes],
    }


def plan_document(spaces: Iterable[Space], unusable: list[str]) -> dict[str, object]:
    """What a run would measure, as a JSON object."""
    problems = [
        {
            "workload": asdict(space.workload),
            "candidates": [_candidate_document(candidate) for candidate in space.candidates],
            "refused": list(space.refused),
        }
        for space in spaces
    ]
    return {"unusable_backends": unusable, "problems": problems}


def stored_document(stored: Iterable[Stored]) -> list[dict[str, object]]:
    """The contents of the store, as a list of JSON objects."""
    return [
        {
            "path": str(entry.path),
            "device": dict(entry.device),
            "problem": asdict(entry.key),
            "backend": entry.backend,
            "config": dict(entry.tuned.config),
            "gain": entry.tuned.gain,
            "gain_low": entry.tuned.gain_low,
            "when": entry.tuned.when,
            "state": entry.state,
        }
        for entry in stored
    ]


def show_plan(console: Console, spaces: Iterable[Space], unusable: list[str]) -> None:
    """Print what a run would measure."""
    for space in spaces:
        _say(console, f"{space.workload.kind.capitalize()}: {space.workload}")
        sizes: dict[str, list[int]] = {}
        for candidate in sorted(space.candidates, key=lambda c: c.block_size):
            sizes.setdefault(str(candidate), []).append(candidate.block_size)
        for name, at in sizes.items():
            _say(console, f"  {name} at block size {', '.join(map(str, at))}")
        for reason in space.refused:
            _say(console, f"  not {reason}")
    for reason in unusable:
        _say(console, f"Not measured: {reason}.")


def show_stored(console: Console, stored: list[Stored]) -> None:
    """Print the contents of the store."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("problem", "choice", "speed", "when", "state"):
        table.add_column(name, justify="right" if name == "speed" else "left", overflow="fold")
    for entry in stored:
        key = entry.key
        fields = ", ".join(f"{name}={value}" for name, value in entry.tuned.config.items())
        problem, choice = key.filename().removesuffix(".json"), f"{entry.backend}({fields})"
        cells = [problem, choice, f"{entry.tuned.gain:.2f}x", entry.tuned.when[:10], entry.state]
        table.add_row(*map(escape, cells))
    console.print(table)
    _say(
        console,
        'Speed is against the untuned choice at that block size. State "auto": backend="auto" uses it; "used": a call '
        'that names the backend does; "stale" (made with other kernels or library versions) and "another machine" are '
        "passed over.",
    )


class Progress:
    """A bar over the time budget with what happens now and the best so far; without a terminal, one line a stage.

    Time spent on preparations, which the budget does not count, is not counted here either. It is drawn between
    measurements only, by the thread that measures.
    """

    def __init__(self, console: Console, budget: float) -> None:
        from rich import progress

        self._console = console
        self._budget = budget
        self._stage = ""
        self._drawn = 0.0
        columns = ("{task.description}", progress.BarColumn(20), "{task.fields[left]}", "{task.fields[best]}")
        self._bar = progress.Progress(*columns, console=console, auto_refresh=False, transient=True)
        self._task = self._bar.add_task("", total=budget, left="", best="")
        self._begin = self._start = self._last = time.monotonic()
        self._preparing = True

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def tell(self, step: str, best: Candidate | None, seconds: float | None) -> None:
        """See `search.Tell`."""
        now = time.monotonic()
        if self._preparing:
            self._start += now - self._last
        self._last = now
        stage = step.partition(" - ")[0]
        self._preparing = stage.endswith((LAYING_OUT, COMPILING))
        if not self._console.is_terminal:
            if stage != self._stage:
                self._stage = stage
                note = ", not counted in the budget" if self._preparing else ""
                self._console.print(f"{now - self._begin:5.0f} s  {stage}{note}", highlight=False)
        elif now - self._drawn > 0.1:
            self._drawn = now
            left = f"{max(0.0, self._budget - now + self._start):.0f} s left" if not self._preparing else "not counted"
            so_far = f"best {_time(seconds)}, block {best.block_size}" if best and seconds else ""
            self._bar.update(
                self._task,
                completed=min(now - self._start, self._budget),
                description=step[:40],
                left=left,
                best=so_far,
            )
            self._bar.refresh()


def _say(console: Console, text: str, style: str = "") -> None:
    """Print plain text: no markup is read from it, for reasons and paths may hold brackets."""
    console.print(text, style=style or None, highlight=False, markup=False)


def _table(outcome: Outcome, every: bool) -> Table:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    decode = outcome.space.workload.kind == "decode"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("block", "time", "GB/s", "of read", "speed") if decode else ("block", "time", "GFLOP/s", "speed"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("choice", overflow="fold")  # the one that takes what room there is
    previous = None
    for candidate in _shown(outcome, every):
        if previous not in (None, candidate.block_size):
            table.add_section()
        block = "" if candidate.block_size == previous else str(candidate.block_size)
        previous = candidate.block_size
        mark, style = _mark(outcome, candidate)
        choice = f"{candidate}{_note(outcome, candidate)}"
        table.add_row(*map(escape, [block, *_figures(outcome, candidate), mark, choice]), style=style)
    return table


def _figures(outcome: Outcome, candidate: Candidate) -> list[str]:
    workload, seconds = outcome.space.workload, outcome.log.seconds(candidate)
    decode = workload.kind == "decode"
    if seconds is None:
        return ["-"] * (4 if decode else 3)
    rate = (workload.kv_bytes if decode else workload.flops) / seconds / 1e9
    share = outcome.share(candidate)
    ratio = compare(outcome.log, candidate, outcome.space.baseline, ERROR_RATE)
    yardstick = outcome.log.seconds(outcome.space.baseline)
    estimate = f"~{yardstick / seconds:.2g}x" if yardstick else "-"
    speed = f"{ratio.ratio:.2f}x" if ratio.rounds else estimate
    return [_time(seconds), _digits(rate), *(["-" if share is None else f"{share:.0%}"] if decode else []), speed]


def _mark(outcome: Outcome, candidate: Candidate) -> tuple[str, str | None]:
    """A sign that says whether a candidate was chosen, and the style of its row."""
    winner = outcome.verdict.winners.get(candidate.block_size)
    if outcome.verdict.best and candidate == outcome.verdict.best.candidate:
        return BEST, "bold green"
    if winner and candidate == winner.candidate:
        return CHOSEN, None
    return " ", "dim" if candidate in outcome.log.left_out else None


def _note(outcome: Outcome, candidate: Candidate) -> str:
    if candidate in outcome.log.left_out:
        return f": {outcome.log.left_out[candidate]}"
    return ", untuned" if candidate == outcome.space.untuned(candidate.block_size) else ""


def _shown(outcome: Outcome, every: bool) -> list[Candidate]:
    """The finalists; of a backend without any, and of what is wrong, the first; by block size."""
    left_out = outcome.log.left_out
    shown = [c for c in outcome.space.candidates if every or (c in outcome.log.screened and c not in left_out)]
    missing = {c.backend for c in outcome.space.candidates} - {c.backend for c in shown}
    for backend in missing:
        own = [c for c in outcome.space.candidates if c.backend == backend]
        shown.append(next((c for c in own if c in outcome.log.screened), own[0]))
    return sorted(shown, key=lambda c: c.block_size)


def _headline(outcome: Outcome) -> str:
    read = outcome.read_bandwidth
    plain = f" Plain read: {_digits(read / 1e9)} GB/s." if read and outcome.space.workload.kind == "decode" else ""
    return f"{outcome.space.workload.kind.capitalize()}: {outcome.space.workload}.{plain}"


def _notes(outcome: Outcome, every: bool) -> Iterator[str]:
    log, verdict, baseline = outcome.log, outcome.verdict, outcome.space.baseline if outcome.space.candidates else None
    shown = _shown(outcome, every)
    reasons = Counter(reason for c, reason in log.left_out.items() if c not in shown)
    if reasons:
        listed = "; ".join(f"{count} {reason}" for reason, count in reasons.items())
        yield f"Not listed ({sum(reasons.values())}; --all lists them): {listed}."
    for reason in outcome.space.refused:
        yield f"Not at {reason}."
    if baseline is None:
        yield "No backend of this machine computes this."
    elif outcome.kept_untuned:
        yield (
            f"Untuned stays, and nothing is stored: in this time the finals had {len(log.finals)} rounds of "
            f"{MIN_ROUNDS} needed. A longer --budget may find something faster."
        )
    elif verdict.best is None or verdict.gain is None:
        yield f"Not decided: the finals had {len(log.finals)} rounds of {MIN_ROUNDS} needed. Take a longer --budget."
    elif verdict.best.candidate == baseline:
        rivals = len({c for times in log.finals for c in times}) - 1
        yield (
            f"Untuned stays: in {verdict.gain.rounds} rounds none of {rivals} others was faster by {MIN_GAIN - 1:.0%} "
            f"with {1 - ERROR_RATE:.0%} confidence."
        )
    else:
        yield (
            f"Best: block size {verdict.best.candidate.block_size}, {verdict.best.candidate}: "
            f"{verdict.gain.ratio:.2f}x the speed of the untuned choice at block size {baseline.block_size} "
            f"(at least {verdict.gain.low:.2f}x with {1 - ERROR_RATE:.0%} confidence, {verdict.gain.rounds} rounds)."
        )


def _conclusion(run: Run) -> Iterator[str]:
    if any(outcome.log.finals for outcome in run.outcomes):
        yield (
            f"{BEST} best, {CHOSEN} chosen for its block size. Speed: the median over rounds of the ratio to the "
            "untuned choice at the usual block size."
        )
    yield from _one_block_size(run)
    folders = Counter(path.parent for outcome in run.outcomes for path in outcome.stored.values())
    for folder, count in folders.items():
        yield f'Stored (block sizes: {count}): backend="auto" uses this from now on for models of this shape. Files in'
        yield f"  {folder}"
    for outcome in run.outcomes:
        if outcome.not_stored:
            yield f"Not stored ({outcome.space.workload.kind}): {outcome.not_stored}"
    if run.interrupted:
        yield "Interrupted: what is shown is the best so far."


def _one_block_size(run: Run) -> Iterator[str]:
    """A cache has one block size for decode and prefill: what the best of each does to the other."""
    decided = [(o, o.verdict.best.candidate) for o in run.outcomes if o.verdict.best]
    moved = [(o, best) for o, best in decided if best.block_size != o.space.baseline.block_size]
    for outcome, best in moved:
        line = f"Block size {best.block_size} is best in {outcome.space.workload.kind}"
        for other, _ in decided:
            if other is not outcome and (pick := other.verdict.winners.get(best.block_size)):
                gain = compare(other.log, pick.candidate, other.space.baseline, ERROR_RATE)
                line += f"; there {other.space.workload.kind} runs at {gain.ratio:.2f}x"
        yield f"{line}."
    if moved:
        yield "Only the time of the kernels counts here, not the memory that a sequence's last block leaves unused."


def _outcome_document(outcome: Outcome) -> dict[str, object]:
    space, log, verdict = outcome.space, outcome.log, outcome.verdict
    workload = space.workload
    rows = []
    for c in space.candidates:
        seconds = log.seconds(c)
        winner = verdict.winners.get(c.block_size)
        ratio = compare(log, c, space.baseline, ERROR_RATE)
        rows.append(
            {
                **_candidate_document(c),
                "seconds": seconds,
                "kv_bytes_per_second": workload.kv_bytes / seconds if seconds else None,
                "flops_per_second": workload.flops / seconds if seconds else None,
                "share_of_read_bandwidth": outcome.share(c),
                "speed": ratio.ratio if ratio.rounds else None,
                "untuned": c == space.untuned(c.block_size),
                "chosen": winner is not None and winner.candidate == c,
                "left_out": log.left_out.get(c),
                "rounds": [times.get(c) for times in log.finals],
            }
        )
    best = verdict.best and {
        **_candidate_document(verdict.best.candidate),
        "gain": verdict.gain and verdict.gain.ratio,
        "gain_low": verdict.gain and verdict.gain.low,
        "confidence": 1 - ERROR_RATE,
    }
    return {
        "workload": {**asdict(workload), "seq_lens": workload.seq_lens},
        "baseline": _candidate_document(space.baseline) if space.candidates else None,
        "read_bytes_per_second": log.reads,
        "rows": rows,
        "refused": list(space.refused),
        "best": best,
        "stored": {block_size: str(path) for block_size, path in outcome.stored.items()},
        "not_stored": outcome.not_stored or None,
        "ended": log.ended or "complete",
    }


def _candidate_document(candidate: Candidate) -> dict[str, object]:
    return {"block_size": candidate.block_size, "backend": candidate.backend, "config": candidate.fields}


def _time(seconds: float) -> str:
    return f"{_digits(seconds * 1e3)} ms" if seconds >= 1e-3 else f"{_digits(seconds * 1e6)} µs"


def _digits(value: float) -> str:
    """Three of them."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
