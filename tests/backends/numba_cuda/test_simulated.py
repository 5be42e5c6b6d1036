"""What the contract cannot see: the order of threads, float32 arithmetic, paths that its configuration leaves out."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

if os.environ.get("NUMBA_ENABLE_CUDASIM") != "1":
    pytest.skip("Numba's simulator is off: there is a GPU", allow_module_level=True)

import pagedkern
from pagedkern.backends.numba_cuda.config import SHARED_BYTES, Constants, NumbaCudaConfig
from pagedkern.errors import InvalidArgument
from tests.contract.cache_checks import check_copy, check_write
from tests.contract.checks import assert_same, check_exact, check_no_leak
from tests.contract.problems import Spec, build
from tests.contract.targets import EMULATED_CONFIG, Target
from tests.emulation.simulated_blocks import running

CONFIG = EMULATED_CONFIG["numba_cuda"]
TARGET = Target("numba_cuda", "cpu", CONFIG, True)
SPECS = {
    "decode": Spec(seq_lens=(1, 0, 17, 150)),
    "mixed": Spec(seq_lens=(20, 5, 0, 70), query_lens=(13, 9, 2, 1), spare_rows=2, window=9, block_size=8, sinks=0.5),
    "int8": Spec(kv_dtype="int8", q_dtype="float16", seq_lens=(20, 41), query_lens=(18, 2), alibi=True),
}
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


@each_spec
@pytest.mark.parametrize("threads", [32, 64])
def test_the_order_of_threads_and_blocks_changes_nothing(spec: Spec, threads: int) -> None:
    target = Target("numba_cuda", "cpu", {**CONFIG, "threads": threads}, True)
    call = build(spec)
    want = target.attend(call)
    for order in ("backward", "random"):
        with running(order=order):
            assert_same(target.attend(call), want, order)


@each_spec
def test_exact_in_float32(spec: Spec) -> None:
    """The error bound holds where every product and sum is rounded to float32, as on a GPU."""
    with running(single_precision=True):
        check_exact(TARGET, spec)


@pytest.mark.parametrize("seed", range(3))
def test_long_products_are_exact(seed: int) -> None:
    """Scores of ten and more out of many products, which one float32 sum after the other would round too often."""
    with running(single_precision=True):
        check_exact(TARGET, Spec(heads=2, kv_heads=1, head_dim=256, scale=0.3, seq_lens=(65, 130), seed=seed))


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2", "int8", "bfloat16", "float16"])
def test_writes_in_float32(kv_dtype: str) -> None:
    scales: dict[str, Any] = {} if kv_dtype.endswith("16") else {"k_scale": 0.3, "v_scale": 0.7}
    with running(single_precision=True):
        check_write(TARGET, Spec(kv_dtype=kv_dtype, head_dim=24), [3, 40, -1, 7, 0], 3, **scales)


def test_copies_in_any_order() -> None:
    """Chains, a cycle, a source of two, and a copy onto itself, whichever thread block comes first."""
    for order in ("forward", "backward", "random"):
        with running(order=order):
            caches = [torch.randn(8, 5, 3), torch.arange(8 * 6).view(8, 6).to(torch.int16)[:, ::2]]
            check_copy(TARGET, caches, [0, 1, 2, 3, 3, 6], [1, 2, 0, 4, 5, 6])


def test_copies_of_more_caches_than_one_launch_takes() -> None:
    check_copy(TARGET, [torch.randn(4, 6) for _ in range(37)], [0, 1], [1, 3])


@pytest.mark.parametrize(
    "config",
    [
        {"threads": 64, "keys": 16, "span": 16, "splits": 5},  # several threads share a piece of acc
        {"threads": 32, "keys": 32, "decode_rows": 16, "prefill_rows": 32, "span": 64},  # several pieces a thread
        {"threads": 256, "keys": 64, "decode_rows": 1, "span": 64, "splits": 1},
    ],
    ids=str,
)
def test_other_shares_of_the_work(config: dict[str, int]) -> None:
    target = Target("numba_cuda", "cpu", config, True)
    spec = Spec(heads=6, head_dim=40, head_dim_v=72, seq_lens=(70, 33, 2), query_lens=(1, 33, 3))
    check_exact(target, spec)
    check_no_leak(target, spec, ("nan",))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("dim", [16, 72, 128, 192, 256])
def test_tiles_fit_into_shared_memory(dtype: str, dim: int) -> None:
    """Whatever a tuner may ask for."""
    for keys in (16, 128):
        for rows in (1, 64):
            fields: dict[str, Any] = dict.fromkeys(
                ("causal", "window", "softcap", "alibi", "sinks", "lse", "ragged"), True
            )
            fields |= dict.fromkeys(("q_vector", "k_vector", "v_vector", "decode_tokens"), 1)
            asked = Constants(
                q_dtype="float32", kv_dtype=dtype, head_dim=dim, head_dim_v=dim, group=4, block_size=16, threads=128,
                keys=keys, rows=rows, span=256, splits=4, **fields,
            )  # fmt: skip
            fitted = asked.fitted()
            assert fitted.shared_bytes <= SHARED_BYTES
            assert fitted.keys >= 8
            assert fitted.rows >= min(rows, 4)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"threads": 48}, "config.threads: got 48"),
        ({"threads": 16}, "config.threads: got 16"),
        ({"keys": 256}, "config.keys: got 256"),
        ({"keys": True}, "config.keys: got True"),
        ({"decode_rows": 3}, "config.decode_rows: got 3, expected 0 or"),
        ({"prefill_rows": 0}, "config.prefill_rows: got 0"),
        ({"span": 32}, "config.span: got 32, expected at least config.keys"),
        ({"splits": 0}, "config.splits: got 0"),
        ({"splits": 2.0}, "config.splits: got 2.0"),
        ({"tile": 16}, "unknown field 'tile'"),
    ],
)
def test_configurations_that_are_refused(fields: dict[str, Any], named: str) -> None:
    call = build(Spec())
    with pytest.raises(InvalidArgument, match=named.replace(".", r"\.")):
        pagedkern.paged_attention(**call.args, backend="numba_cuda", config=fields)


def test_the_default_configuration_is_among_those_to_try() -> None:
    call = build(Spec(seq_lens=(900,)))
    configs = TARGET.configs(call)
    assert NumbaCudaConfig() in configs
    assert len(set(configs)) == len(configs) > 3
