"""write_kv, copy_blocks, merge_states: exact, whole, and nothing else written."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import pagedkern
from tests.contract.cache_checks import check_copy, check_write, new_tokens
from tests.contract.pairwise import pairwise
from tests.contract.problems import LAYOUTS, QUANTIZED, Spec, bits, dtype_of
from tests.contract.targets import Target, torch_settings

FLOATS = ("float32", "float16", "bfloat16")
WRITES = pairwise(
    {
        "q_dtype": FLOATS,  # of the new tokens
        "kv_dtype": FLOATS + QUANTIZED,
        "kv_heads": (1, 3, 8),
        "dims": ((16, 16), (72, 72), (192, 128), (40, 256)),
        "block_size": (1, 8, 16, 24, 5),
        "layout": LAYOUTS,
        "scale": ("one", "power", "number", "heads"),
    }
)


@pytest.mark.parametrize("number", range(len(WRITES)))
def test_write_grid(target: Target, number: int) -> None:
    row = dict(WRITES[number])
    (dim, dim_v), kind = row.pop("dims"), row.pop("scale")
    spec = Spec(heads=row["kv_heads"], head_dim=dim, head_dim_v=dim_v, seed=number, **row)
    check_write(target, spec, [17, -1, 0, 23, 24, -1, 38, 39], 40, **scales_of(spec, kind, target.device))


def scales_of(spec: Spec, kind: str, device: str) -> dict[str, Any]:
    if not spec.quantized:
        return {}
    unit = 1 / 40 if spec.kv_dtype == "int8" else 1.0
    heads = torch.arange(1, spec.kv_heads + 1, dtype=torch.float32, device=device)
    kinds: dict[str, dict[str, Any]] = {
        "one": {"k_scale": 1.0, "v_scale": torch.ones_like(heads)},
        "power": {"k_scale": 0.25, "v_scale": 2.0 ** -(heads - 1)},
        "number": {"k_scale": 0.3 * unit, "v_scale": 0.7 * unit},
        "heads": {"k_scale": 0.3 * unit * heads, "v_scale": 0.1 * unit * (heads + 2)},
    }
    return kinds[kind]


@pytest.mark.parametrize("kv_dtype", QUANTIZED)
@pytest.mark.parametrize("q_dtype", FLOATS)
def test_ties_go_to_the_even_code(target: Target, kv_dtype: str, q_dtype: str) -> None:
    """Every code, every number halfway between two of them, and its neighbours in the tokens' dtype."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype_of(kv_dtype)).double()
    codes = codes[codes.isfinite()].sort().values
    middles = (codes[1:] + codes[:-1]) / 2
    dtype = dtype_of(q_dtype)
    x = torch.cat([codes, middles]).to(dtype)
    up, down = (torch.nextafter(x.float(), torch.tensor(to)).to(dtype) for to in (math.inf, -math.inf))
    x = torch.cat([x, up, down])
    x = x[: len(x) // 16 * 16].view(-1, 1, 16)
    spec = Spec(heads=1, kv_heads=1, head_dim=16, q_dtype=q_dtype, kv_dtype=kv_dtype)
    for scale in (1.0, 0.25):
        tokens = ((x.double() * scale).to(dtype), (x.double() * scale).to(dtype))
        check_write(target, spec, list(range(len(x))), 10, tokens=tokens, k_scale=scale, v_scale=scale)


@pytest.mark.parametrize("kv_dtype", QUANTIZED)
def test_a_quantized_cache_without_scales_is_one_with_scale_one(target: Target, kv_dtype: str) -> None:
    spec = Spec(kv_dtype=kv_dtype)
    k, v = (x.to(target.device) for x in new_tokens(spec, 3))
    slots = torch.tensor([0, 5, 9], device=target.device)
    results = []
    ones: dict[str, Any] = {"k_scale": 1.0, "v_scale": 1.0}
    for scales in ({}, ones):
        k_cache, v_cache = (torch.zeros(2, 8, 2, 32, dtype=spec.cache_dtype, device=target.device) for _ in range(2))
        pagedkern.write_kv(k, v, k_cache, v_cache, slots, backend=target.name, **scales)
        results.append(torch.stack([bits(k_cache), bits(v_cache)]))
    assert torch.equal(results[0], results[1])
    assert results[0].any()


@pytest.mark.parametrize("kv_dtype", ["float16", "int8"])
def test_no_token(target: Target, kv_dtype: str) -> None:
    scales: dict[str, Any] = {"k_scale": 1.0, "v_scale": 1.0} if kv_dtype == "int8" else {}
    check_write(target, Spec(kv_dtype=kv_dtype), [], 3, tokens=(torch.zeros(0, 2, 32),) * 2, **scales)


@pytest.mark.parametrize(("setting", "value"), [("default_dtype", torch.float64), ("default_device", "meta")])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", *QUANTIZED])
def test_settings_of_torch_change_nothing(target: Target, kv_dtype: str, setting: str, value: Any) -> None:
    spec = Spec(kv_dtype=kv_dtype)
    k, v = (x.to(target.device) for x in new_tokens(spec, 3))
    slots, moved = (torch.tensor(x, device=target.device) for x in ([0, 5, 9], [1, 0]))
    scales = scales_of(spec, "number", target.device)
    results = []
    for changed in (False, True):
        k_cache, v_cache = (torch.zeros(2, 8, 2, 32, dtype=spec.cache_dtype, device=target.device) for _ in range(2))
        with torch_settings(setting, value) if changed else nullcontext():
            pagedkern.write_kv(k, v, k_cache, v_cache, slots, backend=target.name, **scales)
            pagedkern.copy_blocks([k_cache, v_cache], moved, moved.flip(0), backend=target.name)
        results.append(torch.stack([bits(k_cache), bits(v_cache)]))
    assert torch.equal(results[0], results[1])
    assert results[0].any()


def test_many_tokens(target: Target) -> None:
    """A prompt: slots in order, then scattered."""
    order = torch.randperm(3000, generator=torch.Generator().manual_seed(1)).tolist()
    for slots in (list(range(2000)), order[:2000]):
        check_write(target, Spec(kv_heads=1, head_dim=16, block_size=24), slots, 126)


@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "int8"])
def test_tokens_as_slices_of_a_fused_tensor(target: Target, kv_dtype: str) -> None:
    """K and V of [T, H + 2G, D], never made contiguous by the caller."""
    spec = Spec(kv_dtype=kv_dtype, head_dim=24)
    fused = torch.randn(5, 8, 24, device=target.device)
    scales: dict[str, Any] = {"k_scale": 0.05, "v_scale": 0.05} if kv_dtype == "int8" else {}
    check_write(target, spec, [3, 40, -1, 7, 0], 3, tokens=(fused[:, 4:6], fused[:, 6:]), **scales)


def test_what_is_written_is_read_back(target: Target) -> None:
    """write_kv and paged_attention agree on slots and scales: a token that attends to itself gives v."""
    for kv_dtype, tolerance in (("float32", 0.0), ("float16", 0.0), ("int8", 0.03), ("float8_e4m3fn", 0.25)):
        spec = Spec(heads=2, head_dim=16, kv_dtype=kv_dtype, q_dtype="float16")
        k, v = (torch.randn(3, 2, 16, device=target.device).clamp(-3, 3).half() for _ in range(2))
        k_cache, v_cache = (torch.zeros(4, 8, 2, 16, dtype=spec.cache_dtype, device=target.device) for _ in range(2))
        step = torch.tensor([0.05, 0.04], device=target.device)
        scales: dict[str, Any] = {"k_scale": step, "v_scale": step} if spec.quantized else {}
        slots = torch.tensor([8, 24, 0], device=target.device)
        pagedkern.write_kv(k, v, k_cache, v_cache, slots, backend=target.name, **scales)
        table = torch.tensor([[1], [3], [0]], dtype=torch.int32, device=target.device)
        lens = torch.ones(3, dtype=torch.int32, device=target.device)
        out = pagedkern.paged_attention(v, k_cache, v_cache, table, lens, backend=target.name, **scales)
        assert isinstance(out, torch.Tensor)
        assert (out - v).abs().max() <= tolerance, kv_dtype


@pytest.mark.parametrize("dtype", FLOATS + QUANTIZED)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced"])
def test_copy(target: Target, dtype: str, layout: str) -> None:
    n, shape = 12, (12, 5, 3, 24)
    caches = []
    for i in range(3):
        codes = torch.randint(0, 256, (n, 5, 3, 24 * 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(i))
        cache = codes.to(target.device).view(dtype_of(dtype))[..., :24]  # random bits: NaN must be copied as they are
        assert cache.shape == shape
        if layout == "contiguous":
            cache = bits(cache).contiguous().view(dtype_of(dtype))
        elif layout == "transposed":
            cache = bits(cache).transpose(1, 2).contiguous().transpose(1, 2).view(dtype_of(dtype))
        caches.append(cache)
    for src, dst in (([], []), ([3], [9]), ([0, 1, 2], [11, 10, 9]), ([5, 5, 5], [0, 1, 2]), ([4], [4])):
        check_copy(target, caches, src, dst)


@pytest.mark.parametrize(
    ("src", "dst"), [([0, 1], [1, 0]), ([0, 1, 2], [1, 2, 3]), ([3, 2, 1], [2, 1, 0]), ([0, 1, 2], [1, 2, 0])], ids=str
)
def test_copy_reads_every_source_before_it_writes(target: Target, src: list[int], dst: list[int]) -> None:
    cache = torch.randn(4, 300, device=target.device)
    check_copy(target, [cache, cache.clone()], src, dst)


def test_copy_of_nothing(target: Target) -> None:
    nothing = torch.zeros(0, dtype=torch.int64, device=target.device)
    pagedkern.copy_blocks([], nothing, nothing, backend=target.name)


def test_copy_of_many_blocks(target: Target) -> None:
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(1)).tolist()
    check_copy(target, [torch.randn(1000, 4, 2, 8, device=target.device)], order[:500], order[500:])
