"""Attention through the block table, beside torch on contiguous memory and beside whoever else is installed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import rows, shapes
from benchmarks.conftest import device_of
from benchmarks.meter import Measure, Meter


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    config = metafunc.config
    size, device, configs = config.getoption("--size"), device_of(config), config.getoption("--configs")
    if metafunc.function is test_block_size:
        base = shapes.varied(size)
        found = [replace(base, name=f"{base.name}, block {n}", block_size=n) for n in shapes.BLOCK_SIZES[size]]
        own = [rows.Row(shape, name) for shape in found for name in rows.names() if name != "reference"]
        parameters = [pytest.param(row, id=f"{shapes.title(row.shape)}-{row.name}") for row in own]
    else:
        problems = shapes.decode(size) if metafunc.function is test_decode else shapes.prefill(size)
        parameters = [parameter for shape in problems for parameter in rows.of(shape, device, configs)]
    metafunc.parametrize("row", parameters)


def test_decode(row: rows.Row, problems: rows.Problems, meter: Meter, measure: Measure) -> None:
    """One query token for each sequence: bound by the reading of K and V."""
    run(f"decode {shapes.title(row.shape)}", row, problems, meter, measure)


def test_prefill(row: rows.Row, problems: rows.Problems, meter: Meter, measure: Measure) -> None:
    """Many query tokens for each sequence: bound by matrix products."""
    run(f"prefill {shapes.title(row.shape)}", row, problems, meter, measure)


def test_block_size(row: rows.Row, problems: rows.Problems, meter: Meter, measure: Measure) -> None:
    """One decode problem in blocks of every size."""
    base = shapes.varied(measure.size)
    measure.benchmark.extra_info["block_size"] = row.shape.block_size
    run(f"block size, {row.contender}, decode {shapes.title(base)}", row, problems, meter, measure)


def run(group: str, row: rows.Row, problems: rows.Problems, meter: Meter, measure: Measure) -> None:
    measure.benchmark.group = group
    measure.benchmark.extra_info["row"] = row.name
    with row.timer(problems(row.shape), meter) as timer:
        measure(timer, num_bytes=row.shape.kv_bytes, flops=row.shape.flops)
