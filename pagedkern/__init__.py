"""pagedkern: the paged KV cache of LLM inference as a micro-library.

Importing it loads nothing but this file: each public name is fetched from its module on first use, so that an engine
that wants the block allocator or the ABI alone needs neither torch nor NumPy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOMES = {  # module: the public names that live there
    "pagedkern.errors": (
        "AuditError",
        "BackendUnavailable",
        "BlockIndexError",
        "InvalidArgument",
        "InvalidType",
        "OutOfBlocks",
        "PagedKernError",
        "StaleSequence",
        "Unsupported",
        "WrongThread",
    ),
    "pagedkern.allocator": ("BlockAllocator", "Sequence", "Step", "Verdict"),
    "pagedkern.cache": ("KVCache",),
    "pagedkern.autotune.api": ("tune",),
    "pagedkern.autotune.recommend": ("Recommendation", "recommend"),
    "pagedkern.backends": ("BackendInfo",),
    "pagedkern.ops": ("Choice", "copy_blocks", "explain", "merge_states", "paged_attention", "write_kv"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}
_INSTALL = "pip install 'pagedkern[cpu]', for a GPU " + " or ".join(
    f"pip install 'pagedkern[{extra}]'" for extra in ("cuda12", "cuda13", "triton")
)
_SUBMODULES = (
    "abi",
    "allocator",
    "autotune",
    "backends",
    "cache",
    "errors",
    "gpucheck",
    "integrations",
    "ops",
    "scheduler",
)

__all__ = [
    "AuditError",
    "BackendInfo",
    "BackendUnavailable",
    "BlockAllocator",
    "BlockIndexError",
    "Choice",
    "InvalidArgument",
    "InvalidType",
    "KVCache",
    "OutOfBlocks",
    "PagedKernError",
    "Recommendation",
    "Sequence",
    "StaleSequence",
    "Step",
    "Unsupported",
    "Verdict",
    "WrongThread",
    "__version__",
    "backends",
    "copy_blocks",
    "explain",
    "merge_states",
    "paged_attention",
    "recommend",
    "tune",
    "write_kv",
]


if TYPE_CHECKING:
    from pagedkern import abi, allocator, autotune, cache, errors, gpucheck, integrations, ops, scheduler  # noqa: F401
    from pagedkern.allocator import BlockAllocator, Sequence, Step, Verdict
    from pagedkern.autotune.api import tune
    from pagedkern.autotune.recommend import Recommendation, recommend
    from pagedkern.backends import BackendInfo, backends
    from pagedkern.cache import KVCache
    from pagedkern.errors import (
        AuditError,
        BackendUnavailable,
        BlockIndexError,
        InvalidArgument,
        InvalidType,
        OutOfBlocks,
        PagedKernError,
        StaleSequence,
        Unsupported,
        WrongThread,
    )
    from pagedkern.ops import Choice, copy_blocks, explain, merge_states, paged_attention, write_kv
else:  # a type checker is shown the names themselves, so that it knows which there are not

    def __getattr__(name: str) -> object:
        if name in _SUBMODULES:  # `backends` is also a public function: the module is callable
            return import_module(f"{__name__}.{name}")
        if name not in _HOME:
            raise AttributeError(f"module 'pagedkern' has no attribute {name!r}")
        try:
            value = getattr(import_module(_HOME[name]), name)
        except ModuleNotFoundError as error:
            message = f"pagedkern.{name}: {error}: {_INSTALL}"
            raise ModuleNotFoundError(message, name=error.name, path=error.path) from error
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
