"""What can go wrong with the store outside of it: file systems, other processes, age."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from pagedkern.autotune import store
from pagedkern.autotune.cli import options
from pagedkern.autotune.recommend import known, recommend
from pagedkern.autotune.store import files, lookup, save
from pagedkern.environment import notices
from tests.autotune.test_store import DECODE, TUNED, path_of
from tests.environment.conditions import needs_compiler, shim


@contextmanager
def unprivileged() -> Iterator[None]:
    """Root may do anything, so be somebody else for a moment."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_read_only_store_is_read_and_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:  # tmp_path is inside folders that only their owner enters
        monkeypatch.setenv("PAGEDKERN_CACHE_DIR", folder)
        path = save(DECODE, {"reference": TUNED})
        folders = [Path(folder), Path(folder) / "tuned", path.parent]
        content = path.read_bytes()
        path.chmod(0o444)
        for p in folders:
            p.chmod(0o555)
        with unprivileged():
            store.reload()
            assert lookup(DECODE) is not None
            with pytest.raises(OSError):
                save(DECODE, {"reference": replace(TUNED, gain=9.0)})
            with pytest.raises(OSError):
                save(replace(DECODE, device="xpu"), {"reference": TUNED})  # whose folder is not there yet
        assert path.read_bytes() == content
        path.chmod(0)
        with unprivileged():
            store.reload()
            assert lookup(DECODE) is None
        for p in folders:
            p.chmod(0o755)


def test_a_cache_directory_that_cannot_be_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("PAGEDKERN_CACHE_DIR", folder)
        save(DECODE, {"reference": TUNED})
        Path(folder).chmod(0)
        with unprivileged():
            store.reload()
            assert lookup(DECODE) is None
            assert list(store.contents()) == []
            assert known() == []
            assert options.last_records() is None
            assert recommend("chat", "8GB").tier == "default"
        Path(folder).chmod(0o755)
        store.reload()
        assert lookup(DECODE) is not None


def test_a_cache_directory_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PAGEDKERN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    store.reload()
    assert lookup(DECODE) is None
    with pytest.raises(OSError):
        save(DECODE, {"reference": TUNED})


def test_no_home_is_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGEDKERN_CACHE_DIR")
    monkeypatch.setattr(files, "directory", lambda: None)
    store.reload()
    assert lookup(DECODE) is None
    assert list(store.contents()) == []
    with pytest.raises(OSError, match="PAGEDKERN_CACHE_DIR"):
        save(DECODE, {"reference": TUNED})


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_what_was_there(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(DECODE, {"reference": TUNED})
    content = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(OSError, match="No space left"):
            save(DECODE, {"reference": replace(TUNED, gain=9.0)})
    assert path.read_bytes() == content
    assert {p.name for p in path.parent.iterdir()} == {path.name, ".lock"}


def test_a_lock_that_is_never_released(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Hours of measuring are not lost by it: what was found is stored, beside what was there, and a warning says so."""
    monkeypatch.setattr(notices, "_said", {})
    path = save(DECODE, {"reference": TUNED})
    another = path.with_name(f".{path.name}.of-another-writer")
    another.write_text("{")
    monkeypatch.setattr(files, "LOCK_SECONDS", 0.1)
    with (path.parent / ".lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        for gain in (2.0, 3.0):
            save(DECODE, {"triton": replace(TUNED, gain=gain)})
    document = json.loads(path.read_text())
    assert {name: choice["gain"] for name, choice in document["choices"].items()} == {
        "reference": TUNED.gain,
        "triton": 3.0,
    }
    assert another.exists(), "who has the lock may still be writing it"
    [record] = caplog.records
    assert record.getMessage().endswith(".lock cannot be locked (another process holds it): going on without a lock")
    save(DECODE, {"reference": TUNED})
    assert not another.exists()


def test_a_temporary_file_that_another_writer_takes_for_a_dead_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    path, real, taken = save(DECODE, {"reference": TUNED}), os.replace, []

    def take(source: str, target: Path) -> None:
        if not taken:
            taken.append(source)
            os.unlink(source)
        real(source, target)

    monkeypatch.setattr(os, "replace", take)
    save(DECODE, {"reference": replace(TUNED, gain=9.0)})
    assert taken
    assert json.loads(path.read_text())["choices"]["reference"]["gain"] == 9.0


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(
    number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(notices, "_said", {})
    monkeypatch.setattr(fcntl, "flock", fail)
    for heads in (8, 16, 8):
        save(replace(DECODE, num_heads=heads), {"reference": TUNED})
    store.reload()
    assert lookup(DECODE) is not None
    [record] = caplog.records
    assert f"cannot be locked ({os.strerror(number)}): going on without a lock" in record.getMessage()


@needs_compiler
def test_writers_without_locks_leave_files_that_are_whole(home: Path, tmp_path: Path) -> None:
    """A real file system without locks: what one of two writes at once may be lost, never what both read."""
    env = {**os.environ, "LD_PRELOAD": shim("nolocks", tmp_path)}
    processes = [start_writer(f"writer{w}", 40, env=env) for w in range(3)]
    while any(p.poll() is None for p in processes):
        if path_of().exists():
            json.loads(path_of().read_text())  # whole at any time
    for process in processes:
        assert process.returncode == 0
        assert process.stderr is not None
        assert process.stderr.read().count(b"going on without a lock") == 1
    assert json.loads(path_of().read_text())["choices"]
    assert not list(path_of().parent.glob(".*.json.*"))


def test_folders_under_a_umask_that_lets_the_group_write(home: Path) -> None:
    """The tuner makes the cache folder, and compiled kernels are loaded only from one that nobody else can write."""
    before = os.umask(0o002)
    try:
        path = save(DECODE, {"reference": TUNED})
    finally:
        os.umask(before)
    for folder in (home, home / "tuned", path.parent):
        assert folder.stat().st_mode & 0o777 == 0o755


WRITER = """
import os, signal, sys
from pagedkern.autotune import store
from pagedkern.autotune.store import device
from tests.autotune.test_store import DECODE, TUNED
from dataclasses import replace
device.code = lambda name: {"pagedkern": "x", "kernel": "y", "libraries": {}}
store._fresh = lambda name, code: True
me, rounds, mode = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if mode == "die":
    os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
for i in range(rounds):
    store.save(DECODE, {f"{me}-{i}": TUNED})
    store.save(replace(DECODE, num_heads=8 * (1 + i)), {me: TUNED})
"""


def start_writer(
    name: str, rounds: int, mode: str = "live", env: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", WRITER, name, str(rounds), mode]
    return subprocess.Popen(command, cwd=root, env=env, stderr=subprocess.PIPE if env else None)


def test_writers_in_many_processes_lose_nothing(home: Path) -> None:
    writers, rounds = 4, 15
    processes = [start_writer(f"writer{w}", rounds) for w in range(writers)]
    while any(p.poll() is None for p in processes):
        if path_of().exists():
            json.loads(path_of().read_text())  # whole at any time
    assert [p.returncode for p in processes] == [0] * writers
    names = set(json.loads(path_of().read_text())["choices"])
    assert names == {f"writer{w}" for w in range(writers)} | {
        f"writer{w}-{i}" for w in range(writers) for i in range(rounds)
    }
    for i in range(1, rounds):
        document = json.loads(path_of(replace(DECODE, num_heads=8 * (1 + i))).read_text())
        assert set(document["choices"]) == {f"writer{w}" for w in range(writers)}
    assert not list(path_of().parent.glob(".*.json.*"))


def test_a_writer_killed_at_the_worst_moment() -> None:
    path = save(DECODE, {"reference": TUNED})
    content = path.read_bytes()
    process = start_writer("victim", 1, "die")
    assert process.wait() == -signal.SIGKILL
    assert path.read_bytes() == content
    assert len(list(path.parent.glob(f".{path.name}.*"))) == 1  # what it was writing
    save(DECODE, {"reference": TUNED})
    assert {p.name for p in path.parent.iterdir()} == {path.name, ".lock"}


def test_two_tuners_at_once_lose_nothing_in_100_rounds(home: Path) -> None:
    """Both store the same problem and problems of their own, as fast as they can."""
    rounds = 100
    processes = [start_writer(f"tuner{w}", rounds) for w in range(2)]
    while any(p.poll() is None for p in processes):
        if path_of().exists():
            json.loads(path_of().read_text())  # whole at any time
    assert [p.returncode for p in processes] == [0, 0]
    names = set(json.loads(path_of().read_text())["choices"])
    assert names >= {f"tuner{w}-{i}" for w in range(2) for i in range(rounds)}
    for i in range(1, rounds):
        document = json.loads(path_of(replace(DECODE, num_heads=8 * (1 + i))).read_text())
        assert set(document["choices"]) == {"tuner0", "tuner1"}


def age(path: Path, days: float) -> None:
    then = time.time() - 86400 * days
    os.utime(path, (then, then))


def test_old_entries_that_are_stale_are_evicted(home: Path) -> None:
    paths = [save(replace(DECODE, num_heads=8 * i), {"reference": TUNED}) for i in range(2, 6)]
    for path in paths[:2]:
        document = json.loads(path.read_text())
        document["choices"]["reference"]["code"]["kernel"] = "of long ago"
        path.write_text(json.dumps(document))
    age(paths[0], 91)  # stale and old
    age(paths[1], 89)  # stale: another installation may still use it
    age(paths[2], 1000)  # old and in use
    paths[3].write_text("{")
    age(paths[3], 91)  # damaged and old
    save(DECODE, {"reference": TUNED})
    assert [path.exists() for path in paths] == [False, True, True, False]


def test_there_are_only_so_many_stale_files(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "KEPT_FILES", 3)
    paths = [save(replace(DECODE, num_heads=8 * i), {"reference": TUNED}) for i in range(2, 9)]
    for i, path in enumerate(paths):
        document = json.loads(path.read_text())
        document["choices"]["reference"]["code"]["kernel"] = "of long ago"
        path.write_text(json.dumps(document))
        age(path, 10 - i)
    save(DECODE, {"reference": TUNED})
    assert [path.exists() for path in paths] == [False] * 5 + [True] * 2  # and the new one is the third
