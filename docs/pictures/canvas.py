"""A sheet to draw on: SVG by the standard library, in two sets of colours, light and dark.

Stand-alone (on GitHub, in an editor) a drawing follows the reader's system; in the site its switch.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

WIDTH = 520  # of the drawings of the guides, in units of which a line of text is 15 high: legible on a phone
LIGHT = {
    "ink": "#22313a", "dim": "#5d6f79", "line": "#8296a1", "hole": "#eef2f4", "paper": "#ffffff",
    "a": "#bfdcf0", "b": "#f9d2a8", "c": "#c6e3bd", "both": "#d9cdee", "hot": "#c2410c",
}  # fmt: skip
DARK = {
    "ink": "#e7eef2", "dim": "#9fb2bd", "line": "#6d828e", "hole": "#263238", "paper": "#1c262b",
    "a": "#27577a", "b": "#7c4a17", "c": "#33613a", "both": "#534180", "hot": "#fb923c",
}  # fmt: skip
RULES = """\
svg.pk text { font: 15px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--ink); }
svg.pk .small { font-size: 13px; fill: var(--dim); }
svg.pk .strong { font-weight: 600; }
svg.pk .code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
svg.pk .mid { text-anchor: middle; }
svg.pk .end { text-anchor: end; }
svg.pk .down { writing-mode: vertical-rl; text-anchor: middle; }
svg.pk .hot { fill: var(--hot); }
svg.pk path, svg.pk rect { stroke: var(--line); stroke-width: 1.2; fill: none; }
svg.pk .a { fill: var(--a); } svg.pk .b { fill: var(--b); } svg.pk .c { fill: var(--c); }
svg.pk .both { fill: var(--both); } svg.pk .hole { fill: var(--hole); } svg.pk .paper { fill: var(--paper); }
svg.pk .dashed { stroke-dasharray: 4 3; }
svg.pk .arrow { stroke: var(--ink); stroke-width: 1.5; } svg.pk .head { fill: var(--ink); stroke: none; }
svg.pk .arrow.warm { stroke: var(--hot); } svg.pk .head.warm { fill: var(--hot); }
"""


def _variables(colours: dict[str, str]) -> str:
    return "svg.pk { " + " ".join(f"--{name}: {value};" for name, value in colours.items()) + " }"


class Canvas:
    """One drawing: `title` is what it shows, in words, for those who cannot see it."""

    def __init__(self, name: str, height: int, title: str, width: int = WIDTH) -> None:
        self.name, self.height, self.title, self.width = name, height, title, width
        self._items: list[str] = []

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        """Words on the line y; `kind`: of small, strong, code, hot, mid, end, down."""
        attribute = f' class="{kind}"' if kind else ""
        self._items.append(f'<text x="{x:g}" y="{y:g}"{attribute}>{escape(words)}</text>')

    def box(self, x: float, y: float, w: float, h: float, kind: str = "paper", words: str = "", text: str = "") -> None:
        """A box with words in its middle."""
        self._items.append(f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3" class="{kind}"/>')
        if words:
            self.text(x + w / 2, y + h / 2 + 5, words, f"mid {text}".strip())

    def cells(self, x: float, y: float, size: float, kinds: list[str], words: list[str] | None = None) -> None:
        """A row of square cells, as of one block of the cache."""
        for i, kind in enumerate(kinds):
            label = words[i] if words else ""
            self.box(x + i * size, y, size, size, kind, label, "small" if len(label) > 2 else "")

    def arrow(self, *points: tuple[float, float], bend: float = 0.0, kind: str = "") -> None:
        """From the first point to the last; between two, bent sideways by so many units."""
        (x0, y0), (x1, y1) = points[-2], points[-1]
        if len(points) == 2 and bend:
            mx, my, long = (x0 + x1) / 2, (y0 + y1) / 2, ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
            cx, cy = mx - (y1 - y0) / long * bend, my + (x1 - x0) / long * bend
            path = f"M{x0:g} {y0:g} Q{cx:.1f} {cy:.1f} {x1:g} {y1:g}"
            x0, y0 = cx, cy
        else:
            path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        long = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
        ux, uy = (x1 - x0) / long, (y1 - y0) / long
        left = (x1 - 9 * ux - 4.5 * uy, y1 - 9 * uy + 4.5 * ux)
        right = (x1 - 9 * ux + 4.5 * uy, y1 - 9 * uy - 4.5 * ux)
        self._items.append(f'<path d="{path}" class="{f"arrow {kind}".strip()}"/>')
        corners = " L".join(f"{x:.1f} {y:.1f}" for x, y in (left, right))
        self._items.append(f'<path d="M{x1:g} {y1:g} L{corners} Z" class="{f"head {kind}".strip()}"/>')

    def line(self, *points: tuple[float, float], kind: str = "") -> None:
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        self._items.append(f'<path d="{path}" class="{kind}"/>')

    def svg(self) -> str:
        """The file: colours, rules, items."""
        return "\n".join(
            [
                '<svg xmlns="http://www.w3.org/2000/svg" class="pk" '
                f'viewBox="0 0 {self.width} {self.height}" role="img">',
                f"<title>{escape(self.title)}</title>",
                "<style>",
                _variables(LIGHT),
                f"@media (prefers-color-scheme: dark) {{ {_variables(DARK)} }}",
                RULES + "</style>",
                *self._items,
                "</svg>\n",
            ]
        )

    def save(self, folder: Path) -> Path:
        path = folder / f"{self.name}.svg"
        path.write_text(self.svg())
        return path
