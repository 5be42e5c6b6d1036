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
PACKAGES = ("numba", "llvmlite", "numba-cuda")


def refusal() -> str | None:
    """Why nothing that Numba compiles can run in this process; None if it can."""
    config = _config()
    if config.DISABLE_JIT:
        return "NUMBA_DISABLE_JIT is set, so that Numba compiles nothing: unset it"
    if config.CPU_FEATURES:
        from llvmlite import binding

        has = binding.get_host_cpu_features()
        asked = [flag[1:] for flag in str(config.CPU_FEATURES).split(",") if flag.startswith("+")]
        if missing := [name for name in asked if has.get(name) is False]:
            return f"NUMBA_CPU_FEATURES asks for {', '.join(missing)}, which this processor does not have: unset it"
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
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return tuple(found)


def _config() -> Any:
    from numba.core import config

    return config
