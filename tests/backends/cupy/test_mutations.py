"""Faults planted into the CUDA sources, each of which a small check must catch: what the emulation and the contract are
worth together.

A mutant is a textual change of one source file. If that text is gone, somebody changed the kernels: plant it into the
new text. `mode` "checked" is for faults whose results are right by luck, of the order or of what lies beside an array.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch

from pagedkern.backends import probe
from tests.contract.cache_checks import check_copy, check_write
from tests.contract.checks import (
    check_exact,
    check_no_leak_between_rows,
    check_whole,
)
from tests.contract.problems import Spec, build, contents
from tests.contract.targets import EMULATED_CONFIG, Target
from tests.contract.test_extremes import check_beyond_32_bits
from tests.emulation.cuda_host import EmulationError, settings
from tests.emulation.cuda_host.compiler import Mode
from tests.emulation.cuda_host.launcher import SOURCES

pytestmark = pytest.mark.skipif(not probe("cupy").emulated, reason="the CUDA kernels are not emulated here")

Check = Callable[[Target], None]
TARGET = Target("cupy", "cpu", EMULATED_CONFIG["cupy"], emulated=True)

DECODE = Spec(heads=2, kv_heads=1, seq_lens=(70, 0, 300), head_dim=16)
MIXED = Spec(seq_lens=(20, 5, 0, 70), query_lens=(3, 9, 2, 1), spare_rows=2, head_dim=16)
HALF = replace(MIXED, q_dtype="float16", sinks=0.5)
WINDOW = replace(HALF, window=9)
INT8 = replace(HALF, kv_dtype="int8", sinks=None)


def copying(path: str) -> Target:
    """Tiles reach shared memory in that way."""
    return replace(TARGET, config={**EMULATED_CONFIG["cupy"], "copy": path, "stages": 3})


@cache
def exact(*specs: Spec) -> Check:
    def check(target: Target) -> None:
        for spec in specs:
            check_exact(target, spec)

    return check


@cache
def exact_by(path: str) -> Check:
    return lambda _: check_exact(copying(path), replace(HALF, seq_lens=(20, 5, 0, 300)))


def shows_nan(target: Target) -> None:
    """NaN in V reaches those rows that see it, and no others."""
    tokens = contents(HALF)
    tokens[3].v[-1, 0, 0] = tokens[1].v[2, 1, 3] = torch.nan
    call = build(HALF, tokens)
    assert torch.equal(target.attend(call).out.isnan(), call.oracle()[0].isnan())


def writes(target: Target) -> None:
    check_write(target, Spec(kv_dtype="float32", head_dim=16), [5, -1, 17, 40], 4)


def writes_int8(target: Target) -> None:
    check_write(target, Spec(kv_dtype="int8", head_dim=16), [5, -1, 17, 40], 4, k_scale=0.5, v_scale=0.25)


def copies(target: Target) -> None:
    check_copy(target, [torch.arange(1200.0).view(4, 300)], [0, 1, 2], [1, 2, 0])


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    check: Check
    old: str
    new: str
    mode: Mode = "plain"


MUTANTS = [
    # barriers and waits
    Mutant("tiles not awaited by the block", "attention.cu", exact(DECODE, HALF),
           old="__syncthreads(); /* the tile is there", new="/*"),
    Mutant("sums over tiles still read", "attention.cu", exact(HALF, DECODE), mode="checked",
           old="__syncthreads(); /* nobody reads a tile", new="/*"),
    Mutant("queries not awaited", "attention.cu", exact(HALF), mode="checked",
           old="queries);\n  __syncthreads();", new="queries);"),
    Mutant("sums not awaited", "attention.cu", exact(HALF),
           old="  }\n  __syncthreads();\n  for (int step", new="  }\n  for (int step"),
    Mutant("factors not awaited", "attention.cu", exact(HALF), old="    __syncthreads();\n  }\n}", new="  }\n}"),
    Mutant("weights not awaited by the warp", "fma.cuh", exact(MIXED), old="    __syncwarp();\n    for", new="    for"),
    Mutant("no wait for cp.async", "tiles.cuh", exact_by("async"), old="cp_async_wait(i.stages - 2)", new="(void)0"),
    Mutant("wait for one group too few", "tiles.cuh", exact_by("async"),
           old="cp_async_wait(i.stages - 2)", new="cp_async_wait(i.stages - 1)"),
    Mutant("no wait for bulk copies", "tiles.cuh", exact_by("bulk"),
           old="mbarrier_wait(full + 8 * stage, turn / i.stages & 1)", new="(void)0"),
    Mutant("wrong parity", "tiles.cuh", exact_by("bulk"), old="turn / i.stages & 1", new="turn & 1"),
    Mutant("barriers not awaited", "tiles.cuh", exact_by("bulk"), old="    __syncthreads();\n#endif", new="#endif"),
    Mutant("copy overtakes the last readers", "copy_blocks.cu", copies, old="    __syncthreads();\n", new=""),
    # places
    Mutant("last token dropped", "tiles.cuh", exact(DECODE), old="token < end;", new="token < end - 1;"),
    Mutant("one token too many", "attention.cu", exact(MIXED),
           old="const int next = position(row) + 1;", new="const int next = position(row) + 2;"),
    Mutant("unmasked tail", "attention.cu", exact(HALF), old=" || key >= rows.to[r]", new=""),
    Mutant("window one too wide", "attention.cu", exact(WINDOW),
           old="params.sliding_window + 1 : 0", new="params.sliding_window : 0"),
    Mutant("32-bit offset of K", "tiles.cuh", lambda t: check_beyond_32_bits(t, "int8"),
           old="(long long)block * k.stride_block", new="(long long)(int)(block * k.stride_block)"),
    Mutant("table read by the token's bits", "tiles.cuh", exact(replace(DECODE, block_size=24)),
           old="(unsigned)token % block_size : 0", new="(unsigned)token & (block_size - 1) : 0"),
    Mutant("slot -1 written", "write_kv.cu", writes, mode="checked", old="if (slot < 0) return;", new=""),
    Mutant("padding rows not written", "attention.cu", lambda t: check_whole(t, MIXED),
           old="if (!i.prefill && batch.cu_seqlens_q && blockIdx.x == 0", new="if (false"),
    # numbers
    Mutant("sink dropped", "softmax.cuh", exact(HALF), old="if (params.sinks)", new="if (false)"),
    Mutant("no rescaling of the sums", "attention.cu", exact(DECODE, replace(HALF, magnitude=8.0)),
           old="    core.decay(r, decay);\n", new=""),
    Mutant("scales swapped", "attention.cu", exact(INT8),
           old="params.k_scale ? params.k_scale[", new="params.k_scale ? params.v_scale["),
    Mutant("scale of head 0 for all", "attention.cu", exact(INT8),
           old="params.k_scale[work.kv_head]", new="params.k_scale[0]"),
    Mutant("splits that do not exist are merged", "merge.cu", exact(DECODE),
           old="spans < plan.splits ? (int)spans : plan.splits", new="plan.splits"),
    Mutant("parts merged by their own weight", "merge.cu", exact(DECODE),
           old="total += weight_of(state[2 * p], top) *", new="total +="),
    Mutant("NaN of other rows", "mma.cuh", lambda t: check_no_leak_between_rows(t, HALF),
           old="if (apart) finite_only(b), finite_only(b + 2);", new=""),
    Mutant("NaN hidden", "mma.cuh", shows_nan, old="if (apart) add_infinite(tile, pitch, sees);", new=""),
    Mutant("infinity minus infinity", "softmax.cuh", exact(WINDOW),
           old="return top == -infinity() ? 0.0f : top;", new="return top;"),
    Mutant("binary logarithm", "softmax.cuh", exact(MIXED), old="logf(total)", new="log2f(total)"),
    Mutant("int8 not saturated", "elements.cuh", writes_int8, old="rintf(clamped(x, -128.0f, 127.0f))", new="rintf(x)"),
    Mutant("rounded down", "elements.cuh", writes_int8,
           old="(signed char)(int)rintf(", new="(signed char)(int)floorf("),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name.replace(" ", "_"))
def test_planted_fault_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    for path in SOURCES.glob("*.cu*"):
        shutil.copy(path, tmp_path)
    text = (tmp_path / mutant.file).read_text()
    assert text.count(mutant.old) == 1, f"{mutant.file} has changed: plant {mutant.name!r} anew"
    (tmp_path / mutant.file).write_text(text.replace(mutant.old, mutant.new))
    with settings(sources=tmp_path, mode=mutant.mode, level=0), pytest.raises((AssertionError, EmulationError)):
        mutant.check(TARGET)


@pytest.mark.parametrize("mode", ["plain", "checked"])
def test_sources_as_they_are_pass(mode: Mode) -> None:
    with settings(mode=mode, level=0):
        for check in dict.fromkeys(mutant.check for mutant in MUTANTS):
            check(TARGET)
