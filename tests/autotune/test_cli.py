"""The command line, in this process and in one of its own, on problems that take milliseconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import pagedkern
from pagedkern.autotune import store
from pagedkern.autotune.cli import main
from pagedkern.autotune.store import device

SHAPE = ["--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--seqs", "2", "--context", "100", "--prompt", "40"]
SHAPE += ["--dtype", "float32"]
TINY = [
    *SHAPE,
    "--device",
    "cpu",
    "--block-sizes",
    "8,16",
    "--budget",
    "170s",
    "--in-process",
]  # of which a second or two is needed


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def start(*arguments: str) -> subprocess.Popen[str]:
    """A run as users start it, candidates in a worker."""
    isolated = [a for a in arguments if a != "--in-process"]
    command = [sys.executable, "-m", "pagedkern.autotune", *isolated]
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        command,
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a background job inherits it ignored
    )


def explain(block_size: int, seqs: int, context: int) -> pagedkern.Choice:
    """What would be used in decode for the model of `SHAPE`."""
    width = -(-context // block_size)
    cache = torch.zeros(seqs * width, block_size, 2, 16)
    table = torch.arange(seqs * width, dtype=torch.int32).view(seqs, width)
    lens = torch.full((seqs,), context, dtype=torch.int32)
    return pagedkern.explain(torch.zeros(seqs, 4, 16), cache, cache.clone(), table, lens)


def test_a_run_from_the_shell_is_stored_and_used(home: Path) -> None:
    untuned = explain(16, 2, 100)
    assert untuned.tier == "default"
    process = start(*TINY)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert "decode: finals" in err
    assert "prefill: finals" in err
    assert max(len(line) for line in out.splitlines() if str(home) not in line) <= 80
    for expected in (
        "Decode: 2 sequences of 88 to 100 tokens",
        "Prefill: 2 sequences of 40 tokens, all new",
        "untuned",
    ):
        assert expected in out
    assert len(list(home.glob("tuned/*/*.json"))) == 4
    store.reload()
    assert explain(16, 2, 100).tier == "tuned"
    for seqs, context in ((1, 5), (3, 100), (2, 5000)):
        near = explain(16, seqs, context)
        assert near.tier == "tuned-nearest"
        assert near.config == explain(16, 2, 100).config
    assert explain(24, 2, 100).tier == "default"  # not a block size that was measured
    q = torch.randn(2, 4, 16)
    cache = torch.randn(2, 16, 2, 16)
    table, lens = torch.tensor([[0], [1]], dtype=torch.int32), torch.tensor([3, 16], dtype=torch.int32)
    auto = pagedkern.paged_attention(q, cache, cache, table, lens)
    exact = pagedkern.paged_attention(q, cache, cache, table, lens, backend="reference")
    torch.testing.assert_close(auto, exact)


def test_json_is_all_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--json", "--seed", "3"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["format"] == 1
    assert [p["workload"]["kind"] for p in document["problems"]] == ["decode", "prefill"]
    for problem in document["problems"]:
        assert problem["best"]["block_size"] in (8, 16)
        assert problem["ended"] == "complete"
        assert {row["block_size"] for row in problem["rows"] if row["chosen"]} == {8, 16}
        for path in problem["stored"].values():
            assert json.loads(Path(path).read_text())["choices"]


def test_a_dry_run_measures_and_stores_nothing(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry-run", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "Decode:" in text
    assert "reference() at block size 8, 16, 32, 64, 128, 256" in text
    assert main(["tune", "--dry-run", "--json", *TINY]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {c["block_size"] for c in document["problems"][0]["candidates"]} == {8, 16}
    assert not home.exists()


def test_show(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    assert main(["show"]) == 0
    assert str(home) in capsys.readouterr().out
    assert main([*TINY, "--backends", "reference", "--block-sizes", "16"]) == 0
    capsys.readouterr()
    assert main(["show"]) == 0
    text = capsys.readouterr().out
    assert "decode-float32-h4-g2-d16-b16" in text
    assert "h4-g2-d16-float32 " in text  # its rates
    assert max(len(line) for line in text.splitlines() if str(home) not in line) <= 80  # paths are left whole
    assert main(["show", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    entries, (rates,) = document["choices"], document["rates"]
    assert {entry["problem"]["kind"] for entry in entries} == {"decode", "prefill"}
    assert {entry["state"] for entry in entries} <= {"auto", "used"}
    assert (rates["state"], rates["shape"]["head_dim"], list(rates["speeds"])) == ("used", 16, ["16"])
    assert {entry["driver"] for entry in entries} == {rates["driver"]} == {device.driver("cpu")} != {""}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "soon"], "expected a time"),
        (["--budget", "0"], "expected a time"),
        (["--budget", "-5s"], "--budget"),
        (["--backends", "cuda"], "expected"),
        (["--backends", "reference,"], "expected"),
        (["--block-sizes", "16,x"], "expected a whole number"),
        (["--block-sizes", "0"], "expected a whole number"),
        (["--block-sizes", ""], "expected a whole number"),
        (["--heads", "9", "--kv-heads", "2"], "multiple"),
        (["--dtype", "int8"], "--dtype"),
        (["--kv-dtype", "int4"], "--kv-dtype"),
        (["--seed", "x"], "--seed"),
        (["--bud", "3s"], "unrecognized"),
        (["--context", "1.5"], "expected a whole number"),
        (["show", "--budget", "3s"], "unrecognized"),
        (["tuen"], "there are tune, show"),
        (["tune", "extra"], "unrecognized"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(arguments)
    except SystemExit as end:  # by argparse
        status = end.code  # type: ignore[assignment]
    assert status == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(
    ("arguments", "kind", "advice"),
    [
        (["--seqs", "64", "--context", "1000000"], "decode: 64 sequences of up to 1,000,000 tokens", "--context"),
        (["--seqs", "1000000", "--context", "1000000", "--budget", "5s"], "decode: 1,000,000 sequences", "--context"),
        (["--seqs", "2147483647", "--dry-run"], "decode: 2,147,483,647 sequences", "--seqs"),
        (["--prompt", "10000000"], "prefill: 2 sequences of up to 10,000,000 tokens", "--prompt"),
        (["--block-sizes", "16,2000000000"], "decode:", "--block-sizes"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_allocated(
    arguments: list[str], kind: str, advice: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(*_: object, **__: object) -> None:
        raise AssertionError("allocated")

    monkeypatch.setattr(device, "free_memory", lambda _: 16 << 30)
    monkeypatch.setattr(torch, "randn", allocate)
    with pytest.raises(SystemExit) as end:
        main(["--device", "cpu", *arguments])
    assert end.value.code == 2
    message = capsys.readouterr().err
    for expected in (kind, "of memory, 17.2 GB are free", advice):
        assert expected in message


HELP = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "rich", "numpy", "numba", "filelock", "platformdirs"):
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Block())
from pagedkern.autotune.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def test_help_needs_nothing_and_teaches() -> None:
    done = subprocess.run([sys.executable, "-c", HELP, "--help"], capture_output=True, text=True, check=True)
    for word in (
        "--budget",
        "--backends",
        "--json",
        "show",
        "exit status",
        "PAGEDKERN_CACHE_DIR",
        "examples:",
        "130",
        "too short",
    ):
        assert word in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 88
    assert "--json" in subprocess.run([sys.executable, "-c", HELP, "show", "-h"], capture_output=True, text=True).stdout


def test_a_missing_package_is_named() -> None:
    done = subprocess.run([sys.executable, "-c", HELP, *TINY], capture_output=True, text=True)
    assert done.returncode == 1
    assert "No module named 'rich'" in done.stderr
    assert "pip install 'pagedkern[autotune]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_store_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PAGEDKERN_CACHE_DIR", str(tmp_path / "file"))
    assert main([*TINY, "--backends", "reference", "--block-sizes", "16"]) == 3
    text = capsys.readouterr().out
    assert "Not stored (decode)" in text
    assert "1.00x" in text  # what was measured is shown all the same


def test_too_little_time_decides_nothing(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--budget", "0.001s"]) == 1
    assert "Take a longer --budget" in " ".join(capsys.readouterr().out.split())
    assert not (home / "tuned").exists()
    assert not (home / "rates").exists()


def test_a_named_backend_that_is_not_there(
    add_backend: Callable[[str, str], None], capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    add_backend("absent", "Absent")
    assert main([*TINY, "--backends", "absent"]) == 1
    assert "absent: no module named 'absent': pip install pagedkern[absent]" in " ".join(
        capsys.readouterr().out.split()
    )
    assert not home.exists()


@pytest.mark.parametrize("stage", ["decode: laying out the caches", "prefill: finals"])
def test_ctrl_c_keeps_the_best_so_far(stage: str, home: Path) -> None:
    process = start(*TINY)
    assert process.stderr is not None
    for line in process.stderr:
        if stage in line:
            process.send_signal(signal.SIGINT)
            break
    out, err = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in err
    stored = sorted(path.name.partition("-")[0] for path in home.glob("tuned/*/*.json"))
    if stage.startswith("prefill"):
        assert "Interrupted" in out
        assert stored[:2] == ["decode", "decode"]  # and prefill, if it had rounds enough
    else:
        assert stored == []
    assert "PAGEDKERN_CACHE_DIR" in os.environ  # of this test alone: nothing went to the user's own store
