"""An environment with CuPy and Numba for the CUDA versions that the tests' own environment does not have them for.

    python tests/other_cuda.py lend FOLDER     lends a fresh environment all packages but those of CUDA
    FOLDER/bin/python tests/other_cuda.py      says what it has; fails if that is not what was asked for

`make other-cuda` does both. torch and the tools for tests are lent by links: torch has no say in the version of CUDA.
"""

from __future__ import annotations

import sys
import sysconfig
from importlib import import_module
from importlib.metadata import distributions, version
from pathlib import Path

CUDA = "cuda", "cupy", "numba_cuda", "nvidia"  # how what is not lent begins


def lend(environment: Path) -> None:
    """What this environment's site-packages have, without CUDA."""
    (site,) = environment.glob("lib/python*/site-packages")
    lent = environment / "lent"
    lent.mkdir()
    for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not path.name.lstrip("_").startswith(CUDA):
            (lent / path.name).symlink_to(path)
    (site / "lent.pth").write_text(f"{lent.resolve()}\n")


def check() -> None:
    """CuPy is for CUDA 13, Numba for CUDA 12; no other package for either is in sight."""
    names = {found.name.lower().replace("_", "-") for found in distributions()}
    assert {name for name in names if name.startswith("cupy")} == {"cupy-cuda13x"}
    assert version("cuda-bindings").startswith("12.")
    assert "nvidia-cuda-nvcc-cu12" in names, "libnvvm and ptxas of CUDA 12"
    assert not {"nvidia-nvvm", "nvidia-cuda-nvcc"} & names, "libnvvm and ptxas of CUDA 13"
    for name in ("cupy", "cupy_backends", "numba_cuda", "cuda.bindings", "cuda.pathfinder"):
        place = Path(str(import_module(name).__file__))
        assert place.is_relative_to(sys.prefix), f"{name} is that of {place}"
    mine = (f"{name} {version(name)}" for name in ("cupy-cuda13x", "numba-cuda", "cuda-bindings", "cuda-toolkit"))
    sys.stdout.write(f"{sys.prefix}: {', '.join(mine)}\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["lend"]:
        lend(Path(sys.argv[2]))
    else:
        check()
