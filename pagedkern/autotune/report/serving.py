"""What block sizes give for workloads, as tables: the objective with its three terms apart, and what to take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pagedkern.autotune.advice import listed
from pagedkern.autotune.objective import USUAL_BLOCK_SIZE, Score
from pagedkern.autotune.recommend import Recommendation
from pagedkern.autotune.report.console import Column, TableRow, say, show_table
from pagedkern.autotune.report.formats import bar_text, digits, time_text

if TYPE_CHECKING:
    from rich.console import Console

    from pagedkern.autotune.runs import Serving


def show_served(console: Console, served: Sequence[Serving]) -> None:
    """A row for each workload: the block size to take, and what it gives. A table for each model."""
    for model in dict.fromkeys(one.model for one in served):
        _show_model(console, [one for one in served if one.model == model])


def _show_model(console: Console, served: Sequence[Serving]) -> None:
    first = served[0]
    say(console, f"What to serve with: {first.model.name} ({first.model.dtype}), {_gigabytes(first)} of cache", "bold")
    tiers = {(one.advice.tier, one.advice.basis) for one in served if one.advice.scores}
    for tier, reason in sorted(tiers):
        if tier != "tuned":
            say(console, f"Tier {tier}: {reason}.")
    columns = [Column("workload"), *(Column(name, right=True) for name in ("block", "tokens/s", "against 16"))]
    rows = []
    for one in served:
        found = one.advice
        usual = next((s for s in found.scores if s.block_size == USUAL_BLOCK_SIZE), None)
        if found.tokens_per_second is None:
            rows.append(TableRow([one.traffic.name, *"----"]))
            continue
        against = f"{found.tokens_per_second / usual.tokens_per_second:.3f}x" if usual else "-"
        rows.append(TableRow([one.traffic.name, str(found.block_size), _tokens(found), against, alike_text(found)]))
    show_table(console, [*columns, Column("block sizes that are alike", folds=True)], rows)
    names = ("fit", "waste", "max_num_seqs", "token_budget")
    rows = []
    for one in served:
        found = one.advice
        chosen = next((s for s in found.scores if s.block_size == found.block_size), None)
        if chosen is not None:
            limits = [str(found.max_num_seqs), f"{found.token_budget:,}"]
            rows.append(TableRow([one.traffic.name, digits(chosen.concurrency), f"{chosen.waste:.1%}", *limits]))
    if rows:
        show_table(console, [Column("workload"), *(Column(name, right=True) for name in names)], rows)
        say(
            console,
            "Another block size than 16 is taken if it is proven better, beyond the error bars (±), which are of its "
            "tokens/s beside those of 16; of block sizes that are alike the longest is shown. "
            "fit: sequences that the memory holds. waste: share of their slots without a token. max_num_seqs and "
            "token_budget: the least for a scheduler that give all but 2 % of the tokens/s.",
        )
    if missing := [one.traffic.name for one in served if not one.advice.scores]:
        say(console, f"-: the longest request does not fit ({', '.join(missing)}): give more --memory, or a --model.")


def show_terms(console: Console, scores: Sequence[Score], chosen: int) -> None:
    """A row for each block size, with the three terms apart; `chosen` is the one to take."""
    names = ("block", "seqs", "waste", "step", "attn", "request", "cached", "tok/s", "±", "of best")
    most = max(s.tokens_per_second for s in scores)
    rows = []
    for s in scores:
        times = [time_text(seconds) for seconds in (s.step_seconds, s.attention_seconds, s.request_seconds)]
        cells = [str(s.block_size), digits(s.concurrency), f"{s.waste:.1%}", *times, f"{s.cached_tokens:,.0f}"]
        cells += [digits(s.tokens_per_second), f"{s.error:.1%}", f"{s.tokens_per_second / most:.1%}"]
        rows.append(TableRow(cells, "bold green" if s.block_size == chosen else ""))
    show_table(console, [Column(name, right=True) for name in names], rows)
    say(
        console,
        "seqs: sequences that fit the memory. waste: share of the slots they hold without a token. step: time of one "
        "that decodes, attn: attention in it. request: its prompt, copies and swaps. cached: tokens of a prompt found "
        "in the cache. tok/s: outputs. ±: what the measurements leave open of that, beside the usual block size. See "
        "docs/objective.md.",
    )


def alike_text(found: Recommendation) -> str:
    """Which block sizes are as good as the one to take within the error bars, and how far apart they are."""
    others = [size for size in found.alike if size != found.block_size]
    if found.within is None or not others:
        return "none" if len(found.scores) > 1 else "no other was measured"
    what = "all" if len(found.alike) == len(found.scores) else listed(others)
    bar = max(score.error for score in found.scores if score.block_size in found.alike)
    return f"{what} within {100 * found.within:.1f} %{bar_text(bar)}"


def _tokens(found: Recommendation) -> str:
    return f"{digits(found.tokens_per_second or 0.0)}{bar_text(found.error)}"


def _gigabytes(one: Serving) -> str:
    return f"{one.memory / 1e9:.1f} GB"
