"""The Triton backend: paged attention for NVIDIA GPUs of compute capability 8.0 and later.

`launch` goes from tensors to kernels; `decode` splits keys among programs and merges, `prefill` does not, and both walk
their keys by `walk` over the tiles of `tiles`, for the query rows of `rows`; `store` writes and copies; `config` says
what may be tuned. With TRITON_INTERPRET=1 Triton's interpreter runs the same kernels on tensors of the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from types import ModuleType
from typing import ClassVar

from pagedkern.backends.base import AttentionCall, Config, CopyCall, Probe, Problem, WriteCall, foreign
from pagedkern.backends.triton import config as _config
from pagedkern.backends.triton.config import TritonConfig

INSTALL = "pip install 'pagedkern[triton]'"
OLDEST = (8, 0)  # compute capability: asynchronous copies and bfloat16


class TritonBackend:
    """Kernels in Triton. Stateless; may be used from several threads."""

    name: ClassVar[str] = "triton"

    def probe(self) -> Probe:
        """Look for torch, triton, a driver and a device. Triton itself is imported only when something is computed."""
        for package in ("torch", "triton"):
            if find_spec(package) is None:
                return Probe(False, f"no module named {package!r}: {INSTALL}")
        if _emulated():
            return Probe(True, "Triton's interpreter on the CPU (TRITON_INTERPRET=1)", emulated=True)
        import torch

        if torch.version.cuda is None:
            return Probe(False, f"torch {torch.__version__} is built without CUDA: install a CUDA build of torch")
        if not torch.cuda.is_available():
            return Probe(False, "no CUDA device, or no NVIDIA driver: see nvidia-smi")
        capability = torch.cuda.get_device_capability()
        if capability < OLDEST:
            return Probe(
                False, f"{torch.cuda.get_device_name()} has compute capability {capability}, needed is {OLDEST}"
            )
        return Probe(True, torch.cuda.get_device_name())

    def supports(self, problem: Problem) -> str | None:
        """Everything on a GPU with a head_dim of at most 256."""
        reason = foreign(problem, "cpu" if _emulated() else "cuda")
        if reason is None and max(problem.head_dim, problem.head_dim_v) > 256:
            return f"head_dim is {problem.head_dim} of K, {problem.head_dim_v} of V; this backend goes up to 256"
        return reason

    def configs(self, problem: Problem) -> Iterable[TritonConfig]:
        """The default and its neighbours that fit into this GPU, 10 to 25."""
        return list(_config.configs(problem, _capability()))

    def default_config(self, problem: Problem) -> TritonConfig:
        """The default by head_dim, dtype, group and this GPU's compute capability: see `config.default_config`."""
        if problem.op != "attention":
            return TritonConfig()  # writing and copying have none
        return _config.default_config(problem, _capability())

    def make_config(self, fields: Mapping[str, object]) -> TritonConfig:
        """The config with these fields."""
        return TritonConfig.from_dict(fields)

    def attention(self, call: AttentionCall, config: Config) -> None:
        """Compute what `paged_attention` documents into `call.out` and `call.lse`; nothing waits on the host."""
        _launch().attention(call, TritonConfig.expect(config))

    def write_kv(self, call: WriteCall) -> None:
        """Scatter K and V into their slots on the current stream."""
        _launch().write_kv(call)

    def copy_blocks(self, call: CopyCall) -> None:
        """Copy blocks in every cache on the current stream."""
        _launch().copy_blocks(call)


def _emulated() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def _capability() -> tuple[int, int]:
    """Compute capability of the current device; that of an H100 where the kernels are interpreted."""
    if _emulated():
        return (9, 0)
    import torch

    return torch.cuda.get_device_capability()


def _launch() -> ModuleType:
    from pagedkern.backends.triton import launch  # imports torch and Triton: only when something is computed

    return launch
