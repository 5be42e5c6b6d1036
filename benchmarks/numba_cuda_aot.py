"""Compile the kernels of the Numba CUDA backend for GPUs that need not be here, and tell what became of them.

    python -m benchmarks.numba_cuda_aot --out benchmarks/results/numba_cuda_kernels.md   the whole grid, as a page
    python -m benchmarks.numba_cuda_aot --every 20 --json                  each 20th cell, one JSON object a line

Numba compiles to PTX, ptxas (of CUDA, or of the package nvidia-cuda-nvcc) to machine code; nothing runs. The
command fails if anything could not be compiled.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks import nvrtc

CAPABILITIES = [80, 90, 100]
DIMS = [(64, 64), (72, 72), (128, 128), (192, 128), (256, 256)]  # of K and of V
DTYPES = [
    ("float16", "float16"),
    ("bfloat16", "bfloat16"),
    ("float32", "float32"),
    ("bfloat16", "int8"),
    ("bfloat16", "float8_e4m3fn"),
    ("float16", "float8_e5m2"),
]  # of q and of the cache
SOME_DTYPES = [("bfloat16", "bfloat16"), ("float32", "float32")]
PAGE = """\
# What the Numba CUDA kernels compile to

Made by `python -m benchmarks.numba_cuda_aot --out benchmarks/results/numba_cuda_kernels.md`
with numba-cuda {numba} and {ptxas};
do not edit. Each kernel was compiled for each GPU with the default configuration. A field tells the registers of a
thread, the KiB of shared memory of a block, the loads of 16 bytes from global memory that the PTX holds (of all loads
from global memory, asynchronous copies included; the others fetch block ids, lengths and single numbers), and bytes
spilled, if any. `decode` and `prefill` are compiled with all features (window, softcap, ALiBi, sinks, lse), some also
without: the field shows the larger numbers, and the fewer wide loads.

"""


@dataclass(frozen=True)
class Cell:
    """One kernel for one GPU."""

    capability: int  # 80 is sm_80
    kernel: str  # "decode", "merge", "prefill", "write", "gather", "scatter"
    head_dim: int = 128
    head_dim_v: int = 128
    q_dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    group: int = 4
    features: bool = False


@dataclass(frozen=True)
class Compiled:
    """What ptxas says of a kernel, and what its PTX holds."""

    cell: Cell
    nvvm: str  # the version that compiled it: "13.0"
    registers: int
    spilled: int  # bytes stored and loaded
    stack: int  # bytes of local memory of a thread
    shared: int  # bytes of a block
    wide_loads: int  # 16 bytes, from global memory, straight to shared memory or to registers
    loads: int  # all from global memory
    calls: int  # of functions that were not inlined


def grid() -> Iterator[Cell]:
    """Every dtype with head_dim 128, some with the others; groups and features where they matter most."""
    for capability in CAPABILITIES:
        for kernel in ("decode", "prefill"):
            for dim, dim_v in DIMS:
                for q, kv in DTYPES if dim == 128 else SOME_DTYPES:
                    yield Cell(capability, kernel, dim, dim_v, q, kv, features=True)
            yield Cell(capability, kernel)
            yield Cell(capability, kernel, kv_dtype="float8_e4m3fn")
        for group in (1, 16):
            yield Cell(capability, "decode", group=group, features=True)
        for q, kv in DTYPES:
            yield Cell(capability, "write", q_dtype=q, kv_dtype=kv)
        yield Cell(capability, "merge", features=True)
        yield Cell(capability, "gather")
        yield Cell(capability, "scatter")


def parts_of(cell: Cell) -> tuple[Callable[..., None], Any, int]:
    """The kernel's function, signature and threads, as a launch of the default configuration compiles it."""
    import torch

    from pagedkern.backends.base import AttentionCall
    from pagedkern.backends.numba_cuda import launch, store
    from pagedkern.backends.numba_cuda.config import NumbaCudaConfig

    if cell.kernel in ("gather", "scatter"):
        functions = dict(zip(("gather", "scatter"), store.copy_kernels(16, launch.THREADS), strict=True))
        return functions[cell.kernel], launch.copy_signature(), launch.THREADS
    q, k, v = (
        torch.empty(*shape, dtype=getattr(torch, dtype))
        for shape, dtype in (
            ((2, 2 * cell.group, cell.head_dim), cell.q_dtype),
            ((4, 16, 2, cell.head_dim), cell.kv_dtype),
            ((4, 16, 2, cell.head_dim_v), cell.kv_dtype),
        )
    )
    if cell.kernel == "write":
        new = torch.empty(2, 2, cell.head_dim, dtype=q.dtype)
        vector = launch.common_vector(new, k)
        function = store.write_kernel(
            cell.q_dtype, cell.kv_dtype, (cell.head_dim,) * 2, (vector, vector), 16, launch.THREADS
        )
        return function, launch.write_signature(cell.q_dtype, cell.kv_dtype), launch.THREADS
    numbers, floats = torch.zeros(3, dtype=torch.int32), torch.zeros(2 * cell.group)
    call = AttentionCall(
        q=q, k_cache=k, v_cache=v, block_table=numbers[None], seq_lens=numbers, cu_seqlens_q=numbers, max_seqlen_q=99,
        scale=1.0, causal=True, sliding_window=5 if cell.features else None, softcap=1.0 if cell.features else None,
        alibi_slopes=floats if cell.features else None, sinks=floats if cell.features else None, k_scale=floats,
        v_scale=floats, out=q, lse=floats[None] if cell.features else None,
    )  # fmt: skip
    constants = launch.constants(call, NumbaCudaConfig())[cell.kernel == "prefill"]
    return launch.FACTORIES[cell.kernel](constants), launch.signatures(constants)[cell.kernel], constants.threads


def compiled(cell: Cell, folder: Path) -> Compiled:
    """Compile a cell; raises what Numba raises, or RuntimeError with what ptxas says."""
    from numba import cuda
    from numba.cuda import dispatcher

    from pagedkern.backends.numba_cuda.launch import launch_bounds

    capability = divmod(cell.capability, 10)
    # Numba asks the GPU at hand what to compile device functions for, whatever kernels are compiled for.
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=capability)
    function, signature, threads = parts_of(cell)
    ptx, _ = cuda.compile(
        function,
        signature,
        device=False,
        abi="numba",
        cc=capability,
        output="ptx",
        launch_bounds=launch_bounds(threads),
    )
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    command = [str(ptxas()), f"-arch=sm_{cell.capability}", "-v", str(source), "-o", str(folder / "kernel.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    loads = re.findall(r"ld\.global\S*|cp\.async\.c[ag]\.shared\.global .*", ptx)
    wide = [load for load in loads if re.fullmatch(r"ld\.global\.v4\.\w32|cp\.async.* 16;", load)]
    stack, stores, loaded = map(int, _numbers(r"(\d+) bytes stack frame, (\d+) .* stores, (\d+)", done.stderr))
    return Compiled(
        cell,
        nvvm=nvrtc.signature(ptx),
        registers=int(_numbers(r"Used (\d+) registers", done.stderr)[0]),
        spilled=stores + loaded,
        stack=stack,
        shared=int((re.findall(r"(\d+) bytes smem", done.stderr) or ["0"])[0]),
        wide_loads=len(wide),
        loads=len(loads),
        calls=len(re.findall(r"^\s*call", ptx, re.MULTILINE)),
    )


def _numbers(pattern: str, text: str) -> tuple[str, ...]:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"ptxas said nothing of {pattern!r}: {text}")
    return found.groups()


@cache
def ptxas() -> Path:
    """ptxas of a CUDA toolkit, or of the packages that bring it."""
    places = [Path(folder) / "nvidia/cu13/bin/ptxas" for folder in sys.path]  # newer first: it reads older PTX
    places += [Path(folder) / "nvidia/cuda_nvcc/bin/ptxas" for folder in sys.path]
    for place in places:
        if place.exists():
            return place
    found = shutil.which("ptxas")
    if found is None:
        raise FileNotFoundError("no ptxas: pip install nvidia-cuda-nvcc, or a CUDA toolkit on PATH")
    return Path(found)


def page(results: list[Compiled]) -> str:
    """The tables, one for each kernel."""
    version = subprocess.run([str(ptxas()), "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"release \S+, V(\S+)", version)
    head = PAGE.format(numba=importlib.metadata.version("numba-cuda"), ptxas=f"ptxas {release and release.group(1)}")
    return head + "\n".join(_table(kernel, results) for kernel in dict.fromkeys(r.cell.kernel for r in results))


def _table(kernel: str, results: list[Compiled]) -> str:
    rows: dict[str, dict[int, list[Compiled]]] = {}
    for result in results:
        c = result.cell
        dims = str(c.head_dim) if c.head_dim == c.head_dim_v else f"{c.head_dim}/{c.head_dim_v}"
        dtypes = c.q_dtype if c.q_dtype == c.kv_dtype else f"{c.q_dtype}, {c.kv_dtype}"
        name = "16-byte vectors | |" if kernel in ("gather", "scatter") else f"{dims} | {dtypes} | {c.group}"
        if c.kernel == kernel:
            rows.setdefault(name, {}).setdefault(c.capability, []).append(result)
    lines = [
        f"## `{kernel}`\n",
        "| head_dim | q, cache | group | " + " | ".join(f"sm_{c}" for c in CAPABILITIES) + " |",
    ]
    lines.append("| --- " * (3 + len(CAPABILITIES)) + "|")
    for name, fields in rows.items():
        lines.append(f"| {name} | " + " | ".join(_field(fields.get(c, [])) for c in CAPABILITIES) + " |")
    return "\n".join(lines) + "\n"


def _field(results: list[Compiled]) -> str:
    if not results:
        return ""
    fewest = min(results, key=lambda each: each.wide_loads)
    text = f"{max(each.registers for each in results)} registers"
    if shared := max(each.shared for each in results):
        text += f", {shared / 1024:.0f} KiB"
    text += f", {fewest.wide_loads}/{fewest.loads} wide"
    if spilled := max(each.spilled for each in results):
        text += f", **{spilled} bytes spilled**"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="compile each n-th cell only")
    parser.add_argument("--first", type=int, default=0, help="begin with this cell")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument("--out", type=Path, help="write the page to this file")
    arguments = parser.parse_args()
    results, failed = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for cell in list(grid())[arguments.first :: arguments.every]:
            try:
                result = compiled(cell, Path(folder))
            except Exception as error:  # whatever went wrong, the other cells are compiled
                failed += 1
                print(f"{cell}: {type(error).__name__}: {error}", file=sys.stderr)
                continue
            results.append(result)
            if arguments.json:
                print(json.dumps(asdict(result)), flush=True)
    if arguments.out:
        arguments.out.write_text(page(results))
    return 1 if failed else 0


if __name__ == "__main__":
    os.environ["NUMBA_ENABLE_CUDASIM"] = "0"  # before Numba is imported
    sys.exit(main())
