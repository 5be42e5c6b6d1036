"""The CuPy backend: hand-written CUDA C++, compiled at run time by NVRTC.

`attention.cu` (with `tiles`, `mma`, `fma` and `softmax`), `merge.cu`, `write_kv.cu` and `copy_blocks.cu` are the
kernels, `ptx.cuh` the instructions that C++ has no words for, `elements.cuh` the dtypes, `instance.cuh` the structs
that launches hand over (in Python `instance`). `config` says what can be tuned and which instance a call needs,
`launch` goes from tensors to launches, `launcher` and `compiler` to the machine. docs/cupy_backend.md tells more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import ClassVar

from pagedkern.backends.base import AttentionCall, Config, CopyCall, Probe, Problem, WriteCall, foreign
from pagedkern.backends.cupy import config as configuration
from pagedkern.backends.cupy.config import CupyConfig
from pagedkern.backends.cupy.instance import MAX_DIM
from pagedkern.backends.cupy.launcher import current_launcher

__all__ = ["CupyBackend", "CupyConfig"]

GRID_Y = 65535  # blocks of threads in the second dimension of a grid: KV heads, or 4 heads each when splits are merged


class CupyBackend:
    """CUDA kernels for GPUs of compute capability 8.0 and more. Stateless; may be used from several threads."""

    name: ClassVar[str] = "cupy"

    def probe(self) -> Probe:
        """Look for torch, a GPU and CuPy; loads torch, but not CuPy."""
        return current_launcher().probe()

    def supports(self, problem: Problem) -> str | None:
        """Every dtype and block size; head_dim in steps of 8 up to 256."""
        reason = foreign(problem, "cpu" if current_launcher().emulated else "cuda")
        if reason is None and problem.op == "attention":
            for name, dim in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
                if not 8 <= dim <= MAX_DIM or dim % 8:
                    return f"{name} is {dim}; this backend computes multiples of 8 up to {MAX_DIM}"
            if problem.num_kv_heads > GRID_Y or problem.num_heads > 4 * GRID_Y:
                heads = f"{problem.num_heads} heads over {problem.num_kv_heads} KV heads"
                return f"{heads}; this backend computes up to {4 * GRID_Y} over {GRID_Y}"
        return reason

    def configs(self, problem: Problem) -> Iterable[CupyConfig]:
        """The default, and other spans, splits, pipelines and copies around it."""
        return configuration.configs(problem)

    def default_config(self, problem: Problem) -> CupyConfig:
        """The default by dtype, head_dim and group: results then do not depend on the batch."""
        return configuration.default_config(problem)

    def make_config(self, fields: Mapping[str, object]) -> CupyConfig:
        """The config with these fields."""
        return CupyConfig.from_dict(fields)

    def attention(self, call: AttentionCall, config: Config) -> None:
        """Compute what `paged_attention` documents into `call.out` and `call.lse`."""
        _launch().attention(call, CupyConfig.expect(config))

    def write_kv(self, call: WriteCall) -> None:
        """Scatter K and V into their slots."""
        _launch().write_kv(call)

    def copy_blocks(self, call: CopyCall) -> None:
        """Copy blocks in every cache."""
        _launch().copy_blocks(call)


def _launch() -> ModuleType:
    from pagedkern.backends.cupy import launch  # imports torch: only when something is computed

    return launch
