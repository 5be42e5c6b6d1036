"""Launches of compiled kernels: what reaches the CUDA driver, which is a stand-in, shows without a GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.backends.triton.launched import Launched

ROOT = Path(__file__).parents[3]
BOTH = ["split_kernel", "merge_kernel"]


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Launched]]:
    """The launches of each call in `launched.CALLS`."""
    folder = tmp_path_factory.mktemp("libcuda")
    compiler, source = shutil.which(os.environ.get("CC", "cc")), Path(__file__).with_name("libcuda.c")
    if compiler is None:
        pytest.skip("needs a C compiler, as Triton's launcher does")
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(folder / "libcuda.so.1")], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_LIBCUDA_PATH": str(folder), "LD_LIBRARY_PATH": str(folder), "TRITON_CACHE_DIR": str(folder)}
    command = [sys.executable, "-m", "tests.backends.triton.launched"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return {name: [Launched(**each) for each in launches] for name, launches in found.items()}


def test_a_kernel_gets_what_it_was_meant_to_get(calls: dict[str, list[Launched]]) -> None:
    """Whether Triton looked the kernel up or not: its arguments without constants and None, and two null pointers to
    scratch memory that it does not use; its grid, threads, shared memory and the current stream."""
    launches = [each for launches in calls.values() for each in launches]
    for each in launches:
        assert each.got_kernel == each.kernel
        assert each.parameters == [*each.arguments, 0, 0], each
        assert each.got_grid == each.grid, each
        assert each.got_block == [32 * each.warps, 1, 1], each
        assert each.shared_fits, each
        assert each.got_stream == 0x5EED, each
        assert each.hooks == [[each.kernel, 0x5EED]] * 2, each
    assert {(each.kernel, each.looked_up) for each in launches} >= {
        (kernel, looked_up)
        for kernel in (*BOTH, "prefill_kernel", "write_kernel", "copy_kernel")
        for looked_up in (0, 1)
    }


def test_a_kernel_believes_of_addresses_what_is_true(calls: dict[str, list[Launched]]) -> None:
    """One compiled for multiples of 16 is launched with those only, whichever was compiled first."""
    for launches in calls.values():
        for each in launches:
            wrong = {i: n for i, n in each.multiples.items() if each.parameters[int(i)] % n}
            assert not wrong, (wrong, each)
    split = [calls[name][0].multiples for name in ("first", "k shifted", "lens shifted", "not shifted")]
    assert [("1" in each, "4" in each) for each in split] == [(True, True), (False, True), (True, False), (True, True)]


def test_kernels_are_looked_up_once(calls: dict[str, list[Launched]]) -> None:
    """Other numbers of sequences and columns launch what is there; another alignment, feature or config compiles."""
    looked_up = {name: [each.kernel for each in launches if each.looked_up] for name, launches in calls.items()}
    assert looked_up == {
        "first": BOTH,
        "again": [],
        "one column": ["split_kernel"],  # one span: without a workspace
        "wide": [],
        "k shifted": ["split_kernel"],
        "lens shifted": BOTH,
        "not shifted": [],
        "window": BOTH,
        "other window": [],
        "warps": ["split_kernel"],
        "full": [*BOTH, "prefill_kernel"],
        "full again": [],
        "write": ["write_kernel"],
        "write again": [],
        "write quantized": ["write_kernel"],
        "copy": ["copy_kernel"],
        "copy again": [],
        "copy many": ["copy_kernel", "copy_kernel"],  # to a copy of the sources, and from it
    }
