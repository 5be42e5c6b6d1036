"""What the tuner says and takes: whole paths, bars where there are any, all of its time, KV heads by every name."""

from __future__ import annotations

import io
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import pagedkern
from pagedkern.autotune import api, workloads
from pagedkern.autotune.cli import main
from pagedkern.autotune.cli import tune as command
from pagedkern.autotune.decision import decide
from pagedkern.autotune.process import Process
from pagedkern.autotune.profile import ModelShape, Profile
from pagedkern.autotune.recommend import recommend_by
from pagedkern.autotune.records import Journal
from pagedkern.autotune.report import console, serving
from pagedkern.autotune.report.formats import bar_text
from pagedkern.autotune.runs import Outcome, Serving, TuningRun
from pagedkern.autotune.store import files
from pagedkern.errors import InvalidArgument
from tests.autotune.test_advice import SMALL, TRUTH, machine, rates
from tests.autotune.test_configs import folder
from tests.autotune.test_report import printed

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("width", [20, 60, 80, 120])
def test_a_path_is_left_whole_at_any_width(width: int) -> None:
    """rich cuts a line that it may not fold, unless told otherwise."""
    file, path = io.StringIO(), f"  /{'folder/' * 30}file.jsonl"
    console.say(Console(file=file, width=width), path)
    assert file.getvalue() == f"{path}\n"


@pytest.mark.parametrize("sizes", [(16,), (8, 16, 32)])
def test_a_bar_is_shown_where_there_is_one(sizes: tuple[int, ...]) -> None:
    """The usual block size has none, for bars are beside it: what is alike has. ±0.0 % would be taken for certainty."""
    measured = rates(machine(TRUTH, 0.02))
    measured = replace(measured, speeds={b: measured.speeds[b] for b in sizes})
    profile = Profile({}, ModelShape.of(SMALL), measured, {}, "", "", "")
    chat = workloads.load("chat")
    found = recommend_by(profile, "tuned", "", chat, SMALL, 24 * 10**9)
    file = io.StringIO()
    serving.show_served(Console(file=file, width=120), [Serving(chat, SMALL, 24 * 10**9, found)])
    text = " ".join(file.getvalue().split())
    assert "±0.0%" not in text
    assert "--" not in text
    if len(sizes) > 1:
        longest = max(score.error for score in found.scores)
        assert longest > 0
        assert f"all within {100 * (found.within or 0):.1f} %{bar_text(longest)}" in text
    else:
        assert "no other was measured" in text


@pytest.mark.parametrize("rivals", [0, 1, 2])
def test_it_says_whether_anything_ran_beside_the_untuned_choice(rivals: int) -> None:
    recorded = machine(TRUTH, 0.0)
    space, log = recorded.spaces[0], recorded.logs[0]
    finalists = [space.baseline, *(c for c in space.candidates if c != space.baseline)][: rivals + 1]
    log.finals = [dict.fromkeys(finalists, 0.01) for _ in range(9)]
    outcome = Outcome(space, log, decide(space, log), {16: Path("/store/a.json")})
    text = " ".join(printed(TuningRun({"type": "cpu", "name": "A processor", "threads": 2}, [outcome])).split())
    assert ["(9 rounds) it was alone", "the other was not faster by 2%", "none of 2 others was faster"][rivals] in text
    assert "Stored (1 choice):" in text


def test_what_is_imported_counts_for_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins before torch is asked for a GPU, which imports it; on the command line before options are read."""
    asked: list[float] = []

    def no_gpu() -> bool:
        asked.append(time.monotonic())
        return False

    monkeypatch.setattr(torch.cuda, "is_available", no_gpu)
    assert api.plan("chat", model="smollm2-135m").begun <= asked[0]
    begun: list[float] = []

    def planned(*_: Any, **given: Any) -> None:
        begun.append(given["begun"])
        raise InvalidArgument("enough")

    read = command._parser
    monkeypatch.setattr(command, "_parser", lambda: (asked.append(time.monotonic()), read())[1])
    monkeypatch.setattr(api, "plan", planned)
    with pytest.raises(SystemExit):
        main(["tune", "--budget", "5s"])
    assert begun[0] <= asked[-1]


def test_a_store_that_is_nowhere_is_called_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(files, "directory", lambda: None)
    assert main(["show"]) == 0
    text = capsys.readouterr().out
    assert "there is no home. Set PAGEDKERN_CACHE_DIR" in " ".join(text.split())
    assert "None" not in text


def test_records_that_are_cut_are_called_so(tmp_path: Path) -> None:
    """A disk that becomes full, as a limit of the size of files."""
    recorded, reasons = machine(TRUTH, 0.0), []
    path = tmp_path / "run.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Journal(path, recorded, reasons.append):
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, before[1]))
        try:
            recorded.logs[0].read(1e9)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert reasons == ["File too large"]
    run = TuningRun({"type": "cpu", "name": "A processor", "threads": 2}, records=path, records_cut=reasons[0])
    text = " ".join(printed(run).split())
    assert "Measurements are in, until no more could be written (File too large)" in text
    assert "Every measurement" not in text
    assert "records: no more could be written: File too large" in api.result_of(run).reasons


def test_a_profile_that_cannot_be_read_is_said_once(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = home / "rates" / "machine"
    folder.mkdir(parents=True)
    (folder / "shape.json").write_text("{")
    for _ in range(3):
        pagedkern.recommend("chat", "24GB")
    assert len([r for r in caplog.records if "shape.json cannot be used" in r.getMessage()]) == 1


def test_the_worker_imports_nothing_from_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only from where the program does."""
    (tmp_path / "struct.py").write_text("raise SystemExit('planted')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(ROOT), *(p for p in sys.path if p)])
    worker = Process()
    try:
        worker.send(("unknown",), time.monotonic() + 60)
        assert worker.exchange(("other",), 60.0)[0] == "error"  # it answers
    finally:
        worker.end()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"workload": 3}, "workload: got int"),
        ({"workload": ["chat", None]}, "workload: got NoneType"),
        ({"records": 3}, "records: got int"),
        ({"seed": 1 << 64}, "seed: got 18446744073709551616"),
        ({"memory": "1KB"}, "memory: got 1,000 bytes, expected at least 368,640, one block of smollm2-135m"),
        ({"model": ""}, "model: got ''"),
        ({"model": " "}, "model: got ' '"),
        ({"model": b"llama-3-8b"}, "model: got bytes"),
    ],
)
def test_what_is_refused(given: dict[str, Any], message: str, home: Path) -> None:
    with pytest.raises(InvalidArgument) as error:
        pagedkern.tune(**{"workload": "chat", "model": "smollm2-135m", "budget": 1, "quiet": True, **given})
    assert message in str(error.value)
    assert not home.exists()


@pytest.mark.parametrize(
    ("changes", "kv_heads"),
    [
        ({"model_type": "dbrx", "attn_config": {"kv_n_heads": 4}}, 4),
        ({"model_type": "mpt", "attn_config": {"alibi": True}}, 32),
        ({"model_type": "step3", "num_attention_groups": 1}, 1),
        ({"n_kv_heads": 2}, 2),
        ({"num_query_groups": 16}, 16),
    ],
)
def test_kv_heads_by_every_name(changes: dict[str, Any], kv_heads: int, tmp_path: Path) -> None:
    found = workloads.model(folder(tmp_path / "model", **{"num_key_value_heads": None, **changes}))
    assert (found.num_heads, found.num_kv_heads) == (32, kv_heads)


@pytest.mark.parametrize("family", ["qwen2", "qwen2_moe", "qwen3"])
def test_a_window_that_has_to_be_asked_for(family: str, tmp_path: Path) -> None:
    """As transformers has it: without `use_sliding_window` these families have none."""
    found = workloads.model(folder(tmp_path / "a", model_type=family, sliding_window=4096))
    assert found.windows == (None,)
    found = workloads.model(folder(tmp_path / "b", model_type=family, sliding_window=4096, use_sliding_window=True))
    assert found.sliding_window == 4096


@pytest.mark.parametrize("window", ["4096", 4096.5, [4096], True])
def test_a_window_that_is_none(window: object, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"sliding_window: got .*, expected a whole number or null"):
        workloads.model(folder(tmp_path / "model", sliding_window=window))


NO_LIBRARY = """
import sys
sys.modules["filelock"] = sys.modules["platformdirs"] = None
from pathlib import Path
from pagedkern.autotune.store import files
with files.locked(Path(sys.argv[1])) as alone:
    files.replace(Path(sys.argv[1]) / "a.json", {"format": 1}, alone)
assert alone
print(files.load(Path(sys.argv[1]) / "a.json", 1))
"""


def test_no_lock_of_another_library(tmp_path: Path) -> None:
    """Of those some versions cannot tell a file system without locks."""
    command = [sys.executable, "-c", NO_LIBRARY, str(tmp_path / "folder")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "{'format': 1}"
