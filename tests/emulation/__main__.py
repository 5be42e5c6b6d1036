"""`python -m tests.emulation MODULE [arguments]`: run a module as `python -m MODULE` would, with GPU kernels emulated
where there is no GPU."""

from __future__ import annotations

import runpy
import sys

from tests import emulation

if __name__ == "__main__":
    emulation.set_up()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
