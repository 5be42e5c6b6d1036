"""The paths that this processor would not take, and numbers of threads: the same answers, and the same bits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from pagedkern.backends.cpu import CpuBackend
from pagedkern.backends.cpu.jit import ISAS
from tests.backends.cpu.helpers import attend
from tests.contract.checks import assert_exact, assert_same
from tests.contract.problems import QUANTIZED, Spec, build
from tests.contract.targets import torch_threads

DECODE = Spec(heads=14, kv_heads=2, head_dim=72, head_dim_v=40, seq_lens=(0, 1, 63, 64, 700), block_size=24)
MIXED = Spec(
    heads=6, kv_heads=2, head_dim=64, seq_lens=(5, 0, 300, 129, 40), query_lens=(7, 1, 40, 1, 0), window=50,
    softcap=20.0, alibi=True, sinks=0.0, spare_rows=2,
)  # fmt: skip
LONG = Spec(heads=8, kv_heads=2, head_dim=128, seq_lens=(9000, 3, 4100), block_size=16, layout="HND")
CHUNKS = Spec(heads=4, kv_heads=2, head_dim=64, seq_lens=(2500, 700), query_lens=(300, 700))


def with_dtype(spec: Spec, kv_dtype: str) -> Spec:
    q_dtype = "bfloat16" if kv_dtype in QUANTIZED else kv_dtype
    return Spec(**{**vars(spec), "q_dtype": q_dtype, "kv_dtype": kv_dtype})


@pytest.mark.parametrize("isa", ISAS[1:])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8"])
@pytest.mark.parametrize("spec", [DECODE, MIXED], ids=["decode", "mixed"])
def test_lesser_processors(spec: Spec, kv_dtype: str, isa: str) -> None:
    call = build(with_dtype(spec, kv_dtype))
    assert_exact(call, attend(call, CpuBackend(isa)))


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float16", *QUANTIZED])
@pytest.mark.parametrize("spec", [LONG, CHUNKS, MIXED], ids=["long", "chunks", "mixed"])
def test_any_number_of_threads_gives_the_same_bits(spec: Spec, kv_dtype: str) -> None:
    call = build(with_dtype(spec, kv_dtype))
    with torch_threads(1):
        want = attend(call)
    for number in (2, 3, 7):
        with torch_threads(number):
            assert_same(attend(call), want, f"{number} threads")


WALKED = [
    Spec(heads=40, kv_heads=20, head_dim=64, seq_lens=(1500, 70, 1, 2100), block_size=16, layout=layout, window=window)
    for layout, window in (("HND", None), ("NHD", 1200))
] + [Spec(heads=12, kv_heads=6, head_dim=72, seq_lens=(1500, 70), query_lens=(3, 7), block_size=24, layout="HND")]


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8", "float8_e5m2"])
@pytest.mark.parametrize("spec", WALKED, ids=["decode", "window", "speculative"])
def test_heads_walked_together_or_apart(spec: Spec, kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = build(with_dtype(spec, kv_dtype))
    monkeypatch.setattr("pagedkern.backends.cpu.launch.ITEMS", 1 << 40)
    want = attend(call)
    assert_exact(call, want)
    for items in (4, 1):  # the second: as many together as a group has rows for
        monkeypatch.setattr("pagedkern.backends.cpu.launch.ITEMS", items)
        assert_same(attend(call), want, f"{items} items for each thread")


def test_more_threads_than_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """NUMBA_NUM_THREADS bounds the threads; raised here, so that real helpers take part however few cores there are."""
    monkeypatch.setattr("pagedkern.backends.cpu.launch.config.NUMBA_NUM_THREADS", 8)
    monkeypatch.setattr("pagedkern.backends.cpu.launch.WORTH_A_THREAD", 1)
    for spec in (LONG, CHUNKS, MIXED):
        call = build(spec)
        with torch_threads(1):
            want = attend(call)
        with torch_threads(8):
            for _ in range(5):
                assert_same(attend(call), want, "8 threads")


def test_callers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedkern.backends.cpu.launch.config.NUMBA_NUM_THREADS", 4)
    monkeypatch.setattr("pagedkern.backends.cpu.launch.WORTH_A_THREAD", 1)
    specs = [Spec(seq_lens=(300 + 7 * i, 2000), seed=i) for i in range(6)]
    calls = [build(spec) for spec in specs]
    with torch_threads(1):
        want = [attend(call) for call in calls]
    with torch_threads(4), ThreadPoolExecutor(6) as callers:
        for _ in range(10):
            for got, expected in zip(callers.map(attend, calls), want, strict=True):
                assert_same(got, expected, "several callers")
