"""Numbers as people read them."""

from __future__ import annotations


def time_text(seconds: float) -> str:
    """With its unit."""
    if seconds >= 1:
        return f"{digits(seconds)} s"
    return f"{digits(seconds * 1e3)} ms" if seconds >= 1e-3 else f"{digits(seconds * 1e6)} µs"


def digits(value: float) -> str:
    """Three of them."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
