"""The command line as on a machine on which a round of measurements takes next to nothing: with a processor that has
little cache, and fewer rounds. `python -m tests.autotune.quick ARGUMENTS`, workers included."""

from __future__ import annotations

import sys

from pagedkern.autotune import process, search, worker
from pagedkern.autotune.cli import main
from pagedkern.autotune.store import device

CACHE = 1 << 18  # bytes
ROUNDS = 9


def small_cache(_: str) -> int:
    return CACHE


device.last_level_cache = small_cache
search.MAX_ROUNDS = ROUNDS
process.COMMAND = (sys.executable, "-m", __spec__.name, "--worker")

if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        worker.main()
    else:
        sys.exit(main())
