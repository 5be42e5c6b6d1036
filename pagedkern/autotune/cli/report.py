"""`report`: the measurements as a page with pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pagedkern.autotune import workloads
from pagedkern.autotune.cli import PROG, options
from pagedkern.autotune.report import console

HELP = """\
Draw the measurements of a run: what each block size gives for a workload,
time against concurrency, backends against the length of the context, and the
share of the memory bandwidth. Writes one HTML page that needs no other file,
and the same picture as PNG.
"""


def run(argv: Sequence[str]) -> int:
    parser = options.parser("report", HELP, arguments=" [FILE]")
    parser.add_argument("file", type=Path, nargs="?", help="records (default: those of the last run)")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("pagedkern-report"),
        metavar="PATH",
        help="without its ending (default pagedkern-report)",
    )
    options.add_serving(parser.add_argument)
    given = parser.parse_args(argv)
    from pagedkern.autotune.report import page

    recorded = options.records(given.file)
    traffic = given.workload
    model = given.model or traffic.model or workloads.default_model()
    memory = given.memory or 8 * traffic.limit * model.token_bytes
    try:
        html, png = page.write(recorded, traffic, model, memory, given.output)
    except OSError as error:
        console.complain(f"{PROG} report: {error}")
        return 3
    console.write(f"{html}\n{png}\n")
    return 0
