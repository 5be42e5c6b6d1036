"""The page that `benchmarks.triton_aot` makes of its results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from benchmarks.triton_aot import SHARED_BYTES, Compiled, Failed, Result

INTRODUCTION = """\
# What the Triton kernels compile to

Made by `python -m benchmarks.triton_aot --out benchmarks/results/triton_aot.md`
with triton {triton} and {ptxas}; do not edit.

{kernels} kernels of {cells} calls, each with its default configuration, were compiled by making the call with a driver
that runs nothing. K and V have head_dim {dims} (K/V where they differ), queries and cache are
{dtypes}, and there are {groups} query heads for each KV head, some of these with all
features (window, softcap, ALiBi, sinks, lse) and the others with none.

Unless told otherwise, the command compiles every head_dim with every dtype for every GPU, the groups and the two kinds
of call (decode, prefill; a prefill has the split kernel, too) taking turns, and all of these at head_dim 128 in
bfloat16. `--every 1` compiles every combination, which takes an hour and a half of a CPU's time.

A field of the tables is the worst over what was compiled: registers of a thread; bytes of a thread in local memory
(spills), if any; KiB of shared memory of a block (limits: {limits}); loads from global memory of 16 bytes or more, of
all loads in the code (the others fetch block ids, lengths and single numbers); the tensor-core instruction, if used.
"""


def page(results: Iterable[Result]) -> str:
    compiled = [result for result in results if isinstance(result, Compiled)]
    failed = [result for result in results if isinstance(result, Failed)]
    parts = [_introduction(compiled)]
    for kernel in dict.fromkeys(result.kernel for result in compiled):
        parts.append(f"## `{kernel}`\n\n" + _table([result for result in compiled if result.kernel == kernel]))
    if failed:
        parts.append("## Not compiled\n\n" + "".join(f"- {each.cell}: {each.error}\n" for each in failed))
    return "\n".join(parts)


def _introduction(compiled: list[Compiled]) -> str:
    cells = {result.cell for result in compiled}
    capabilities = sorted({cell.capability for cell in cells})
    return INTRODUCTION.format(
        triton=_version(),
        ptxas=_ptxas(capabilities),
        kernels=len(compiled),
        cells=len(cells),
        dims=", ".join(dict.fromkeys(_dims(result) for result in compiled)),
        dtypes=", ".join(dict.fromkeys(_dtypes(result) for result in compiled)),
        groups=", ".join(map(str, sorted({cell.group for cell in cells}))),
        limits=", ".join(f"sm_{each} {SHARED_BYTES[each] // 1024}" for each in capabilities),
    )


def _table(compiled: list[Compiled]) -> str:
    capabilities = sorted({result.cell.capability for result in compiled})
    rows: dict[tuple[str, str], dict[int, list[Compiled]]] = defaultdict(lambda: defaultdict(list))
    for result in compiled:
        rows[_dims(result), _dtypes(result)][result.cell.capability].append(result)
    lines = [
        "| head_dim | queries, cache | " + " | ".join(f"sm_{each}" for each in capabilities) + " |",
        "| --- | --- | " + " | ".join("---" for _ in capabilities) + " |",
    ]
    for (dims, dtypes), by_capability in rows.items():
        fields = [_field(by_capability[each]) if each in by_capability else "" for each in capabilities]
        lines.append(f"| {dims} | {dtypes} | " + " | ".join(fields) + " |")
    return "\n".join(lines) + "\n"


def _field(compiled: list[Compiled]) -> str:
    parts = [f"{max(each.registers for each in compiled)} registers"]
    spilled = max(each.local_bytes if each.local_accesses else 0 for each in compiled)
    if spilled:
        parts.append(f"**{spilled} bytes spilled**")
    shared = max(each.shared for each in compiled)
    if shared:
        parts.append(f"{shared / 1024:.0f} KiB")
    fewest = min(compiled, key=lambda each: each.wide_loads / max(1, sum(each.loads.values())))
    if fewest.loads:
        parts.append(f"{fewest.wide_loads}/{sum(fewest.loads.values())} wide")
    instructions = {name.split(".")[0] for each in compiled for name in each.tensor_core}
    return ", ".join(parts + sorted(instructions))


def _dims(result: Compiled) -> str:
    cell = result.cell
    return f"{cell.head_dim}" if cell.head_dim == cell.head_dim_v else f"{cell.head_dim}/{cell.head_dim_v}"


def _dtypes(result: Compiled) -> str:
    cell = result.cell
    return cell.q_dtype if cell.q_dtype == cell.kv_dtype else f"{cell.q_dtype} + {cell.kv_dtype}"


def _version() -> str:
    import triton

    return str(triton.__version__)


def _ptxas(capabilities: list[int]) -> str:
    from triton.backends.nvidia.compiler import get_ptxas

    return "ptxas " + " and ".join(dict.fromkeys(get_ptxas(each).version for each in capabilities))
