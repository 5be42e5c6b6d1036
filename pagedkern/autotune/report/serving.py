"""What block sizes come to for workloads, as tables: the objective with its three terms apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pagedkern.autotune.objective import Score, best
from pagedkern.autotune.report.formats import digits, time_text

if TYPE_CHECKING:
    from rich.console import Console

    from pagedkern.autotune.tune import Served

USUAL = 16


def show_served(console: Console, served: Sequence[Served]) -> None:
    """A row for each workload: the block size to take, and what it gives. A table for each model."""
    for model in dict.fromkeys(one.model for one in served):
        _show_model(console, [one for one in served if one.model == model])


def _show_model(console: Console, served: Sequence[Served]) -> None:
    from rich import box
    from rich.table import Table

    first = served[0]
    head = f"What to serve with: {first.model.name} ({first.model.dtype}), {first.memory / 1e9:.1f} GB of cache"
    console.print(head, style="bold", highlight=False, markup=False)
    if first.tier != "tuned":
        console.print(f"Tier {first.tier}: {first.reason}.", highlight=False, markup=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("workload", "block", "tokens/s", "against 16", "sequences", "waste"):
        table.add_column(name, justify="left" if name == "workload" else "right", no_wrap=True)
    for one in served:
        chosen = best(one.scores)
        if chosen is None:
            table.add_row(one.traffic.name, *"-----")
            continue
        usual = next((s for s in one.scores if s.block_size == USUAL), None)
        against = f"{chosen.tokens_per_second / usual.tokens_per_second:.3f}x" if usual else "-"
        cells = [str(chosen.block_size), digits(chosen.tokens_per_second), against]
        table.add_row(one.traffic.name, *cells, digits(chosen.concurrency), f"{chosen.waste:.1%}")
    console.print(table)
    if missing := [one.traffic.name for one in served if not one.scores]:
        text = f"-: the longest request does not fit ({', '.join(missing)}): give more --memory, or a --model."
        console.print(text, highlight=False, markup=False)


def show_terms(console: Console, scores: Sequence[Score]) -> None:
    """A row for each block size, with the three terms apart."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for name in ("block", "seqs", "waste", "step", "attn", "request", "cached", "tok/s", "of best"):
        table.add_column(name, justify="right", no_wrap=True)
    chosen = best(scores)
    for s in scores:
        times = [time_text(seconds) for seconds in (s.step_seconds, s.attention_seconds, s.request_seconds)]
        cells = [str(s.block_size), digits(s.concurrency), f"{s.waste:.1%}", *times, f"{s.cached_tokens:,.0f}"]
        style = "bold green" if s == chosen else None
        share = s.tokens_per_second / chosen.tokens_per_second if chosen else 0.0
        table.add_row(*cells, digits(s.tokens_per_second), f"{share:.2%}", style=style)
    console.print(table)
    console.print(
        "seqs: sequences that fit the memory. waste: share of the slots they hold without a token. step: time of one "
        "that decodes, attn: attention in it. request: its prompt, copies and swaps. cached: tokens of a prompt found "
        "in the cache. tok/s: outputs. See docs/objective.md.",
        highlight=False,
        markup=False,
    )
