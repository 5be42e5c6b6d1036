"""`show`: list the store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pagedkern.autotune import recommend, store
from pagedkern.autotune.cli import PROG, options
from pagedkern.autotune.report import console
from pagedkern.autotune.store import files

HELP = """\
List what is stored: for each problem the choice, its gain when it was
measured, and whether it is used on this machine now; and the rates that block
sizes are predicted with, those that were imported and that ship among them.
Choices for other machines, and those made with other kernels or library
versions, are listed but not used.
"""


def run(argv: Sequence[str]) -> int:
    parser = options.parser("show", HELP)
    options.add_json(parser.add_argument, "a JSON document instead of tables")
    given = parser.parse_args(argv)
    from pagedkern.autotune.report import document, terminal

    stored, profiles = list(store.contents()), recommend.known()
    if given.json:
        options.write_json({"choices": document.stored_document(stored), "rates": document.rates_document(profiles)})
        return 0
    if stored:
        terminal.show_stored(console.console(), stored)
    if profiles:
        terminal.show_rates(console.console(), profiles)
    if not stored and not any(state in ("used", "other threads", "stale") for state, _, _ in profiles):
        for line in _nothing(files.directory()):
            console.say(console.console(), line)
    return 0


def _nothing(folder: Path | None) -> tuple[str, ...]:
    if folder is None:
        return ("Nothing can be stored: there is no home. Set PAGEDKERN_CACHE_DIR to a folder.",)
    return "Nothing of this machine is stored in", f"  {folder}", f"Run {PROG} to change that."
