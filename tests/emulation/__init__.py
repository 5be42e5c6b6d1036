"""GPU kernels on a machine without a GPU: what makes the interpreter, the simulator and the host compiler run them.

`set_up()` is called before anything imports torch, triton or numba. On a machine with a GPU it does nothing: there the
tests run the real thing. EMULATE=1 emulates even so.
"""

from __future__ import annotations

import os
from pathlib import Path

EMULATED = os.environ.get("EMULATE", "") == "1" or not Path("/dev/nvidiactl").exists()


def set_up() -> None:
    """Choose interpreter and simulator. Subprocesses inherit the choice."""
    if EMULATED:
        os.environ.setdefault("TRITON_INTERPRET", "1")
        os.environ.setdefault("NUMBA_ENABLE_CUDASIM", "1")
