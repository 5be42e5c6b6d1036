"""Compiled code on disk: kept, found again, or done without, with one warning."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pagedkern.environment import code_cache
from pagedkern.environment.code_cache import CodeCache

CODE = bytes(range(256)) * 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "cpu"


@pytest.fixture
def store(folder: Path) -> CodeCache:
    return CodeCache("compiled kernels of a test", lambda: folder)


@pytest.fixture
def name(store: CodeCache) -> str:
    """The name of something that is kept."""
    name = store.name("kernel", "key")
    assert store.save(name, CODE)
    return name


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_kept_and_found_again(store: CodeCache, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = store.name("kernel", "a key"), store.name("kernel", "another key")
    assert first != second
    assert store.load(first) is None
    assert store.save(first, CODE)
    assert store.save(second, b"")
    assert store.load(first) == CODE
    assert store.load(second) == b""
    assert store.save(first, b"anew")
    assert store.load(first) == b"anew"
    assert {path.name for path in folder.iterdir()} == {first, second}
    assert not caplog.records


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def in_place(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


DAMAGES: dict[str, Callable[[Path], None]] = {
    "empty": lambda path: path.write_bytes(b"") and None,
    "cut": cut,
    "longer": lengthen,
    "garbage": lambda path: path.write_bytes(b"\x80\x04garbage") and None,
    "another-version": lambda path: path.write_bytes(path.read_bytes().replace(b"code 1", b"code 2")) and None,
    "of-another-name": lambda path: shutil.copy(next(path.parent.glob("other*")), path) and None,
    "too-long": lambda path: os.truncate(path, code_cache.MOST_BYTES + 1),
    "a-folder": in_place(Path.mkdir),
    "a-pipe": in_place(os.mkfifo),
    "a-link": in_place(lambda path: path.symlink_to(next(path.parent.glob("other*")))),
    "a-lost-link": in_place(lambda path: path.symlink_to("nowhere")),
    "writable-by-others": lambda path: path.chmod(0o666),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file(
    damage: str, store: CodeCache, name: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Is said once, with its path, and made good by the next that is kept."""
    store.save(store.name("other", "x"), b"code of something else")
    DAMAGES[damage](folder / name)
    for _ in range(2):
        assert store.load(name) is None
    [warning] = warnings(caplog)
    assert "compiled kernels of a test are compiled anew" in warning
    assert str(folder / name) in warning
    if damage == "a-folder":
        assert not store.save(name, CODE)
    else:
        assert store.save(name, CODE)
        assert store.load(name) == CODE
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize("seed", range(5))
def test_random_damage(seed: int, store: CodeCache, name: str, folder: Path) -> None:
    """Whatever bytes are cut off, added, swapped or overwritten: what is loaded is what was kept, or nothing."""
    rng = random.Random(seed)
    path = folder / name
    whole = path.read_bytes()
    for _ in range(200):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            at, size = rng.randrange(len(data) + 1), rng.randrange(64)
            data[at : at + size] = rng.choice([b"", rng.randbytes(size), data[: rng.randrange(64)], bytes(size)])
        path.write_bytes(data)
        assert store.load(name) == (CODE if data == whole else None)


@pytest.mark.parametrize("what", ["none", "file", "below-a-file", "lost-link", "circle", "shared"])
def test_a_folder_that_cannot_be_used(what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "lost-link").symlink_to(tmp_path / "file" / "x")
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    folder = None if what == "none" else tmp_path / ("file/cache" if what == "below-a-file" else what) / "cpu"
    before = sorted(tmp_path.rglob("*"))
    store = CodeCache("compiled kernels of a test", lambda: folder)
    name = store.name("kernel", "key")
    for _ in range(2):
        with store.turn(name):
            assert store.load(name) is None
            assert not store.save(name, CODE)
    [warning] = warnings(caplog)
    assert "PAGEDKERN_CACHE_DIR" in warning if folder is None else str(folder) in warning
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else for a moment")
def test_a_folder_that_only_root_enters(
    store: CodeCache, name: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.seteuid(54321)
    try:
        assert store.load(name) is None
        assert not store.save(name, b"")
    finally:
        os.seteuid(0)
    [warning] = warnings(caplog)
    assert "Permission denied" in warning
    assert store.load(name) == CODE


def test_a_folder_that_goes_in_between(
    store: CodeCache, name: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with store.turn(other := store.name("kernel", "other")):
        shutil.rmtree(folder.parent)
        assert store.load(name) is None
        assert store.save(other, CODE)
    assert store.load(other) == CODE
    assert not caplog.records


def test_a_disk_that_is_full(
    store: CodeCache, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Or only read, or over its quota: what is there stays, nothing is left behind."""
    real, written = os.write, 0

    def write(file: int, data: bytes) -> int:
        nonlocal written
        written += len(data)
        if written > 100:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return real(file, data[:50])

    monkeypatch.setattr(os, "write", write)
    assert not store.save(name, CODE[::-1])
    assert store.load(name) == CODE
    assert os.listdir(folder) == [name]
    assert "Disk quota exceeded" in warnings(caplog)[0]


def test_no_number_is_left_for_another_file(store: CodeCache, name: str, caplog: pytest.LogCaptureFixture) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        with store.turn(other := store.name("kernel", "other")):
            assert store.load(name) is None
            assert not store.save(other, CODE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    [warning] = warnings(caplog)
    assert "Too many open files" in warning
    assert store.load(name) == CODE


def test_what_nobody_uses_goes(store: CodeCache, name: str, folder: Path) -> None:
    """Of files that are as old only those stay that were used; so do others' that are younger."""

    def age(path: Path, days: float) -> None:
        then = time.time() - 86400 * days
        os.utime(path, (then, then))

    used = store.name("used", "x")
    for each in (used, *(store.name("old", str(i)) for i in range(3))):
        store.save(each, CODE)
    for each in folder.iterdir():
        age(each, code_cache.MOST_DAYS + 1)
    assert store.load(used) == CODE
    for left in (f".{name}.123.abcd", f"{name}.lock", "a file of somebody else"):
        (folder / left).write_bytes(b"")
        age(folder / left, 1)
    (folder / f".{name}.124.abcd").write_bytes(b"of a process that writes it now")
    store.save(name, CODE)
    assert {p.name for p in folder.iterdir()} == {name, used, f".{name}.124.abcd", "a file of somebody else"}
    store = CodeCache("compiled kernels of a test", lambda: folder, most_files=5)
    names = [store.name("many", str(i)) for i in range(9)]
    for i, each in enumerate(names):
        store.save(each, CODE)
        age(folder / each, (9 - i) / 100)
    store.save(name, CODE)
    assert {p.name for p in folder.glob("*.bin")} == {name, used, *names[6:]}


WORKER = """
import sys, time
from pathlib import Path
from pagedkern.environment import code_cache
from pagedkern.environment.code_cache import CodeCache
store = CodeCache("compiled kernels", lambda: Path(sys.argv[1]))
made = 0
for i in range(20):
    name = store.name("kernel", str(i))
    with store.turn(name):
        code = store.load(name)
        if code is None:
            time.sleep(0.005)
            made += 1
            store.save(name, code := str(i).encode() * 1000)
    assert code == str(i).encode() * 1000
print(made)
"""


def test_many_processes_make_everything_once(folder: Path) -> None:
    command = [sys.executable, "-c", WORKER, str(folder)]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    results = [worker.communicate(timeout=120) for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * 4, results
    assert sum(int(out) for out, _ in results) == 20
    assert not any(err for _, err in results)
    assert all(path.suffix == ".bin" for path in folder.iterdir())
