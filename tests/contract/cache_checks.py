"""Checks of what writes into a cache: `write_kv` and `copy_blocks`. As in checks.py, functions of a target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import pagedkern
from reference import oracle
from tests.contract.problems import QUANTIZED, Spec, bits, dtype_of, lay_out
from tests.contract.targets import Target

ULP = 2.0**-22  # slack for a quotient rounded to float32, or a product with a rounded reciprocal


def new_tokens(spec: Spec, num_tokens: int, spread: float = 3.0) -> tuple[Tensor, Tensor]:
    """K and V of new tokens in `spec.q_dtype`: ordinary numbers, among them zeros, NaN, infinities and huge ones."""
    generator = torch.Generator().manual_seed(spec.seed)
    made = []
    for dim in (spec.head_dim, spec.dim_v):
        x = torch.randn(num_tokens, spec.kv_heads, dim, generator=generator) * spread
        special = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 3e4, -3e4, 1e-7, 0.5, 1.5, -2.5])
        places = torch.randperm(x.numel(), generator=generator)[: len(special)]
        x.view(-1)[places] = special[: len(places)]
        made.append(x.to(dtype_of(spec.q_dtype)))
    return made[0], made[1]


def check_write(
    target: Target,
    spec: Spec,
    slots: Sequence[int],
    num_blocks: int,
    *,
    tokens: tuple[Tensor, Tensor] | None = None,
    fill: str = "nan",
    **scales: Any,
) -> None:
    """The slots named hold the tokens, converted or quantized; every other byte of the cache's memory is as before."""
    k, v = (x.to(target.device) for x in (tokens or new_tokens(spec, len(slots))))
    k_cache, v_cache, buffers = lay_out(spec, num_blocks, target.device, fill)
    slot_mapping = torch.tensor(slots, dtype=torch.int64, device=target.device)
    want = oracle.write_kv(k, v, k_cache, v_cache, slot_mapping, **scales)
    inputs = [x.clone() for x in (k, v, slot_mapping)]

    before = [bits(x).clone() for x in buffers]
    with target.threads():
        pagedkern.write_kv(k, v, k_cache, v_cache, slot_mapping, backend=target.name, **scales)

    for name, x, cache, expected in (("k", k, k_cache, want[0]), ("v", v, v_cache, want[1])):
        scale = scales.get(f"{name}_scale")
        if spec.cache_dtype in map(dtype_of, QUANTIZED) and scale is not None:
            assert_nearest(x, cache, slot_mapping, expected, scale, f"{name}_cache: {spec}")
        else:
            got = cache.contiguous()
            same = (bits(got) == bits(expected)) | (got.isnan() & expected.isnan())
            assert same.all(), f"{name}_cache: {int((~same).sum())} elements differ: {spec}"
    for x, old in zip((k, v, slot_mapping), inputs, strict=True):
        assert torch.equal(bits(x), bits(old)), "an input was written to"
    for buffer, old, gap in zip(buffers, before, _gaps(spec, num_blocks, target.device), strict=True):
        assert torch.equal(bits(buffer)[gap], old[gap]), f"wrote between the slots: {spec}"


def _gaps(spec: Spec, num_blocks: int, device: str) -> list[Tensor]:
    """For each buffer of `lay_out`, which elements belong to no slot."""
    k_cache, v_cache, buffers = lay_out(spec, num_blocks, device, "zero")
    for cache in (k_cache, v_cache):
        bits(cache)[...] = 1
    return [bits(x) == 0 for x in buffers]


def assert_nearest(
    x: Tensor, cache: Tensor, slot_mapping: Tensor, expected: Tensor, scale: float | Tensor, message: str
) -> None:
    """Each stored code is the one nearest to x / scale; which of two equally near ones is decided by the oracle.

    The quotient may have been rounded to float32 before: a code is also right if it is as near as that.
    """
    slots = slot_mapping.tolist()
    written = torch.zeros(cache.shape[:2], dtype=torch.bool, device=cache.device)
    scales = oracle.exact(torch.as_tensor(scale)).reshape(-1, 1)
    power_of_two = bool((torch.frexp(scales).mantissa == 0.5).all())
    for token, slot in enumerate(slots):
        if slot < 0:
            continue
        block, offset = slot // cache.shape[1], slot % cache.shape[1]
        written[block, offset] = True
        quotient = oracle.exact(x[token]) / scales
        got, want = (oracle.exact(c[block, offset]) for c in (cache, expected))
        same = (got == want) | (got.isnan() & want.isnan())
        if not power_of_two:
            same |= (got - quotient).abs() <= (want - quotient).abs() + ULP * quotient.abs()
        where = (~same).nonzero()
        assert same.all(), (
            f"{message}: token {token}, {int((~same).sum())} codes wrong, first {quotient[tuple(where[0])]} stored as "
            f"{got[tuple(where[0])]}, nearest is {want[tuple(where[0])]}"
        )
    untouched = bits(cache.contiguous()) == bits(expected)
    assert untouched[~written].all(), f"{message}: a slot that was not named has changed"


def check_copy(target: Target, caches: list[Tensor], src: Sequence[int], dst: Sequence[int]) -> None:
    """Destinations equal what the sources were before; everything else is as before."""
    ids = [torch.tensor(x, dtype=torch.int64, device=target.device) for x in (src, dst)]
    want = oracle.copy_blocks([bits(c) for c in caches], *ids)
    with target.threads():
        pagedkern.copy_blocks(caches, *ids, backend=target.name)
    for i, (cache, expected) in enumerate(zip(caches, want, strict=True)):
        assert torch.equal(bits(cache).contiguous(), expected), f"caches[{i}] differs after {src} -> {dst}"
    assert [x.tolist() for x in ids] == [list(src), list(dst)], "the ids were written to"
