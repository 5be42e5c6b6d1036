"""The forms in which numbers and ids may come: all that mean the same give the same bits, on every backend."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import pagedkern
from tests.contract.checks import assert_same, clause
from tests.contract.problems import QUANTIZED, Spec, bits, build, dtype_of
from tests.contract.targets import Result, Target

SCALES: dict[str, Callable[[float, str], object]] = {  # a number, a device
    "numpy float32": lambda x, _: np.float32(x),
    "numpy float64": lambda x, _: np.float64(x),
    "numpy float16": lambda x, _: np.float16(x),
    "numpy without dimensions": lambda x, _: np.array(x),
    "a fraction": lambda x, _: Fraction(x),
    "a tensor without dimensions": lambda x, device: torch.tensor(x, device=device),
    "float64 without dimensions": lambda x, device: torch.tensor(x, dtype=torch.float64, device=device),
    "bfloat16 without dimensions": lambda x, device: torch.tensor(x, dtype=torch.bfloat16, device=device),
    "on the host without dimensions": lambda x, _: torch.tensor(x, device="cpu"),
    "[1]": lambda x, device: torch.tensor([x], device=device),
    "one for each head": lambda x, device: torch.full((3,), x, device=device),
    "a slice of [1]": lambda x, device: torch.full((3, 2), x, device=device)[1, 1:],
}


@pytest.mark.parametrize("form", SCALES)
@pytest.mark.parametrize("kv_dtype", QUANTIZED)
def test_a_scale(target: Target, form: str, kv_dtype: str) -> None:
    """Of 0.25 and 2, exact in every float dtype."""

    @clause
    def check() -> None:
        call = build(Spec(heads=6, kv_heads=3, kv_dtype=kv_dtype, seq_lens=(9, 40)), device=target.device)
        call.args |= {"k_scale": 0.25, "v_scale": 2.0}
        want = target.attend(call)
        made = {name: SCALES[form](x, target.device) for name, x in (("k_scale", 0.25), ("v_scale", 2.0))}
        call.args |= made
        assert_same(target.attend(call), want, form)
        assert_same(target.attend(call, debug=True), want, form)
        assert torch.equal(written(target, kv_dtype, **made), written(target, kv_dtype, k_scale=0.25, v_scale=2.0))

    check()


def written(target: Target, kv_dtype: str, slots: Tensor | None = None, **options: Any) -> Tensor:
    """The bits of two caches into which four tokens were written."""
    k, v = torch.randn(2, 4, 3, 16, generator=torch.Generator().manual_seed(0)).to(target.device)
    pools = [torch.zeros(3, 8, 3, 16, dtype=dtype_of(kv_dtype), device=target.device) for _ in range(2)]
    slots = torch.tensor([3, -1, 20, 8], device=target.device) if slots is None else slots
    pagedkern.write_kv(k, v, *pools, slots, backend=target.name, **options)
    result = torch.stack([bits(pool) for pool in pools])
    assert result.any()
    return result


def test_a_whole_number_as_a_scale(target: Target) -> None:
    for two in (2, np.int64(2), np.uint8(2), torch.tensor(2, device=target.device)):
        got = written(target, "int8", k_scale=two, v_scale=two)
        assert torch.equal(got, written(target, "int8", k_scale=2.0, v_scale=2.0))


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_slots_of_32_bits(target: Target, kv_dtype: str) -> None:
    slots = torch.tensor([3, -1, 20, 8], dtype=torch.int32, device=target.device)
    assert torch.equal(written(target, kv_dtype, slots, debug=True), written(target, kv_dtype))
    fused = torch.stack([slots, slots])[1]  # a slice
    assert torch.equal(written(target, kv_dtype, fused), written(target, kv_dtype))
    assert slots.tolist() == [3, -1, 20, 8]


@pytest.mark.parametrize("src_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dst_dtype", [torch.int32, torch.int64])
def test_blocks_of_32_bits(target: Target, src_dtype: torch.dtype, dst_dtype: torch.dtype) -> None:
    cache = torch.arange(6 * 40.0, device=target.device).view(6, 2, 20)
    want = cache.clone()[[0, 1, 0, 5, 3, 4]]
    src, dst = (
        torch.tensor(ids, dtype=dtype, device=target.device)
        for ids, dtype in (([0, 5, 4, 3], src_dtype), ([2, 3, 5, 4], dst_dtype))
    )
    pagedkern.copy_blocks([cache], src, dst, backend=target.name)
    assert torch.equal(cache, want)
    dst[1] = 6
    with pytest.raises(pagedkern.BlockIndexError, match=r"dst_blocks\[1\]: got 6"):
        pagedkern.copy_blocks([cache], src, dst, backend=target.name, debug=True)


NUMBERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # as Python has them, and as others do
    "scale": ({"scale": 0.5}, {"scale": np.float32(0.5)}),
    "scale without dimensions": ({"scale": 0.5}, {"scale": np.array(0.5)}),
    "a whole scale": ({"scale": 1.0}, {"scale": np.int32(1)}),
    "softcap": ({"softcap": 2.0}, {"softcap": np.float32(2)}),
    "softcap of float16": ({"softcap": 2.0}, {"softcap": np.float16(2)}),
    "window": ({"sliding_window": 7}, {"sliding_window": np.int64(7)}),
    "window of 8 bits": ({"sliding_window": 7}, {"sliding_window": np.uint8(7)}),
    "window without dimensions": ({"sliding_window": 7}, {"sliding_window": np.array(7)}),
    "longest query": ({"max_seqlen_q": 9}, {"max_seqlen_q": np.int32(9)}),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_of_numpy(target: Target, name: str) -> None:
    @clause
    def check() -> None:
        call = build(Spec(seq_lens=(30, 9), query_lens=(5, 9)), device=target.device)
        results = []
        for options in NUMBERS[name]:
            call.args |= options
            target.check_support(call)
            given: dict[str, Any] = {"return_lse": True, "backend": target.name, "config": target.config}
            results.append(Result(*pagedkern.paged_attention(**call.args, **given)))
        assert_same(results[1], results[0], name)

    check()


@pytest.mark.parametrize("seed", range(30))
def test_random_scales_in_memory(target: Target, seed: int) -> None:
    """Good ones are taken; the first bad one is named with its head and value, and nothing is written."""
    rng = random.Random(seed)
    good = [0.5, 1.2e-38, 3e38, 1.0, 7e-5]
    bad = [0.0, -0.0, -0.25, float("nan"), float("inf"), -float("inf"), 1e-38, 1e-45]
    values = [rng.choice(good if rng.random() < 0.7 else bad) for _ in range(3)]
    scale = torch.tensor(values, device=target.device)
    faults = [i for i, x in enumerate(scale.tolist()) if not 2.0**-126 <= x < float("inf")]
    name = rng.choice(["k_scale", "v_scale"])
    if not faults:
        written(target, "int8", **{name: scale}, debug=True)
        return
    k = torch.ones(1, 3, 16, device=target.device)
    pools = [torch.zeros(1, 8, 3, 16, dtype=torch.int8, device=target.device) for _ in range(2)]
    slots = torch.tensor([0], device=target.device)
    value = str(scale[faults[0]].item())
    with pytest.raises(pagedkern.InvalidArgument, match=rf"{name}\[{faults[0]}\]: got {value} for KV head {faults[0]}"):
        pagedkern.write_kv(k, k, *pools, slots, **{name: scale}, backend=target.name, debug=target.device != "cpu")
    assert not any(pool.any() for pool in pools)
