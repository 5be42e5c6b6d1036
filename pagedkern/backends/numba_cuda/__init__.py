"""The Numba CUDA backend: paged attention as Python functions that Numba compiles for NVIDIA GPUs. The one to read.

`tile` holds the steps of attention on one tile of queries, `decode` and `prefill` the kernels made of them, `store` the
small kernels, `dtypes` the number formats, `device` the instructions that Numba lacks, `config` what is tuned and what
kernels are compiled for, `launch` goes from tensors to launches. docs/numba_cuda_walkthrough.md explains them in order.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from types import ModuleType
from typing import ClassVar

from pagedkern.backends.base import AttentionCall, Config, CopyCall, Probe, Problem, WriteCall, foreign
from pagedkern.backends.numba_cuda.config import NumbaCudaConfig

INSTALL = "pip install 'pagedkern[cuda12]' (or [cuda13])"
HEAD_DIMS = range(16, 257, 8)


class NumbaCudaBackend:
    """Kernels compiled by Numba for the GPU at hand. Stateless; may be used from several threads."""

    name: ClassVar[str] = "numba_cuda"

    def probe(self) -> Probe:
        """Look for the packages, then for a GPU. Imports Numba only where there is one, or a simulated one."""
        for package in ("torch", "numba", "numba_cuda", "cuda.bindings"):
            if not _is_installed(package):
                return Probe(False, f"no module named {package!r}: {INSTALL}")
        if _simulated():
            return _probe_simulator()
        import torch

        if torch.version.cuda is None:
            return Probe(False, f"torch {torch.__version__} is built without CUDA: {INSTALL} brings one that has it")
        if not torch.cuda.is_available():
            return Probe(False, f"torch finds no NVIDIA GPU, or no driver for CUDA {torch.version.cuda}")
        try:
            from numba import cuda

            if not cuda.is_available():
                return Probe(False, f"Numba finds no CUDA driver ({cuda.cuda_error()}): install NVIDIA's")
            toolkit = ".".join(map(str, cuda.runtime.get_version()))
        except Exception as error:  # a missing toolkit shows in many ways
            return Probe(False, f"Numba cannot use CUDA ({type(error).__name__}: {error}): {INSTALL}")
        return Probe(True, f"{torch.cuda.get_device_name()}, compiled by Numba with CUDA {toolkit}")

    def supports(self, problem: Problem) -> str | None:
        """Everything on the device "cuda" ("cpu" under the simulator) with head_dims of a multiple of 8."""
        reason = foreign(problem, "cpu" if _simulated() else "cuda")
        if reason is not None or problem.op != "attention":
            return reason
        for name, dim in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
            if dim not in HEAD_DIMS:
                return f"{name} is {dim}; this backend computes multiples of 8 from 16 to 256"
        if problem.num_kv_heads > 65535:
            return f"{problem.num_kv_heads} KV heads; this backend computes up to 65535"
        return None

    def configs(self, problem: Problem) -> Iterable[NumbaCudaConfig]:
        """The default, and one step away from it in each direction that may pay."""
        default = self.default_config(problem).to_dict()
        steps: list[dict[str, int]] = [{}, {"threads": 64}, {"threads": 256}, {"keys": 32}, {"keys": 128}]
        if problem.max_seqlen_k > 256:
            steps += [{"span": 512}, {"splits": 16}, {"splits": 64}]
        if problem.max_seqlen_q > 1:
            steps += [{"prefill_rows": 16}, {"prefill_rows": 64, "keys": 32}]
        return list(dict.fromkeys(self.make_config({**default, **step}) for step in steps))

    def default_config(self, problem: Problem) -> NumbaCudaConfig:
        """The same for every problem; tiles are fitted to the model's shape. Results do not depend on the batch."""
        return NumbaCudaConfig()

    def make_config(self, fields: Mapping[str, object]) -> NumbaCudaConfig:
        """The config with these fields."""
        return NumbaCudaConfig.from_dict(fields)

    def attention(self, call: AttentionCall, config: Config) -> None:
        """Compute what `paged_attention` documents into `call.out` and `call.lse`."""
        _launch().attention(call, NumbaCudaConfig.expect(config))

    def write_kv(self, call: WriteCall) -> None:
        """Scatter K and V into their slots. Slots are not checked: -1 writes nothing, others must lie in the cache."""
        _launch().write_kv(call)

    def copy_blocks(self, call: CopyCall) -> None:
        """Copy blocks in every cache. Ids are not checked."""
        _launch().copy_blocks(call)


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ImportError:  # of the package that it lies in
        return False


def _simulated() -> bool:
    return os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")


def _probe_simulator() -> Probe:
    from numba import cuda

    if not hasattr(cuda, "shfl_xor_sync"):
        return Probe(
            False,
            "NUMBA_ENABLE_CUDASIM is set, and Numba's simulator has no warp shuffles: unset it to use a GPU "
            "(tests/emulation/numba_simulator.py extends the simulator)",
        )
    return Probe(True, "this CPU, which simulates a GPU thread by thread, for tests", emulated=True)


def _launch() -> ModuleType:
    from pagedkern.backends.numba_cuda import launch  # imports torch and Numba: only when something is computed

    return launch
