"""Compilation: the note on stderr, the cache on disk, what makes it stale, and several processes at once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkern.backends.base import ITEMSIZE
from pagedkern.backends.cpu import jit
from pagedkern.backends.cpu.jit import ISAS, Target, target

WRITE = """
import sys, torch
from pagedkern.backends.base import WriteCall
from pagedkern.backends.cpu import CpuBackend, jit, launch
jit.PATIENCE = float(sys.argv[2])
dtype = getattr(torch, sys.argv[1])
k = torch.arange(-32., 32.).view(2, 2, 16)
cache = [torch.zeros(3, 4, 2, 16, dtype=dtype) for _ in "kv"]
scale = torch.full((2,), 0.5) if dtype.itemsize == 1 else None
CpuBackend().write_kv(WriteCall(k, -k, *cache, torch.tensor([9, 2]), scale, scale))
for x, sign in zip(cache, (1, -1)):
    want = torch.zeros(12, 2, 16)
    want[[9, 2]] = sign * k / (0.5 if scale is not None else 1)
    assert torch.equal(x.view(12, 2, 16).float(), want)
stats = launch.WRITE.dispatcher.stats
print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))
"""


def start(cache: Path, dtype: str, patience: float = 0.0) -> subprocess.Popen[str]:
    env = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", WRITE, dtype, str(patience)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[list[str], str]:
    out, err = process.communicate(timeout=150)
    assert process.returncode == 0, err
    return out.split(), err


def test_compiled_once_for_all_processes(tmp_path: Path) -> None:
    """Two processes compile two signatures of one kernel at the same time; later ones load what belongs to them."""
    for process in [start(tmp_path, dtype) for dtype in ("int8", "bfloat16")]:
        counts, err = finish(process)
        assert counts == ["0", "1"]
        assert "pagedkern: compiled the CPU write kernel (" in err
    for dtype in ("int8", "bfloat16"):
        counts, err = finish(start(tmp_path, dtype, patience=1e6))
        assert counts == ["1", "0"]
        assert "pagedkern" not in err


def test_the_note_says_what_is_true(tmp_path: Path) -> None:
    """That a kernel is kept is said only if it is; where nothing is compiled nothing is said."""
    assert "; kept on disk" in finish(start(tmp_path / "a", "float32"))[1]
    assert "compil" not in finish(start(tmp_path / "a", "float32"))[1]
    (tmp_path / "file").write_text("in the way")
    counts, err = finish(start(tmp_path / "file", "float32"))
    assert counts == ["0", "1"]
    assert "pagedkern: compiled the CPU write kernel (float32) in" in err
    assert "kept on disk" not in err
    assert err.count("Not a directory") == 1


def test_a_change_of_any_source_is_a_cache_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    key = target("int8").key
    before = Target(key)
    assert Target(key) == before
    monkeypatch.setattr(jit, "source_digest", lambda: "another")
    assert Target(key) != before


def test_the_digest_covers_every_file() -> None:
    assert len(jit.source_digest()) == 16
    names = {path.name for path in jit.sources()}
    assert {"jit.py", "simd.py", "convert.py", "micro.py", "kernels.py", "plan.py", "store.py", "memory.py"} <= names


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float32", "int8"])
def test_targets(kv_dtype: str) -> None:
    keys = {isa: target(kv_dtype, isa, "bfloat16").key for isa in ISAS}
    assert keys["portable"] == jit.TargetKey(kv_dtype, 4, half=False, dot=False)
    assert keys["avx2"] == jit.TargetKey(kv_dtype, 8, half=jit.converts_half(), dot=False)
    assert keys["avx512"] == jit.TargetKey(kv_dtype, 16, half=jit.converts_half(), dot=False)
    assert keys["native"].lanes in (4, 8, 16)
    assert not target(kv_dtype, "native", "float16").key.dot, "pairs need a query of bfloat16"


FEATURES = ["avx", "avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512vl", "avx512bf16", "avx512vbmi", "sse4.2"]
PROCESSORS = {  # what LLVM says of them, as far as it matters here; then dot for bfloat16, for 8 bits
    "Zen 4, Sapphire Rapids": ("avx avx2 f16c avx512bw avx512vl avx512bf16 avx512vbmi", 16, True, True),
    "Cooper Lake": ("avx avx2 f16c avx512bw avx512vl avx512bf16", 16, True, False),
    "Skylake": ("avx avx2 f16c avx512bw avx512vl", 16, False, False),
    "Haswell": ("avx avx2 f16c", 8, False, False),
    "Nehalem": ("", 4, False, False),
}


@pytest.mark.parametrize("processor", PROCESSORS)
def test_the_best_of_a_processor(processor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    features, lanes, words, tables = PROCESSORS[processor]
    monkeypatch.setattr(jit, "codegen", lambda: compiles_for(features.split()))
    for kv_dtype in ITEMSIZE:
        key = target.__wrapped__(kv_dtype, "native", "bfloat16").key
        assert key.lanes == lanes
        assert key.tables == (tables and ITEMSIZE[kv_dtype] == 1), kv_dtype
        assert key.dot == (words if kv_dtype == "bfloat16" else key.tables), kv_dtype
        assert not target.__wrapped__(kv_dtype, "native", "float32").key.dot


def compiles_for(features: Iterable[str], without: Iterable[str] = ()) -> SimpleNamespace:
    """Numba's code generator where it compiles for these features, and explicitly without others."""
    flags = [*(f"+{name}" for name in features), *(f"-{name}" for name in without)]
    return SimpleNamespace(magic_tuple=lambda: ("x86_64-unknown-linux-gnu", "a-processor", ",".join(flags)))


@given(st.sets(st.sampled_from(FEATURES)), st.sets(st.sampled_from(FEATURES)))
def test_nothing_is_emitted_that_was_not_asked_for(features: set[str], without: set[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit, "codegen", lambda: compiles_for(sorted(features), sorted(without)))
        patch.setattr(jit.platform, "machine", lambda: "x86_64")
        has = features - without
        for kv_dtype in ITEMSIZE:
            for isa in ISAS:
                key = target.__wrapped__(kv_dtype, isa, "bfloat16").key
                assert {"avx", "f16c"} <= has or not key.half
                assert {"avx512bw", "avx512vl", "avx512bf16"} <= has or not key.dot
                assert "avx512vbmi" in has or not key.tables
                assert isa != "native" or key.lanes <= (16 if {"avx512bw", "avx512vl"} <= has else 8)
                assert isa != "native" or key.lanes == 4 or has & {"avx2", "avx512bw"}
