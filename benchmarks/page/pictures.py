"""Results as pictures: SVG on a light card, so that they are read on a dark page as well."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

from benchmarks.page.results import Result, Row
from benchmarks.page.tables import is_own

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0b6e99", "#d9730d", "#448361", "#9065b0", "#c4554d", "#787774", "#a27b00")
CARD, INK, FAINT = "#fbfaf8", "#37352f", "#d3d1cb"
STYLE: dict[Any, Any] = {
    "font.size": 9, "axes.titlesize": 11, "axes.titleweight": "bold", "axes.edgecolor": FAINT, "axes.labelcolor": INK,
    "axes.facecolor": CARD, "text.color": INK, "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False,
    "axes.spines.right": False, "legend.frameon": False, "svg.hashsalt": "pagedkern",
}  # fmt: skip
USED = {"tokens": "holds a token", "later": "reserved, will", "never": "reserved, never will", "holes": "free"}


def draw(result: Result) -> dict[str, str]:
    """The pictures of one machine by name, each as the text of an SVG file."""
    from matplotlib import rc_context

    made = {}
    with rc_context(STYLE):
        for name, picture in (("decode", _decode), ("branch", _branch), ("allocator", _allocator), ("memory", _memory)):
            if (figure := picture(result)) is not None:
                made[name] = _svg(figure)
    return made


def _decode(result: Result) -> Figure | None:
    groups = list(result.starting("decode"))
    if not groups:
        return None
    height = 0.9 + 0.2 * sum(len(rows) for _, rows in groups) + 0.22 * len(groups)
    axis = _axis(height, "Decode: how fast K and V are read, as a share of a plain read at that moment")
    _bars(axis, groups, "of_read")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axis.legend(fontsize=8, ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.04))
    return axis.get_figure()  # type: ignore[return-value]


def _branch(result: Result) -> Figure | None:
    groups = list(result.starting("branch a"))
    if not groups:
        return None
    axis = _axis(1.6, "To branch a prompt: milliseconds")
    _bars(axis, groups, None)
    axis.legend(fontsize=8)
    return axis.get_figure()  # type: ignore[return-value]


def _allocator(result: Result) -> Figure | None:
    groups = [(group.removeprefix("allocator, "), rows) for group, rows in result.starting("allocator")]
    if not groups:
        return None
    height = 0.9 + 0.2 * sum(len(rows) for _, rows in groups) + 0.22 * len(groups)
    axis = _axis(height, "Bookkeeping: microseconds (logarithmic)")
    _bars(axis, groups, None, 1e6)
    axis.set_xscale("log")
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(0.75, 1.0))
    return axis.get_figure()  # type: ignore[return-value]


def _bars(axis: Axes, groups: list[tuple[str, list[Row]]], figure: str | None, factor: float = 1e3) -> None:
    """Horizontal bars, a block of them for each group, one colour for each name. `figure`: a share; None: the
    time."""
    names = list(dict.fromkeys(row.name for _, rows in groups for row in sorted(rows, key=lambda r: not is_own(r))))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    y, across = 0.0, axis.get_yaxis_transform()
    seen: set[str] = set()
    for group, rows in groups:
        axis.text(0, y - 0.25, group.removeprefix("decode "), transform=across, va="bottom", weight="bold")
        y += 0.35
        for row in sorted(rows, key=lambda row: names.index(row.name)):
            value = row.info[figure] if figure else row.seconds * factor
            label = None if row.name in seen else row.name
            bar = axis.barh(y, value, height=0.8, color=colours[row.name], label=label)
            axis.bar_label(bar, labels=[f"{value:.0%}" if figure else f"{value:,.3g}"], padding=3, fontsize=8)
            seen.add(row.name)
            y += 0.9
        y += 0.75
    axis.set_ylim(y - 0.6, -1.2)
    axis.set_yticks([])
    axis.margins(x=0.1)


def _memory(result: Result) -> Figure | None:
    rows = [row for _, found in result.starting("memory") for row in found]
    if not rows:
        return None
    lines = [(row.name.partition(",")[0], name, usage) for row in rows for name, usage in row.info["usage"].items()]
    axis = _axis(0.8 + 0.26 * len(lines), "What the memory is used for, while requests wait")
    shades = (COLOURS[0], "#6cb0cc", COLOURS[1], FAINT)
    place, last = 0.0, None
    ticks = []
    for workload, name, usage in lines:
        place += 0.5 if last not in (None, workload) else 0.0
        left = 0.0
        for (part, meaning), shade in zip(USED.items(), shades, strict=True):
            label = meaning if last is None else None
            axis.barh(place, usage[part], left=left, color=shade, height=0.8, label=label)
            left += usage[part]
        axis.text(1.01, place, f"{usage['resident']:.0f} requests", va="center", fontsize=8)
        ticks.append((place, f"{workload}: {name}" if workload != last else name))
        place, last = place + 1, workload
    axis.set_yticks([at for at, _ in ticks], [label for _, label in ticks])
    axis.set_ylim(place - 0.4, -0.6)
    axis.set_xlim(0, 1)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axis.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.4, -0.06))
    return axis.get_figure()  # type: ignore[return-value]


def _axis(height: float, title: str) -> Axes:
    from matplotlib.figure import Figure

    axis = Figure(figsize=(8.6, height), layout="constrained", facecolor=CARD).subplots()
    axis.set_title(title, loc="left")
    axis.grid(axis="x", color=FAINT, linewidth=0.5)
    axis.set_axisbelow(True)
    return axis


def _svg(figure: Figure) -> str:
    """Equal results give equal files."""
    text = io.StringIO()
    figure.savefig(text, format="svg", facecolor=CARD, metadata={"Date": None, "Creator": None})
    return re.sub(r"[ \t]+\n", "\n", text.getvalue())
