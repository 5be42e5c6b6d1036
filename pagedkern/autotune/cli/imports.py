"""`import`: take over what another machine, or another installation on this one, has exported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pagedkern.autotune import profile as profiles
from pagedkern.autotune import store
from pagedkern.autotune.cli import PROG, options
from pagedkern.autotune.report import console
from pagedkern.autotune.store import device as machine
from pagedkern.autotune.store import files
from pagedkern.autotune.store import profiles as stored
from pagedkern.errors import InvalidArgument

HELP = """\
Take over a file that "export" wrote. If it is of a machine like this one in
every respect its rates count as measured here. The kernels, and all that is of
another machine, are what is looked at for want of measurements of this
machine's own, if it is the one most like it. Of two measurements the later one
is kept.
"""


def run(argv: Sequence[str]) -> int:
    parser = options.parser("import", HELP, arguments=" FILE")
    parser.add_argument("file", type=Path, help='a file that "export" wrote')
    given = parser.parse_args(argv)
    try:
        document = files.load(given.file, stored.FORMAT)
        profile = profiles.from_json(document)
    except files.INVALID as error:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise InvalidArgument(f"{given.file}: got {why}, expected a file that export wrote") from error
    kind = str(profile.device["type"])
    here = machine.present(kind) and dict(machine.identity(kind)) == dict(profile.device)
    whose = "this machine" if here else machine.describe(profile.device)
    console.write(f"Of {whose}, {profile.when}, {profile.measured}\n")
    for what, own in [("kernels", False), ("rates", True)] if here else [("kernels and rates", False)]:
        try:
            path, kept = stored.take_over(document, profile.shape.name(), own)
        except OSError as error:
            console.complain(f"{PROG} import: {error}")
            return 3
        done = f"Kept: {what} of {kept}, which are newer" if kept else f"Taken over: {what}"
        console.write(f"{done}\n  {path}\n")
    store.reload()
    return 0
