"""Compiling ahead in several processes, as for a GPU: how many, in which order, and when they are out of the way.

The processes are real; what they compile is made up, but for the last tests, in which they run real candidates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

import pytest

from pagedkern.autotune.isolate import Limits, Workers
from pagedkern.autotune.log import Log
from pagedkern.autotune.process import COMMAND, Process
from pagedkern.autotune.search import search
from pagedkern.autotune.space import Candidate, Space, candidates, problems_of
from pagedkern.autotune.store import device
from pagedkern.autotune.workloads import model
from tests.autotune.test_isolate import small, tiles
from tests.autotune.test_worker_lost import fake

Line = tuple[int, str, str, int]
LIMITS = Limits(prepare=20.0, check=20.0, sample=20.0, start=20.0)
CONFIGS = 12


def space_of(block_sizes: Sequence[int] = (16, 32)) -> Space:
    """Two backends with many configurations: those of "fast" are faster the larger their number."""
    found = [
        Candidate(b, name, json.dumps({"n": n}), is_default=n == 0)
        for name in ("fast", "slow")
        for b in block_sizes
        for n in range(CONFIGS)
    ]
    return Space(problems_of(model("llama-3-8b"), "cpu")[0], tuple(found), ())


def lines(tmp_path: Path) -> list[Line]:
    return [tuple(json.loads(text)) for text in (tmp_path / "count.log").read_text().splitlines()]  # type: ignore[misc]


def searched(tmp_path: Path, count: int, *harm: dict[str, object], budget: float = 100.0) -> tuple[Log, list[Line]]:
    space, log = space_of(), Log()
    workers = Workers(LIMITS, fake(tmp_path, *harm), compilers=count)
    try:
        search(space, workers.runner(space, 0), log, budget)
    finally:
        workers.close()
    return log, lines(tmp_path)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_as_many_processes_as_it_is_told(count: int, tmp_path: Path) -> None:
    log, said = searched(tmp_path, count)
    (measuring,) = {pid for pid, name, _, _ in said if name in ("check", "sample")}
    compiling = {pid for pid, _, _, _ in said} - {measuring}
    assert len(compiling) == count
    assert {name for pid, name, _, _ in said if pid in compiling} == {"open", "prepare"}
    opened = {seqs for pid, name, seqs, _ in said if pid in compiling and name == "open"}
    assert opened == {1}  # one sequence of the problem
    compiled = [(what, b) for pid, name, what, b in said if pid in compiling and name == "prepare"]
    assert len(compiled) == len(set(compiled)) == 2 * 2 * CONFIGS  # each once
    assert len(log.finals) == 41


def test_nothing_is_measured_while_something_compiles(tmp_path: Path) -> None:
    """All of a block size is compiled, then it is checked and timed; then comes the next one."""
    _, said = searched(tmp_path, 3)
    (measuring,) = {pid for pid, name, _, _ in said if name in ("check", "sample")}
    steps = [("measure" if pid == measuring else "compile", b) for pid, name, _, b in said if name != "open"]
    steps = [step for step, _ in groupby(steps) if step[0] == "compile" or step[1]]
    first = steps.index(("measure", 16))
    assert ("compile", 32) not in steps[:first]
    last = max(i for i, step in enumerate(steps) if step == ("compile", 32))
    assert ("measure", 32) not in steps[:last]


def test_the_most_promising_come_first(tmp_path: Path) -> None:
    """One process: its order is what is asked for. The untuned choice, the other default, and then, where nothing is
    known, in the order of the space; at the next block size by the times that were seen at the first."""
    log, said = searched(tmp_path, 1)
    (measuring,) = {pid for pid, name, _, _ in said if name in ("check", "sample")}
    order = {
        b: [what for pid, name, what, at in said if pid != measuring and name == "prepare" and at == b]
        for b in (16, 32)
    }
    assert order[16][:3] == ["fast(n=0)", "slow(n=0)", "fast(n=1)"]
    assert order[32][:2] == ["fast(n=0)", "slow(n=0)"]
    times = {str(c): seconds for c, seconds in log.screened.items() if c.block_size == 16}
    assert [times[what] for what in order[32][2:]] == sorted(times[what] for what in order[32][2:])


@pytest.mark.parametrize("do", ["segv", "exit", "hang"])
def test_what_comes_to_harm_is_not_run(do: str, tmp_path: Path) -> None:
    """A candidate with which the compiler crashes or hangs: it is lost, and another process goes on with the rest."""
    space, log = space_of(), Log()
    limits = Limits(prepare=2.0 if do == "hang" else 20.0, check=20.0, sample=20.0, start=20.0)
    harm = {"do": do, "command": "prepare", "from": 12, "times": 1}
    workers = Workers(limits, fake(tmp_path, harm), compilers=2)
    try:
        search(space, workers.runner(space, 0), log, 100.0)
    finally:
        workers.close()
    lost = {c: why for c, why in log.left_out.items() if any(w in why for w in ("crashed", "exit status", "took more"))}
    assert len({(c.backend, c.config) for c in lost}) == 1
    assert set(lost) <= log.lasting
    (name,) = {str(c) for c in lost}
    assert not [1 for _, command, what, _ in lines(tmp_path) if command in ("check", "sample") and what == name]
    assert len(log.finals) == 41


def test_one_that_is_killed_is_nobodys_fault(tmp_path: Path) -> None:
    log, _ = searched(tmp_path, 2, {"do": "kill", "command": "prepare", "from": 9, "times": 1})
    assert not [why for why in log.left_out.values() if "killed" in why]
    assert set(log.screened) == set(space_of().candidates)


def test_if_none_can_be_kept_alive_the_worker_compiles_for_itself(tmp_path: Path) -> None:
    log, said = searched(tmp_path, 2, {"do": "exit", "command": "open", "argument": 1})
    assert len(log.finals) == 41
    assert len({pid for pid, _, _, _ in said}) < 20  # tried again a few times
    assert len({pid for pid, name, _, _ in said if name == "prepare"}) == 1


def test_when_the_time_is_over_nobody_compiles_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Process] = []
    real = Process.__init__

    def watched(self: Process, command: Sequence[str] = COMMAND) -> None:
        real(self, command)
        started.append(self)

    monkeypatch.setattr(Process, "__init__", watched)
    space = space_of([16])
    workers = Workers(LIMITS, fake(tmp_path, {"do": "hang", "command": "prepare"}), compilers=3)
    try:
        runner = workers.runner(space, 0)
        runner.open()
        assert runner.compile_ahead(space.candidates, 5.0) == {}
        busy = [name for _, name, _, _ in lines(tmp_path) if name == "prepare"]
        assert len(busy) == 3
        ended = [process for process in started if not process.alive]
        assert len(ended) == 3
    finally:
        workers.close()
    assert not any(process.alive for process in started)


def test_how_many_there_are_is_decided_by_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, gib, expected in ((16, 128, 16), (16, 8, 4), (64, 1024, 64), (2, 128, 2)):
        monkeypatch.setattr(device, "cpu_threads", lambda cores=cores: cores)
        monkeypatch.setattr(device, "free_memory", lambda _, gib=gib: gib << 30)
        found = Workers().compilers("cuda")
        assert found is not None
        assert found.count == expected
        assert Workers().compilers("cpu") is None  # where all configurations are one kernel
    monkeypatch.setattr(device, "free_memory", lambda _: 1 << 30)
    assert Workers().compilers("cuda") is None


def test_real_candidates_are_run(add_backend: Callable[[str, str], None]) -> None:
    """On one sequence of the problem, in processes that hold a real bench; the one that crashes is found out."""
    add_backend("crashes", "Crashes")
    space = candidates(small(), [16], ["crashes"])
    workers = Workers(Limits(memory=1 << 30), compilers=2)
    try:
        runner = workers.runner(space, 0)
        runner.open()
        own = tiles(space, "crashes")
        assert runner.compile_ahead(list(own.values()), 100.0) == {own[32]: "crashed: SIGSEGV"}
        runner.lay_out(16)
        assert runner.check(own[32]) == "crashed: SIGSEGV, at block size 16"
        assert runner.check(own[64]) is None
    finally:
        workers.close()
