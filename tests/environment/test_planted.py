"""Planted code: what somebody else has put, or may have put, into a cache folder is never run, nor is any put there."""

from __future__ import annotations

import hashlib
import inspect
import os
import pickle
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.environment.conditions import ROOT, SOMEBODY, both, files, needs_root, run


class Plant:
    """When it is unpickled it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self._mark = str(mark)

    def __reduce__(self) -> tuple[object, ...]:
        return (open, (self._mark, "w"))


def plant(path: Path, mark: Path) -> None:
    """Replace a file that holds compiled code by one that is as good, but for what it does."""
    code = pickle.dumps(Plant(mark))
    if path.suffix == ".bin":
        from pagedkern.environment import code_cache

        code = code_cache.MAGIC + hashlib.sha256(path.name.encode() + b"\0" + code).digest() + code
    path.write_bytes(code)


def tree(folder: Path) -> dict[Path, tuple[int, bytes]]:
    """Every file below a folder, with its time and content."""
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files(folder)}


def test_a_plant_would_be_run(cache: Path, problem: Path, tmp_path: Path) -> None:
    """In a folder of our own that nobody else can write: so the tests below can fail."""
    for path in files(cache):
        if "find_bad_slot" in path.name:
            plant(path, tmp_path / "mark")
    outcome = run(problem, **both(cache))
    assert outcome.right
    assert (tmp_path / "mark").exists()


def test_a_folder_that_others_can_write(cache: Path, problem: Path, tmp_path: Path) -> None:
    for path in files(cache):
        plant(path, tmp_path / "mark")
    cache.chmod(0o777)
    before = tree(cache)
    outcome = run(problem, part="write", **both(cache))
    assert not (tmp_path / "mark").exists()
    assert outcome.right
    [warning] = outcome.warnings
    assert "the compiled CPU kernels are neither loaded from" in warning
    assert f"nor kept there: others can write {cache}" in warning
    assert tree(cache) == before


def owned_by_another(path: Path) -> None:
    os.chown(path, SOMEBODY, -1)


def written_by_others(path: Path) -> None:
    path.chmod(0o664)


def a_link(path: Path) -> None:
    path.rename(aside := path.with_suffix(".aside"))
    path.symlink_to(aside)


@needs_root
@pytest.mark.parametrize("how", [owned_by_another, written_by_others, a_link])
def test_a_file_that_is_not_ours(how: Callable[[Path], None], cache: Path, problem: Path, tmp_path: Path) -> None:
    """It is replaced by one of ours."""
    [path] = (path for path in files(cache) if "find_bad_slot" in path.name)
    plant(path, tmp_path / "mark")
    how(path)
    outcome = run(problem, **both(cache))
    assert not (tmp_path / "mark").exists()
    assert outcome.right
    [warning] = outcome.warnings
    assert f"the compiled CPU kernels are compiled anew where needed: {path}" in warning
    outcome = run(problem, **both(cache))
    assert (outcome.right, outcome.warnings, outcome.compiled) == (True, [], [])
    info = path.lstat()
    assert (stat.S_ISREG(info.st_mode), info.st_uid, info.st_mode & 0o022) == (True, os.geteuid(), 0)


def numba_files(package: Path, home: Path) -> list[Path]:
    """Where Numba's own cache would look for our kernels: beside the sources, and in its folder in the home."""
    from pagedkern.backends.cpu import launch

    found = []
    for entry in (launch.PLAN, launch.ATTEND, launch.FIND_BAD_SLOT, launch.WRITE):
        function = entry.dispatcher.py_func
        source = package / Path(inspect.getfile(function)).relative_to(ROOT / "pagedkern")
        version = f"py{sys.version_info[0]}{sys.version_info[1]}{sys.abiflags}"
        name = f"{source.stem}.{function.__qualname__}-{function.__code__.co_firstlineno}.{version}.nbi"
        digest = hashlib.sha1(str(source.parent).encode()).hexdigest()
        found += [
            source.parent / "__pycache__" / name,
            home / ".cache" / "numba" / f"{source.parent.name}_{digest}" / name,
        ]
    return found


def test_the_folders_of_numba_itself(full_cache: Path, problem: Path, tmp_path: Path) -> None:
    """Nothing is looked for in them."""
    skipped = shutil.ignore_patterns("__pycache__")
    package = Path(shutil.copytree(ROOT / "pagedkern", tmp_path / "site" / "pagedkern", ignore=skipped))
    for path in numba_files(package, tmp_path / "home"):
        path.parent.mkdir(parents=True, exist_ok=True)
        plant(path, tmp_path / "mark")
    variables = {"HOME": str(tmp_path / "home"), "PYTHONPATH": f"{package.parent}:{ROOT}"}
    outcome = run(problem, cwd=package.parent, PAGEDKERN_CACHE_DIR=str(full_cache / "pagedkern"), **variables)
    assert not (tmp_path / "mark").exists()
    assert (outcome.right, outcome.warnings, outcome.compiled) == (True, [], [])


def test_what_others_compile_stays_where_it_was(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(
        "import numba, pagedkern.backends.cpu.launch\n"
        "@numba.njit(cache=True)\ndef twice(x): return 2 * x\n"
        "assert twice(4) == 8\nprint(sum(twice.stats.cache_hits.values()))\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    for hits in ("0", "1"):
        command = [sys.executable, str(tmp_path / "other.py")]
        assert subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.strip() == hits
    assert len(list((tmp_path / "__pycache__").glob("other.twice-*.nb?"))) == 2


def test_planted_code_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the CuPy backend is machine code for the GPU, with no pickle around it."""
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    from pagedkern.backends.cupy import compiler
    from pagedkern.environment import code_cache

    try:
        compiler.version()
    except Exception as error:  # what is raised where the library is missing differs between versions of CuPy
        pytest.skip(f"no NVRTC here: {error}")
    monkeypatch.setenv("PAGEDKERN_CACHE_DIR", str(tmp_path))
    code = compiler.compiled("merge.cu", {}, 90)
    [path] = files(tmp_path)
    planted = b"code of somebody else"
    path.write_bytes(code_cache.MAGIC + hashlib.sha256(path.name.encode() + b"\0" + planted).digest() + planted)
    assert compiler.compiled("merge.cu", {}, 90) == planted, "so the next line can fail"
    tmp_path.chmod(0o777)
    assert compiler.compiled("merge.cu", {}, 90) == code
