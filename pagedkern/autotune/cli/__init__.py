"""The command line: `python -m pagedkern.autotune`. One module a command; each parses, calls, and prints."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

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

EXTRAS = {"matplotlib": "report", "rich": "autotune", "filelock": "autotune", "platformdirs": "autotune"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    command = given.pop(0) if given and not given[0].startswith("-") else "tune"
    if command not in COMMANDS:
        sys.stderr.write(f"{PROG}: no command {command!r}: there are {', '.join(COMMANDS)}; see --help\n")
        return 2
    try:
        status: int = import_module(f"{__name__}.{COMMANDS[command][0]}").run(given)
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read the output has seen enough
        return 0
    except PagedKernError as error:
        sys.stderr.write(f"{PROG} {command}: {error}\n")
        return 2
    except OSError as error:  # of the output: a full disk
        sys.stderr.write(f"{PROG} {command}: {error}\n")
        return 3
    except ImportError as error:
        extra = next((extra for name, extra in EXTRAS.items() if name in str(error)), "cpu")
        other = ", or the extra of your GPU" if extra == "cpu" else ""
        sys.stderr.write(f"{PROG}: {error}: pip install 'pagedkern[{extra}]'{other}\n")
        return 1
