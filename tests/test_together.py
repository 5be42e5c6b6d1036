"""Tests that share something are one piece of work for pytest-xdist; no file is named that is not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("xdist", reason="pytest-xdist is not installed")

from tests.together import SHARED, Together

ROOT = Path(__file__).parents[1]


class Worker:
    """What a scheduler sees of a worker."""

    id = "one of two"
    shutting_down = False

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.gateway = self

    def send_runtest_some(self, indices: list[int]) -> None:
        self.sent += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def scheduled(config: pytest.Config, tests: list[str]) -> tuple[Any, list[Worker]]:
    scheduler: Any = Together(config)
    scheduler.numnodes = 2
    workers = [Worker(), Worker()]
    for worker in workers:
        scheduler.add_node(worker)
        scheduler.add_node_collection(worker, tests)
    scheduler.schedule()
    return scheduler, workers


def test_files_are_there() -> None:
    for name in SHARED:
        assert (ROOT / name).is_file()


def test_each_test_runs_once_and_those_that_share_on_one_worker(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pytestconfig.option, "tx", ["popen", "popen"], raising=False)
    monkeypatch.setattr(pytestconfig.option, "loadscopereorder", True, raising=False)
    alone = [f"tests/abi/test_csr.py::test_{i}" for i in range(40)]
    sharing = [f"{name}::test_{i}[x]" for i in range(3) for name in SHARED]
    tests = alone[:20] + sharing + alone[20:]
    scheduler, workers = scheduled(pytestconfig, tests)
    done: dict[str, Worker] = {}
    while len(done) < len(tests):
        for worker in workers:
            if worker.sent:
                index = worker.sent.pop(0)
                assert tests[index] not in done
                done[tests[index]] = worker
                scheduler.mark_test_complete(worker, index)
                assert all(not all(unit.values()) for unit in scheduler.assigned_work[worker].values())
    for what in set(SHARED.values()):
        assert len({done[test] for test in sharing if SHARED[test.partition("::")[0]] == what}) == 1
    assert {done[test] for test in alone} == set(workers)
    assert scheduler.tests_finished
    assert not scheduler.has_pending
