"""`export`: what is known of a machine, as a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pagedkern.autotune.cli import PROG, options
from pagedkern.autotune.profile import distil
from pagedkern.autotune.report import console
from pagedkern.errors import InvalidArgument

HELP = """\
Write what the records of a run support to a file: the rates of the machine
and the best kernels, with where and when they were measured. The command
"import" takes it over on another machine. The files that ship with the
library are made in this way from the folder autotune/records of the
repository.
"""


def run(argv: Sequence[str]) -> int:
    parser = options.parser("export", HELP, arguments=" [FILE]")
    parser.add_argument("file", type=Path, nargs="?", help="records (default: those of the last run)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: standard output")
    given = parser.parse_args(argv)
    document = distil(options.records(given.file))
    if document is None:
        raise InvalidArgument(f"records: nothing was decided from them: run {PROG} with a longer --budget")
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    if given.output is None:
        console.write(text)
        return 0
    try:
        given.output.write_text(text, encoding="utf-8")
    except OSError as error:
        console.complain(f"{PROG} export: {given.output}: {error.strerror}")
        return 3
    return 0
