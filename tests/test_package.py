"""What is in the wheel, and that its declared version and files are right."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    build = (
        "import sys; from hatchling.builders.wheel import WheelBuilder; "
        "print(*WheelBuilder(sys.argv[1]).build(directory=sys.argv[2]))"
    )
    made = subprocess.run(
        [sys.executable, "-c", build, str(ROOT), str(folder)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return zipfile.ZipFile(made.stdout.split()[-1])


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
