"""What may be tuned: accepted values, the default by rule, the space."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pagedkern.backends.base import Problem
from pagedkern.backends.triton import TritonBackend, TritonConfig
from pagedkern.backends.triton.config import _fits, configs, default_config, operand, padded, split_columns
from pagedkern.errors import InvalidArgument

PROBLEM = Problem("cuda", "bfloat16", "bfloat16", 32, 8, 128, 128, 16, 4, 4, 1, 8192)
CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tile": 48}, "config.tile: got 48, expected 16, 32, 64, 128, 256"),
        ({"tile": 64.0}, "config.tile: got 64.0"),
        ({"span": 32}, "config.span: got 32, expected at least the tile, 64"),
        ({"num_splits": 0}, "config.num_splits: got 0, expected 1 to 256"),
        ({"warps": True}, "config.warps: got True"),
        ({"allow_tf32": 1}, "config.allow_tf32: got 1, expected True or False"),
        ({"threads": 1}, "config: got an unknown field 'threads', expected tile, span"),
    ],
    ids=str,
)
def test_a_wrong_config_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        TritonBackend().make_config(fields)
    assert message in str(caught.value)


def test_a_config_survives_its_dictionary() -> None:
    config = TritonConfig(tile=32, allow_tf32=True)
    assert TritonBackend().make_config(config.to_dict()) == config


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("head_dim", [16, 72, 128, 256])
def test_the_default_does_not_know_the_batch(capability: tuple[int, int], kv_dtype: str, head_dim: int) -> None:
    problem = replace(PROBLEM, kv_dtype=kv_dtype, head_dim=head_dim, head_dim_v=head_dim)
    default = default_config(problem, capability)
    for change in ({"num_seqs": 999}, {"num_tokens": 7}, {"max_seqlen_q": 500}, {"max_seqlen_k": 64}):
        assert default_config(replace(problem, **change), capability) == default
    assert _fits(default, problem, capability) or operand(problem) == "float32"


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize("max_seqlen_q", [1, 8, 500])
def test_the_space_is_small_and_holds_the_default(capability: tuple[int, int], max_seqlen_q: int) -> None:
    problem = replace(PROBLEM, max_seqlen_q=max_seqlen_q)
    space = list(configs(problem, capability))
    assert default_config(problem, capability) in space
    assert len(set(space)) == len(space)
    assert 5 <= len(space) <= 30


def test_partial_results_are_small_beside_k_and_v() -> None:
    for group in (1, 4, 8, 16):
        for kv_dtype in ("bfloat16", "int8"):
            problem = replace(PROBLEM, num_heads=8 * group, kv_dtype=kv_dtype)
            span = default_config(problem, (9, 0)).span
            read = span * problem.kv_bytes // problem.num_kv_heads
            written = group * (problem.head_dim_v + 4) * 4
            assert span == 2048 or written <= read / 24


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
@pytest.mark.parametrize("wide", [False, True])
def test_columns_hold_head_dim(head_dim: int, wide: bool) -> None:
    first, rest = split_columns(head_dim, wide)
    for part in (first, rest):
        assert part == 0 or part & (part - 1) == 0
        assert part == 0 or part >= 16
    assert first + rest >= head_dim
    assert first + rest <= padded(head_dim)
    assert rest == 0 or first < head_dim
    assert not wide or max(first, rest) <= 128


def test_columns() -> None:
    assert split_columns(128, False) == (128, 0)
    assert split_columns(192, False) == (128, 64)
    assert split_columns(72, False) == (64, 16)
    assert split_columns(120, False) == (128, 0)
    assert split_columns(256, True) == (128, 128)
