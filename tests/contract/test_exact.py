"""Clause 1: exact, over a grid in which every pair of values of any two factors occurs, and densely along each axis."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.contract.checks import check_exact, clause
from tests.contract.pairwise import pairwise
from tests.contract.problems import LAYOUTS, Q_LAYOUTS, QUANTIZED, Spec, build
from tests.contract.strategies import limited
from tests.contract.targets import Target

GROUPS = (1, 2, 3, 4, 5, 7, 8, 16, 20, 128)
FLOATS = ("float32", "float16", "bfloat16")
MIXES = {  # name: (seq_lens, query_lens)
    "decode": ((1, 15, 16, 17, 130, 0), None),
    "prefill": ((1, 40, 33), (1, 40, 33)),
    "chunk": ((70, 33), (23, 16)),
    "verify": ((50, 9, 33), (4, 9, 5)),
    "mixed": ((1, 90, 0, 47, 300, 12), (1, 1, 0, 21, 1, 0)),
    "blind": ((1, 0, 40), (34, 3, 41)),  # more queries than tokens
}
GRID = pairwise(
    {
        "q_dtype": FLOATS,
        "kv_dtype": (None, *FLOATS, *QUANTIZED),
        "group": GROUPS,
        "dims": ((16, 16), (64, 64), (72, 72), (80, 80), (96, 96), (128, 128), (192, 128), (40, 256), (192, 192)),
        "block_size": (1, 8, 16, 24, 128, 256, 5),
        "mix": tuple(MIXES),
        "window": (None, 1, 15, 16, 17, 1000),
        "softcap": (None, 5.0),
        "alibi": (False, True),
        "sinks": (None, 1.0),
        "causal": (True, False),
        "scale": (None, 0.3),
        "scale_kind": ("heads", "number"),
        "layout": LAYOUTS,
        "q_layout": Q_LAYOUTS,
        "spare_rows": (0, 3),
    }
)


def spec_of(row: dict[str, Any], **changes: Any) -> Spec:
    """A row of the grid as a spec; a window near 16 stands for one near the block size."""
    row = dict(row)
    group, (dim, dim_v), (seq_lens, query_lens) = row.pop("group"), row.pop("dims"), MIXES[row.pop("mix")]
    if row["window"] in (15, 16, 17):
        row["window"] = max(1, row["block_size"] + row["window"] - 16)
    if query_lens is None:
        row["spare_rows"] = 0
    kv_heads = 1 if group >= 16 else 3
    spec = Spec(
        heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=dim,
        head_dim_v=dim_v,
        seq_lens=seq_lens,
        query_lens=query_lens,
        **row,
    )
    return replace(spec, **changes)


def ids(spec: Spec) -> str:
    return str(spec)


@pytest.mark.parametrize("number", range(len(GRID)))
def test_grid(target: Target, number: int) -> None:
    check_exact(target, limited(target, spec_of(GRID[number], seed=number), 4_000_000))


@pytest.mark.parametrize("head_dim", range(16, 257, 8))
def test_every_head_dim(target: Target, head_dim: int) -> None:
    other = 272 - head_dim  # of V: what K has not
    for spec in (
        Spec(head_dim=head_dim, seq_lens=(3, 40)),
        Spec(head_dim=head_dim, head_dim_v=other, seq_lens=(40, 21), query_lens=(5, 1), q_dtype="bfloat16"),
    ):
        check_exact(target, spec)


@pytest.mark.parametrize("kv_dtype", FLOATS + QUANTIZED)
@pytest.mark.parametrize("q_dtype", FLOATS)
def test_every_pair_of_dtypes(target: Target, q_dtype: str, kv_dtype: str) -> None:
    for query_lens in (None, (1, 12, 17)):
        check_exact(target, Spec(q_dtype=q_dtype, kv_dtype=kv_dtype, seq_lens=(5, 64, 33), query_lens=query_lens))


@pytest.mark.parametrize("group", sorted({*GROUPS, 6, 9, 12, 15, 17, 24, 32, 48, 64, 71, 96, 127}))
def test_every_group(target: Target, group: int) -> None:
    for kv_heads in (1, 2):
        spec = Spec(heads=group * kv_heads, kv_heads=kv_heads, seq_lens=(37, 16), query_lens=(1, 4))
        check_exact(target, spec)
        check_exact(target, replace(spec, query_lens=None))


@pytest.mark.parametrize("block_size", [1, 2, 3, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 48, 64, 72, 128, 136, 256, 512])
def test_every_block_size(target: Target, block_size: int) -> None:
    """Lengths at, before and after a block's edge."""
    edges = (1, block_size - 1, block_size, block_size + 1, 2 * block_size - 1, 2 * block_size, 2 * block_size + 1)
    for query_lens in (None, tuple(min(3, n) for n in edges)):
        check_exact(target, Spec(block_size=block_size, seq_lens=edges, query_lens=query_lens, head_dim=16))


@pytest.mark.parametrize("block_size", [8, 16, 24])
def test_every_context_length(target: Target, block_size: int) -> None:
    """All lengths up to 300, whatever spans and tiles a backend cuts them into."""
    check_exact(target, Spec(block_size=block_size, seq_lens=tuple(range(0, 301, target.size(1, 7))), head_dim=16))


@pytest.mark.parametrize("block_size", [16, 40, 128])
def test_contexts_around_powers_of_two(target: Target, block_size: int) -> None:
    seq_lens = tuple(2**k + d for k in range(8, target.size(14, 11)) for d in (-1, 0, 1))
    check_exact(target, Spec(heads=2, kv_heads=1, block_size=block_size, seq_lens=seq_lens, head_dim=16))


def test_every_query_length(target: Target) -> None:
    """All query lengths up to 70 over a fixed context, and as whole prompts."""
    lens = tuple(range(0, 71, target.size(1, 5)))
    check_exact(target, Spec(heads=2, kv_heads=1, head_dim=16, seq_lens=(80,) * len(lens), query_lens=lens))
    check_exact(target, Spec(heads=2, kv_heads=1, head_dim=16, seq_lens=lens, query_lens=lens))


@pytest.mark.parametrize("query_len", [127, 128, 129, 257, 600])
def test_long_prefill(target: Target, query_len: int) -> None:
    spec = Spec(heads=3, kv_heads=1, head_dim=24, seq_lens=(query_len, query_len + 700), query_lens=(query_len,) * 2)
    check_exact(target, limited(target, spec, 4_000_000))


FEATURES: list[dict[str, Any]] = [
    {"causal": False},
    {"softcap": 2.0},
    {"alibi": True},
    {"sinks": 0.0},
    {"window": 9},
    {"window": 9, "causal": False},
    {"window": 9, "softcap": 2.0, "alibi": True, "sinks": 0.5},
    {"alibi": True, "sinks": 0.5, "causal": False},
    {"scale": -0.2, "softcap": 1.0},
]


@pytest.mark.parametrize("features", FEATURES, ids=lambda f: ",".join(f"{k}={v}" for k, v in f.items()))
@pytest.mark.parametrize("mix", MIXES)
def test_features(target: Target, mix: str, features: dict[str, Any]) -> None:
    seq_lens, query_lens = MIXES[mix]
    check_exact(target, Spec(seq_lens=seq_lens, query_lens=query_lens, **features))
    check_exact(target, Spec(seq_lens=seq_lens, query_lens=query_lens, kv_dtype="float8_e4m3fn", **features))


@pytest.mark.parametrize("window", [1, 2, 7, 8, 9, 16, 33])
def test_every_distance_to_the_window(target: Target, window: int) -> None:
    """Windows begin at every offset in a block, tile and span."""
    step = target.size(1, 3)
    check_exact(target, Spec(block_size=8, head_dim=16, window=window, seq_lens=tuple(range(1, 80, step))))
    lens = tuple(range(1, 40, step))
    check_exact(target, Spec(block_size=8, head_dim=16, window=window, seq_lens=(45,) * len(lens), query_lens=lens))


CONFIG_SPECS = [
    Spec(seq_lens=(1, 100, 1030), head_dim=64),
    Spec(heads=5, kv_heads=1, seq_lens=(1, 2100), kv_dtype="int8", q_dtype="bfloat16", window=700),
    Spec(heads=7, kv_heads=1, seq_lens=(90, 300, 0), query_lens=(90, 33, 2), sinks=0.5, block_size=8),
    Spec(heads=128, kv_heads=1, seq_lens=(70,), head_dim=72, q_dtype="float16", block_size=24),
]


@pytest.mark.parametrize("spec", CONFIG_SPECS, ids=ids)
def test_every_config(target: Target, spec: Spec) -> None:
    """Whatever a tuner may choose is exact, the default among it."""

    @clause
    def check() -> None:
        call = build(spec, device=target.device)
        target.check_support(call)
        configs = target.configs(call)
        assert configs, "no configuration, not even the default"
        small = limited(target, spec, 300_000)
        for config in configs:
            check_exact(replace(target, config=config), small)
            check_exact(replace(target, config=config.to_dict()), small)

    check()
