"""Options, fixtures, and what goes into a result: the machine without names of hosts, people or folders."""

from __future__ import annotations

import os
import platform
from typing import Any

import pytest
import torch

import pagedkern
from benchmarks import shapes
from benchmarks.meter import READING, Measure, Meter
from benchmarks.rows import Problems
from pagedkern.autotune.store import device as machine


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("pagedkern")
    group.addoption("--size", choices=shapes.SIZES, default="small", help="of the problems (small: a CPU, minutes)")
    group.addoption("--device", choices=("cpu", "cuda"), default=None, help="default: the GPU if there is one")
    group.addoption("--configs", choices=("default", "all"), default="default", help="of each backend")


def device_of(config: pytest.Config) -> str:
    return config.getoption("--device") or ("cuda" if torch.cuda.is_available() else "cpu")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[MACHINE] = {
        "device": machine.describe(machine.identity(device_of(config))),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {"pagedkern": pagedkern.__version__, **machine.libraries()},
    }


MACHINE = pytest.StashKey[dict[str, Any]]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.benchmark(timer=READING, disable_gc=True))


@pytest.hookimpl(tryfirst=True)
def pytest_benchmark_generate_machine_info(config: pytest.Config) -> dict[str, Any]:
    return config.stash[MACHINE]


def pytest_benchmark_update_commit_info(commit_info: dict[str, Any]) -> None:
    for name in set(commit_info) - {"id", "time", "dirty"}:
        del commit_info[name]


def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    output_json["size"] = config.getoption("--size")
    output_json["load"] = machine.load()
    for row in output_json["benchmarks"]:  # the statistics are enough, and so is the id
        row["stats"].pop("data", None)
        for name in ("params", "options"):
            row.pop(name, None)


@pytest.fixture(scope="session")
def size(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--size"))


@pytest.fixture(scope="session")
def meter(request: pytest.FixtureRequest) -> Meter:
    return Meter(device_of(request.config))


@pytest.fixture(scope="session")
def problems(meter: Meter) -> Problems:
    return Problems(meter.device)


@pytest.fixture
def measure(benchmark: Any, meter: Meter, size: str) -> Measure:
    return Measure(benchmark, meter, size)


@pytest.fixture(scope="session", autouse=True)
def threads() -> None:
    """As many as this process may use, whatever the machine has."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(machine.cpu_threads())
