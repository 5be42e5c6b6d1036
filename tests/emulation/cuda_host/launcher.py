"""The CuPy backend's launcher for tests: named by PAGEDKERN_CUPY_LAUNCHER, it runs the kernels on the host."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pagedkern
from pagedkern.backends.base import Probe
from tests.emulation.cuda_host import run
from tests.emulation.cuda_host.compiler import Kernel, compile_kernels, compiler

if TYPE_CHECKING:
    import torch  # imported by whoever has tensors; to ask what this launcher is takes none

PACKAGE = Path(pagedkern.__file__).parent
SOURCES = PACKAGE / "backends" / "cupy"


@dataclass(frozen=True)
class Handle:
    """A kernel by name: compiled when it is launched, in the mode and from the sources of that moment."""

    file: str
    name: str
    macros: tuple[tuple[str, object], ...]

    def kernel(self) -> Kernel:
        settings = run.current()
        source = (settings.sources or SOURCES) / self.file
        how = {"mode": settings.mode, "level": settings.level, "include": [PACKAGE / "abi"]}
        return compile_kernels(source, [self.name], dict(self.macros), **how)[self.name]  # type: ignore[arg-type]


class HostLauncher:
    """Takes tensors of the device "cpu" and looks like a GPU of compute capability 9.0."""

    emulated = True
    generic = True

    def probe(self) -> Probe:
        try:
            import torch  # noqa: F401
        except ModuleNotFoundError:
            return Probe(False, "no module named 'torch': pip install 'pagedkern[cuda12]'")
        if compiler() is None:
            return Probe(False, "no g++ 12 or later on the PATH, which the emulation of CUDA compiles the kernels with")
        return Probe(True, "the kernels compiled by g++, their threads run one at a time", emulated=True)

    def capability(self, device: torch.device) -> int:
        return 90

    def shared_limit(self, device: torch.device) -> int:
        return 227 * 1024

    def kernel(self, file: str, name: str, macros: Mapping[str, object], device: torch.device) -> Handle:
        return Handle(file, name, tuple(sorted(macros.items())))

    def launch(
        self,
        handle: Handle,
        grid: tuple[int, int, int],
        block: int,
        shared_bytes: int,
        args: tuple[ctypes.Structure, ...],
        arrays: tuple[torch.Tensor, ...],
        device: torch.device,
    ) -> None:
        assert shared_bytes <= self.shared_limit(device)
        assert all(0 < size < most for size, most in zip(grid, (2**31, 2**16, 2**16), strict=True)), f"grid: {grid}"
        assert 0 < block <= 1024, f"blocks of {block} threads"
        run.launch(handle.kernel(), grid, (block, 1, 1), shared_bytes, args, [extent(array) for array in arrays])


def extent(array: torch.Tensor) -> tuple[int, int]:
    """Address and bytes from the first to the last element."""
    if array.numel() == 0:
        return array.data_ptr(), 0
    last = sum((size - 1) * stride for size, stride in zip(array.shape, array.stride(), strict=True))
    return array.data_ptr(), (last + 1) * array.element_size()
