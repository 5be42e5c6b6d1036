"""Launches of compiled kernels, with a driver that loads and runs nothing: what is launched shows without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = """
import json, sys
from types import SimpleNamespace
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from pagedkern.backends.base import AttentionCall
from pagedkern.backends.triton import TritonConfig, launch

launched, looked_up = [], []

class Launcher:
    def __init__(self, source, metadata):
        self.name = metadata.name
    def __call__(self, x, y, z, stream, function, packed, metadata, enter, leave, *arguments):
        values = [tuple(a.shape) if isinstance(a, torch.Tensor) else a for a in arguments]
        launched.append([self.name, [x, y, z], [str(v) for v in values]])

utils = SimpleNamespace(
    load_binary=lambda *_: (object(), 1, 32, 0, 1024), unload_module=lambda _: None,
    get_device_properties=lambda _: {"max_shared_mem": 232448},
)
driver.set_active(SimpleNamespace(
    launcher_cls=Launcher, utils=utils, get_current_device=lambda: 0, get_current_stream=lambda _: 0,
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
))
launch.native_fp8 = lambda _: True
run = JITFunction.run
def counted(self, *args, **kwargs):
    looked_up.append(self.fn.__name__)
    return run(self, *args, **kwargs)
JITFunction.run = counted

def call(seqs, width, shift=0, **options):
    k = torch.zeros(2 * 2 * 16 * 16 + shift)[shift:].view(2, 2, 16, 16).transpose(1, 2)
    launch.attention(AttentionCall(
        torch.zeros(seqs, 4, 16), k, k, torch.zeros(seqs, width, dtype=torch.int32),
        torch.zeros(seqs, dtype=torch.int32), None, 1, 0.5, True, options.get("window"),
        None, None, None, None, None, torch.zeros(seqs, 4, 16), None,
    ), TritonConfig(tile=16, span=32, num_splits=4, rows=2, warps=options.get("warps", 4)))
    names = looked_up[:]
    looked_up.clear()
    return names

calls = [(3, 8, {}), (3, 8, {}), (16, 1, {}), (5, 1000, {}), (3, 8, {"shift": 1}), (3, 8, {"window": 7})]
calls += [(3, 8, {"window": 9}), (3, 8, {"warps": 2})]
result = [call(seqs, width, **options) for seqs, width, options in calls]
print(json.dumps([result, launched]))
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[str]], list[tuple[str, list[int], list[str]]]]:
    """For each call which kernels Triton looked up, and every launch: name, grid, arguments."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    looked_up, launched = json.loads(done.stdout)
    return looked_up, launched


def test_kernels_are_looked_up_once(seen: tuple[list[list[str]], list[tuple[str, list[int], list[str]]]]) -> None:
    """Other numbers of sequences and columns launch what is there; another alignment, feature or config compiles."""
    both = ["split_kernel", "merge_kernel"]
    first, again, one_column, wide, unaligned, window, other_window, warps = seen[0]
    assert first == both
    assert again == wide == other_window == []
    assert one_column == ["split_kernel"]  # one span: without a workspace
    assert unaligned == warps == ["split_kernel"]
    assert window == both


def test_the_second_launch_is_like_the_first(
    seen: tuple[list[list[str]], list[tuple[str, list[int], list[str]]]],
) -> None:
    """The short way passes the same arguments, constants included."""
    launched = seen[1]
    assert [name for name, _, _ in launched[:4]] == ["split_kernel", "merge_kernel"] * 2
    assert launched[0:2] == launched[2:4]
    split = launched[0]
    assert split[1] == [3 * 4 * 2, 1, 1]  # sequences, splits, KV heads
    assert split[2][:3] == ["(3, 4, 16)", "(2, 16, 2, 16)", "(2, 16, 2, 16)"]
