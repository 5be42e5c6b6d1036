"""The contract under configurations that no rule chooses, but that `make_config` accepts."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip("triton")

from pagedkern.backends.triton import TritonBackend
from tests.contract.checks import (
    check_batch_invariant,
    check_no_leak,
    check_no_leak_between_rows,
    check_whole,
)
from tests.contract.problems import Spec, build, contents
from tests.contract.targets import Target

pytestmark = pytest.mark.skipif(not TritonBackend().probe().emulated, reason="needs Triton's interpreter")

CONFIGS: dict[str, dict[str, Any]] = {
    "one split": {"tile": 16, "span": 32, "num_splits": 1, "split_queries": 2},
    "span of one tile": {"tile": 16, "span": 16, "num_splits": 5, "split_queries": 1},
    "one row": {"tile": 16, "span": 32, "num_splits": 2, "rows": 1, "split_queries": 2},
    "all split": {"tile": 32, "span": 32, "num_splits": 3, "rows": 4, "split_queries": 64},
    "prefill rows below a group": {"tile": 64, "span": 64, "split_queries": 1, "prefill_rows": 16, "prefill_tile": 64},
}
SPECS = [
    Spec(heads=3, kv_heads=1, head_dim=40, head_dim_v=24, block_size=24, seq_lens=(16, 17, 97), kv_dtype="bfloat16"),
    Spec(heads=3, kv_heads=1, block_size=8, seq_lens=(0, 33, 80), query_lens=(2, 3, 8), window=16, sinks=0.5),
    Spec(heads=17, kv_heads=1, head_dim=24, seq_lens=(33, 5), query_lens=(1, 3), softcap=30.0, spare_rows=2),
    Spec(
        heads=3, kv_heads=1, block_size=256, seq_lens=(70, 33), query_lens=(1, 17), causal=False, window=17, alibi=True
    ),
    Spec(heads=3, kv_heads=1, seq_lens=(), query_lens=(), spare_rows=40, sinks=0.5),
]


def target(config: str) -> Target:
    return Target("triton", "cpu", {"prefill_rows": 16, "prefill_tile": 16} | CONFIGS[config], emulated=True)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_exact_and_whole(config: str, spec: Spec) -> None:
    check_whole(target(config), spec, "odd")


@pytest.mark.parametrize("config", CONFIGS)
def test_nothing_leaks(config: str) -> None:
    check_no_leak(target(config), SPECS[1], ("mixed",))
    check_no_leak_between_rows(target(config), SPECS[1])


@pytest.mark.parametrize("config", CONFIGS)
def test_alone_and_among_others(config: str) -> None:
    check_batch_invariant(target(config), SPECS[2], contents(SPECS[2])[:1])


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_as_many_infinities_as_edges_can_hold(value: float) -> None:
    """Rows and keys in the largest tiles, at the worst place: all 600 keys that a row sees lie in tiles at an edge."""
    spec = Spec(heads=1, kv_heads=1, head_dim=16, q_dtype="bfloat16", seq_lens=(639,), query_lens=(256,), window=600)
    tokens = contents(spec)
    tokens[0].v[:] = value
    config = {"split_queries": 1, "prefill_rows": 256, "prefill_tile": 256}
    got = Target("triton", "cpu", config, emulated=True).attend(build(spec, tokens))
    assert (got.out == value).all()
