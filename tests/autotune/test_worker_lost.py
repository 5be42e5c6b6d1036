"""A worker that is killed, crashes, hangs or cannot be started: what was decided is kept, and the reason is said.

The processes are real, what they measure is made up; none is waited for longer than its limit.
"""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedkern.autotune import process, store
from pagedkern.autotune.cli import main
from pagedkern.autotune.isolate import Limits, Workers
from pagedkern.autotune.records import load
from pagedkern.autotune.runs import Order, TuningRun, carry_out
from pagedkern.autotune.space import problems_of
from pagedkern.autotune.workloads import model
from tests.autotune.test_cli import SHAPE

LIMITS = Limits(prepare=20.0, check=20.0, sample=20.0, start=20.0)
SHORT = Limits(prepare=3.0, check=3.0, sample=3.0, start=6.0)
Harm = dict[str, Any]


def fake(tmp_path: Path, *harm: Harm) -> list[str]:
    return [sys.executable, "-m", "tests.autotune.fake_worker", str(tmp_path / "count"), json.dumps(harm)]


def run_with(
    tmp_path: Path, *harm: Harm, limits: Limits = LIMITS, command: list[str] | None = None, **more: Any
) -> tuple[TuningRun, Workers]:
    """A decode and a prefill problem at two block sizes."""
    order = Order(problems_of(model("llama-3-8b"), "cpu"), [16, 32], ["cpu"], budget=100.0)
    workers = Workers(limits, command or fake(tmp_path, *harm))
    try:
        run = carry_out(order, make_runner=workers.runner, **more)
    finally:
        workers.close()
    return run, workers


def commands(tmp_path: Path) -> int:
    return (tmp_path / "count").stat().st_size


def decided(run: TuningRun) -> list[list[int]]:
    return [sorted(outcome.stored) for outcome in run.outcomes]


def test_nothing_happens(tmp_path: Path) -> None:
    run, workers = run_with(tmp_path)
    assert (run.exit_code, run.failures, workers.started) == (0, [], 1)
    assert decided(run) == [[16, 32], [16, 32]]
    assert commands(tmp_path) > 500


@pytest.mark.parametrize("seed", range(8))
def test_a_worker_that_is_killed_now_and_then_costs_nothing(seed: int, tmp_path: Path) -> None:
    """By SIGKILL, as when memory is short, at any two commands: it is started again, and all is decided."""
    rng = random.Random(seed)
    at = sorted(rng.sample(range(1, 560), 2))
    run, workers = run_with(tmp_path, *({"do": "kill", "from": n, "until": n + 1} for n in at))
    assert run.failures == []
    assert run.exit_code == 0
    assert decided(run) == [[16, 32], [16, 32]]
    assert workers.started == 3
    for outcome in run.outcomes:
        assert not any("killed" in reason for reason in outcome.log.left_out.values())


@pytest.mark.parametrize("seed", range(6))
def test_a_worker_that_is_killed_again_and_again_keeps_what_was_decided(seed: int, tmp_path: Path) -> None:
    """From some command on every worker is killed: the best so far is stored, and the reason said."""
    first = random.Random(seed).randrange(1, 600)
    run, workers = run_with(tmp_path, {"do": "kill", "from": first}, journal=tmp_path / "run.jsonl")
    assert run.exit_code == 1
    assert workers.started < 12
    assert run.failures
    assert all("was killed (SIGKILL): the system may be out of memory" in failure for failure in run.failures)
    assert len(run.outcomes) == 2
    for outcome in run.outcomes:
        assert sorted(outcome.stored) == sorted(outcome.verdict.winners)
    recorded = load(tmp_path / "run.jsonl")
    assert [log.finals for log in recorded.logs] == [outcome.log.finals for outcome in run.outcomes]
    if first > 300:  # in the finals of decode, or later
        assert decided(run)[0] == [16, 32]
        assert run.profile is not None
    again, _ = run_with(tmp_path, journal=tmp_path / "run.jsonl", resume=True)
    assert again.exit_code == 0
    assert decided(again) == [[16, 32], [16, 32]]
    assert again.outcomes[0].log.finals[: len(recorded.logs[0].finals)] == recorded.logs[0].finals


@pytest.mark.parametrize("do", ["kill", "segv", "exit", "abort", "half"])
@pytest.mark.parametrize("block_size", [16, 32])
def test_a_block_size_that_cannot_be_laid_out(do: str, block_size: int, tmp_path: Path) -> None:
    """Each time: the usual one ends the problem, another one is left out."""
    run, _ = run_with(tmp_path, {"do": do, "command": "lay_out", "argument": block_size})
    reason = {
        "kill": "was killed", "segv": "crashed: SIGSEGV", "exit": "exit status 7", "abort": "crashed: SIGABRT",
        "half": "exit status 0",
    }[do]  # fmt: skip
    if block_size == 16:
        assert decided(run) == [[], []]
        assert len(run.failures) == 2
        assert all(reason in failure for failure in run.failures)
        assert run.exit_code == 1
    else:
        assert decided(run) == [[16], [16]]
        assert (run.exit_code, run.failures) == (0, [])
        log = run.outcomes[0].log
        assert any("block size 32 cannot be laid out" in why and reason in why for why in log.left_out.values())


@pytest.mark.parametrize("name", ["open", "lay_out", "reserve", "read_bandwidth", "product_rate"])
@pytest.mark.parametrize("do", ["kill", "segv"])
def test_what_is_nobodys_fault_is_tried_again(name: str, do: str, tmp_path: Path) -> None:
    run, workers = run_with(tmp_path, {"do": do, "command": name, "times": 1})
    assert (run.exit_code, run.failures, workers.started) == (0, [], 2)
    assert decided(run) == [[16, 32], [16, 32]]


@pytest.mark.parametrize("do", ["segv", "exit", "abort", "term"])
def test_a_candidate_that_crashes_costs_itself(do: str, tmp_path: Path) -> None:
    """Also the untuned choice, once it is in the finals: what was measured until then counts."""
    run, _ = run_with(tmp_path, {"do": do, "command": "sample", "from": 150, "until": 152})
    assert run.failures == []
    assert 16 in decided(run)[0]
    assert decided(run)[1] == [16, 32]


@pytest.mark.parametrize(
    ("do", "name"),
    [("hang", name) for name in ("open", "lay_out", "prepare", "check", "sample", "read_bandwidth")]
    + [("stop", "sample")],
)
def test_a_hang_ends_at_its_limit(do: str, name: str, tmp_path: Path) -> None:
    """Also one in the middle of an answer. What is nobody's own is tried again, else its candidate is lost with it."""
    untuned = 8 if name in ("prepare", "check", "sample") else 0  # commands until it has been entered
    run, workers = run_with(tmp_path, {"do": do, "command": name, "from": untuned, "times": 1}, limits=SHORT)
    assert (workers.started, run.failures) == (2, [])
    assert decided(run) == [[16, 32], [16, 32]]
    lost = [reason for reason in run.outcomes[0].log.left_out.values() if "took more than" in reason]
    assert bool(lost) == (name in ("prepare", "check", "sample"))


@pytest.mark.parametrize(
    "error",
    [
        BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        MemoryError(),
        PermissionError(errno.EACCES, "Permission denied"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_no_process_can_be_started(error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(subprocess, "Popen", fail)
    run, workers = run_with(tmp_path)
    assert (run.exit_code, workers.started) == (1, 0)
    assert len(run.failures) == 2
    for kind, failure in zip(("decode", "prefill"), run.failures, strict=True):
        assert failure.startswith(f"{kind}: the worker that measures: cannot be started: ")
        assert str(error) in failure or "MemoryError" in failure


def test_no_process_can_be_started_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first worker is killed in the finals, and there is no memory for a second one."""
    real: Callable[..., Any] = subprocess.Popen
    started = []

    def once(*arguments: Any, **options: Any) -> Any:
        started.append(arguments)
        if len(started) > 1:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return real(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", once)
    run, _ = run_with(tmp_path, {"do": "kill", "from": 300})
    assert decided(run)[0] == [16, 32]
    assert run.exit_code == 1
    assert "Cannot allocate memory" in run.failures[0]


@pytest.mark.parametrize("json_", [False, True])
def test_the_command_says_why_and_how_to_go_on(
    json_: bool, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the table of 0.1.0's faults names: killed twice, nothing was stored, and no word of --resume."""
    monkeypatch.setattr(process, "COMMAND", tuple(fake(tmp_path, {"do": "kill", "from": 300})))
    arguments = [*SHAPE, "--device", "cpu", "--block-sizes", "16,32", "--budget", "100s", "--workload", "chat"]
    assert main([*arguments, *(["--json"] if json_ else [])]) == 1
    printed = capsys.readouterr()
    said = " ".join(printed.err.split())
    assert "Ended early: decode: the worker that measures was killed (SIGKILL)" in said
    assert "--resume" in said
    if json_:
        document = json.loads(printed.out)
        assert document["failures"]
        assert document["problems"][0]["ended"] == "failed"
    else:
        assert "--resume" in " ".join(printed.out.split())
    assert list(home.glob("tuned/*/decode-*.json"))
    assert list(home.glob("rates/*/*.json"))
    monkeypatch.setattr(process, "COMMAND", tuple(fake(tmp_path)))
    store.reload()
    assert main([*arguments, "--resume"]) == 0
    assert list(home.glob("tuned/*/prefill-*.json"))


def test_no_worker_is_left_behind(tmp_path: Path) -> None:
    """Whatever happened, and also if the problem is given up while it still computes."""
    workers = Workers(SHORT, fake(tmp_path, {"do": "hang", "command": "check", "times": 1}))
    order = Order(problems_of(model("llama-3-8b"), "cpu"), [16], ["cpu"], budget=100.0)
    pids = []
    real = process.Process.__init__

    def watched(self: process.Process, *arguments: Any) -> None:
        real(self, *arguments)
        pids.append(self.pid)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process.Process, "__init__", watched)
        carry_out(order, make_runner=workers.runner)
    workers.close()
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
