"""The kernels compiled for GPUs that need not be here: no spills, wide loads, tensor cores, inside the chip's limits.

A sample of the grid of `benchmarks.triton_aot`; TRITON_AOT=full compiles all of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

from benchmarks.sass import read_code
from benchmarks.triton_aot import (
    CAPABILITIES,
    DTYPES,
    GROUPS,
    HEAD_DIMS,
    SHARED_BYTES,
    Cell,
    Compiled,
    Failed,
    attention_grid,
    store_grid,
)
from pagedkern.backends.base import ITEMSIZE

ROOT = Path(__file__).parents[3]
FULL = os.environ.get("TRITON_AOT", "") == "full"
EVERY = 1 if FULL else 53  # prime, so that a sample has each value of each axis
LIMIT = 20000 if FULL else 1500  # seconds; some 200 on a quiet core
pytestmark = pytest.mark.timeout(LIMIT)


def compiled(cells: Iterable[Cell]) -> list[Compiled]:
    """Compile cells in another process: in this one Triton interprets."""
    lines = "".join(json.dumps(asdict(cell)) + "\n" for cell in cells)
    workers = "2" if FULL else "1"  # the other core has tests to run
    command = [sys.executable, "-m", "benchmarks.triton_aot", "--cells", "--json", "--workers", workers]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, cwd=ROOT, timeout=LIMIT, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    failed = [Failed(Cell(**each["cell"]), each["error"]) for each in found if each.pop("kind") == "Failed"]
    assert not failed
    assert done.returncode == 0, done.stderr
    return [Compiled(**each | {"cell": Cell(**each["cell"])}) for each in found]


def sample() -> list[Cell]:
    return attention_grid()[::EVERY] + store_grid()[:: 1 if FULL else 5]


@pytest.fixture(scope="session")  # minutes: not to be made twice by a worker
def kernels() -> list[Compiled]:
    return compiled(sample())


def attention(kernels: list[Compiled]) -> list[Compiled]:
    """Those that read the cache."""
    return [each for each in kernels if each.kernel in ("split_kernel", "prefill_kernel")]


def test_code_is_read() -> None:
    used = read_code(
        """
        /*0010*/ LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/ @!P0 LDGSTS.E.BYPASS.LTC128B.128 [R3], desc[UR4][R2.64] ;
        /*0030*/ LDG.E R4, desc[UR4][R2.64] ;
        /*0040*/ LDG.E.U16 R4, desc[UR4][R2.64] ;
        /*0050*/ LDG.E.64.CONSTANT R4, desc[UR4][R2.64] ;
        /*0060*/ LDGDEPBAR ;
        /*0070*/ UBLKCP.S.G [UR4], [UR6], UR8 ;
        /*0080*/ HMMA.16816.F32.BF16 R4, R4, R8, R4 ;
        /*0090*/ STL [R1], R2 ;
        /*00a0*/ LDL.LU R2, [R1] ;
        """,
        registers=40,
        local_bytes=8,
    )
    assert used.loads == {16: 3, 8: 1, 4: 1, 2: 1}
    assert used.wide_loads == 3
    assert used.tensor_core == {"HMMA.16816.F32.BF16": 1}
    assert used.local_accesses == 2
    assert used.spills


def test_the_sample_has_every_value() -> None:
    cells = [cell for cell in sample() if cell.op in ("decode", "prefill")]
    for op in ("decode", "prefill"):
        of_op = [cell for cell in cells if cell.op == op]
        assert {(cell.head_dim, cell.head_dim_v) for cell in of_op} == set(HEAD_DIMS)
        assert {(cell.q_dtype, cell.kv_dtype) for cell in of_op} == set(DTYPES)
        assert {(cell.group, cell.features) for cell in of_op} == set(GROUPS)
        assert {cell.capability for cell in of_op} == set(CAPABILITIES)


def test_every_kernel_was_compiled(kernels: list[Compiled]) -> None:
    names = {each.kernel for each in kernels}
    assert names >= {"split_kernel", "merge_kernel", "prefill_kernel", "write_kernel", "copy_kernel"}


def test_nothing_is_spilled(kernels: list[Compiled]) -> None:
    spilled = [each for each in kernels if each.local_accesses]
    assert not spilled, "\n".join(map(str, spilled))


def test_shared_memory_and_registers_fit(kernels: list[Compiled]) -> None:
    for each in kernels:
        assert each.shared <= SHARED_BYTES[each.cell.capability], each
        assert each.registers * each.warps * 32 <= 65536, each


def test_the_cache_is_read_16_bytes_at_a_time(kernels: list[Compiled]) -> None:
    """Where a row of the cache is a multiple of 16 bytes; else as wide as its alignment allows."""
    for each in attention(kernels):
        cell, itemsize = each.cell, ITEMSIZE[each.cell.kv_dtype]
        if cell.head_dim * itemsize % 16 == 0 and cell.head_dim_v * itemsize % 16 == 0:
            assert each.wide_loads >= 4, each
            assert not any(int(size) < 4 for size in each.loads), each


def test_16_bit_operands_go_to_the_tensor_cores(kernels: list[Compiled]) -> None:
    for each in attention(kernels):
        operands_are_narrow = ITEMSIZE[each.cell.q_dtype] == 2
        assert bool(each.tensor_core) == operands_are_narrow, each  # and float32 stays exact: no TF32


def test_chips_with_little_shared_memory() -> None:
    """Compute capability 8.6, 8.9 and 12.0: 99 KiB a block."""
    cells = [
        Cell(capability, op, head_dim, head_dim, *dtypes)
        for capability, op, head_dim, dtypes in [
            (89, "decode", 128, DTYPES[1]),
            (89, "prefill", 256, DTYPES[1]),
            (120, "prefill", 128, DTYPES[4]),
            (86, "prefill", 256, DTYPES[2]),
        ]
    ]
    for each in compiled(cells):
        assert each.shared <= SHARED_BYTES[each.cell.capability], each


@pytest.mark.parametrize("op", ["decode", "prefill"])
def test_configs_fit(op: str) -> None:
    """What `configs()` offers for tuning compiles and fits; it may spill: the tuner sees how fast it is."""
    base = Cell(80, op, 256, 256, "float16", "float16", 8, True)
    cells = [replace(base, config=index) for index in (range(30) if FULL else (0, 1, 5, 9))]
    for each in compiled(cells):
        assert each.shared <= SHARED_BYTES[80], each
        assert each.registers * each.warps * 32 <= 65536, each
