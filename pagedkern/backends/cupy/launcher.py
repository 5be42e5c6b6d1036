"""How kernels are found and launched: the seam between the backend and the machine.

The real launcher is CuPy's compiler and driver on torch's current stream. `PAGEDKERN_CUPY_LAUNCHER=module:attribute`
names another one; the tests' runs the same sources on the CPU.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol, cast

from pagedkern.backends.base import Probe

if TYPE_CHECKING:
    from torch import Tensor, device

Grid = tuple[int, int, int]
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Launcher(Protocol):
    emulated: bool  # takes tensors on the CPU
    generic: bool  # kernels are compiled once and read the constants of their instance from the launch

    def probe(self) -> Probe:
        """Whether it can run here; cheap, without side effects."""

    def capability(self, on: device) -> int:
        """Compute capability of the device: 90 is 9.0."""

    def shared_limit(self, on: device) -> int:
        """Bytes of dynamic shared memory that a block of threads may have."""

    def kernel(self, file: str, name: str, macros: Mapping[str, str], on: device) -> Any:
        """The kernel `name` of the source `file`, compiled with these macros on first use."""

    def launch(
        self,
        kernel: Any,
        grid: Grid,
        threads: int,
        shared_bytes: int,
        args: tuple[ctypes.Structure, ...],
        arrays: tuple[Tensor, ...],
        on: device,
    ) -> None:
        """Start it on the device's current stream. `arrays`: all tensors that `args`, passed by value, point into."""


@cache
def current_launcher() -> Launcher:
    """The one that this process uses."""
    named = os.environ.get("PAGEDKERN_CUPY_LAUNCHER")
    if not named:
        return CupyLauncher()
    module, _, attribute = named.partition(":")
    return cast(Launcher, getattr(import_module(module), attribute)())


class CupyLauncher:
    """NVRTC and the CUDA driver through CuPy."""

    emulated = False
    generic = False

    def __init__(self) -> None:
        self._kernels: dict[tuple[object, ...], Any] = {}
        self._lock = Lock()

    def probe(self) -> Probe:
        if not _is_installed("torch"):
            return Probe(False, "no module named 'torch': pip install 'pagedkern[cuda12]', or [cuda13]")
        import torch

        extra = "cuda13" if (torch.version.cuda or "").startswith("13") else "cuda12"
        missing = []
        if not torch.cuda.is_available():
            without = f"torch {torch.__version__} is built without CUDA: install a CUDA build of torch"
            missing.append("torch finds no CUDA device" if torch.version.cuda else without)
        elif torch.cuda.get_device_capability()[0] < 8:
            missing.append(f"{torch.cuda.get_device_name()} is older than compute capability 8.0")
        if not _is_installed("cupy"):
            missing.append(f"no module named 'cupy': pip install 'pagedkern[{extra}]'")
        if missing:
            return Probe(False, "; ".join(missing))
        return Probe(True, f"{torch.cuda.get_device_name()}, kernels compiled by NVRTC through CuPy")

    def capability(self, on: device) -> int:
        return _properties(on.index)[0]

    def shared_limit(self, on: device) -> int:
        return _properties(on.index)[1]

    def kernel(self, file: str, name: str, macros: Mapping[str, str], on: device) -> Any:
        key = (file, name, *macros.items(), on.index)
        with self._lock:
            if key not in self._kernels:
                self._kernels[key] = self._load(file, name, macros, on)
            return self._kernels[key]

    def _load(self, file: str, name: str, macros: Mapping[str, str], on: device) -> Any:
        import torch
        from cupy.cuda.function import Module
        from cupy_backends.cuda.api import driver, runtime

        from pagedkern.backends.cupy import compiler

        code = compiler.compiled(file, macros, self.capability(on))
        with torch.cuda.device(on):
            module = Module()
            try:
                module.load(code)
            except driver.CUDADriverError as error:
                raise RuntimeError(_not_loaded(file, compiler.version(), runtime.driverGetVersion())) from error
            function = module.get_function(name)  # keeps its module
            driver.funcSetAttribute(function.ptr, MAX_DYNAMIC_SHARED, self.shared_limit(on))
        return function

    def launch(
        self,
        kernel: Any,
        grid: Grid,
        threads: int,
        shared_bytes: int,
        args: tuple[ctypes.Structure, ...],
        arrays: tuple[Tensor, ...],
        on: device,
    ) -> None:
        import torch
        from cupy_backends.cuda.api import driver, runtime

        pointers = (ctypes.c_void_p * len(args))(*map(ctypes.addressof, args))
        with torch.cuda.device(on):
            if not driver.ctxGetCurrent():  # a thread that has not used CUDA yet: the driver gives it no context
                runtime.setDevice(on.index)
            stream = torch.cuda.current_stream(on).cuda_stream
            driver.launchKernel(
                kernel.ptr, *grid, threads, 1, 1, shared_bytes, stream, ctypes.addressof(pointers), 0
            )  # fmt: skip


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ImportError:  # of a finder that keeps it away
        return False


def _not_loaded(file: str, compiler: tuple[int, ...], driver: int) -> str:
    """What to say when the driver refuses compiled code; `driver` is the newest CUDA that it knows: 12080 is 12.8."""
    known = driver // 1000, driver % 1000 // 10
    said = f"{file}: the CUDA driver does not load what NVRTC {_dotted(compiler)} compiled"
    if compiler <= known:
        return said
    return f"{said}: the driver knows CUDA up to {_dotted(known)}, expected an NVRTC that is no newer"


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


@cache
def _properties(index: int) -> tuple[int, int]:
    """Compute capability and bytes of shared memory that a block may opt in to."""
    import torch

    found: Any = torch.cuda.get_device_properties(index)
    return 10 * found.major + found.minor, found.shared_memory_per_block_optin
