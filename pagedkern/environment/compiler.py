"""What Numba is set to, by variables of the environment or by a program: see `numba.core.config`.

Imports Numba when it is asked.
"""

from __future__ import annotations

import importlib.metadata
import sys
from functools import cache
from typing import Any

SETTINGS = (  # that change what is compiled, for any target
    "OPT", "DEBUGINFO_DEFAULT", "CUDA_DEBUGINFO_DEFAULT", "BOUNDSCHECK", "LOOP_VECTORIZE", "SLP_VECTORIZE",
    "DISABLE_INTEL_SVML", "USING_SVML", "LLVM_REFPRUNE_PASS", "LLVM_REFPRUNE_FLAGS", "ENABLE_PROFILING",
    "EXTEND_VARIABLE_LIFETIMES", "DEBUG_JIT", "DEBUG_NRT", "JIT_COVERAGE", "ENABLE_SYS_MONITORING",
)  # fmt: skip


def refusal() -> str | None:
    """Why nothing that Numba compiles can run in this process; None if it can."""
    config = _config()
    if config.DISABLE_JIT:
        return "NUMBA_DISABLE_JIT is set, so that Numba compiles nothing: unset it"
    return _refused_features(str(config.CPU_FEATURES)) if config.CPU_FEATURES else None


def _refused_features(flags: str) -> str | None:
    """Why code for these features would end the process: LLVM cannot read them, or the processor lacks one."""
    from llvmlite import binding

    names = flags.split(",")
    if not all(name.startswith(("+", "-")) for name in names):
        return f"NUMBA_CPU_FEATURES: got {flags!r}, expected features behind + or -, with commas between them"
    has = binding.get_host_cpu_features()
    if lacking := [name[1:] for name in names if name.startswith("+") and has.get(name[1:]) is False]:
        return f"NUMBA_CPU_FEATURES asks for {', '.join(lacking)}, which this processor does not have: unset it"
    return None


def cache_folder() -> str:
    """The folder that `NUMBA_CACHE_DIR` names; "" if it names none."""
    return str(_config().CACHE_DIR or "")


def key() -> str:
    """What compiled code depends on beside its source, signature and processor: settings and versions."""
    config = _config()
    settings = [f"{name}={getattr(config, name, None)!r}" for name in SETTINGS]
    return " ".join([sys.implementation.cache_tag or "", sys.abiflags, *_versions(), *settings])


@cache
def _versions() -> tuple[str, ...]:
    import llvmlite
    import numba

    try:
        cuda = importlib.metadata.version("numba-cuda")
    except importlib.metadata.PackageNotFoundError:
        cuda = ""
    return numba.__version__, llvmlite.__version__, cuda


def _config() -> Any:
    from numba.core import config

    return config
