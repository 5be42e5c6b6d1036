"""The command line: `python -m pagedkern.autotune`. One module a command; each parses, calls, and prints."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from pagedkern.autotune.report import console
from pagedkern.errors import PagedKernError

PROG = "python -m pagedkern.autotune"
COMMANDS = {  # name: (module, what it does)
    "tune": ("tune", "measure this machine and store the best (without a command, too)"),
    "show": ("show", "list what is stored, and what of it is used on this machine"),
    "explain": ("explain", "say which block size and kernels to use for a workload, and why"),
    "replay": ("replay", "search recorded measurements again, without a clock"),
    "report": ("report", "draw the measurements as a page (HTML and PNG)"),
    "export": ("export", "write what is known of this machine to a file"),
    "import": ("imports", "take over such a file, of this machine or of another"),
    "workloads": ("workloads", "list the workloads and models, or print one to start from"),
}

EXTRAS = {"matplotlib": "report", "rich": "autotune"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status."""
    console.open_what_is_closed()
    given = list(sys.argv[1:] if argv is None else argv)
    command = given.pop(0) if given and not given[0].startswith("-") else "tune"
    if command not in COMMANDS:
        console.complain(f"{PROG}: no command {command!r}: there are {', '.join(COMMANDS)}; see --help")
        return 2
    status = 0

    def run() -> None:
        nonlocal status
        status = import_module(f"{__name__}.{COMMANDS[command][0]}").run(given)

    try:
        return console.printed(run, 0) or status
    except KeyboardInterrupt:
        return 130
    except PagedKernError as error:
        console.complain(f"{PROG} {command}: {error}")
        return 2
    except ImportError as error:
        extra = next((extra for name, extra in EXTRAS.items() if name in str(error)), "cpu")
        other = ", or the extra of your GPU" if extra == "cpu" else ""
        console.complain(f"{PROG}: {error}: pip install 'pagedkern[{extra}]'{other}")
        return 1
