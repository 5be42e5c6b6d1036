"""GPU kernels on a machine without a GPU: what makes the interpreter, the simulator and the host compiler run them.

`set_up()` is called before anything imports torch, triton or numba. On a machine with a GPU it does nothing: there the
tests run the real thing. EMULATE=1 emulates even so.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.emulation.after_import import after_import

EMULATED = os.environ.get("EMULATE", "") == "1" or not Path("/dev/nvidiactl").exists()


def set_up() -> None:
    """Choose interpreter and simulator. Subprocesses inherit the choice."""
    if EMULATED:
        os.environ.setdefault("TRITON_INTERPRET", "1")
        os.environ.setdefault("NUMBA_ENABLE_CUDASIM", "1")
        os.environ.setdefault("PAGEDKERN_CUPY_LAUNCHER", "tests.emulation.cuda_host.launcher:HostLauncher")
        if os.environ["TRITON_INTERPRET"] == "1":
            after_import("triton", _mend_triton)
        if os.environ["NUMBA_ENABLE_CUDASIM"] == "1":
            after_import("numba.cuda", _extend_numba)


def _mend_triton() -> None:
    from tests.emulation import triton_interpreter

    triton_interpreter.apply()


def _extend_numba() -> None:
    from tests.emulation import numba_simulator

    numba_simulator.apply()
