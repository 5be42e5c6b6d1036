"""Sinks, ALiBi slopes and softcaps that are NaN, infinite or at the ends of float32: the same on every backend.

The formula decides (docs/contract.md): exp(-inf) is 0, a sink of +inf takes everything, NaN gives NaN in the rows of
its own head, also in rows that see nothing, and nowhere else.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.contract.checks import check_special_numbers, clause, with_numbers
from tests.contract.problems import Spec
from tests.contract.targets import Target

NAN, INF = math.nan, math.inf

SHAPES: dict[str, dict[str, Any]] = {  # whole and split keys, few queries and many, rows that see nothing
    "decode": {"seq_lens": (33, 0, 7)},
    "split": {"seq_lens": (2500, 5, 0)},
    "drafts": {"seq_lens": (40, 2300, 1), "query_lens": (3, 2, 4), "spare_rows": 3},
    "prefill": {"seq_lens": (70, 1, 0, 33), "query_lens": (70, 34, 2, 0), "spare_rows": 2},
    "blind": {"seq_lens": (0, 2), "query_lens": (3, 6), "spare_rows": 40},
}


def shape_of(target: Target, name: str) -> dict[str, Any]:
    """Smaller where kernels are emulated, whose spans are, too."""
    shape = dict(SHAPES[name])
    shape["seq_lens"] = tuple(min(n, target.size(n, 150)) for n in shape["seq_lens"])
    if target.slow and "query_lens" in shape:
        shape["query_lens"] = tuple(min(n, 9) for n in shape["query_lens"])
    return shape


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("extra", [{}, {"causal": False}, {"window": 5}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_sink_that_is_no_number(target: Target, shape: str, extra: dict[str, Any], dtype: str) -> None:
    """Of NaN, both infinities and a number, each head has one; a NaN does not reach the next head."""

    @clause
    def check() -> None:
        spec = Spec(q_dtype=dtype, **shape_of(target, shape), **extra)
        check_special_numbers(target, spec, sinks=[NAN, INF, -INF, 0.5])
        got = target.attend(with_numbers(target, spec, sinks=[NAN, INF, -INF, 0.5]))
        assert got.out[:, 0].isnan().all()
        assert got.lse[:, 0].isnan().all()
        assert (got.out[:, 1] == 0).all()
        assert (got.lse[:, 1] == INF).all()
        without = target.attend(with_numbers(target, spec))
        assert torch.equal(got.out[:, 2], without.out[:, 2])
        assert torch.equal(got.lse[:, 2], without.lse[:, 2])
        assert not got.out[:, 2:].isnan().any()

    check()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("extra", [{}, {"causal": False}, {"window": 5}], ids=str)
@pytest.mark.parametrize("slope", [NAN, INF, -INF])
def test_a_slope_that_is_no_number(target: Target, shape: str, extra: dict[str, Any], slope: float) -> None:
    """It makes NaN of the token at distance 0, so of every row that sees itself, and of no row that sees nothing."""
    spec = Spec(**shape_of(target, shape), **extra)
    check_special_numbers(target, spec, alibi_slopes=[slope, 0.25, slope, -0.01])
    check_special_numbers(target, spec, alibi_slopes=[slope, 0.25, slope, -0.01], sinks=[1.0, NAN, INF, -INF])


@pytest.mark.parametrize("shape", ["split", "prefill"])
@pytest.mark.parametrize("softcap", [5e-324, 1e-46, 1e-38, 1e-3, 1e38, 1e39, 1.7e308])
def test_a_softcap_at_the_ends_of_floats(target: Target, shape: str, softcap: float) -> None:
    check_special_numbers(target, Spec(**shape_of(target, shape)), softcap=softcap, sinks=[NAN, INF, -INF, 0.0])


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "int8"])
def test_special_sinks_beside_scales(target: Target, kv_dtype: str) -> None:
    for shape in ("split", "prefill"):
        check_special_numbers(target, Spec(kv_dtype=kv_dtype, **shape_of(target, shape)), sinks=[NAN, INF, -INF, 0.5])


@pytest.mark.parametrize("seed", range(40))
def test_random_numbers_of_heads(target: Target, seed: int) -> None:
    rng = random.Random(seed)
    kv_heads = rng.choice([1, 2, 3])
    heads = kv_heads * rng.choice([1, 2, 5])
    spec = Spec(heads=heads, kv_heads=kv_heads, head_dim=rng.choice([16, 40]), seed=seed)
    spec = replace(
        spec,
        **shape_of(target, rng.choice(list(SHAPES))),
        q_dtype=rng.choice(["float32", "bfloat16"]),
        causal=rng.random() < 0.7,
        window=rng.choice([None, None, 1, 20]),
    )
    special = [NAN, INF, -INF, 0.0, -0.0, 1e-40, 0.25, -2.0, 3e38, -3e38]
    numbers: dict[str, Any] = {}
    if rng.random() < 0.8:
        numbers["sinks"] = [rng.choice(special) for _ in range(heads)]
    if rng.random() < 0.5:
        numbers["alibi_slopes"] = [rng.choice([NAN, INF, -INF, 0.0, 1e-40, 0.25, -0.01]) for _ in range(heads)]
    if rng.random() < 0.4:
        numbers["softcap"] = rng.choice([1e-40, 0.5, 30.0, 1e40])
    check_special_numbers(target, spec, **numbers)
