"""Runs the launcher as on a GPU, with the driver replaced: kernels are compiled and kept on disk, launches recorded.

A script, because it must decide before Numba is imported. Prints one JSON object: what was launched, and what was found
on disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from types import SimpleNamespace
from typing import Any

os.environ["NUMBA_ENABLE_CUDASIM"] = "0"

import torch
from numba import cuda
from numba.cuda import dispatcher
from numba.cuda.cudadrv import devices, driver

import pagedkern.backends.numba_cuda.launch as launcher
from pagedkern.backends.base import AttentionCall, CopyCall, WriteCall
from pagedkern.backends.numba_cuda.config import NumbaCudaConfig

launches: list[dict[str, Any]] = []
compiled_anew: list[str] = []  # kernels that were not found on disk


def record(stream: Any, config: Any, kernel: str, *args: Any) -> None:
    numbers = [getattr(arg, "value", arg) for arg in args]
    launches.append({"kernel": kernel, "grid": config.grid, "block": config.block, "stream": stream, "args": numbers})


def counted(signature: Any, threads: int, made_for: object) -> Any:
    def compile_(function: Any) -> Any:
        made = compiled(signature, threads, made_for)(function)
        if made._cache_misses:
            compiled_anew.append(function.__name__)
        for kernel in made.overloads.values():
            kernel._codelibrary.get_cufunc = lambda: SimpleNamespace(kernel=function.__name__)
        return made

    return compile_


def replace_driver() -> None:
    """Whatever Numba asks of a driver when it compiles, keeps and launches a kernel."""
    device = SimpleNamespace(compute_capability=(9, 0))
    dispatcher.get_current_device = lambda: device
    devices.get_context = lambda: SimpleNamespace(device=device)
    dispatcher._Kernel.bind = lambda self: None
    dispatcher.launch = record
    dispatcher.LaunchConfig = SimpleNamespace
    driver._to_core_stream = lambda stream: stream
    cuda.external_stream = lambda handle: f"stream {handle}"
    cuda.gpus = {None: contextlib.nullcontext()}
    torch.cuda.current_stream = lambda device: SimpleNamespace(cuda_stream=7)  # type: ignore[assignment, misc]


replace_driver()
compiled, launcher._compiled = launcher._compiled, counted

lens = torch.tensor([20, 5, 40], dtype=torch.int32)
table = torch.zeros(3, 5, dtype=torch.int32)
starts = torch.tensor([0, 20, 21, 22], dtype=torch.int32)
q, out = torch.zeros(2, 25, 4, 32).half()
cache = torch.zeros(2, 6, 16, 2, 32, dtype=torch.int8)
scales, lse = torch.ones(2), torch.zeros(25, 4)
launcher.attention(
    AttentionCall(
        q=q, k_cache=cache[0], v_cache=cache[1], block_table=table, seq_lens=lens, cu_seqlens_q=starts, max_seqlen_q=20,
        scale=0.5, causal=True, sliding_window=9, softcap=None, alibi_slopes=None, sinks=None, k_scale=scales,
        v_scale=scales, out=out, lse=lse,
    ),
    NumbaCudaConfig(),
)  # fmt: skip
slots = torch.zeros(7, dtype=torch.int64)
launcher.write_kv(WriteCall(q[:7, :2], q[:7, 2:], cache[0], cache[1], slots, scales, scales))
launcher.copy_blocks(CopyCall([cache[0], cache[1]], slots[:3], slots[3:6]))
names = {x.data_ptr(): n for n, x in {"q": q, "k": cache[0], "v": cache[1], "table": table, "lens": lens, "out": out,
         "starts": starts, "scales": scales, "lse": lse, "slots": slots}.items()}  # fmt: skip
for each in launches:
    each["args"] = [names.get(x, x) if isinstance(x, int) and x > 1 << 20 else x for x in each["args"]]
sys.stdout.write(json.dumps({"launches": launches, "compiled": compiled_anew}))
