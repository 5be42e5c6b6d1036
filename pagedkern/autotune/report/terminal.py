"""Results of a run, and what is stored, as tables for a console of any width."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from pagedkern.autotune.decision import ERROR_RATE, MIN_ROUNDS, compare
from pagedkern.autotune.report.console import Column, TableRow, say, show_table
from pagedkern.autotune.report.formats import bar_text, digits, time_text
from pagedkern.autotune.report.serving import show_served
from pagedkern.autotune.runs import Outcome, TuningRun
from pagedkern.autotune.store import MIN_GAIN, StoreEntry
from pagedkern.autotune.store import device as machine

BEST, CHOSEN = "*", "+"

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from pagedkern.autotune.profile import Profile
    from pagedkern.autotune.space import Candidate, Space


def show_run(console: Console, run: TuningRun, every: bool = False) -> None:
    """Print the table of each problem and what became of it. `every`: also candidates that left early."""
    say(console, machine.describe(run.device), "bold")
    for outcome in run.outcomes:
        say(console, f"\n{_headline(outcome)}")
        if outcome.log.screened or outcome.log.left_out:
            _table(console, outcome, every)
        for line in _notes(outcome, every):
            say(console, line, "bold" if line.startswith("Best") else "")
    if run.served:
        say(console, "")
        show_served(console, run.served)
    say(console, "")
    for line in [*(f"Not measured: {reason}." for reason in run.unusable), *_conclusion(run)]:
        say(console, line, "bold red" if line.startswith(("Not stored", "Ended early")) else "")


def show_plan(console: Console, spaces: Iterable[Space], unusable: list[str]) -> None:
    """Print what a run would measure."""
    for space in spaces:
        say(console, f"{space.workload.kind.capitalize()}: {space.workload}")
        sizes: dict[str, list[int]] = {}
        for candidate in sorted(space.candidates, key=lambda c: c.block_size):
            sizes.setdefault(str(candidate), []).append(candidate.block_size)
        for name, at in sizes.items():
            say(console, f"  {name} at block size {', '.join(map(str, at))}")
        for reason in space.refused:
            say(console, f"  not {reason}")
    for reason in unusable:
        say(console, f"Not measured: {reason}.")


def show_stored(console: Console, stored: list[StoreEntry]) -> None:
    """Print the contents of the store."""
    columns = [Column("problem", folds=True), Column("choice", folds=True), Column("speed", right=True)]
    rows = []
    for entry in sorted(stored, key=lambda e: (e.path.parent, e.path.name.partition("-b")[0], e.key.block_size)):
        fields = ", ".join(f"{name}={value}" for name, value in entry.tuned.config.items())
        problem, choice = entry.key.filename().removesuffix(".json"), f"{entry.backend}({fields})"
        rows.append(TableRow([problem, choice, f"{entry.tuned.gain:.2f}x", entry.tuned.when[:10], entry.state]))
    show_table(console, [*columns, Column("when"), Column("state", folds=True)], rows)
    say(
        console,
        'Speed is against the untuned choice at that block size. State "auto": backend="auto" uses it; "used": a call '
        'that names the backend does; "stale" (made with other kernels or library versions) and "other threads" (with '
        'more or fewer of them on this machine): used for want of others, if the kernels are the same; "another '
        'machine": passed over.',
    )


def show_rates(console: Console, profiles: list[tuple[str, Path, Profile]]) -> None:
    """Print profiles with their states: see `recommend.known`."""
    columns = [Column("rates for", folds=True), Column("machine", folds=True), Column("GB/s", right=True)]
    rows = []
    for state, _, profile in profiles:
        fastest = max(profile.rates.speeds.values(), key=lambda speed: speed.kv_bytes_per_second)
        rate = f"{digits(fastest.kv_bytes_per_second / 1e9)}{bar_text(fastest.kv_error)}"
        rows.append(TableRow([profile.shape.name(), machine.describe(profile.device), rate, profile.when[:10], state]))
    show_table(console, [*columns, Column("when"), Column("state", folds=True)], rows)
    say(
        console,
        "GB/s: of decode at the fastest block size, ± what the measurements leave open beside the usual block size: "
        'the usual one is taken unless another is better beyond that. State "used": for a model of that shape on this '
        'machine, and for want of one for others; "other threads": measured on this machine with more or fewer of '
        'them, and "stale": with other kernels or library versions, both for want of those; "imported", "shipped": '
        "for want of measurements of this machine, if it is the one most like it.",
    )


def _table(console: Console, outcome: Outcome, every: bool) -> None:
    decode = outcome.space.workload.kind == "decode"
    names = ("time", "GB/s", "of read", "speed") if decode else ("time", "GFLOP/s", "speed")
    columns = [Column("block", right=True, once=True), *(Column(name, right=True) for name in names)]
    rows = []
    previous = None
    for candidate in _shown(outcome, every):
        mark, style = _mark(outcome, candidate)
        cells = [str(candidate.block_size), *_figures(outcome, candidate), mark]
        begins = previous != candidate.block_size
        previous = candidate.block_size
        rows.append(TableRow([*cells, f"{candidate}{_note(outcome, candidate)}"], style, begins))
    show_table(console, [*columns, Column(""), Column("choice", folds=True)], rows)


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
    return [time_text(seconds), digits(rate), *(["-" if share is None else f"{share:.0%}"] if decode else []), speed]


def _mark(outcome: Outcome, candidate: Candidate) -> tuple[str, str]:
    """A sign that says whether a candidate was chosen, and the style of its row."""
    winner = outcome.verdict.winners.get(candidate.block_size)
    if outcome.verdict.best and candidate == outcome.verdict.best.candidate:
        return BEST, "bold green"
    if winner and candidate == winner.candidate:
        return CHOSEN, ""
    return "", "dim" if candidate in outcome.log.left_out else ""


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
    plain = f" Plain read: {digits(read / 1e9)} GB/s." if read and outcome.space.workload.kind == "decode" else ""
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
        yield _untuned_stays(verdict.gain.rounds, rivals)
    else:
        yield (
            f"Best: block size {verdict.best.candidate.block_size}, {verdict.best.candidate}: "
            f"{verdict.gain.ratio:.2f}x the speed of the untuned choice at block size {baseline.block_size} "
            f"(at least {verdict.gain.low:.2f}x with {1 - ERROR_RATE:.0%} confidence, {verdict.gain.rounds} rounds)."
        )


def _untuned_stays(rounds: int, rivals: int) -> str:
    if not rivals:
        return f"Untuned stays: in the finals ({rounds} rounds) it was alone. A longer --budget lets others in."
    who = "the other" if rivals == 1 else f"none of {rivals} others"
    was = "was not" if rivals == 1 else "was"
    return (
        f"Untuned stays: in {rounds} rounds {who} {was} faster by {MIN_GAIN - 1:.0%} with {1 - ERROR_RATE:.0%} "
        "confidence."
    )


def _conclusion(run: TuningRun) -> Iterator[str]:
    if any(outcome.log.finals for outcome in run.outcomes):
        yield (
            f"{BEST} best, {CHOSEN} chosen for its block size. Speed: the median over rounds of the ratio to the "
            "untuned choice at the usual block size."
        )
    yield from _one_block_size(run)
    folders = Counter(path.parent for outcome in run.outcomes for path in outcome.stored.values())
    for folder, count in folders.items():
        what = "1 choice" if count == 1 else f"{count} choices"
        yield f'Stored ({what}): backend="auto" uses this from now on for models of this shape. Files in'
        yield f"  {folder}"
    for outcome in run.outcomes:
        if outcome.not_stored:
            yield f"Not stored ({outcome.space.workload.kind}): {outcome.not_stored}"
    if run.records is not None:
        cut = f"Measurements are in, until no more could be written ({run.records_cut}):"
        yield cut if run.records_cut else "Every measurement is in (replay, report and export read it)"
        yield f"  {run.records}"
    if machine.is_busy(run.load):
        yield (
            f"Others used this machine (load {run.load} on {machine.cpu_threads()} threads): measure again when it is "
            "quiet. Comparisons are of runs in turn, and hold better than the times."
        )
    again = " Run again with --resume to measure the rest." if run.records is not None else ""
    for failure in run.failures:
        yield f"Ended early: {failure}. What was decided until then was kept.{again}"
    if run.interrupted:
        yield f"Interrupted: what is shown is the best so far.{again}"


def _name(outcome: Outcome, several: bool) -> str:
    """A problem in a word, with its window if there are several."""
    window = outcome.space.workload.sliding_window
    where = "" if not several else " without a window" if window is None else f" with a window of {window:,}"
    return f"{outcome.space.workload.kind}{where}"


def _one_block_size(run: TuningRun) -> Iterator[str]:
    """A cache has one block size for decode and prefill: what the best of each does to the other."""
    decided = [(o, o.verdict.best.candidate) for o in run.outcomes if o.verdict.best]
    moved = [(o, best) for o, best in decided if best.block_size != o.space.baseline.block_size]
    several = len({o.space.workload.sliding_window for o in run.outcomes}) > 1
    for outcome, best in moved:
        line = f"Block size {best.block_size} is best in {_name(outcome, several)}"
        for other, _ in decided:
            if other is not outcome and (pick := other.verdict.winners.get(best.block_size)):
                gain = compare(other.log, pick.candidate, other.space.baseline, ERROR_RATE)
                line += f"; there {_name(other, several)} runs at {gain.ratio:.2f}x"
        yield f"{line}."
    if moved:
        yield "Here only the time of the kernels counts; the table of workloads weighs memory and prefixes too."
