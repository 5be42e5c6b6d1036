"""The commands beside `tune` and `show`, on recorded measurements; and a run that is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from pagedkern.autotune import store, workloads
from pagedkern.autotune.cli import COMMANDS, main, options
from pagedkern.autotune.profile import distil
from pagedkern.autotune.records import load
from pagedkern.autotune.store import files
from tests.autotune.recordings import recording
from tests.autotune.test_records import written

ROOT = Path(__file__).parents[2]
SHAPE = ["--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--seqs", "2", "--context", "100", "--prompt", "40"]


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture(scope="module")
def recorded_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(written(recording(), tmp_path_factory.mktemp("records") / "machine.jsonl"))


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_help_that_fits(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert "usage: python -m pagedkern.autotune" in text
    assert max(map(len, text.splitlines())) <= 80
    assert len(text.splitlines()) > 8


@pytest.mark.parametrize(
    "arguments",
    [
        ["--dry-run", "--device", "cpu"], ["show"], ["explain", "--memory", "8GB", "--device", "cpu"], ["workloads"],
        ["replay", "--workload", "chat", "--memory", "8GB"],
    ],
    ids=lambda arguments: arguments[0],
)  # fmt: skip
def test_what_programs_read_says_its_format(
    arguments: list[str], recorded_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = [recorded_file] if arguments[0] == "replay" else []
    assert main([*arguments, *file, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["format"] == options.FORMAT
    assert len(document) > 1


def test_replay_shows_the_regret(recorded_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", recorded_file]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert all(name in text for name in workloads.names())
    assert main(["replay", recorded_file, "--json", "--workload", "chat", "--memory", "8GB", "--seed", "2"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document["regret"]) == {"chat"}
    assert 0 <= document["regret"]["chat"] <= 0.03
    assert main(["replay", recorded_file, "--json", "--budget", "0.01s"]) == 0  # nothing is decided in that time
    assert set(json.loads(capsys.readouterr().out)["regret"].values()) == {None}


def test_export_import_explain(recorded_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "profile.json")
    assert main(["export", recorded_file, "-o", file]) == 0
    assert main(["export", recorded_file]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(Path(file).read_text())
    assert main(["explain", "--memory", "8GB", "--json"]) == 0
    before = json.loads(capsys.readouterr().out)
    assert main(["import", file]) == 0
    assert "Of A processor, 8 threads, 2026-01-01" in said(capsys)
    assert main(["explain", "--memory", "8GB", "--json"]) == 0
    after = json.loads(capsys.readouterr().out)
    assert "A processor" not in before["reason"]
    assert after["tier"] == "tuned-nearest"
    assert after["block_size"] in (32, 64, 128)
    assert len(after["scores"]) == 6
    assert [kernel["kind"] for kernel in after["kernels"]] == ["decode", "prefill"]
    assert main(["explain", "--memory", "8GB", "--workload", "beam"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert f"Take block size {after['block_size']}" in text or "Take block size" in text


def test_a_profile_of_this_machine_counts_as_measured_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = recording()
    here.device = dict(store.device.identity("cpu"))
    here.code = [{"fast": {"kernel": "unknown"}, "slow": {"kernel": "unknown"}} for _ in here.code]
    records = written(here, tmp_path / "here.jsonl")
    assert main(["export", str(records), "-o", str(tmp_path / "p.json")]) == 0
    assert main(["import", str(tmp_path / "p.json")]) == 0
    assert "Taken over: rates" in said(capsys)
    shape = "heads=32,kv_heads=8,head_dim=128,layers=32,dtype=float32,weight_bytes=32e9"
    assert main(["explain", "--model", shape, "--memory", "8GB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tier"] == "tuned"


def test_the_kernels_of_this_machine_are_taken_over_too(
    tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = recording()
    here.device = dict(store.device.identity("cpu"))
    records = written(here, tmp_path / "here.jsonl")
    assert main(["export", str(records), "-o", str(tmp_path / "p.json")]) == 0
    assert main(["import", str(tmp_path / "p.json")]) == 0
    taken = [json.loads(path.read_text()) for path in home.glob("profiles/*.json")]
    assert [len(document["choices"]) for document in taken] == [24]


def test_an_import_stays_in_the_cache_folder(tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = distil(recording())
    assert document is not None
    for device in (document["device"], dict(store.device.identity("cpu"))):
        shape = {**document["shape"], "dtype": "x/../../../../outside"}
        (tmp_path / "p.json").write_text(json.dumps({**document, "device": device, "shape": shape}))
        assert main(["import", str(tmp_path / "p.json")]) == 2
        assert "got an invalid dtype" in capsys.readouterr().err
    assert not list(tmp_path.glob("**/*outside*"))


def test_the_model_that_is_asked_for(recorded_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "tuning.md").read_text()
    (example,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "mine.toml").write_text(example.replace('name = "mine"', 'name = "mine"\nmodel = "llama-3-70b"'))
    plan = ["--dry-run", "--json", "--device", "cpu", "--seqs", "1", "--context", "64", "--block-sizes", "16"]
    for named, heads in ([], 64), (["--model", "smollm2-135m"], 9):
        assert main([*plan, "--workload", str(tmp_path / "mine.toml"), *named]) == 0
        assert json.loads(capsys.readouterr().out)["problems"][0]["workload"]["num_heads"] == heads
    small = "heads=4,kv_heads=2,head_dim=64,layers=2,dtype=float32,weight_bytes=1e6,kv_dtype=int8"
    assert main([*plan, "--model", small]) == 0
    assert json.loads(capsys.readouterr().out)["problems"][0]["workload"]["kv_dtype"] == "int8"
    memory = str(8192 * 327680 * 3 // 4)  # too little for the longest request of 70B, enough for 8B
    replay = ["replay", recorded_file, "--workload", str(tmp_path / "mine.toml"), "--memory", memory, "--json"]
    assert main(replay) == 0
    assert json.loads(capsys.readouterr().out)["regret"]["mine"] is None
    assert main([*replay, "--model", "llama-3-8b"]) == 0
    assert json.loads(capsys.readouterr().out)["regret"]["mine"] is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["replay"], "records: none of this machine: run python -m pagedkern.autotune, or name a file"),
        (["report", "no.jsonl"], "records: no.jsonl: cannot be read: No such file"),
        (["export", "no.jsonl"], "no.jsonl"),
        (["import", "no.json"], "no.json: got No such file or directory, expected a file that export wrote"),
        (["workloads", "chats"], "expected one of chat"),
        (["explain", "--memory", "lots"], "expected bytes"),
        (["explain", "--model", "gpt"], "expected one of llama-3-8b"),
        (["explain", "--workload", "no.toml"], "cannot be read"),
        (["--workload", "no.csv"], "cannot be read"),
    ],
)
def test_wrong_usage_of_the_commands(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(arguments)
    except SystemExit as end:
        status = end.code  # type: ignore[assignment]
    assert status == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 1}', '{"format": 2}', "\x00"])
def test_a_file_that_is_no_profile(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.json"
    path.write_text(content)
    assert main(["import", str(path)]) == 2
    assert "expected a file that export wrote" in capsys.readouterr().err


def test_places_that_cannot_be_written(recorded_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = str(tmp_path / "no" / "such" / "folder" / "x")
    assert main(["export", recorded_file, "-o", nowhere]) == 3
    assert main(["report", recorded_file, "-o", nowhere]) == 3
    file = str(tmp_path / "p.json")
    assert main(["export", recorded_file, "-o", file]) == 0
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PAGEDKERN_CACHE_DIR", str(tmp_path / "file"))
    assert main(["import", file]) == 3


def test_workloads_are_listed_and_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["workloads"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert all(name in text for name in (*workloads.names(), *workloads.model_names()))
    assert "CC-BY-4.0" in text
    assert main(["workloads", "--json"]) == 0
    assert {w["name"] for w in json.loads(capsys.readouterr().out)["workloads"]} == set(workloads.names())
    assert main(["workloads", "retrieval"]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "mine.toml").write_text(printed)
    assert tomllib.loads(printed)["name"] == "retrieval"
    assert workloads.load(tmp_path / "mine.toml") == workloads.load("retrieval")


def test_a_report_is_one_page_and_a_picture(
    recorded_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "my.report"
    arguments = ["report", recorded_file, "--memory", "8GB", "--workload", "parallel-sampling"]
    assert main([*arguments, "-o", str(base)]) == 0
    html, png = (Path(line) for line in capsys.readouterr().out.split())
    assert png.read_bytes().startswith(b"\x89PNG")
    text = html.read_text()
    assert "<svg" in text
    assert not re.search(
        r"(src|href)\s*=\s*[\"']?(http|//|file)", text.replace('xlink:href="#', "")
    )  # needs nothing else
    assert "<script" not in text
    assert re.search(r"<h1>Block size (32|64): [\d.]+ output tokens per second", text)
    for expected in ("Prefill: the kernels chosen", "fast(tile=32)", "CC-BY-4.0", "Pareto"):
        assert expected in text
    again = tmp_path / "again"
    assert main([*arguments, "-o", str(again)]) == 0
    assert (tmp_path / "again.html").read_text() == text  # equal records give equal pages


def test_a_report_of_little(tmp_path: Path) -> None:
    """Records of a run that was interrupted early, and a memory in which nothing fits."""
    little = recording(rounds=1)
    for log in little.logs:
        log.lengths.clear()
    path = written(little, tmp_path / "a.jsonl")
    assert main(["report", str(path), "-o", str(tmp_path / "r")]) == 0
    assert "Nothing was decided" in (tmp_path / "r.html").read_text()
    whole = written(recording(), tmp_path / "b.jsonl")
    assert main(["report", str(whole), "-o", str(tmp_path / "s"), "--memory", "1GB", "--workload", "long-context"]) == 0


def run_until(stage: str, *arguments: str) -> None:
    """Start a run in a process of its own and kill it in a stage."""
    command = [sys.executable, "-m", "pagedkern.autotune", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if stage in line:
            time.sleep(0.3)
            os.kill(process.pid, signal.SIGKILL)
            break
    process.stderr.read()
    process.stderr.close()
    assert process.wait() == -signal.SIGKILL


def test_a_run_that_was_killed_is_resumed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """kill -9 in the second problem: the first is stored, and is not measured again."""
    tiny = [*SHAPE, "--device", "cpu", "--block-sizes", "8,16", "--budget", "100s", "--workload", "chat"]
    run_until("prefill: shortlist", *tiny)
    journal = next(home.glob("runs/*.jsonl"))
    before = load(journal)
    assert len(before.logs[0].finals) > 5
    assert list(home.glob("tuned/*/decode-*.json"))
    assert main([*tiny, "--resume", "--json", "--in-process"]) == 0
    document = json.loads(capsys.readouterr().out)
    after = load(journal)
    assert after.logs[0].finals[: len(before.logs[0].finals)] == before.logs[0].finals
    assert after.logs[0].screened == before.logs[0].screened
    assert after.logs[1].screened.items() >= before.logs[1].screened.items()
    assert document["records"] == str(journal)
    assert document["profile"]["speeds"].keys() == {"8", "16"}
    assert document["workloads"][0]["workload"] == "chat"
    assert list(home.glob("tuned/*/prefill-*.json"))
    assert list(home.glob("rates/*/*.json"))


def test_a_journal_that_cannot_be_read_or_written(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    tiny = [*SHAPE, "--device", "cpu", "--block-sizes", "16", "--budget", "60s", "--in-process", "--workload", "chat"]
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"record": "run"}\n')
    assert main([*tiny, "--backends", "reference", "--records", str(broken), "--resume"]) == 2
    assert "not the records of a run" in capsys.readouterr().err
    assert main([*tiny, "--backends", "reference", "--records", str(tmp_path), "--json"]) == 0  # a folder
    assert json.loads(capsys.readouterr().out)["records"] is None
    assert f"{tmp_path}: no records are written" in caplog.text
    assert files.directory() == home


def test_the_examples_of_the_page_work(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "tuning.md").read_text()
    (example,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "mine.toml").write_text(example)
    traffic = workloads.load(tmp_path / "mine.toml")
    assert (traffic.name, traffic.families, traffic.prefix) == ("mine", 16, 400)
    assert all(request.shared >= 400 for request in traffic.draw(100))
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(code, "docs/tuning.md", "exec"), {})
    for name in COMMANDS:
        assert f"`{name}`" in page
