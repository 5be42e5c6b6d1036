"""Who else computes attention: one module each, imported when its row is measured. A new peer is one file and one line.

A module has `attention(problem, meter) -> Timer`; it raises `Missing` with what is not there, or what it cannot do.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType

from benchmarks.meter import Meter
from benchmarks.timer import Timer
from pagedkern.gpucheck.problems import CallTensors

_MODULES = {
    "torch SDPA, contiguous": "torch_sdpa",
    "torch flex_attention, paged": "torch_flex",
    "vLLM CPU": "vllm_cpu",
    "FlashInfer": "flashinfer_paged",
    "FlashAttention": "flash_attention",
}
NAMES = tuple(_MODULES)


class Missing(Exception):
    """Why a peer takes no part."""


def attention(name: str, problem: CallTensors, meter: Meter) -> Timer:
    """One call of a peer on the tokens of a problem; `Missing` says why not."""
    make: Callable[[CallTensors, Meter], Timer] = import_module(f"{__name__}.{_MODULES[name]}").attention
    return make(problem, meter)


def required(module: str, package: str, device: str, meter: Meter) -> ModuleType:
    """An optional module, and the device that it is for."""
    if meter.device != device:
        raise Missing(f"needs a {'GPU' if device == 'cuda' else 'CPU'}, measured is {meter.device}")
    try:
        return import_module(module)
    except ImportError as error:
        raise Missing(f"{error}: pip install {package}") from error


def without(problem: CallTensors, *features: str) -> None:
    """Raise `Missing` for what a peer is not asked to do here."""
    shape = problem.shape
    if "quantized" in features and shape.kv_dtype is not None:
        raise Missing(f"no cache of {shape.kv_dtype} beside queries of {shape.q_dtype}")
    if "queries" in features and shape.query_lens is not None:
        raise Missing("decode only")
    if "float32" in features and shape.q_dtype == "float32":
        raise Missing("no float32")
