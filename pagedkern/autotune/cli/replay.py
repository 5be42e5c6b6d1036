"""`replay`: search recorded measurements again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pagedkern.autotune import workloads
from pagedkern.autotune.cli import options
from pagedkern.autotune.workloads import Model

HELP = """\
Search recorded measurements as a run would have searched the machine, without
a kernel and without a clock, and show the regret: how many output tokens a
second the choice gives away against the best of all that was recorded.
Records of a run with --exhaustive hold the times of every candidate.
"""


def run(argv: Sequence[str]) -> int:
    parser = options.parser("replay", HELP, arguments=" [FILE]")
    parser.add_argument("file", type=Path, nargs="?", help="records (default: those of the last run)")
    options.add_serving(parser.add_argument, several=True)
    parser.add_argument(
        "--budget", type=options.seconds, default=60.0, metavar="TIME", help="of the search (default 60s)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    options.add_json(parser.add_argument)
    given = parser.parse_args(argv)
    from pagedkern.autotune.replay import regret, replay
    from pagedkern.autotune.report.console import Column, TableRow, console, show_table
    from pagedkern.autotune.report.formats import digits

    recorded = options.records(given.file)
    searched = replay(recorded, given.budget, given.seed)
    rows = []
    for traffic in given.workload or [workloads.load(name) for name in workloads.names()]:
        model = given.model or traffic.model or workloads.default_model()
        found = regret(searched, traffic, model, given.memory or _memory(traffic.limit, model))
        rows.append((traffic.name, found))
    if given.json:
        options.write_json(
            {
                "regret": {name: found.share if found else None for name, found in rows},
                "block_sizes": {name: found.chosen.block_size if found else None for name, found in rows},
                "best_block_sizes": {name: found.optimum.block_size if found else None for name, found in rows},
            }
        )
        return 0
    columns = [Column("workload"), *(Column(name, right=True) for name in ("chosen", "best", "tokens/s", "regret"))]
    lines = []
    for name, found in rows:
        cells = ["-", "-", "-", "-"]
        if found is not None:
            sizes = [str(score.block_size) for score in (found.chosen, found.optimum)]
            cells = [*sizes, digits(found.chosen.tokens_per_second), f"{found.share:.2%}"]
        lines.append(TableRow([name, *cells]))
    show_table(console(), columns, lines)
    return 0


def _memory(limit: int, model: Model) -> int:
    """Bytes of cache that eight of the longest requests take."""
    return 8 * limit * model.token_bytes
