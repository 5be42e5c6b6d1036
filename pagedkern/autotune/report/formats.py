"""Numbers as people read them."""

from __future__ import annotations


def time_text(seconds: float) -> str:
    """A time with the unit that suits it."""
    if seconds >= 1:
        return f"{digits(seconds)} s"
    return f"{digits(seconds * 1e3)} ms" if seconds >= 1e-3 else f"{digits(seconds * 1e6)} µs"


def bar_text(error: float | None) -> str:
    """An error bar behind a number, of so large a share of it; nothing where there is none."""
    return f" ±{error:.1%}" if error else ""


def digits(value: float) -> str:
    """Three of them, or more before the point."""
    for least, places in ((100, 0), (10, 1), (1, 2)):
        if value >= least:
            return f"{value:,.{places}f}"
    return f"{value:.3g}"
