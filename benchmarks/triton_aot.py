"""Compile the Triton backend for GPUs that need not be here, and tell what became of its kernels.

    python -m benchmarks.triton_aot --out benchmarks/results/triton_aot.md       a representative grid, as a page
    python -m benchmarks.triton_aot --every 1 --out FILE           the whole grid: an hour and a half of a CPU's time
    python -m benchmarks.triton_aot --every 20 --json              each 20th cell of it, one JSON object a line

A cell is one call of the backend with its default configuration. It is compiled by making that call, with Triton's
driver replaced by one that names the wanted GPU and runs nothing: what is compiled is what a launch compiles. The
command fails if a call could not be compiled.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

LIMIT = 600  # seconds for one cell, of which it needs some 5 on a quiet machine
SHARED_BYTES = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
"""Shared memory that one block may use, by compute capability: CUDA C++ Programming Guide, table of technical
specifications, less the KiB that the system keeps."""

HEAD_DIMS = [(64, 64), (72, 72), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)]  # of K and of V
DTYPES = [
    ("float16", "float16"),
    ("bfloat16", "bfloat16"),
    ("float32", "float32"),
    ("bfloat16", "int8"),
    ("bfloat16", "float8_e4m3fn"),
    ("float16", "float8_e5m2"),
]  # of q and of the cache
GROUPS = [(1, False), (4, True), (16, False), (64, True)]  # query heads of a KV head; with all features, or with none
CAPABILITIES = [80, 90, 100]


@dataclass(frozen=True)
class Cell:
    """One call: what decides which kernels it launches and how they are compiled."""

    capability: int  # 80 is sm_80
    op: str  # "decode", "prefill", "write_kv", "copy_blocks"
    head_dim: int = 128
    head_dim_v: int = 128
    q_dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    group: int = 4
    features: bool = False  # window, softcap, ALiBi, sinks and lse, or none of them
    config: int | None = None  # which of `configs()`, counted around; None: the default


@dataclass(frozen=True)
class Compiled:
    """One kernel of a cell."""

    cell: Cell
    kernel: str
    warps: int
    stages: int
    registers: int  # of a thread
    local_bytes: int  # of a thread's stack
    local_accesses: int  # instructions that load or store there: spills
    shared: int  # bytes of a block
    loads: dict[str, int]  # from global memory: bytes of one -> instructions
    tensor_core: dict[str, int]  # instruction -> how often

    @property
    def wide_loads(self) -> int:
        return sum(count for size, count in self.loads.items() if int(size) >= 16)


@dataclass(frozen=True)
class Failed:
    cell: Cell
    error: str


Result = Compiled | Failed


def attention_grid() -> list[Cell]:
    """Every head_dim, dtype and group, for decode and prefill."""
    axes = itertools.product(HEAD_DIMS, DTYPES, GROUPS, ["decode", "prefill"], CAPABILITIES)
    return [Cell(capability, op, *dims, *dtypes, *group) for dims, dtypes, group, op, capability in axes]


def representative_grid() -> list[Cell]:
    """Every head_dim with every dtype for every capability, the groups and the two kinds of call taking turns; every
    group with both kinds of call at head_dim 128 in bfloat16; writing and copying for one capability."""
    turns = list(itertools.product(GROUPS, ["decode", "prefill"]))
    cells = []
    axes = [enumerate(values) for values in (HEAD_DIMS, DTYPES, CAPABILITIES)]
    for (a, dims), (b, dtypes), (c, capability) in itertools.product(*axes):
        group, op = turns[(a + 3 * b + 5 * c) % len(turns)]
        cells.append(Cell(capability, op, *dims, *dtypes, *group))
    usual = [cell for cell in attention_grid() if (cell.head_dim, cell.kv_dtype) == (128, "bfloat16")]
    return list(dict.fromkeys(cells + usual)) + [cell for cell in store_grid() if cell.capability == 90]


def store_grid() -> list[Cell]:
    """Writing and copying, for every dtype."""
    axes = itertools.product(["write_kv", "copy_blocks"], DTYPES, CAPABILITIES)
    return [Cell(capability, op, 128, 128, *dtypes) for op, dtypes, capability in axes]


# In a worker


def _die_with_parent(parent: int) -> None:
    """Whoever ends the command ends its workers, also in the middle of a cell."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def compile_cell(cell: Cell) -> list[Result]:
    """Compile what the call of a cell launches; an error becomes a result."""
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(LIMIT)
    try:
        return [_inspected(cell, kernel) for kernel in _launched(cell)]
    except Exception as error:
        return [Failed(cell, _explained(error))]
    finally:
        signal.alarm(0)


def _explained(error: BaseException) -> str:
    """The error and what caused it: Triton's own says where, its cause what."""
    text = "".join(traceback.format_exception_only(error)).strip()
    return text if error.__cause__ is None else f"{text}\n{_explained(error.__cause__)}"


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"not compiled within {LIMIT} seconds")


def _inspected(cell: Cell, kernel: Any) -> Compiled:
    from benchmarks.sass import usage

    used = usage(kernel.asm["cubin"])
    return Compiled(
        cell,
        kernel.metadata.name,
        kernel.metadata.num_warps,
        kernel.metadata.num_stages,
        used.registers,
        used.local_bytes,
        used.local_accesses,
        kernel.metadata.shared,
        {str(size): count for size, count in used.loads.items()},
        used.tensor_core,
    )


class _Driver:
    """What Triton asks of a driver while it compiles. Each capability is a device of its own, with its own cache."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


def _launched(cell: Cell) -> list[Any]:
    """The kernels that the cell's call would launch, compiled."""
    from unittest import mock

    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from pagedkern.backends.triton import TritonBackend, launch

    kernels: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernels.append(run(self, *args, grid=grid, warmup=True, **options))
        return kernels[-1]

    driver.set_active(_Driver(cell.capability))
    capability = divmod(cell.capability, 10)
    launch.native_fp8.cache_clear()  # both of these remember what is so for a device, and all cells have the same one
    launch._compiled.clear()  # what is compiled already would be launched
    with (
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch("torch.cuda.get_device_capability", return_value=capability),
    ):
        _call(TritonBackend(), cell)
    return [kernel.result() if hasattr(kernel, "result") else kernel for kernel in kernels]


def _call(backend: Any, cell: Cell) -> None:
    import torch

    from pagedkern.backends.base import CopyCall, WriteCall

    q_dtype, kv_dtype = getattr(torch, cell.q_dtype), getattr(torch, cell.kv_dtype)
    k_cache, v_cache = (
        torch.zeros(4, 2, 16, dim, dtype=kv_dtype).transpose(1, 2) for dim in (cell.head_dim, cell.head_dim_v)
    )  # [N, B, G, D], the HND layout
    scales = None if kv_dtype == q_dtype else torch.ones(2)
    if cell.op == "copy_blocks":
        backend.copy_blocks(CopyCall([k_cache, v_cache], torch.tensor([0, 1]), torch.tensor([2, 3])))
    elif cell.op == "write_kv":
        k, v = (torch.zeros(8, 2, dim, dtype=q_dtype) for dim in (cell.head_dim, cell.head_dim_v))
        backend.write_kv(WriteCall(k, v, k_cache, v_cache, torch.arange(8), scales, scales))
    else:
        _attention(backend, cell, k_cache, v_cache, scales)


def _attention(backend: Any, cell: Cell, k_cache: Any, v_cache: Any, scales: Any) -> None:
    import torch

    from pagedkern.backends.base import AttentionCall, Problem

    heads, seqs, width = 2 * cell.group, 4, 512
    tokens = seqs if cell.op == "decode" else 256 * seqs
    q, out = (
        torch.zeros(tokens, heads, dim, dtype=getattr(torch, cell.q_dtype)) for dim in (cell.head_dim, cell.head_dim_v)
    )
    few = None if cell.op == "decode" else torch.zeros(seqs + 1, dtype=torch.int32)
    per_head = torch.zeros(heads) if cell.features else None
    call = AttentionCall(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=torch.zeros(seqs, width, dtype=torch.int32),
        seq_lens=torch.zeros(seqs, dtype=torch.int32),
        cu_seqlens_q=few,
        max_seqlen_q=tokens // seqs,
        scale=0.1,
        causal=True,
        sliding_window=1000 if cell.features else None,
        softcap=30.0 if cell.features else None,
        alibi_slopes=per_head,
        sinks=per_head,
        k_scale=scales,
        v_scale=scales,
        out=out,
        lse=torch.zeros(tokens, heads) if cell.features else None,
    )
    problem = Problem(
        device="cuda",
        q_dtype=cell.q_dtype,
        kv_dtype=cell.kv_dtype,
        num_heads=heads,
        num_kv_heads=2,
        head_dim=cell.head_dim,
        head_dim_v=cell.head_dim_v,
        block_size=16,
        num_seqs=seqs,
        num_tokens=tokens,
        max_seqlen_q=call.max_seqlen_q,
        max_seqlen_k=width * 16,
        sliding_window=call.sliding_window,
        softcap=cell.features,
        alibi=cell.features,
        sinks=cell.features,
    )
    if cell.config is None:
        config = backend.default_config(problem)
    else:
        offered = list(backend.configs(problem))
        config = offered[cell.config % len(offered)]
    backend.attention(call, config)


# In the parent


def compile_all(cells: Iterable[Cell], workers: int) -> Iterator[Result]:
    """Compile cells in processes of their own, without Triton's interpreter and with an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ.pop("TRITON_INTERPRET", None)
        os.environ["TRITON_CACHE_DIR"] = cache
        with ProcessPoolExecutor(workers, get_context("spawn"), _die_with_parent, (os.getpid(),)) as pool:
            for results in pool.map(compile_cell, cells):
                yield from results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--every", type=int, metavar="N", help="each N-th cell of the whole grid")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, help="write the results to this file as a Markdown page")
    parser.add_argument("--json", action="store_true", help="print the results as JSON, one a line")
    parser.add_argument("--cells", action="store_true", help="read the cells from standard input, as JSON, one a line")
    options = parser.parse_args()
    if options.cells:
        cells = [Cell(**json.loads(line)) for line in sys.stdin]
    elif options.every:
        cells = attention_grid()[:: options.every] + store_grid()[:: options.every]
    else:
        cells = representative_grid()
    results: list[Result] = []
    for result in compile_all(cells, options.workers):
        results.append(result)
        if options.json:
            print(json.dumps({"kind": type(result).__name__, **asdict(result)}), flush=True)
        elif isinstance(result, Failed):
            print(f"{result.cell}: {result.error}", file=sys.stderr)
    failed = sum(isinstance(result, Failed) for result in results)
    if not options.json:
        print(f"{len(cells)} calls, {len(results) - failed} kernels compiled, {failed} calls failed")
    if options.out:
        from benchmarks.triton_aot_page import page

        options.out.write_text(page(results))
    sys.exit(failed > 0)


if __name__ == "__main__":
    from benchmarks.triton_aot import main  # not of __main__: the page and the workers know these classes by that name

    main()
