"""What is in the wheel and in the source package, what it declares, and that it works where it is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


BUILD = """
import sys
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
print(*{"wheel": WheelBuilder, "sdist": SdistBuilder}[sys.argv[1]](sys.argv[2]).build(directory=sys.argv[3]))
"""


def built(kind: str, root: Path, folder: Path) -> Path:
    """A wheel or an sdist of the project at `root`, by the build backend that pip calls."""
    command = [sys.executable, "-c", BUILD, kind, str(root), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    return Path(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def wheel_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def wheel(wheel_file: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(wheel_file)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked sdist."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(built("sdist", ROOT, folder)) as archive:
        archive.extractall(folder, filter="data")
    return next(path for path in folder.iterdir() if path.is_dir())


def test_wheel_holds_the_library_only(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"pagedkern"}


def test_wheel_holds_all_of_it(wheel: zipfile.ZipFile) -> None:
    tracked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "pagedkern").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert tracked <= set(wheel.namelist())
    assert "pagedkern/py.typed" in tracked
    assert "pagedkern/abi/pagedkern_abi.h" in tracked
    assert {".cu", ".cuh", ".toml"} <= {Path(name).suffix for name in tracked}


def test_wheel_metadata(wheel: zipfile.ZipFile) -> None:
    import pagedkern

    name = next(name for name in wheel.namelist() if name.endswith("/METADATA"))
    metadata = wheel.read(name).decode()
    assert f"Version: {pagedkern.__version__}" in metadata
    assert "License-Expression: Apache-2.0" in metadata
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert required == []  # the allocator and the ABI need the standard library only
    for extra in ("autotune", "cpu", "triton", "cuda12", "cuda13", "transformers", "examples", "test", "dev"):
        assert f"Provides-Extra: {extra}" in metadata


def test_source_builds_the_same_wheel(source: Path, wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    again = zipfile.ZipFile(built("wheel", source, tmp_path))
    assert {(item.filename, item.CRC) for item in again.infolist()} == {
        (item.filename, item.CRC) for item in wheel.infolist()
    }


def test_source_runs_its_tests(source: Path) -> None:
    """Some of them, with the packages of this environment and the library of the sdist."""
    for folder in ("tests", "reference", "benchmarks", "examples", "docs", "autotune"):
        assert (source / folder).is_dir()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["tests/test_imports.py", "tests/scheduler/test_calls.py", "-k", "not loads and not quick"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=source, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout


@pytest.fixture(scope="module")
def environment(wheel_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with nothing but the wheel. (`make dist` makes one by pip, and installs the extra by pip, too.)"""
    place = tmp_path_factory.mktemp("a user's") / "environment"
    venv.create(place, symlinks=True)
    (site,) = place.glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel_file).extractall(site)
    return place


@pytest.mark.parametrize("extras", ["bare", "cpu"])
def test_installed(environment: Path, extras: str, tmp_path: Path) -> None:
    """What an extra brings is lent by the environment of the tests; the library is the wheel's."""
    if extras == "cpu":
        (site,) = environment.glob("lib/python*/site-packages")
        (site / "lent.pth").write_text(sysconfig.get_paths()["purelib"])
    kept = {name: value for name, value in os.environ.items() if name in ("HOME", "PATH", "PAGEDKERN_CACHE_DIR")}
    command = [str(environment / "bin" / "python"), "-I", str(ROOT / "tests" / "installed.py"), extras]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=kept, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{extras}: all as it should be" in done.stdout


def test_constraints_meet_the_extras() -> None:
    """Every pin that `make` installs satisfies the bounds that users get."""
    from packaging.requirements import Requirement

    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split("\n") if "==" in line)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    seen = 0
    for requirement in map(Requirement, (item for items in extras.values() for item in items)):
        if requirement.name in pins:
            seen += 1
            assert requirement.specifier.contains(pins[requirement.name]), requirement
    assert seen > 5
