"""The journal of a run: whatever happens to it or to the run, what was measured is there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pagedkern.autotune import records
from pagedkern.autotune.records import Journal, Recording, load, take_up
from pagedkern.autotune.replay import ReplayRunner
from pagedkern.autotune.search import search
from pagedkern.autotune.store import files
from pagedkern.autotune.workloads import model
from tests.autotune.recordings import recording
from tests.autotune.test_models import tuned
from tests.autotune.test_records import begun, same, written

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def recorded() -> Recording:
    return recording(rounds=3)


RESUME = """
import fcntl, os, signal, sys
from pathlib import Path
from pagedkern.autotune import records
path, when = Path(sys.argv[1]), int(sys.argv[2])
known = records.load(path)
done = 0

def step(function):
    def counted(*arguments):
        global done
        done += 1
        if done == when:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)
    return counted

for module, name in ((os, "fsync"), (os, "replace"), (fcntl, "flock"), (records, "_line")):
    setattr(module, name, step(getattr(module, name)))
with records.Journal(path, known):
    known.logs[0].read(12345.0)
print(done)
"""


def go_on(path: Path, killed_at: int = -1) -> subprocess.CompletedProcess[str]:
    """Go on with a journal in a process that is killed at one of its steps."""
    command = [sys.executable, "-c", RESUME, str(path), str(killed_at)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_a_run_killed_while_it_takes_up_a_journal_loses_nothing(recorded: Recording, tmp_path: Path) -> None:
    """kill -9 at each step of putting the new file in the place of the old one, and while it is written."""
    path = written(recorded, tmp_path / "run.jsonl")
    content = path.read_bytes()
    steps = int(go_on(path).stdout)
    lines = len(content.splitlines())
    assert steps > lines  # a step for each measurement, then the sync, the exchange and the new measurement
    assert load(path).logs[0].reads[-1] == 12345.0
    for killed_at in (1, 2, 3, lines // 2, steps - 3, steps - 2, steps - 1, steps):
        path.write_bytes(content)
        done = go_on(path, killed_at)
        assert done.returncode == -signal.SIGKILL, done.stderr
        found = load(path)
        assert all(same(a, b) for a, b in zip(found.logs, recorded.logs, strict=True)), killed_at
        assert take_up(found, recorded.spaces, recorded.code) is not None
        with Journal(path, found) as journal:  # whose lock the dead one does not hold
            assert journal.path == path
        assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_is_full_when_a_journal_is_taken_up(
    call: str, recorded: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(recorded, tmp_path / "run.jsonl")
    content = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(OSError, match="No space left"), Journal(path, begun(recorded)):
            pass
    assert path.read_bytes() == content
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_run_that_is_gone_on_with_says_how_busy_the_machine_ever_was(home: Path) -> None:
    path = home / "runs" / "run.jsonl"
    of = model("smollm2-135m")
    tuned(of, journal=path)
    first = load(path)
    assert first.load is not None
    first.load += 1000
    written(first, path)
    again = tuned(of, journal=path, resume=True)
    assert again.load == load(path).load == first.load
    assert all(same(a, b) for a, b in zip(load(path).logs, first.logs, strict=True))


def test_an_empty_journal_is_begun_anew(home: Path) -> None:
    """A run killed before it wrote anything."""
    path = home / "run.jsonl"
    home.mkdir()
    path.touch()
    run = tuned(model("smollm2-135m"), journal=path, resume=True)
    assert run.records == path
    assert len(load(path).logs[1].finals) > 5


def test_files_of_earlier_runs_are_dropped(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = files.runs()
    assert folder == home / "runs"
    folder.mkdir(parents=True)
    monkeypatch.setattr(records, "KEPT_RUNS", 4)
    names = ["oldest.jsonl", ".killed.jsonl.123", "third.jsonl", "second.jsonl", "first.jsonl"]
    for days, name in zip((91, 20, 10, 9, 8), names, strict=True):
        (folder / name).touch()
        os.utime(folder / name, (time.time() - 86400 * days,) * 2)
    (folder / "notes.txt").write_text("of somebody else")
    tuned(model("smollm2-135m"), journal=folder / "now.jsonl")
    assert {p.name for p in folder.iterdir()} == {
        "now.jsonl", "first.jsonl", "second.jsonl", "third.jsonl", "notes.txt",
    }  # fmt: skip
    tuned(model("smollm2-135m"), journal=home / "elsewhere.jsonl")  # a file that the user names is left to him
    assert len(list(folder.iterdir())) == 5


def test_two_runs_that_write_at_once_do_not_mix(recorded: Recording, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("of an earlier run\n")
    runs = [begun(recorded), begun(recorded), begun(recorded, 2)]
    with Journal(path, runs[0]) as first, Journal(path, runs[1]) as second:
        assert first.path == path != second.path
        runs[0].logs[0].read(1e9)
        runs[1].logs[0].read(2e9)
    assert (load(path).logs[0].reads, load(second.path).logs[0].reads) == ([1e9], [2e9])
    with Journal(path, runs[2]) as third:
        assert third.path == path
        runs[2].logs[1].read(3e9)
    assert [log.reads for log in load(path).logs] == [[], [3e9]]
    assert {p.name for p in tmp_path.iterdir()} == {path.name, second.path.name}


def test_a_full_disk_costs_the_records_not_the_run(
    recorded: Recording, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    known, runner = begun(recorded), ReplayRunner(recorded.spaces[0], recorded.logs[0])
    (log,) = known.logs
    with pytest.raises(OSError, match="No space left"), Journal(Path("/dev/full"), known):
        pass
    path = tmp_path / "run.jsonl"
    with Journal(path, known) as journal:
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, journal._file.fileno())  # as if the disk were full from now on
        os.close(full)
        search(recorded.spaces[0], runner, log, 5.0, clock=runner.clock)
    assert len(log.finals) >= 5
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "no more records are written" in caplog.text
    assert load(path).spaces == recorded.spaces[:1]
