"""Tries an installed pagedkern as a user has it: python -I tests/installed.py bare | cpu

"bare" is an environment without any extra, "cpu" one with `pagedkern[cpu]`. Standard library only, and run from outside
of the checkout's path: what is imported is what was installed.
"""

from __future__ import annotations

import importlib
import math
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pagedkern

GPU = "cuda12", "cuda13", "triton"


def bare() -> None:
    """The allocator works, and whatever needs more says what to install."""
    use_allocator()
    assert not {"torch", "numpy", "numba"} & set(sys.modules), "the allocator needs the standard library only"
    for name in ("paged_attention", "KVCache", "explain"):
        said = missing(lambda name=name: getattr(pagedkern, name))
        assert f"pagedkern.{name}" in said
        assert all(f"pip install 'pagedkern[{extra}]'" in said for extra in ("cpu", *GPU)), said
    assert "pip install 'pagedkern[transformers]'" in missing(
        lambda: importlib.import_module("pagedkern.integrations.transformers")
    )
    for info in pagedkern.backends():
        assert not info.available
        assert "pip install " in info.reason, info
    for module in ("autotune", "gpucheck"):
        done = command(module)
        assert done.returncode == 1
        assert "pip install 'pagedkern[" in done.stderr, done.stderr


def use_allocator() -> None:
    """A prompt, two samples of it, and a token for each: one of them has to copy the block that both write to."""
    allocator = pagedkern.BlockAllocator(num_blocks=8, block_size=4)
    prompt = allocator.create([1, 2, 3, 4, 5])
    allocator.commit(allocator.prefill([prompt]))
    step = allocator.append([prompt, *allocator.fork(prompt)], [6, 7])
    assert len(step.copies) == 1
    allocator.commit(step)
    allocator.check()


def missing(use: object) -> str:
    """What is said when a package is not there."""
    try:
        use()  # type: ignore[operator]
    except ModuleNotFoundError as error:
        return str(error)
    raise AssertionError("nothing was missing")


def command(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-I", "-m", f"pagedkern.{module}", *arguments]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def cpu() -> None:
    """Attention through a block table is what the formula says; the command lines run."""
    import torch

    assert {info.name for info in pagedkern.backends() if info.available} >= {"cpu", "reference"}
    cache = pagedkern.KVCache(1, 8, 16, 2, 32, dtype=torch.float32, device="cpu")
    k_cache, v_cache = cache.layer(0)
    k, v = torch.randn(2, 21, 2, 32)
    slots = torch.tensor([48 + i if i < 16 else 16 + i - 16 for i in range(21)])  # blocks 3 and 1
    pagedkern.write_kv(k, v, k_cache, v_cache, slots)
    q = torch.randn(1, 4, 32)
    table, lens = torch.tensor([[3, 1]], dtype=torch.int32), torch.tensor([21], dtype=torch.int32)
    out = pagedkern.paged_attention(q, k_cache, v_cache, table, lens, backend="cpu")
    keys, values = (x.double().repeat_interleave(2, dim=1) for x in (k, v))
    weights = torch.softmax(torch.einsum("qhd,khd->hqk", q.double(), keys) / math.sqrt(32), -1)
    torch.testing.assert_close(out.double(), torch.einsum("hqk,khd->qhd", weights, values), atol=1e-5, rtol=1e-5)
    for arguments in (("autotune", "--help"), ("autotune", "workloads"), ("gpucheck", "--help")):
        done = command(*arguments)
        assert done.returncode == 0, done.stderr
        assert done.stdout


if __name__ == "__main__":
    place = Path(pagedkern.__file__).parent
    assert place.parent.name == "site-packages", f"{place} was not installed"
    assert (resources.files("pagedkern") / "py.typed").is_file()
    {"bare": bare, "cpu": cpu}[sys.argv[1]]()
    sys.stdout.write(f"pagedkern {pagedkern.__version__}, {sys.argv[1]}: all as it should be\n")
