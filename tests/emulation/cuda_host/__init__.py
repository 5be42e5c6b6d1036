"""CUDA kernels on a machine without a GPU: g++ compiles the very same sources, and their threads run as fibers.

`include/` is what a CUDA compiler builds in, `runtime/` runs the threads, `compiler` builds and caches shared objects,
`launcher` is the CuPy backend's launcher, `settings` says how the kernels are to run. See README.md.
"""

from tests.emulation.cuda_host.compiler import Kernel, compile_kernels
from tests.emulation.cuda_host.launcher import HostLauncher
from tests.emulation.cuda_host.run import EmulationError, Settings, launch, settings

__all__ = ["EmulationError", "HostLauncher", "Kernel", "Settings", "compile_kernels", "launch", "settings"]
