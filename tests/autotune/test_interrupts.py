"""Ctrl-C, SIGTERM and SIGHUP at any moment: what was found is stored, nobody is left behind, the status says why."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkern.autotune import store
from pagedkern.autotune.decision import decide
from pagedkern.autotune.interrupts import ASKED, Interrupted, Interrupts
from pagedkern.autotune.log import Log
from pagedkern.autotune.records import load
from pagedkern.autotune.runs import Order, TuningRun, carry_out
from pagedkern.autotune.space import Candidate, Space, problems_of
from pagedkern.autotune.workloads import model
from tests.autotune.test_cli import SHAPE
from tests.autotune.test_search import Simulated

ROOT = Path(__file__).parents[2]
STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


class Signalled(Simulated):
    """Gets a signal before one of its steps."""

    steps = 0
    at = -1
    number = signal.SIGTERM

    def take(self, seconds: float) -> None:
        type(self).steps += 1
        if self.steps == self.at:
            signal.raise_signal(self.number)
        super().take(seconds)


def signalled(at: int, number: int = signal.SIGTERM, **more: Any) -> tuple[TuningRun, int]:
    """A run that gets a signal at one of its steps, and how many it came to."""
    kind = type("Kind", (Signalled,), {"steps": 0, "at": at, "number": number})

    def make(space: Space, seed: int) -> Signalled:
        return kind(lambda c: 0.01 if c.is_default else 0.008, seed=seed)

    order = Order(problems_of(model("llama-3-8b"), "cpu"), [16, 32], ["cpu"], budget=1e6)
    return carry_out(order, make_runner=make, **more), kind.steps


@pytest.mark.parametrize("number", ASKED)
def test_a_signal_in_the_finals_keeps_the_best_so_far(number: int, home: Path) -> None:
    _, steps = signalled(-1)
    run, _ = signalled(3 * steps // 4, number)
    assert run.interrupted
    assert run.exit_code == STATUS[signal.Signals(number)]
    assert sorted(run.outcomes[0].stored) == [16, 32]
    assert run.profile is not None
    assert list(home.glob("rates/*/*.json"))


def test_a_signal_at_any_step_loses_nothing(home: Path, tmp_path: Path) -> None:
    """Whatever the log supports is stored, and the journal has all of the log."""
    _, steps = signalled(-1)
    assert steps > 300
    rng = random.Random(0)
    for i, at in enumerate([1, 2, 3, steps, *rng.sample(range(1, steps), 20)]):
        number = ASKED[i % len(ASKED)]
        run, _ = signalled(at, number, journal=tmp_path / f"{i}.jsonl")
        assert run.exit_code == STATUS[signal.Signals(number)]
        for outcome in run.outcomes:
            assert sorted(outcome.stored) == sorted(decide(outcome.space, outcome.log).winners)
            for path in outcome.stored.values():
                assert path.is_file()
        recorded = load(tmp_path / f"{i}.jsonl")
        for outcome, log in zip(run.outcomes, recorded.logs, strict=False):
            assert (log.screened, log.shortlist, log.finals) == (
                outcome.log.screened, outcome.log.shortlist, outcome.log.finals,
            )  # fmt: skip
        assert all(signal.getsignal(n) in (signal.SIG_DFL, signal.default_int_handler) for n in ASKED)


def test_a_signal_while_something_is_stored_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = store.save, []

    def save(*arguments: Any) -> Path:
        calls.append(arguments)
        signal.raise_signal(signal.SIGTERM) if len(calls) == 1 else None
        return real(*arguments)

    monkeypatch.setattr(store, "save", save)
    run, _ = signalled(-1)
    assert run.exit_code == 143
    assert sorted(run.outcomes[0].stored) == [16, 32]  # both of the block sizes, though it came at the first
    assert run.outcomes[0].not_stored == ""


@given(st.lists(st.sampled_from(["released", "held", "signal"]), max_size=12), st.sampled_from(ASKED))
def test_the_first_signal_is_raised_where_it_may_and_only_there(steps: list[str], number: int) -> None:
    """Parts that are released and parts that are held in turn, one signal somewhere."""
    came, raised = False, []
    with Interrupts() as interrupts:
        for step in steps:
            try:
                if step == "signal":
                    if came:
                        continue
                    came = True
                    signal.raise_signal(number)  # while nothing is released: it waits
                elif step == "held":
                    with interrupts.held():
                        pass
                else:
                    with interrupts.released():
                        if came:
                            raise AssertionError("not raised")
                        with interrupts.held():
                            pass
            except Interrupted as stop:
                raised.append((step, stop.number))
        assert interrupts.number == (number if came else 0)
    after = "signal" in steps and "released" in steps[steps.index("signal") :]
    assert bool(raised) == after
    assert all(pair == ("released", number) for pair in raised)


def test_a_second_signal_is_not_kept_waiting() -> None:
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Interrupted, match="SIGTERM"), interrupts.held():
            signal.raise_signal(signal.SIGTERM)


def test_what_a_program_ignores_or_handles_stays_as_it_is() -> None:
    """As after nohup, and in a server that has a handler of its own."""
    seen: list[int] = []
    before = {n: signal.getsignal(n) for n in ASKED}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
        _, steps = signalled(-1)
        for number in (signal.SIGHUP, signal.SIGTERM):
            run, _ = signalled(steps // 2, number)
            assert run.exit_code == 0
        assert seen == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)


def test_in_another_thread_signals_are_left_alone() -> None:
    found: list[object] = []

    def watch() -> None:
        with Interrupts() as interrupts, interrupts.released():
            found.extend(signal.getsignal(n) for n in ASKED)
        found.append(signalled(-1)[0].exit_code)

    before = [signal.getsignal(n) for n in ASKED]
    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert found == [*before, 0]


def test_keyboard_interrupt_from_elsewhere_is_ctrl_c() -> None:
    class Stops(Simulated):
        def check(self, candidate: Candidate) -> str | None:
            raise KeyboardInterrupt

    order = Order(problems_of(model("llama-3-8b"), "cpu"), [16], ["cpu"], budget=1e6)
    run = carry_out(order, make_runner=lambda space, seed: Stops(lambda c: 0.01))
    assert (run.interrupted, run.exit_code) == (True, 130)
    assert set(run.outcomes[0].log.left_out.values()) == {"interrupted"}
    assert Log().ended == ""


# The command, its worker included


def children(pid: int) -> list[int]:
    try:
        return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("number", "stage", "group"),
    [
        (signal.SIGTERM, "prefill: laying out", False),
        (
            signal.SIGTERM,
            "decode: laying out",
            True,
        ),  # as `kill` of a job, or a service manager: the worker gets it too
        (signal.SIGHUP, "prefill: finals", True),
    ],
)
def test_a_run_from_the_shell(number: signal.Signals, stage: str, group: bool, home: Path) -> None:
    command = [sys.executable, "-m", "tests.autotune.quick", *SHAPE, "--device", "cpu", "--block-sizes", "8,16"]
    process = subprocess.Popen(
        [*command, "--budget", "170s", "--workload", "chat"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True, preexec_fn=partial(signal.signal, signal.SIGHUP, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stderr is not None
    workers: list[int] = []
    for line in process.stderr:
        workers = children(process.pid) or workers
        if stage in line:
            (os.killpg if group else os.kill)(process.pid, number)
            break
    out, err = process.communicate(timeout=120)
    assert process.returncode == STATUS[number], err
    assert "Traceback" not in err
    assert "Interrupted" in out
    assert "--resume" in out
    stored = {path.name.partition("-")[0] for path in home.glob("tuned/*/*.json")}
    assert ("decode" in stored) == stage.startswith("prefill")
    assert bool(list(home.glob("rates/*/*.json"))) == stage.startswith("prefill")
    for _ in range(100):
        if not any(map(alive, workers)):
            break
        time.sleep(0.1)
    else:
        raise AssertionError("a worker lives on")
