"""Locks between processes: held, waited for, and done without where there are none."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagedkern.environment import locks, threads

HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def holder(tmp_path: Path, file: int) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that holds the lock until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()


def free(tmp_path: Path) -> bool:
    """Whether nobody holds the lock."""
    with open(tmp_path / "lock") as other:
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_held_until_the_end(file: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with locks.held(file, "lock", 60) as locked:
        assert locked
        assert not free(tmp_path)
    assert free(tmp_path)
    assert not caplog.records


def test_waits_for_another_process(file: int, tmp_path: Path, holder: subprocess.Popen[bytes]) -> None:
    assert holder.stdin is not None
    threading.Timer(0.2, holder.stdin.close).start()
    with locks.held(file, "lock", 60) as locked:
        assert locked
        assert holder.wait(60) == 0


def test_a_lock_that_is_never_released(
    file: int, tmp_path: Path, holder: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        with locks.held(file, "a name", 0.1) as locked:
            assert not locked
    assert not free(tmp_path), "it is the other's"
    [record] = caplog.records
    assert (
        record.getMessage() == "pagedkern: a name cannot be locked (another process holds it): going on without a lock"
    )


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EIO, errno.EBADF])
def test_a_file_system_without_locks(
    number: int, file: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fail)
    for _ in range(2):
        with locks.held(file, "a name", 60) as locked:
            assert not locked
    [record] = caplog.records
    assert f"a name cannot be locked ({os.strerror(number)})" in record.getMessage()


def test_a_lock_that_never_answers(
    file: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As over a network whose lock server is gone. An answer that comes too late locks nothing for long."""
    real, answer, answered = fcntl.flock, threading.Event(), threading.Event()

    def hang(descriptor: int, operation: int) -> None:
        if operation & fcntl.LOCK_EX:
            answer.wait(60)
            real(descriptor, operation)
            answered.set()

    monkeypatch.setattr(fcntl, "flock", hang)
    with locks.held(file, "a name", 0.1, grace=0.1) as locked:
        assert not locked
    assert "no answer" in caplog.records[0].getMessage()
    monkeypatch.undo()
    os.closerange(file, file + 1)
    answer.set()
    assert answered.wait(60)
    end = time.monotonic() + 60
    while not free(tmp_path):
        assert time.monotonic() < end
        time.sleep(0.01)
    os.open(tmp_path / "lock", os.O_RDWR)  # for the fixture to close


def test_no_thread_for_it(file: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "start", lambda thread: False)
    with locks.held(file, "lock", 60) as locked:
        assert locked
        assert not free(tmp_path)
    assert free(tmp_path)
