"""`show`: list the store."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pagedkern.autotune import store
from pagedkern.autotune.cli import PROG, options
from pagedkern.autotune.store import files

HELP = """\
List what is stored: for each problem the choice, its gain when it was
measured, and whether it is used on this machine now. Choices for other
machines, and those made with other kernels or library versions, are listed
but not used.
"""


def run(argv: Sequence[str]) -> int:
    parser = options.parser("show", HELP)
    options.add_json(parser.add_argument, "a JSON list instead of a table")
    given = parser.parse_args(argv)
    from rich.console import Console

    from pagedkern.autotune.report import document, terminal

    stored = list(store.contents())
    if given.json:
        options.write_json(document.stored_document(stored))
    elif stored:
        terminal.show_stored(Console(), stored)
    else:
        sys.stdout.write(f"Nothing is stored in {files.directory()}. Run {PROG} to change that.\n")
    return 0
