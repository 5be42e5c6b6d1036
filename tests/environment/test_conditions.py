"""The CPU backend where something is missing that it would like to have: right results, and one warning that says why.

Everything is real here: users, file systems, limits and preloaded libraries, each in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environment.conditions import ROOT, SOMEBODY, both, files, needs_compiler, needs_root, run, shim

COMPILED = "the compiled CPU kernels"


def test_with_everything_there(cache: Path, problem: Path) -> None:
    """What the others are compared with: nothing is compiled, nothing is said, two threads compute."""
    before = {path: path.read_bytes() for path in files(cache)}
    outcome = run(problem, **both(cache))
    assert outcome.right
    assert outcome.warnings == []
    assert outcome.helpers == 1
    assert outcome.compiled == []
    assert {path: path.read_bytes() for path in files(cache)} == before


@needs_root
def test_a_user_without_passwd_entry_and_home(problem: Path) -> None:
    """As in a container that runs under a number."""
    outcome = run(problem, {"uid": SOMEBODY}, part="write", HOME=None)
    assert outcome.right
    [warning] = outcome.warnings
    assert f"{COMPILED} cannot be kept, there is no home: set PAGEDKERN_CACHE_DIR" in warning
    assert not [path for path in ROOT.iterdir() if path.name.startswith("~")]


@needs_root
def test_a_user_whose_home_is_not_there(gap: Path, problem: Path) -> None:
    """As "nobody", whose home is /nonexistent: what root has compiled for all is found, and nothing new is kept."""
    outcome = run(problem, {"uid": SOMEBODY}, HOME="/nonexistent", **both(gap))
    assert outcome.right
    [warning] = outcome.warnings
    assert f"{COMPILED} cannot be kept in {gap}" in warning
    assert "Permission denied" in warning
    assert outcome.compiled == ["write"]


@needs_root
def test_a_read_only_file_system(gap: Path, problem: Path) -> None:
    outcome = run(problem, {"read_only": [str(gap)]}, **both(gap))
    assert outcome.right
    [warning] = outcome.warnings
    assert f"{COMPILED} cannot be kept in {gap}" in warning
    assert "Read-only file system" in warning
    assert outcome.compiled == ["write"]


@needs_root
def test_nothing_at_all_can_be_written(gap: Path, problem: Path) -> None:
    """Neither the home, nor temporary files, wherever."""
    outcome = run(problem, {"read_only": ["/"]}, HOME="/root", TMPDIR="/nonexistent", **both(gap))
    assert outcome.right
    [warning] = outcome.warnings
    assert "Read-only file system" in warning


@needs_root
def test_a_file_system_that_is_full(gap: Path, problem: Path) -> None:
    """A real one, which was filled to the last page."""
    small = gap.parent / "small"
    small.mkdir()
    mounts = [["-t", "tmpfs", "-o", "size=16m,mode=755", "none", str(small)], ["--bind", str(gap), "/mnt"]]
    outcome = run(problem, {"mounts": mounts, "first": ["-c", FILL, str(small)]}, **both(small))
    assert outcome.right
    [warning] = outcome.warnings
    assert f"{COMPILED} cannot be kept in {small}" in warning
    assert "No space left on device" in warning
    assert outcome.compiled == ["write"]


FILL = """
import shutil, sys
shutil.copytree("/mnt", sys.argv[1], dirs_exist_ok=True)
try:
    with open(sys.argv[1] + "/filler", "wb", buffering=0) as file:
        while True: file.write(bytes(4096))
except OSError as error:
    assert error.errno == 28
"""


@needs_compiler
@pytest.mark.parametrize("after", [0, 1000, 30000])
def test_a_disk_that_becomes_full(after: int, gap: Path, problem: Path, tmp_path: Path) -> None:
    before = files(gap)
    outcome = run(
        problem, LD_PRELOAD=shim("nospace", tmp_path), NOSPACE_AFTER=str(after), NOSPACE_FOLDER=str(gap), **both(gap)
    )
    assert outcome.right
    [warning] = outcome.warnings
    assert "No space left on device" in warning
    assert files(gap) == before


@needs_compiler
@pytest.mark.parametrize(("hang", "reason"), [(None, "No locks available"), ("1", "no answer")])
def test_a_file_system_without_locks(hang: str | None, reason: str, gap: Path, problem: Path, tmp_path: Path) -> None:
    """What is compiled is kept all the same."""
    outcome = run(problem, LD_PRELOAD=shim("nolocks", tmp_path), NOLOCKS_HANG=hang, **both(gap))
    assert outcome.right
    [warning] = outcome.warnings
    assert str(gap) in warning
    assert f"cannot be locked ({reason}): going on without a lock" in warning
    outcome = run(problem, **both(gap))
    assert (outcome.right, outcome.warnings, outcome.compiled) == (True, [], [])


@pytest.mark.parametrize("size", [0, 1000])
def test_a_limit_of_the_size_of_files(size: int, gap: Path, problem: Path) -> None:
    """The system sends SIGXFSZ, which Python ignores: then it is an error like any other."""
    before = files(gap)
    outcome = run(problem, {"limits": {"FSIZE": size}}, **both(gap))
    assert outcome.right
    [warning] = outcome.warnings
    assert f"{COMPILED} cannot be kept in {gap}" in warning
    assert "File too large" in warning
    assert files(gap) == before


@needs_root
def test_no_thread_can_be_started(gap: Path, problem: Path) -> None:
    """Neither one that computes nor the one that says meanwhile that something is compiled."""
    for path in (gap, *gap.rglob("*")):
        os.chown(path, SOMEBODY, -1)
    outcome = run(problem, {"uid": SOMEBODY, "limits": {"NPROC": 1}}, **both(gap))
    assert outcome.right
    assert outcome.helpers == 0
    [warning] = outcome.warnings
    assert "no more threads can be started (see ulimit -u): computing with 1 of 2 threads" in warning


@needs_root
@pytest.mark.parametrize("hidden", [["/proc"], ["/sys"], ["/proc", "/sys"]])
def test_without_what_the_system_tells(hidden: list[str], cache: Path, problem: Path) -> None:
    mounts = [["-t", "tmpfs", "none", path] for path in hidden]
    outcome = run(problem, {"mounts": mounts}, **both(cache))
    assert outcome.right
    assert outcome.warnings == []
    assert outcome.compiled == []


def test_without_standard_streams(gap: Path, problem: Path) -> None:
    """What is written meanwhile to standard error goes into no file of ours."""
    assert run(problem, {"close": [0, 2]}, **both(gap)).right
    outcome = run(problem, **both(gap))
    assert (outcome.right, outcome.warnings, outcome.compiled) == (True, [], [])


DAMAGES = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "garbage": lambda content: b"\x80\x05garbage" * 99,
    "another-version": lambda content: content.replace(b"0.6", b"0.5").replace(b"code 1", b"code 0"),
}


@pytest.mark.parametrize(
    ("damage", "kernels"), [*((damage, ("write", "find_bad_slot")) for damage in DAMAGES), ("garbage", ("",))]
)
def test_damaged_files(damage: str, kernels: tuple[str, ...], cache: Path, problem: Path) -> None:
    """One warning for all of them; they are made good."""
    damaged = [path for path in files(cache) if any(name in path.name for name in kernels)]
    assert len(damaged) >= 2
    for path in damaged:
        path.write_bytes(DAMAGES[damage](path.read_bytes()))
    outcome = run(problem, **both(cache))
    assert outcome.right
    [warning] = outcome.warnings
    assert f"{COMPILED} are compiled anew where needed: {cache}" in warning
    outcome = run(problem, **both(cache))
    assert (outcome.right, outcome.warnings, outcome.compiled) == (True, [], [])


def test_a_cache_folder_that_is_a_file(problem: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    outcome = run(problem, part="write", **both(tmp_path / "file"))
    assert outcome.right
    [warning] = outcome.warnings
    assert str(tmp_path / "file") in warning
    assert "Not a directory" in warning


@needs_compiler
def test_several_processes_without_locks(gap: Path, problem: Path, tmp_path: Path) -> None:
    """They compile the same at the same time, and leave files that are whole."""
    code = (
        "import sys; from pathlib import Path; from tests.environment.conditions import both, run\n"
        "outcome = run(Path(sys.argv[1]), LD_PRELOAD=sys.argv[3], **both(Path(sys.argv[2])))\n"
        "assert outcome.right and len(outcome.warnings) == 1, outcome\n"
    )
    command = [sys.executable, "-c", code, str(problem), str(gap), shim("nolocks", tmp_path)]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    assert [(process.communicate()[1], process.returncode) for process in processes] == [("", 0)] * 3
    outcome = run(problem, **both(gap))
    assert (outcome.right, outcome.warnings, outcome.compiled) == (True, [], [])
    assert all(path.suffix == ".bin" for path in files(gap))
