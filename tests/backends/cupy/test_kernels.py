"""The kernels compiled by NVRTC for GPUs that need not be here: no warnings, no spills, wide copies, tensor cores.

NVRTC of CUDA 12 and that of CUDA 13 compile a sample each of the grid of `benchmarks.cupy_kernels`; with
CUPY_KERNELS=full both compile all of it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cupy", reason="no module named 'cupy': pip install 'pagedkern[cuda12]'")

from benchmarks import nvrtc
from benchmarks.cupy_kernels import CAPABILITIES, DIMS, DTYPES, Cell, Facts, grid, measure, wrong
from pagedkern.backends.base import Problem
from pagedkern.backends.cupy import compiler, config, instance

FULL = os.environ.get("CUPY_KERNELS") == "full"
EVERY, FIRST = 26, {12: 0, 13: 14}  # samples that have each value of each axis


def sample(cuda: int) -> list[Cell]:
    """The cells that NVRTC of this CUDA version compiles."""
    cells = grid() if FULL else grid()[FIRST[cuda] :: EVERY]
    return list(dict.fromkeys((*cells, *(cell for cell in grid() if cell.instance is None and cell.capability == 90))))


@pytest.fixture(scope="module")
def process(cuda: int) -> Iterator[Executor]:
    """A process in which CuPy compiles with this NVRTC."""
    with nvrtc.processes(cuda, 1) as pool:
        yield pool


CELLS = [pytest.param(cuda, cell, id=f"NVRTC {cuda}, {cell.name}") for cuda in nvrtc.PACKAGES for cell in sample(cuda)]


@pytest.mark.parametrize(("cuda", "cell"), CELLS, scope="module")
def test_compiles_to_what_it_should(
    process: Executor, cuda: int, cell: Cell, record_property: Callable[[str, object], None]
) -> None:
    facts = process.submit(measure, cell).result()
    assert facts.nvrtc.startswith(f"{cuda}.")
    record_property("compiled by", f"NVRTC {facts.nvrtc}")
    assert wrong(cell, facts) == []


@pytest.mark.parametrize("cuda", nvrtc.PACKAGES)
def test_the_sample_has_every_value(cuda: int) -> None:
    cells = sample(cuda)
    made = [cell.instance for cell in cells if cell.instance]
    assert {cell.capability for cell in cells} == set(CAPABILITIES)
    assert {(i.q_dtype, i.kv_dtype) for i in made} == set(DTYPES)
    assert {i.prefill for i in made} == {False, True}
    assert {i.dim_k for i in made} == {dim for dim, _ in DIMS}
    assert {i.copy for i in made} == {"async", "bulk"}


def kept(folder: Path) -> tuple[int, ...]:
    """Have the library compile a kernel and keep it, with the NVRTC that CuPy finds here; returns the version."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGEDKERN_CACHE_DIR", str(folder))
        compiler.compiled("merge.cu", {}, 90)
    return compiler.version()


@pytest.mark.parametrize("cuda", nvrtc.PACKAGES, ids="NVRTC {}".format, scope="module")
def test_an_nvrtc_that_was_loaded_before(process: Executor, cuda: int, tmp_path: Path) -> None:
    """As torch loads that of its own CUDA version, without the built-in functions: CuPy compiles with it, whichever
    version CuPy is for. What different versions compiled is kept apart."""
    versions = [process.submit(kept, tmp_path).result(), kept(tmp_path)]
    assert versions[0][0] == cuda
    assert len(list((tmp_path / "cupy").iterdir())) == len(set(versions))


def test_what_is_wrong_is_found() -> None:
    good = Facts(nvrtc="13.0", registers=168, stack=0, spills=0, copies=0, bulk=4, mma=32, ldmatrix=16, warnings=())
    made = [cell for cell in grid() if cell.instance and cell.instance.copy == "bulk"]
    cell = next(cell for cell in made if cell.instance and cell.instance.tensor_cores)
    assert wrong(cell, good) == []
    changes: list[dict[str, Any]] = [
        {"spills": 4}, {"stack": 8}, {"registers": -1}, {"bulk": 0}, {"mma": 0}, {"ldmatrix": 0}, {"warnings": ("a",)}
    ]  # fmt: skip
    for change in changes:
        assert len(wrong(cell, replace(good, **change))) == 1, change


def test_structs_equal_those_of_the_header(tmp_path: Path) -> None:
    """Sizes and offsets as a C++ compiler lays them out."""
    cxx = shutil.which("g++")
    if cxx is None:
        pytest.skip("no g++ on the PATH")
    structs = {
        "Instance": instance.InstanceStruct,
        "AttentionPlan": instance.AttentionPlan,
        "WritePlan": instance.WritePlan,
        "CopyPlan": instance.CopyPlan,
    }
    lines, want = [], []
    for name, struct in structs.items():
        lines.append(f'printf("%zu\\n", sizeof({name}));')
        want.append(ctypes.sizeof(struct))
        for field, *_ in struct._fields_:
            lines.append(f'printf("%zu\\n", offsetof({name}, {field}));')
            want.append(getattr(struct, field).offset)
    for name in ("MAX_DIM", "MAX_KEYS", "MAX_STAGES", "COPY_CACHES", "COPY_DIMS", "FEATURE_SOFTCAP", "FEATURE_ALIBI"):
        lines.append(f'printf("%zu\\n", (size_t){name});')
        want.append(getattr(instance, name))
    source = tmp_path / "layout.cpp"
    source.write_text(
        f'#include <cstddef>\n#include <cstdio>\n#include "instance.cuh"\nint main() {{ {"".join(lines)} }}'
    )
    include = [f"-I{compiler.FOLDER}", f"-I{compiler.ABI_HEADER.parent}"]
    subprocess.run([cxx, *include, str(source), "-o", str(tmp_path / "layout")], check=True)
    said = subprocess.run([str(tmp_path / "layout")], capture_output=True, text=True, check=True).stdout
    assert [int(x) for x in said.split()] == want
    fields = [name for name, _ in instance.InstanceStruct._fields_]
    assert fields == list(instance.Instance.__dataclass_fields__)


def test_parameters_fit_a_launch() -> None:
    """4 KiB are what every GPU takes."""
    from pagedkern.abi.structs import AttentionParamsStruct, BatchStruct

    taken = ctypes.sizeof(BatchStruct) + ctypes.sizeof(AttentionParamsStruct) + ctypes.sizeof(instance.AttentionPlan)
    assert max(taken, ctypes.sizeof(instance.CopyPlan)) <= 4096


def test_a_source_that_does_not_compile_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"merge\.cu does not compile: .*error"):
        compiler.build("merge.cu", ("--gpu-architecture=sm_90", "--std=c++17", "-DPAGEDKERN_INSTANCE={1"))


def test_code_is_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled once for each source, options and compiler; a damaged file is compiled anew."""
    monkeypatch.setenv("PAGEDKERN_CACHE_DIR", str(tmp_path))
    builds = []
    real = compiler.build

    def build(file: str, options: tuple[str, ...]) -> compiler.Build:
        builds.append((file, options))
        return real(file, options)

    monkeypatch.setattr(compiler, "build", build)
    first = compiler.compiled("merge.cu", {}, 90)
    assert first[:4] == b"\x7fELF"
    assert compiler.compiled("merge.cu", {}, 90) == first
    assert len(builds) == 1
    [kept] = (tmp_path / "cupy").iterdir()
    kept.write_bytes(kept.read_bytes()[:-1])
    assert compiler.compiled("merge.cu", {}, 90) == first
    assert compiler.compiled("merge.cu", {}, 80) != first
    assert compiler.compiled("merge.cu", {"ANYTHING": "1"}, 90)
    monkeypatch.setattr(compiler, "source", lambda file: real_source(file) + "\n")
    compiler.compiled("merge.cu", {}, 90)
    assert len(builds) == 5
    assert len(list((tmp_path / "cupy").iterdir())) == 4


real_source = compiler.source


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PAGEDKERN_CACHE_DIR", str(tmp_path / "file"))
    assert compiler.compiled("merge.cu", {}, 80)[:4] == b"\x7fELF"


def test_a_gpu_that_the_compiler_does_not_know_gets_ptx() -> None:
    assert compiler.options_for({}, 90, (80, 90))[0] == "--gpu-architecture=sm_90"
    assert compiler.options_for({"A": "2"}, 107, (80, 90, 100)) == (
        "--gpu-architecture=compute_100", "--std=c++17", "-DA=2",
    )  # fmt: skip
    made = compiler.build("merge.cu", compiler.options_for({}, 91, (80, 90)))
    assert b".target sm_90" in made.code


@pytest.mark.parametrize("limit", [99 << 10])
def test_defaults_fit_small_gpus(limit: int) -> None:
    """The shared memory of compute capability 8.6 and 8.9, for every head_dim and dtype; other GPUs have more."""
    for q_dtype, kv_dtype in DTYPES:
        for dim in range(16, 257, 8):
            for dim_v in {dim, 128, 256}:
                for group in (1, 4, 8, 32, 128):
                    problem = Problem("cuda", q_dtype, kv_dtype, group, 1, dim, dim_v, 16, 1, 9, 9, 4096)
                    chosen = config.default_config(problem)
                    for prefill in (False, True):
                        made = config.instance(config.model_of(problem), chosen, "async", prefill)
                        assert made.shared_bytes <= limit, (problem, made)
                        assert made.tile % made.key_warps == 0
                        keys = made.tile // made.key_warps
                        assert keys in ((16, 32, 64) if made.tensor_cores else (8, 16, 32))
                        assert made.tile // (made.row_warps * made.key_warps) <= 32
                        assert made.span % made.tile == 0
