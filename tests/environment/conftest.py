"""What the tests of the environment share: warnings that start anew, and folders that others may enter."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pagedkern.environment import notices
from tests.environment import conditions, program


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test hears its warnings, whatever was said before."""
    monkeypatch.setattr(notices, "_said", {})


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """An empty folder of this user that others may enter, which pytest's own are not."""
    folder = Path(tempfile.mkdtemp(prefix="pagedkern-test-"))
    folder.chmod(0o755)
    yield folder
    for path, _, _ in os.walk(folder):  # root may; others made what is theirs not writable
        os.chmod(path, 0o755)
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def problem(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the problem that `program` computes, for everybody to read."""
    folder = Path(tempfile.mkdtemp(prefix="pagedkern-problem-"))
    folder.chmod(0o755)
    torch.save(program.make(), folder / "problem.pt")
    (folder / "problem.pt").chmod(0o644)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def full_cache(problem: Path) -> Iterator[Path]:
    """A cache folder in which everything is that the program compiles."""
    folder = Path(tempfile.mkdtemp(prefix="pagedkern-cache-"))
    outcome = conditions.run(problem, **conditions.both(folder))
    assert outcome.right
    assert not outcome.warnings
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def cache(full_cache: Path, open_folder: Path) -> Path:
    """A copy of that folder."""
    shutil.copytree(full_cache, copy := open_folder / "cache")
    copy.chmod(0o755)
    return copy


@pytest.fixture
def gap(cache: Path) -> Path:
    """The same without the kernel that writes K and V, which is compiled soonest."""
    left_out = [path for path in conditions.files(cache) if "write" in path.name]
    assert left_out
    for path in left_out:
        path.unlink()
    return cache
