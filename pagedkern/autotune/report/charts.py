"""The pictures of a report, by matplotlib: five panels of one figure."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from pagedkern.autotune.advice import advise
from pagedkern.autotune.objective import USUAL_BLOCK_SIZE, Score
from pagedkern.autotune.records import Recording
from pagedkern.autotune.space import Candidate, Space

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pagedkern.autotune.log import Log

COLOURS = ("#0b6e99", "#d9730d", "#448361", "#9065b0", "#c4554d", "#787774")  # told apart by the colour-blind, too
INK, FAINT, GOOD = "#37352f", "#d3d1cb", "#d9730d"


def draw(recorded: Recording, scores: Sequence[Score], title: str) -> Figure:
    """The figure of a run: what was measured, and what it comes to for a workload."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {"font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold", "axes.edgecolor": FAINT,
             "axes.labelcolor": INK, "text.color": INK, "xtick.color": INK, "ytick.color": INK,
             "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}  # fmt: skip
    with rc_context(style):
        figure = Figure(figsize=(13, 7.8), layout="constrained")
        figure.get_layout_engine().set(h_pad=0.12, w_pad=0.08)  # type: ignore[union-attr,call-arg]
        figure.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
        axes = figure.subplots(2, 3)
        decode = next((i for i, s in enumerate(recorded.spaces) if s.workload.kind == "decode"), None)
        _throughput(axes[0, 0], scores)
        _terms(axes[0, 1], scores)
        _pareto(axes[0, 2], scores)
        if decode is not None:
            space, log = recorded.spaces[decode], recorded.logs[decode]
            colours = _colours(space)
            _share(axes[1, 0], space, log, colours)
            _times(axes[1, 1], space, log, colours)
            _lengths(axes[1, 2], space, log, colours)
        for axis in axes.flat:
            axis.grid(axis="y", color=FAINT, linewidth=0.5)
            axis.set_axisbelow(True)
    return figure


def png(figure: Figure, path: Path) -> None:
    figure.savefig(path, format="png", dpi=120, facecolor="white")


def svg(figure: Figure) -> str:
    """The figure as an element for a page."""
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context({"svg.hashsalt": "pagedkern"}):  # equal records give equal pages
        figure.savefig(text, format="svg", facecolor="white", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def _throughput(axis: Axes, scores: Sequence[Score]) -> None:
    axis.set_title("Output tokens per second", loc="left")
    if not scores:
        return _empty(axis, "nothing fits the memory")
    chosen = _taken(scores)
    values = [s.tokens_per_second for s in scores]
    colours = [GOOD if s == chosen else COLOURS[0] for s in scores]
    bars = axis.bar(range(len(scores)), values, color=colours, width=0.7)
    errors = [[s.tokens_per_second - s.low for s in scores], [s.high - s.tokens_per_second for s in scores]]
    axis.errorbar(range(len(scores)), values, errors, fmt="none", ecolor=INK, capsize=3, linewidth=0.8)
    axis.bar_label(bars, labels=[f"{v:,.4g}" if v < 1000 else f"{v:,.0f}" for v in values], padding=2, fontsize=8)
    axis.set_xticks(range(len(scores)), [str(s.block_size) for s in scores])
    low, high = min(s.low for s in scores), max(s.high for s in scores)
    axis.set_ylim(max(0.0, low - 2 * (high - low) - 0.01 * high), high + 0.35 * (high - low) + 0.005 * high)
    axis.set_xlabel("block size (tokens); the axis does not begin at 0")
    return None


def _taken(scores: Sequence[Score]) -> Score | None:
    advice = advise(scores)
    return advice.score if advice else None


def _terms(axis: Axes, scores: Sequence[Score]) -> None:
    base = min(scores, key=lambda s: abs(s.block_size - USUAL_BLOCK_SIZE), default=None)
    axis.set_title(f"Against block size {base.block_size if base else USUAL_BLOCK_SIZE}", loc="left")
    if base is None:
        return _empty(axis, "nothing fits the memory")
    x = range(len(scores))
    lines = (
        ("sequences in memory", "o", [s.concurrency / base.concurrency for s in scores]),
        ("attention, for each sequence", "s", [_each(s) / _each(base) for s in scores]),
        ("cost of a request", "^", [s.request_seconds / base.request_seconds for s in scores]),
    )
    for (label, marker, values), colour in zip(lines, COLOURS, strict=False):
        axis.plot(x, [100 * v for v in values], marker=marker, color=colour, label=label)
    axis.axhline(100, color=INK, linewidth=0.8, linestyle=":")
    axis.set_xticks(x, [str(s.block_size) for s in scores])
    axis.set_xlabel("block size (tokens)")
    axis.set_ylabel("%")
    axis.legend(fontsize=8)
    return None


def _each(s: Score) -> float:
    return s.attention_seconds / s.concurrency


def _pareto(axis: Axes, scores: Sequence[Score]) -> None:
    axis.set_title("Pareto front: throughput and latency", loc="left")
    if not scores:
        return _empty(axis, "nothing fits the memory")
    unit, factor = ("s", 1.0) if scores[0].step_seconds >= 1 else ("ms", 1e3)
    points = [(s.tokens_per_second, factor * s.step_seconds, s) for s in scores]
    front = [p for p in points if not any(q[0] >= p[0] and q[1] <= p[1] and q[:2] != p[:2] for q in points)]
    front.sort(key=lambda p: p[0])
    axis.plot([p[0] for p in front], [p[1] for p in front], color=FAINT, linewidth=2, zorder=1)
    chosen = _taken(scores)
    for x, y, s in points:
        colour = GOOD if s == chosen else COLOURS[0] if (x, y, s) in front else COLOURS[5]
        axis.scatter([x], [y], color=colour, s=36, zorder=2)
        axis.annotate(str(s.block_size), (x, y), textcoords="offset points", xytext=(5, 5), fontsize=8)
    axis.set_xlabel("output tokens per second (more is better)")
    axis.set_ylabel(f"time of a step ({unit}, less is better)")
    axis.margins(0.12)
    return None


def _share(axis: Axes, space: Space, log: Log, colours: dict[str, str]) -> None:
    axis.set_title("Decode: share of the memory bandwidth", loc="left")
    backends = _timed(space, log)
    if not backends or not log.reads:
        return _empty(axis, "no finals were measured")
    sizes, width = space.block_sizes, 0.8 / len(backends)
    for i, (name, chosen) in enumerate(backends.items()):
        at = [j for j, b in enumerate(sizes) if b in chosen]
        values = [100 * space.workload.kv_bytes / chosen[sizes[j]][1] / median(log.reads) for j in at]
        axis.bar(
            [j + (i - (len(backends) - 1) / 2) * width for j in at], values, width, color=colours[name], label=name
        )
    axis.axhline(100, color=INK, linewidth=0.8, linestyle=":")
    axis.set_xticks(range(len(sizes)), [str(b) for b in sizes])
    axis.set_ylabel("% of a plain read")
    axis.set_xlabel("block size (tokens)")
    axis.set_ylim(0, 1.25 * max(100.0, axis.get_ylim()[1] / 1.05))
    axis.legend(fontsize=8, ncols=3, loc="upper left")
    return None


def _times(axis: Axes, space: Space, log: Log, colours: dict[str, str]) -> None:
    axis.set_title("Decode: time of a call, every round", loc="left")
    backends = _timed(space, log)
    if not backends:
        return _empty(axis, "no finals were measured")
    sizes = space.block_sizes
    for name, chosen in backends.items():
        at = [j for j, b in enumerate(sizes) if b in chosen]
        rounds = [[1e3 * t[chosen[sizes[j]][0]] for t in log.finals if chosen[sizes[j]][0] in t] for j in at]
        for j, times in zip(at, rounds, strict=True):
            axis.scatter([j] * len(times), times, color=colours[name], s=5, alpha=0.3, linewidths=0)
        axis.plot(at, [1e3 * chosen[sizes[j]][1] for j in at], marker="o", color=colours[name], label=name)
    axis.set_xticks(range(len(sizes)), [str(b) for b in sizes])
    axis.set_yscale("log")
    _plain(axis.yaxis)
    axis.set_ylabel("ms (logarithmic)")
    axis.set_xlabel("block size (tokens)")
    axis.legend(fontsize=8)
    return None


def _lengths(axis: Axes, space: Space, log: Log, colours: dict[str, str]) -> None:
    axis.set_title("Decode: backends by length of context", loc="left")
    if not log.lengths:
        return _empty(axis, "no lengths were measured")
    lens, tokens_read = space.workload.seq_lens, space.workload.tokens_read
    for candidate, contexts in log.lengths.items():
        points = []
        for context, times in sorted(contexts.items()):
            read = space.workload.problem(1).kv_bytes * sum(tokens_read(min(n, context)) for n in lens)
            points.append((context, read / median(times) / 1e9))
        label = f"{candidate.backend}, block {candidate.block_size}"
        axis.plot(*zip(*points, strict=True), marker="o", color=colours[candidate.backend], label=label)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    lengths = sorted({context for contexts in log.lengths.values() for context in contexts})
    axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
    _plain(axis.yaxis)
    axis.set_xlabel("context (tokens)")
    axis.set_ylabel("GB/s (logarithmic)")
    axis.legend(fontsize=8)
    return None


def _timed(space: Space, log: Log) -> dict[str, dict[int, tuple[Candidate, float]]]:
    """For each backend and block size its fastest candidate and the median time: of those in the finals, and without
    finals of all that have a time."""
    found: dict[str, dict[int, tuple[Candidate, float]]] = {}
    finalists = {c for times in log.finals for c in times} or set(space.candidates)
    for name in dict.fromkeys(c.backend for c in space.candidates):
        for block_size in space.block_sizes:
            own = [c for c in space.candidates if c in finalists and (c.backend, c.block_size) == (name, block_size)]
            if (fastest := log.fastest(own)) is not None:
                found.setdefault(name, {})[block_size] = fastest, log.seconds(fastest) or 0.0
    return found


def _colours(space: Space) -> dict[str, str]:
    names = dict.fromkeys(c.backend for c in space.candidates)
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}


def _plain(axis: Any) -> None:
    """Numbers at the ticks of a logarithmic axis as they are, not as powers; none where they would stand too close."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    steps = (1, 1.5, 2, 3, 5, 7) if high / max(low, 1e-30) < 10 else (1, 3) if high / max(low, 1e-30) < 1e3 else (1,)
    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _empty(axis: Any, why: str) -> None:
    axis.text(0.5, 0.5, why, ha="center", va="center", transform=axis.transAxes)
    axis.set_xticks([])
    axis.set_yticks([])
