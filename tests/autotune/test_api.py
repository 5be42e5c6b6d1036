"""`tune` from Python: in a script without a guard, a notebook, a thread; what it returns, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import pagedkern
from pagedkern.autotune import TunedChoice, TuneResult, api, arguments, process, search, store, tune
from pagedkern.autotune.store import device
from pagedkern.autotune.workloads import Model, load
from pagedkern.errors import InvalidArgument
from tests.autotune.test_worker_lost import fake

ROOT = Path(__file__).parents[2]
TINY = "heads=4,kv_heads=2,head_dim=16,layers=2,dtype=float32,weight_bytes=1e6"


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that measures nothing, a processor with little cache, and few rounds."""
    monkeypatch.setattr(process, "COMMAND", tuple(fake(tmp_path)))
    monkeypatch.setattr(device, "last_level_cache", lambda _: 1 << 18)
    monkeypatch.setattr(search, "MAX_ROUNDS", 9)


def small(**more: Any) -> TuneResult:
    return tune("chat", **{"model": TINY, "backends": "cpu", "block_sizes": [16, 32], "quiet": True, **more})


def test_it_is_a_public_call() -> None:
    assert pagedkern.tune is tune is api.tune
    assert "tune" in pagedkern.__all__
    assert callable(pagedkern.autotune.tune)
    for module in ("api", "runs", "cli.tune"):  # and stays one, whatever is imported
        import_module(f"pagedkern.autotune.{module}")
    assert pagedkern.autotune.tune is tune
    with pytest.raises(AttributeError, match="no attribute 'tuen'"):
        pagedkern.autotune.tuen  # noqa: B018


def test_what_it_returns(home: Path) -> None:
    found = small()
    assert isinstance(found, TuneResult)
    assert found.device == device.describe(device.identity("cpu"))
    assert [(c.kind, c.block_size) for c in found.choices] == [
        (kind, b) for kind in ("decode", "prefill") for b in (16, 32)
    ]
    for choice in found.choices:
        assert isinstance(choice, TunedChoice)
        assert choice.backend == "cpu"
        assert choice.seconds == pytest.approx(0.003, rel=0.01)
        assert choice.gain == pytest.approx(4 / 3, rel=0.01)
        assert 1.02 <= choice.gain_low <= choice.gain
        assert choice.path is not None
        assert json.loads(choice.path.read_text())["choices"]["cpu"]["config"] == dict(choice.config)
    assert list(found.recommendations) == ["chat"]
    advice = found.recommendations["chat"]
    assert (advice.block_size, advice.tier) == (16, "tuned")
    assert advice.token_budget is not None
    assert found.records is not None
    assert found.records.parent == home / "runs"
    assert (found.interrupted, found.complete) == (False, True)
    assert not [reason for reason in found.reasons if not reason.startswith("not measured: ")]
    store.reload()
    again = pagedkern.recommend("chat", 10**9, model=TINY)
    assert again.tier == "tuned"


def test_all_of_its_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.csv").write_text("prompt,output\n100,20\n300,10\n")
    records = tmp_path / "deep" / "run.jsonl"
    found = tune(
        ["chat", tmp_path / "mine.csv", load("code")], model=TINY, memory="2GB", device="cpu", backends=["cpu"],
        block_sizes="16,32", budget="90s", seed=3, resume=False, records=records, quiet=False,
    )  # fmt: skip
    assert list(found.recommendations) == ["chat", "mine", "code"]
    assert found.recommendations["mine"].num_blocks == 2 * 10**9 // (16 * 2 * 2 * 2 * 16 * 4)
    assert found.records == records
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "decode: finals" in printed.err
    before = records.read_text().count('"final"')
    again = tune("chat", model=TINY, backends=["cpu"], block_sizes=[16, 32], resume=True, records=records, quiet=True)
    assert again.choices[0].seconds == found.choices[0].seconds
    assert records.read_text().count('"final"') == before
    assert capsys.readouterr().err == ""
    everything = small(block_sizes=16)
    assert {c.block_size for c in everything.choices} == {16}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"budget": "soon"}, "budget: got 'soon'"),
        ({"budget": 0}, "budget: got 0"),
        ({"budget": -1.5}, "budget: got -1.5"),
        ({"budget": float("nan")}, "budget: got nan"),
        ({"budget": None}, "budget: got NoneType"),
        ({"budget": True}, "budget: got bool"),
        ({"block_sizes": []}, "block_sizes: got none"),
        ({"block_sizes": 0}, "block_sizes: got 0"),
        ({"block_sizes": [16, 1.5]}, "block_sizes: got 1.5"),
        ({"block_sizes": "16,x"}, "block_sizes: got 'x'"),
        ({"block_sizes": object()}, "block_sizes: got <object"),
        ({"block_sizes": [16, 2_000_000_000]}, "block_sizes: decode: "),
        ({"backends": "cuda"}, "backends: got 'cuda'"),
        ({"backends": 3}, "backends: got int"),
        ({"backends": [None]}, "backends: got None"),
        ({"device": "tpu"}, "device: got 'tpu', expected 'cpu' or 'cuda'"),
        ({"device": 0}, "device: got 0"),
        ({"seed": "one"}, "seed: got 'one'"),
        ({"resume": "yes"}, "resume: got 'yes'"),
        ({"quiet": 1}, "quiet: got 1"),
        ({"memory": "lots"}, "memory: got 'lots'"),
        ({"memory": 1.5}, "memory: got float"),
        ({"model": "gpt"}, "model: got 'gpt'"),
        ({"model": 5}, "model: got int"),
        ({"model": "heads=9,kv_heads=2,head_dim=8,layers=1,dtype=float32,weight_bytes=1"}, "heads: got 9"),
        ({"workload": "no such"}, "workload: got 'no such'"),
        ({"workload": ["chat", "no.csv"]}, "workload: no.csv: cannot be read"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_before_anything_runs(given: dict[str, Any], message: str, home: Path) -> None:
    with pytest.raises(InvalidArgument) as error:
        tune(**{"workload": "chat", "model": TINY, "quiet": True, **given})
    assert message in str(error.value)
    assert not home.exists()


def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(InvalidArgument, match="device: got 'cuda', expected 'cpu': torch finds no GPU"):
        tune("chat", device="cuda")


def test_too_little_time_is_said_and_nothing_stored(home: Path) -> None:
    found = small(budget=1e-6)
    assert (found.choices, found.complete, found.recommendations) == ((), False, {})
    assert [reason for reason in found.reasons if "not decided: the finals had 0 rounds of 5 needed" in reason]
    assert not (home / "tuned").exists()


def test_a_worker_that_fails_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "COMMAND", tuple(fake(tmp_path, {"do": "kill", "command": "open"})))
    found = small()
    assert not found.complete
    assert [reason for reason in found.reasons if "was killed (SIGKILL)" in reason]


def test_a_store_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PAGEDKERN_CACHE_DIR", str(tmp_path / "file"))
    found = small()
    assert (len(found.choices), found.complete, found.records) == (4, False, None)
    assert {choice.path for choice in found.choices} == {None}
    assert [reason for reason in found.reasons if reason.startswith("decode: not stored: ")]


def test_in_a_thread() -> None:
    found: list[TuneResult] = []
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    threads = [threading.Thread(target=lambda: found.append(small())) for _ in range(2)]  # at the same time, too
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result.complete for result in found] == [True, True]
    assert len({result.records for result in found}) == 2
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


SCRIPT = """
import sys
from tests.autotune import quick
import pagedkern
print("once")
found = pagedkern.tune("chat", model={model!r}, backends="reference", block_sizes=[16, 32], budget="100s", quiet=True)
print(found.complete, sorted({{c.block_size for c in found.choices}}), found.interrupted)
"""


@pytest.mark.parametrize("how", ["script", "stdin"])
def test_in_a_script_without_a_guard(how: str, tmp_path: Path, home: Path) -> None:
    """The worker is a process of its own: the script does not run a second time. As in a notebook from standard input,
    where there is no file at all. The worker is a real one."""
    text = SCRIPT.format(model=TINY)
    (tmp_path / "script.py").write_text(text)
    given = [str(tmp_path / "script.py")] if how == "script" else ["-"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *given], input=text if how == "stdin" else None, env=env, cwd=tmp_path, capture_output=True,
        text=True, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "once\nTrue [16, 32] False\n"
    assert len(list(home.glob("tuned/*/*.json"))) == 4


ENDED = """
import os, signal, sys, time, threading
from pagedkern.autotune import process, search
import pagedkern, pagedkern.autotune.runs as runs
process.COMMAND = tuple(sys.argv[2:])
real = runs._conclude
def conclude(*arguments):
    real(*arguments)
    os.kill(os.getpid(), int(sys.argv[1]))  # when the first problem is stored
runs._conclude = conclude
found = pagedkern.tune("chat", model={model!r}, backends="cpu", block_sizes=[16, 32], quiet=True)
print(found.interrupted, len(found.choices), flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_call(number: int, tmp_path: Path, home: Path) -> None:
    """Ctrl-C is answered by the result; SIGTERM ends the program, as it would have, once all is stored."""
    command = [sys.executable, "-c", ENDED.format(model=TINY), str(int(number)), *fake(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    if number == signal.SIGINT:
        assert (done.returncode, done.stdout) == (0, "True 2\n"), done.stderr
    else:
        assert (done.returncode, done.stdout) == (-number, ""), done.stderr
    assert len(list(home.glob("tuned/*/decode-*.json"))) == 2
    assert list(home.glob("rates/*/*.json"))


def test_the_command_line_is_built_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both check by the same plan: what the call does not have, the shape and the batch, comes besides."""
    planned: list[api.TunePlan] = []
    real = api.plan

    def plan(*given: Any, **options: Any) -> api.TunePlan:
        planned.append(real(*given, **options))
        return planned[-1]

    monkeypatch.setattr(api, "plan", plan)
    from pagedkern.autotune.cli import main

    assert main(["--workload", "chat", "--model", TINY, "--block-sizes", "16,32", "--backends", "cpu", "--quiet"]) == 0
    small()
    command, call = planned
    assert command.order == call.order
    assert (command.traffics, command.model, command.records) == (call.traffics, call.model, call.records)
    assert isinstance(command.model, Model)


@pytest.mark.parametrize(
    ("value", "expected"), [(90, 90.0), (1.5, 1.5), ("90", 90.0), ("30s", 30.0), (" 1.5m ", 90.0), ("1h", 3600.0)]
)
def test_times_as_people_write_them(value: Any, expected: float) -> None:
    assert arguments.seconds("budget", value) == expected
