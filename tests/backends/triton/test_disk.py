"""Where Triton's kernels are kept: in a folder that nobody else can write, whatever the environment offers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.environment.conditions import shim

ROOT = Path(__file__).parents[3]
SCRIPT = """
import json, logging, os, sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from pagedkern.backends.triton import disk

@triton.jit
def kernel(p, N: tl.constexpr):
    tl.store(p, N)

said, used = [], []
logging.getLogger("pagedkern").addHandler(handler := logging.Handler())
handler.emit = lambda record: said.append(record.getMessage())

def compile_(n):
    used.append(triton.knobs.cache.dir)
    source = ASTSource(kernel, {"p": "*i32", "N": "constexpr"}, {(1,): n})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"][:4] == b"\\x7fELF"

before = triton.knobs.cache.dir, os.environ.get("TRITON_CACHE_DIR")
right = all(disk.compiling(lambda n=n: compile_(n)) for n in (1, 2))
same = before == (triton.knobs.cache.dir, os.environ.get("TRITON_CACHE_DIR"))
print(json.dumps({"right": right, "same": same, "said": said, "used": used}))
"""


def compiled(folder: Path, tmp_path: Path, **environment: str | None) -> dict[str, object]:
    """Two kernels compiled with that folder for a cache."""
    (tmp_path / "script.py").write_text(SCRIPT)
    given: dict[str, str | None] = {"TRITON_INTERPRET": None, "TRITON_CACHE_DIR": str(folder), **environment}
    env = {name: value for name, value in {**os.environ, "PYTHONPATH": str(ROOT), **given}.items() if value is not None}
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    assert found["right"]
    assert found["same"], "what others compile with Triton goes where it went"
    return found


def test_a_folder_of_ours(tmp_path: Path) -> None:
    found = compiled(tmp_path / "cache", tmp_path)
    assert found["said"] == []
    assert found["used"] == [str(tmp_path / "cache" / "pagedkern")] * 2
    assert any((tmp_path / "cache" / "pagedkern").rglob("*.cubin"))


def test_a_folder_that_nobody_else_can_enter(tmp_path: Path) -> None:
    """Triton makes folders by the umask, below which others could put their code in the place of ours."""
    before = os.umask(0)
    try:
        found = compiled(tmp_path / "cache", tmp_path)
    finally:
        os.umask(before)
    own = tmp_path / "cache" / "pagedkern"
    assert found["said"] == []
    assert any(path.is_dir() and path.stat().st_mode & 0o002 for path in own.iterdir())  # else nothing is tested
    assert own.stat().st_mode & 0o777 == 0o700
    own.chmod(0o755)  # until now others could have entered
    [said] = compiled(tmp_path / "cache", tmp_path)["said"]  # type: ignore[misc]
    assert f"neither loaded from {own} nor kept there: others could enter it" in said


@pytest.mark.parametrize("what", ["shared", "file", "full", "no home"])
def test_a_folder_that_cannot_be_used(what: str, tmp_path: Path) -> None:
    """A folder of the process alone takes its place, which goes with it."""
    folder, environment = tmp_path / "cache", {}
    if what == "shared":
        folder.mkdir()
        folder.chmod(0o777)
    elif what == "file":
        folder.write_text("in the way")
    elif what == "full":
        if shutil.which(os.environ.get("CC", "cc")) is None:
            pytest.skip("needs a C compiler")
        environment = {"LD_PRELOAD": shim("nospace", tmp_path), "NOSPACE_FOLDER": str(folder), "NOSPACE_AFTER": "10"}
    else:
        folder = Path("~/.triton/cache")
    found = compiled(folder, tmp_path, **environment)
    [said] = found["said"]  # type: ignore[misc]
    assert f"kernels of Triton are neither loaded from {folder}/pagedkern nor kept there" in said
    last = Path(found["used"][-1])  # type: ignore[index]
    assert last.parts[-2].startswith("pagedkern-")
    assert not last.exists()
    assert not any(folder.rglob("*.cubin"))
    assert not (tmp_path / "~").exists()
