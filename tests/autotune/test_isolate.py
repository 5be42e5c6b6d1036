"""Workers: whatever a candidate does, the run goes on without it. The processes are real, times are not looked at."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pagedkern.autotune import entry
from pagedkern.autotune.decision import decide
from pagedkern.autotune.isolate import Limits, Workers
from pagedkern.autotune.log import Log
from pagedkern.autotune.runner import CandidateLost, RunnerFailed
from pagedkern.autotune.search import search
from pagedkern.autotune.space import Candidate, Space, Workload, candidates, workloads

ROOT = Path(__file__).parents[2]
LIMITS = Limits(check=30.0, sample=30.0, memory=1 << 30)


def small(kind: str = "decode") -> Workload:
    both = workloads("cpu", "float32", heads=(4, 2, 16), num_seqs=2, context=53, prompt=21)
    return both[0] if kind == "decode" else both[1]


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """One worker for all tests; some of them have to start another."""
    made = Workers(LIMITS)
    yield made
    made.close()


def tiles(space: Space, backend: str, block_size: int = 16) -> dict[int, Candidate]:
    own = [c for c in space.candidates if c.backend == backend and c.block_size == block_size]
    return {int(str(c.fields["tile"])): c for c in own}


def test_a_worker_measures_what_the_bench_measures(add_backend: Callable[[str, str], None], workers: Workers) -> None:
    add_backend("prints", "Prints")
    space = candidates(small(), [8, 16], ["prints", "reference"])
    runner = workers.runner(space, 0)
    for candidate in (c for c in space.candidates if c.backend != "cpu"):
        runner.prepare(candidate)
        assert runner.check(candidate) is None
        assert 0 < runner.sample(candidate, 2) < 10
        assert 0 < runner.sample(candidate, 2, context=7) < 10
    assert runner.read_bandwidth() > 1e6
    assert runner.product_rate() > 1e6


@pytest.mark.parametrize(
    ("cls", "tile", "reason"),
    [
        ("Crashes", 32, "crashed: SIGSEGV"),
        ("EatsMemory", 32, "MemoryError"),
        ("OffByLittle", 64, "wrong by 1.0e-03"),
        ("WritesNothing", 64, "wrong by nan"),
        ("WrongAtFullBlocks", 64, "on edge cases"),
        ("Raises", 64, "RuntimeError: illegal memory access"),
    ],
)
def test_what_is_wrong_is_found_and_the_next_one_is_measured(
    cls: str, tile: int, reason: str, add_backend: Callable[[str, str], None], workers: Workers
) -> None:
    name = f"bad_{cls.lower()}"
    add_backend(name, cls)
    space = candidates(small(), [16], [name, "reference"])
    runner = workers.runner(space, 0)
    found = runner.check(tiles(space, name)[tile])
    assert found is not None
    assert reason in found
    good = next(c for c in space.candidates if c.backend == "reference")
    assert runner.check(good) is None
    assert runner.sample(good, 1) > 0


def test_a_hang_ends_in_time_and_is_quarantined_everywhere(add_backend: Callable[[str, str], None]) -> None:
    add_backend("hangs", "Hangs")
    space = candidates(small(), [8, 16], ["hangs"])
    made = Workers(Limits(check=4.0))
    try:
        runner = made.runner(space, 0)
        assert runner.check(tiles(space, "hangs")[64]) is None
        begin = time.monotonic()
        assert runner.check(tiles(space, "hangs")[128]) == "took more than 4 s, ended"
        assert time.monotonic() - begin < 60
        assert not made.alive
        with pytest.raises(CandidateLost, match="took more than 4 s, ended, at block size 16"):
            runner.sample(tiles(space, "hangs", 8)[128], 1)
        assert made.started == 1  # and asking for it again started nothing
        assert runner.check(tiles(space, "hangs")[32]) is None
        assert made.started == 2
    finally:
        made.close()


def test_a_search_goes_on_without_what_is_lost(
    add_backend: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry, "TOO_SLOW", math.inf)  # so that it stays in the race, however busy the machine
    add_backend("later", "HangsLater")
    space = candidates(small(), [16], ["later"])
    lost = tiles(space, "later")[128]
    made = Workers(Limits(check=20.0, sample=3.0))
    log = Log()
    try:
        search(space, made.runner(space, 0), log, 100.0, exhaustive=True)
    finally:
        made.close()
    assert log.left_out[lost].startswith("took more than 3 s")
    assert lost in log.lasting
    verdict = decide(space, log)
    assert set(verdict.winners) == {16}
    assert lost not in {pick.candidate for pick in verdict.winners.values()}
    assert len(log.finals) >= 5


def test_a_backend_that_is_lost_again_and_again_is_left_alone(
    add_backend: Callable[[str, str], None], workers: Workers
) -> None:
    add_backend("exits", "Exits")
    space = candidates(small(), [16], ["exits", "reference"])
    runner = workers.runner(space, 0)
    own = tiles(space, "exits")
    before = workers.started
    for tile in (32, 64, 128):
        with pytest.raises(CandidateLost, match="exit status 3"):
            runner.prepare(own[tile])
    more = Candidate(16, "exits", '{"tile": 256}')
    with pytest.raises(CandidateLost, match="exits was lost 3 times"):
        runner.sample(more, 1)
    assert workers.started == before + 2


def test_a_worker_that_cannot_lay_out_says_why(workers: Workers) -> None:
    space = candidates(small(), [16], ["reference"])
    runner = workers.runner(space, 0)
    with pytest.raises(CandidateLost, match="block size 0 cannot be laid out: ZeroDivisionError"):
        runner.lay_out(0)
    assert runner.check(next(c for c in space.candidates if c.backend == "reference")) is None
    broken = Space(replace(space.workload, kind="prefill", query_len=-1), space.candidates, ())
    with pytest.raises(RunnerFailed, match="the worker that measures: "):
        workers.runner(broken, 0).open()
    workers.runner(space, 0).open()


PARENT = """
import sys, time
from pagedkern.autotune.isolate import Workers
from tests.autotune.test_isolate import small
from pagedkern.autotune.space import candidates
workers = Workers()
workers.runner(candidates(small(), [16], ["reference"]), 0).open()
print(workers._process.pid, flush=True)
time.sleep(600)
"""


def test_a_worker_ends_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    os.kill(worker, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # of the whole group: it is the parent's to answer
        os.kill(worker, number)
    time.sleep(0.2)
    os.kill(worker, 0)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    for _ in range(300):
        try:
            state = Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            break
        if state == "Z":
            break
        time.sleep(0.1)
    else:
        raise AssertionError("the worker lives on")
