"""A report as one HTML page that needs no other file, and its picture as PNG."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from statistics import median

from pagedkern.autotune.advice import advise
from pagedkern.autotune.decision import decide
from pagedkern.autotune.log import Log
from pagedkern.autotune.objective import Score, best, score
from pagedkern.autotune.profile import ModelShape
from pagedkern.autotune.rates import Rates
from pagedkern.autotune.rating import rates_of
from pagedkern.autotune.records import Recording
from pagedkern.autotune.report import charts
from pagedkern.autotune.report.formats import digits, time_text
from pagedkern.autotune.scheduling import advise_scheduler
from pagedkern.autotune.space import Space
from pagedkern.autotune.store import device as machine
from pagedkern.autotune.workloads import Model, Traffic

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #37352f; max-width: 1100px; margin: 2.5em auto; padding: 0 1em; }
h1 { font-size: 1.5em; margin-bottom: 0; } h2 { font-size: 1.1em; margin-top: 2em; } .faint { color: #787774; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } .wide { overflow-x: auto; }
td, th { padding: .25em .9em; text-align: right; border-bottom: 1px solid #e9e9e7; font-weight: normal; }
th { color: #787774; } td:first-child, th:first-child { text-align: left; padding-left: 0; }
.kernels td:nth-child(2), .kernels th:nth-child(2) { text-align: left; }
tr.best td { font-weight: bold; color: #b35309; } svg { width: 100%; height: auto; } p { max-width: 46em; }
"""

COLUMNS = ("block size", "sequences", "waste", "step", "attention", "request", "cached", "tokens/s", "±", "of best")


def write(recorded: Recording, traffic: Traffic, model: Model, memory: int, path: Path) -> tuple[Path, Path]:
    """Write `path` with the endings .html and .png, and return the two. Raises `OSError`."""
    verdicts = [decide(space, log) for space, log in zip(recorded.spaces, recorded.logs, strict=True)]
    picks = [{b: pick.candidate for b, pick in verdict.winners.items()} for verdict in verdicts]
    rates = rates_of(recorded.spaces, recorded.logs, picks)
    scores = score(traffic, model, rates, memory) if rates else []
    title = f"{machine.describe(recorded.device)}: {traffic.name}, {model.name}, {memory / 1e9:.0f} GB of cache"
    figure = charts.draw(recorded, scores, title)
    html, png = path.with_name(path.name + ".html"), path.with_name(path.name + ".png")
    charts.png(figure, png)
    html.write_text(_page(recorded, traffic, model, memory, rates, scores, charts.svg(figure)), encoding="utf-8")
    return html, png


def _page(
    recorded: Recording, traffic: Traffic, model: Model, memory: int, rates: Rates | None, scores: Sequence[Score],
    picture: str,
) -> str:  # fmt: skip
    advice = advise(scores)
    chosen = advice.score if advice else None
    answer, why = "Nothing was decided: measure for longer.", ""
    if advice is not None:
        taken = advice.score
        answer = f"Block size {taken.block_size}: {digits(taken.tokens_per_second)} output tokens per second"
        gain = taken.tokens_per_second / advice.usual.tokens_per_second - 1
        answer += f", {gain:.1%} more than with {advice.usual.block_size}." if taken != advice.usual else "."
        why = f"<p>{escape(_sentence(str(advice)))} {escape(_limits(traffic, model, rates, taken))}</p>"
    parts = [
        f"<h1>{escape(answer)}</h1>{why}",
        f"<p class=faint>{escape(machine.describe(recorded.device))}, measured {escape(recorded.when[:10])}.<br>"
        f"{escape(traffic.name)}: {escape(str(traffic))}. {escape(traffic.source)}"
        f"{' (' + escape(traffic.licence) + ')' if traffic.licence else ''}.<br>"
        f"{escape(str(model))}; {memory / 1e9:.1f} GB of cache.{escape(_other_shape(recorded, model))}</p>",
        picture,
        "<h2>What each block size comes to</h2>",
        _table(
            COLUMNS,
            [(_score_cells(s, best(scores)), s == chosen) for s in scores],
        ),
        "<p>A larger block wastes more memory and shares less of a prefix, a smaller one may be slower to read. "
        "<i>sequences</i> fit the memory; <i>waste</i> is the share of their slots that hold no token; a <i>step</i> "
        "computes one token for each, <i>attention</i> in it; a <i>request</i> costs its prompt, copies and swaps, "
        "but for <i>cached</i> tokens. ± is what the measurements leave open beside the usual block size: the advice "
        "leaves it only for what is better beyond that.</p>",
    ]
    for space, log in zip(recorded.spaces, recorded.logs, strict=True):
        parts += _kernels(space, log)
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>pagedkern: {escape(traffic.name)}</title><style>{STYLE}</style>\n" + "\n".join(parts) + "\n</html>\n"
    )


def _kernels(space: Space, log: Log) -> list[str]:
    """What was chosen for one problem at each block size."""
    workload, verdict = space.workload, decide(space, log)
    decode = workload.kind == "decode"
    rows = []
    for block_size, pick in sorted(verdict.winners.items()):
        seconds = log.seconds(pick.candidate) or 0.0
        rate = (workload.kv_bytes if decode else workload.flops) / seconds / 1e9
        row = (str(block_size), str(pick.candidate), time_text(seconds), digits(rate), f"{pick.gain.ratio:.2f}x")
        rows.append((row, pick == verdict.best))
    unit = "GB/s" if decode else "GFLOP/s"
    read = f" Plain read: {digits(median(log.reads) / 1e9)} GB/s." if log.reads else ""
    window = f", window {w:,}" if (w := workload.sliding_window) else ""
    return [
        f"<h2>{escape(workload.kind.capitalize())}{window}: the kernels chosen</h2>",
        f"<p class=faint>{escape(str(workload))}; {len(log.finals)} rounds.{read}</p>",
        _table(("block size", "backend and configuration", "time", unit, "against untuned"), rows, "kernels"),
        *_left_out(space, log),
    ]


def _other_shape(recorded: Recording, model: Model) -> str:
    shape = (
        ModelShape.of_problems([space.workload for space in recorded.spaces])
        if recorded.spaces
        else ModelShape.of(model)
    )
    return "" if shape == ModelShape.of(model) else f" The rates are of another shape, {shape.name()}."


def _score_cells(s: Score, most: Score | None) -> tuple[str, ...]:
    times = (time_text(t) for t in (s.step_seconds, s.attention_seconds, s.request_seconds))
    head = (str(s.block_size), digits(s.concurrency), f"{s.waste:.1%}")
    share = f"{s.tokens_per_second / most.tokens_per_second:.2%}" if most else ""
    return (*head, *times, f"{s.cached_tokens:,.0f}", digits(s.tokens_per_second), f"{s.error:.1%}", share)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _limits(traffic: Traffic, model: Model, rates: Rates | None, score: Score) -> str:
    """What to tell a scheduler."""
    if rates is None:
        return ""
    found = advise_scheduler(traffic, model, rates, score)
    return f"For the scheduler: token_budget={found.token_budget}, max_num_seqs={found.max_num_seqs}."


def _left_out(space: Space, log: Log) -> list[str]:
    """A line on the backends of which nothing reached the finals."""
    raced = {c.backend for times in log.finals for c in times}
    why = {c.backend: reason for c, reason in reversed(log.left_out.items()) if c.backend not in raced}
    text = "; ".join(
        f"{name}: {why[name]}" for name in dict.fromkeys(c.backend for c in space.candidates) if name in why
    )
    return [f"<p class=faint>Not in the finals: {escape(text)}.</p>"] if text else []


def _table(head: Iterable[str], rows: Iterable[tuple[Sequence[str], bool]], kind: str = "scores") -> str:
    lines = [f"<div class='wide {kind}'><table><tr>", *(f"<th>{escape(name)}</th>" for name in head), "</tr>"]
    for cells, marked in rows:
        lines.append("<tr class=best>" if marked else "<tr>")
        lines += [f"<td>{escape(cell)}</td>" for cell in cells]
        lines.append("</tr>")
    return "".join([*lines, "</table></div>"])
