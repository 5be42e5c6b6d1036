"""Draws docs/numba_cuda_walkthrough.svg: python docs/draw_numba_cuda_walkthrough.py (needs matplotlib)."""

from __future__ import annotations

from pathlib import Path

from matplotlib import pyplot, rc_context
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

SPLITS = ("#f4b183", "#9dc3e6", "#a9d18e")
PAPER, LINE, FAINT, Q, RESULT = "white", "#404040", "#d9d9d9", "#ffe699", "#cdb4db"


def box(ax: Axes, x: float, y: float, width: float, height: float, color: str, text: str = "", size: int = 9) -> None:
    ax.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor=LINE, linewidth=0.8))
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size)


def arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], bend: float = 0.0) -> None:
    style = f"arc3,rad={bend}"
    ax.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=9, color=LINE, linewidth=0.8, connectionstyle=style
        )
    )


def note(ax: Axes, x: float, y: float, text: str, size: int = 9, align: str = "left") -> None:
    ax.text(x, y, text, fontsize=size, ha=align, va="center", color=LINE)


def tokens_and_blocks(ax: Axes) -> None:
    """The top: spans of tokens, the blocks that hold them, and where these lie in the cache."""
    note(ax, 0, 9.7, "1  The tokens of one sequence, in spans: span n belongs to split n mod 3", 10)
    for n in range(7):
        box(ax, 2 * n, 8.8, 2 if n < 6 else 1.2, 0.6, SPLITS[n % 3], f"span {n}" if n < 6 else "6")
    note(ax, 13.4, 9.1, "seq_len")
    note(ax, 0, 8.25, "2  Its row of the block table: entry j holds tokens j*B .. j*B+B-1", 10)
    ids = [5, 0, 9, 3, 7, 12, 1, 10, 4, 8, 2, 11, 6]
    for j, block in enumerate(ids):
        box(ax, j, 7.4, 1, 0.55, PAPER, str(block))
    box(ax, 13, 7.4, 1, 0.55, FAINT, "?")
    note(ax, 14.15, 7.68, "never read")
    places = {block: j for j, block in enumerate(ids)}
    for block in range(13):
        box(ax, block, 6.2, 1, 0.55, SPLITS[places[block] // 2 % 3], f"block {block}", 7)
    for j in (0, 1, 4):
        arrow(ax, (j + 0.5, 7.4), (ids[j] + 0.5, 6.75))
    note(ax, 0, 5.85, "3  The blocks of the cache, in any order, in any memory layout", 10)


def one_tile(ax: Axes) -> None:
    """The bottom left: one block of threads at work."""
    note(ax, 0, 5.05, "4  One thread block: split 0 of one KV head. For each tile of N keys of its spans:", 10)
    box(ax, 0, 2.6, 1.2, 1.2, Q, "Q\nM x D")
    note(ax, 0, 2.2, "rows: tokens x heads\nof the group", 7)
    box(ax, 1.9, 3.9, 1.8, 0.8, SPLITS[0], "K' (D x N)")
    box(ax, 1.9, 2.6, 1.8, 1.2, PAPER, "p = Q K'\nM x N")
    note(ax, 2.8, 2.35, "score", 8, "center")
    arrow(ax, (3.75, 3.2), (4.55, 3.2))
    note(ax, 4.15, 3.42, "soften", 8, "center")
    box(ax, 4.6, 2.6, 1.8, 1.2, PAPER, "weights\nexp(s - top)")
    box(ax, 6.5, 2.6, 0.9, 1.2, RESULT, "top\ntotal\n[M]", 8)
    box(ax, 8.1, 3.9, 1.8, 0.8, SPLITS[0], "V (N x E)")
    arrow(ax, (7.45, 3.2), (8.05, 3.2))
    note(ax, 7.75, 3.42, "weigh", 8, "center")
    box(ax, 8.1, 2.6, 1.8, 1.2, RESULT, "acc * decay\n+ weights V", 9)
    note(ax, 9.0, 2.35, "in registers, M x E", 8, "center")
    note(ax, 0, 1.6, "V of a tile is on its way from memory while its scores are computed,", 8)
    note(ax, 0, 1.3, "K of the next tile while the weights are made and V is summed.", 8)


def merging(ax: Axes) -> None:
    """The bottom right: partial results and the merge."""
    note(ax, 11.0, 5.05, "5  The second kernel adds the splits", 10)
    for n in range(3):
        box(ax, 11.0, 4.05 - 0.75 * n, 2.6, 0.6, SPLITS[n], f"split {n}: acc, top, total", 8)
        arrow(ax, (13.65, 4.35 - 0.75 * n), (14.35, 3.6))
    box(ax, 14.4, 3.1, 1.6, 1.0, RESULT, "out\nlse", 9)
    note(ax, 11.0, 1.6, "always in this order, so that the bits", 8)
    note(ax, 11.0, 1.3, "do not depend on which block was faster", 8)


def main() -> None:
    figure, ax = pyplot.subplots(figsize=(12, 6.6))
    ax.set_xlim(-0.2, 16.3)
    ax.set_ylim(1.0, 10.1)
    ax.axis("off")
    tokens_and_blocks(ax)
    one_tile(ax)
    merging(ax)
    target = Path(__file__).with_name("numba_cuda_walkthrough.svg")
    with rc_context({"svg.hashsalt": "pagedkern"}):  # equal drawings give equal files
        figure.savefig(target, format="svg", bbox_inches="tight", facecolor="white", metadata={"Date": None})


if __name__ == "__main__":
    main()
