"""Inputs that broke paged-attention kernels of other projects, with their neighbours; the reports are named.

Most are also reached by the grids of the other files; here each stands by name, so that none is lost.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import pagedkern
from reference import oracle
from tests.contract.cache_checks import check_write
from tests.contract.checks import (
    assert_exact,
    check_batch_invariant,
    check_exact,
    check_no_leak,
    check_placement,
    check_whole,
    clause,
)
from tests.contract.problems import QUANTIZED, Spec, build, contents
from tests.contract.targets import Result, Target
from tests.contract.test_extremes import check_beyond_32_bits

SMALL = Spec(heads=2, kv_heads=1, head_dim=16)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_cache_of_more_than_2_31_elements(target: Target, dtype: str, layout: str) -> None:
    """vllm 50427, 47671."""
    check_beyond_32_bits(target, dtype, layout)


@pytest.mark.parametrize("length", [4090, 4096, 4095, 4097, 2048, 8, 1, 127])
@pytest.mark.parametrize("query_len", [None, 1, 3])
def test_nan_past_the_end_of_the_last_block(target: Target, length: int, query_len: int | None) -> None:
    """flash-attention 1745, 2374; vllm 53856."""
    if target.slow and length > 512:
        length -= 4096 - 512 if length > 4000 else 2048 - 256
    spec = replace(SMALL, seq_lens=(length,), query_lens=None if query_len is None else (min(query_len, length),))
    check_no_leak(target, spec)


@pytest.mark.parametrize("seq_lens", [(0, 5), (5, 0), (0,), (5000, 0, 3), (0, 0, 9000), (16, 0, 0, 0)], ids=str)
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("window", [None, 4])
def test_padding_row(target: Target, seq_lens: tuple[int, ...], ragged: bool, window: int | None) -> None:
    """In batches that split keys and in ones that do not: vllm 57094; flashinfer 2883."""
    if target.slow:
        seq_lens = tuple(min(n, 400) for n in seq_lens)
    spec = replace(SMALL, seq_lens=seq_lens, query_lens=(1,) * len(seq_lens) if ragged else None, window=window)
    check_whole(target, spec)
    check_no_leak(target, spec)


@pytest.mark.parametrize(
    ("seq_lens", "query_lens"),
    [
        ((20, 9, 40), (1, 0, 5)),
        ((20, 9, 40), (0, 3, 0)),
        ((20, 9, 40), (0, 0, 0)),
        ((20, 9, 0), (20, 9, 0)),
        ((1,), (34,)),
        ((1, 50), (34, 2)),
        ((33, 1), (34, 1)),
        ((2, 1, 0), (2, 2, 2)),
        ((16, 130), (129, 129)),
        ((1, 1), (300, 1)),
    ],
    ids=str,
)
def test_query_lengths(target: Target, seq_lens: tuple[int, ...], query_lens: tuple[int, ...]) -> None:
    """None in the middle, as many as tokens, more than tokens: flashinfer 4452."""
    for extra in ({}, {"causal": False}, {"window": 3}, {"sinks": 0.5}):
        check_whole(target, replace(SMALL, seq_lens=seq_lens, query_lens=query_lens, **extra))


@pytest.mark.parametrize("slots", [[-1], [-1, -1, -1], [3, -1, 40], [-1, 0, -1, 63, -1]], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_slot_minus_one(target: Target, slots: list[int], dtype: str) -> None:
    """flashinfer 919."""
    scales: dict[str, Any] = {"k_scale": 0.5, "v_scale": 0.5} if dtype == "int8" else {}
    check_write(target, replace(SMALL, kv_dtype=dtype), slots, 4, **scales)


@pytest.mark.parametrize("group", [5, 7, 16, 20, 3, 6, 17, 19, 21])
@pytest.mark.parametrize("q_dtype", ["float32", "float16"])
def test_group_sizes(target: Target, group: int, q_dtype: str) -> None:
    """flashinfer 996, 3563; vllm 23424."""
    for kv_heads, query_lens in ((1, None), (2, None), (2, (3, 20, 1))):
        spec = Spec(heads=group * kv_heads, kv_heads=kv_heads, q_dtype=q_dtype, seq_lens=(7, 50, 16))
        check_exact(target, replace(spec, query_lens=target.short(query_lens)))


@pytest.mark.parametrize("block_size", [1, 8, 24, 128, 256, 16, 40, 255, 257])
@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_block_sizes(target: Target, block_size: int, kv_dtype: str) -> None:
    """flashinfer 4347; vllm 42510, 41339."""
    for query_lens in (None, (3, 20, 1)):
        spec = replace(SMALL, block_size=block_size, kv_dtype=kv_dtype, seq_lens=(7, 600, 256))
        check_exact(target, replace(spec, query_lens=target.short(query_lens)))


@pytest.mark.parametrize("dims", [(72, 72), (80, 80), (96, 96), (192, 192), (192, 128), (104, 88), (256, 16)], ids=str)
@pytest.mark.parametrize("layout", ["NHD", "HND", "fused"])
def test_head_dims(target: Target, dims: tuple[int, int], layout: str) -> None:
    """Nothing is written outside out: aiter 3698."""
    for query_lens in (None, (1, 20)):
        spec = Spec(head_dim=dims[0], head_dim_v=dims[1], seq_lens=(9, 33), layout=layout)
        check_whole(target, replace(spec, query_lens=target.short(query_lens)), "slice")


@pytest.mark.parametrize("dims", [(32, 32), (64, 48)], ids=str)
def test_k_and_v_interleaved(target: Target, dims: tuple[int, int]) -> None:
    """The block stride is not B times the token stride: aiter 3498."""
    spec = Spec(head_dim=dims[0], head_dim_v=dims[1], seq_lens=(9, 70, 33))
    for query_lens in (None, target.short((1, 20, 3))):
        for layout in ("interleaved", "fused", "odd"):
            check_exact(target, replace(spec, query_lens=query_lens, layout=layout))
        check_placement(target, replace(spec, query_lens=query_lens), ("interleaved", "fused"))


@pytest.mark.parametrize("block_size", [8, 16, 24])
@pytest.mark.parametrize("delta", ["1", "B-1", "B", "B+1", "2B", "3B+1", "all", "more"])
def test_sliding_window(target: Target, block_size: int, delta: str) -> None:
    """Exactly W tokens are seen, the query's own included: transformers 39408; sglang 31501."""
    context = 5 * block_size + 3
    named = {"1": 1, "all": context, "more": 10 * context, "2B": 2 * block_size, "3B+1": 3 * block_size + 1}
    named |= {"B-1": block_size - 1, "B": block_size, "B+1": block_size + 1}
    seq_lens = (context, 1, block_size, context - 4)
    for query_lens in (None, (1, 1, block_size, block_size + 1 if target.slow else 2 * block_size)):
        spec = replace(SMALL, block_size=block_size, window=named[delta], seq_lens=seq_lens, query_lens=query_lens)
        check_exact(target, spec)
        check_no_leak(target, spec, ("nan",))
        count_seen(target, spec)


@clause
def count_seen(target: Target, spec: Spec) -> None:
    """With all scores 0, lse is the logarithm of the number of tokens seen."""
    call = build(spec, device=target.device)
    call.args["q"].zero_()
    got = target.attend(call)
    counts = []
    for q_len, n in zip(spec.query_lens or (1,) * len(spec.seq_lens), spec.seq_lens, strict=True):
        counts += [min(p + 1, spec.window or p + 1) for p in range(n - q_len, n)]
    assert got.lse[:, 0].exp().round().int().tolist() == counts


@pytest.mark.parametrize("kv_dtype", QUANTIZED)
@pytest.mark.parametrize("scale_kind", ["number", "heads"])
@pytest.mark.parametrize("query_lens", [None, (3, 17)])
def test_scales_of_a_quantized_cache(
    target: Target, kv_dtype: str, scale_kind: str, query_lens: tuple[int, ...] | None
) -> None:
    """Never ignored, never element 0 for all: flashinfer 4979."""
    spec = Spec(heads=6, kv_heads=3, kv_dtype=kv_dtype, scale_kind=scale_kind, seq_lens=(9, 40))
    spec = replace(spec, query_lens=target.short(query_lens))
    check_exact(target, spec)

    @clause
    def check() -> None:
        call = build(spec, device=target.device)
        got = target.attend(call)
        twice = build(spec, device=target.device)
        twice.args["v_scale"] = twice.args["v_scale"] * 2
        assert torch.equal(target.attend(twice).out, got.out * 2)
        for name in ("k_scale", "v_scale"):  # a number, as many equal numbers, and a tensor of one element
            same = torch.full((3,), 0.25, device=target.device)
            results = []
            for value in (0.25, same, same[0]):
                call.args[name] = value
                results.append(target.attend(call).out)
            assert torch.equal(results[0], results[1])
            assert torch.equal(results[0], results[2])

    check()


@pytest.mark.parametrize("split", [0, 1, 15, 16, 40, 63, 64])
@pytest.mark.parametrize("sinks", [None, 0.5])
def test_merged_prefix_and_suffix(target: Target, split: int, sinks: float | None) -> None:
    """lse is the natural logarithm on every backend: sglang 35045; flashinfer 4485."""

    @clause
    def check() -> None:
        spec = Spec(seq_lens=(64, 64), sinks=sinks)
        tokens = contents(spec)
        whole = build(spec, tokens, device=target.device)
        target.check_support(whole)
        first = [replace(t, k=t.k[:split], v=t.v[:split]) for t in tokens]
        second = [replace(t, k=t.k[split:], v=t.v[split:]) for t in tokens]
        parts = [build(spec, t, device=target.device) for t in (first, second)]
        if sinks is not None:  # it belongs to one part only
            del parts[0].args["sinks"]
        a, b = (target.attend(part) for part in parts)
        merged = Result(*pagedkern.merge_states(a.out, a.lse, b.out, b.lse))
        assert_exact(whole, merged)
        assert merged.lse[0, 0].item() == pytest.approx(float(oracle.paged_attention(**whole.args)[1][0, 0]), abs=1e-5)

    check()


@pytest.mark.parametrize("q_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("query_lens", [None, (1, 20, 3)])
def test_q_as_a_slice_of_fused_qkv(target: Target, q_dtype: str, query_lens: tuple[int, ...] | None) -> None:
    """The row stride is larger than H * D: flash-attention, several."""
    for q_layout in ("fused", "odd"):
        spec = Spec(q_dtype=q_dtype, q_layout=q_layout, seq_lens=(9, 70, 33), query_lens=target.short(query_lens))
        check_exact(target, spec)
        check_whole(target, spec, "slice")
    check_batch_invariant(target, replace(spec, q_layout="fused"))
