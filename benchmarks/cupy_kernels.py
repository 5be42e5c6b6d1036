"""Compile the CuPy backend's kernels for GPUs that need not be here, and tell what became of them.

    python -m benchmarks.cupy_kernels --out benchmarks/results/cupy_kernels.md  the whole grid (some minutes)
    python -m benchmarks.cupy_kernels --every 10 --nvrtc 12          each tenth kernel, by one NVRTC, printed

NVRTC of CUDA 12 and that of CUDA 13, each in processes of its own, compile exactly what a launch would: the default
configuration of each problem on each architecture.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import nvrtc
from pagedkern.backends.base import Problem
from pagedkern.backends.cupy import compiler, config
from pagedkern.backends.cupy.instance import Instance

CAPABILITIES = (80, 90, 100)
DTYPES = (  # of q and of the cache
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
    ("bfloat16", "float8_e4m3fn"),
    ("float16", "float8_e5m2"),
    ("float16", "int8"),
    ("bfloat16", "int8"),
    ("float32", "float32"),
    ("float32", "int8"),
    ("float16", "float32"),
)
DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))  # of K and of V
GROUPS = (1, 8, 32)  # of head_dim 128; of the others 8
KV_HEADS = 8


@dataclass(frozen=True)
class Cell:
    """One kernel for one architecture."""

    capability: int
    file: str = "attention.cu"
    instance: Instance | None = None  # of attention.cu

    @property
    def name(self) -> str:
        i = self.instance
        if i is None:
            return f"{self.file} sm_{self.capability}"
        kind = "prefill" if i.prefill else f"decode, {i.rows} x {i.row_warps} rows"
        options = f", {i.copy}" + (", softcap and ALiBi" if i.features else "")
        return f"sm_{self.capability} {kind}: q {i.q_dtype}, cache {i.kv_dtype}, {i.dim_k}/{i.dim_v}{options}"


@dataclass(frozen=True)
class Facts:
    """What the compiler says of a kernel."""

    nvrtc: str  # the version that compiled it: "12.9"
    registers: int
    stack: int  # bytes of local memory of a thread
    spills: int  # bytes of spill stores
    copies: int  # cp.async of 16 bytes in the PTX
    bulk: int  # cp.async.bulk
    mma: int  # mma.sync.m16n8k16
    ldmatrix: int
    warnings: tuple[str, ...]


def grid() -> list[Cell]:
    """Every kernel of the default configurations, with softcap and ALiBi on every second dtype."""
    cells: list[Cell] = []
    for capability in CAPABILITIES:
        copy = "bulk" if capability >= 90 else "async"
        for number, (q_dtype, kv_dtype) in enumerate(DTYPES):
            for dim, dim_v in DIMS:
                for group in GROUPS if dim == 128 else (8,):
                    problem = Problem(
                        "cuda", q_dtype, kv_dtype, group * KV_HEADS, KV_HEADS, dim, dim_v, 16, 1, 1, 1, 4096,
                        softcap=number % 2 == 1, alibi=number % 2 == 1,
                    )  # fmt: skip
                    default = config.default_config(problem)
                    for prefill in (False, True):
                        made = config.instance(config.model_of(problem), default, copy, prefill)
                        cells.append(Cell(capability, instance=made))
        cells += [Cell(capability, file) for file in ("merge.cu", "write_kv.cu", "copy_blocks.cu")]
    return list(dict.fromkeys(cells))


def measure(cell: Cell) -> Facts:
    """Compile it and read what ptxas and the PTX say. Raises `NVRTCError` if it does not compile."""
    macros = {"PAGEDKERN_INSTANCE": cell.instance.macro} if cell.instance else {}
    options = compiler.options_for(macros, cell.capability, (cell.capability,))
    made = compiler.build(cell.file, (*options, "--ptxas-options=-v"))
    found = {
        name: int(match[1]) if (match := re.search(pattern, made.messages)) else -1
        for name, pattern in (
            ("registers", r"Used (\d+) registers"),
            ("stack", r"(\d+) bytes stack frame"),
            ("spills", r"(\d+) bytes spill stores"),
        )
    }
    return Facts(
        nvrtc=nvrtc.signature(made.ptx),
        **found,
        copies=len(re.findall(r"cp\.async\.cg\.shared\.global \[[^;]*\], 16,", made.ptx)),
        bulk=made.ptx.count("cp.async.bulk.shared::cluster.global"),
        mma=made.ptx.count("mma.sync.aligned.m16n8k16"),
        ldmatrix=made.ptx.count("ldmatrix.sync"),
        warnings=tuple(line for line in made.messages.splitlines() if "warning" in line.lower()),
    )


def wrong(cell: Cell, facts: Facts) -> list[str]:
    """What a kernel must not have, and what it lacks."""
    i, found = cell.instance, [*facts.warnings]
    if facts.registers < 1 or facts.spills != 0 or facts.stack != 0:
        found.append(f"{facts.registers} registers, {facts.spills} bytes spilled, {facts.stack} bytes of stack")
    if i is not None:
        if i.copy == "async" and not facts.copies:
            found.append("no cp.async of 16 bytes")
        if i.copy == "bulk" and not facts.bulk:
            found.append("no bulk copy")
        if bool(facts.mma) != i.tensor_cores:
            found.append(f"{facts.mma} mma instructions")
        if i.tensor_cores and not facts.ldmatrix and i.kv_dtype == i.q_dtype:
            found.append("no ldmatrix")
    return found


def page(cells: Sequence[Cell], facts: Sequence[Sequence[Facts]], every: int) -> str:
    """The table as Markdown; `facts` has a sequence for each NVRTC, in the order of the cells."""
    command = "python -m benchmarks.cupy_kernels" + (f" --every {every}" if every > 1 else "")
    versions = list(dict.fromkeys(f.nvrtc for each in facts for f in each))
    if len(versions) < len(nvrtc.PACKAGES):
        command += f" --nvrtc {versions[0].partition('.')[0]}"
    lines = [
        "# What NVRTC makes of the CUDA kernels",
        "",
        f"Written by `{command} --out benchmarks/results/cupy_kernels.md` with NVRTC {' and '.join(versions)}.",
        "Every kernel is the one that a launch with the default configuration compiles. Shared memory and threads are",
        "those of one block of threads; registers, stack and spills are what ptxas reports; copies are `cp.async` of",
        "16 bytes or `cp.async.bulk` instructions, products `mma.sync.m16n8k16`, both counted in the PTX. Where the",
        "versions of NVRTC differ, each has its number, in the order above.",
        "",
        "| kernel | threads | tile | stages | shared bytes | registers | spilled bytes | copies | products |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    bad = []
    for cell, *found in zip(cells, *facts, strict=True):
        i = cell.instance
        shape = f"{i.threads} | {i.tile} | {i.stages} | {i.shared_bytes:,}" if i else " | | | "
        numbers = ([getattr(f, name) for f in found] for name in ("registers", "spills"))
        counts = [f.copies + f.bulk for f in found], [f.mma for f in found]
        lines.append(f"| {cell.name} | {shape} | {' | '.join(map(_field, (*numbers, *counts)))} |")
        bad += [f"{cell.name}, NVRTC {f.nvrtc}: {'; '.join(w)}" for f in found if (w := wrong(cell, f))]
    lines += ["", f"{len(cells)} kernels, {len(bad)} times something amiss.", *(f"- {line}" for line in bad), ""]
    return "\n".join(lines)


def _field(numbers: Sequence[int]) -> str:
    """One number where all are the same."""
    return " / ".join(map(str, numbers if len(set(numbers)) > 1 else numbers[:1]))


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--every", type=int, default=1, help="each n-th kernel of the grid")
    parser.add_argument("--out", type=Path, help="write the page there")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--nvrtc", type=int, nargs="+", choices=nvrtc.PACKAGES, default=list(nvrtc.PACKAGES), help="of which CUDA"
    )
    options = parser.parse_args(None if arguments is None else list(arguments))
    cells = grid()[:: options.every]
    facts = []
    for cuda in options.nvrtc:
        with nvrtc.processes(cuda, options.jobs) as pool:
            facts.append(list(pool.map(measure, cells)))
    text = page(cells, facts, options.every)
    if options.out:
        options.out.write_text(text)
    else:
        print(text)
    return 1 if any(wrong(cell, f) for each in facts for cell, f in zip(cells, each, strict=True)) else 0


if __name__ == "__main__":
    sys.exit(main())
