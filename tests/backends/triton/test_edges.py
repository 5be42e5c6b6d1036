"""The contract under configurations that no rule chooses, but that `make_config` accepts."""

from __future__ import annotations

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
from tests.contract.problems import Spec, contents
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
