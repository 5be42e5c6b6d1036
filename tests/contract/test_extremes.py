"""Far ends of what every backend accepts: contexts, memory, magnitudes."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import pagedkern
from reference import oracle
from tests.contract.cache_checks import check_copy
from tests.contract.checks import assert_exact, assert_same, check_exact, check_no_leak, check_whole, clause
from tests.contract.problems import (
    QUANTIZED,
    Call,
    Spec,
    Tokens,
    bits,
    build,
    contents,
    dtype_of,
    head_values,
)
from tests.contract.strategies import limited
from tests.contract.targets import Result, Target

MILLION = 2**20
FLOATS = ("float16", "bfloat16")


@clause
def check_long_context(target: Target, spec: Spec, seq_lens: tuple[int, ...]) -> None:
    """Contexts made of a few blocks that the table repeats."""
    size = spec.block_size
    tokens = contents(replace(spec, seq_lens=(64 * size,) * len(seq_lens)))
    call = build(replace(spec, window=None), tokens, device=target.device)
    call.spec, call.args["sliding_window"] = spec, spec.window  # the window releases no block here
    width = max(-(-n // size) for n in seq_lens) + 1
    ids = torch.tensor([call.block_ids[i] for i in range(len(seq_lens))], dtype=torch.int32)
    call.args["block_table"] = ids.repeat(1, -(-width // 64))[:, :width].contiguous().to(target.device)
    call.args["seq_lens"] = torch.tensor(seq_lens, dtype=torch.int32, device=target.device)
    assert_exact(call, target.attend(call))


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("kv_dtype", ["float32", "float8_e4m3fn"])
def test_a_million_tokens(target: Target, block_size: int, kv_dtype: str) -> None:
    spec = Spec(heads=2, kv_heads=1, head_dim=16, block_size=block_size, kv_dtype=kv_dtype, seq_lens=(1, 1))
    check_long_context(target, spec, (target.size(MILLION, 2**14) + 3, 5))


@clause
def check_rounded_weights(target: Target, kv_dtype: str, others: int) -> None:
    spec = Spec(heads=1, kv_heads=1, head_dim=16, q_dtype="bfloat16", kv_dtype=kv_dtype, seq_lens=(others + 1,))
    spec = replace(spec, scale=-math.log(0.50195), scale_kind="number")
    [tokens] = contents(spec)
    for x in (tokens.q, tokens.k, tokens.v):
        x.zero_()
    tokens.q[..., 0], tokens.k[1:, :, 0], tokens.v[1:] = 1, -1, 1
    call = build(spec, [tokens], device=target.device)
    if spec.quantized:
        call.args["k_scale"] = call.args["v_scale"] = 1.0
    got = target.attend(call)
    total = 1 + others * 0.50195
    assert abs(got.lse.item() - math.log(total)) <= 2e-6 * math.log(total)
    assert (got.out.double() - (1 - 1 / total)).abs().max() <= 2**-8


@pytest.mark.parametrize("kv_dtype", ["bfloat16", *QUANTIZED])
@pytest.mark.parametrize("others", [1, 70, 1000])
def test_weights_between_two_bfloat16(target: Target, kv_dtype: str, others: int) -> None:
    """0.50195 is 0.4 % off in bfloat16. Weights may be rounded to be multiplied; lse is of those that are not."""
    check_rounded_weights(target, kv_dtype, min(others, target.size(1000, 70)))


def test_a_million_tokens_in_blocks_of_one(target: Target) -> None:
    check_long_context(
        target, Spec(heads=2, kv_heads=1, head_dim=16, block_size=1, seq_lens=(1,)), (target.size(MILLION, 2**14),)
    )


@pytest.mark.parametrize("features", [{"alibi": True}, {"window": 4096}, {"sinks": 5.0}, {"query_lens": (5,)}])
def test_long_contexts_with(target: Target, features: dict[str, Any]) -> None:
    """ALiBi needs j - p exactly, not slope * j minus slope * p; a window must not walk from token 0 to be right."""
    spec = Spec(heads=2, kv_heads=1, head_dim=16, block_size=128, seq_lens=(1,), **features)
    check_long_context(target, spec, (target.size(262_147, 9_219),))


# ---- Memory beyond 2^31 elements: allocated, never touched but for a few blocks. ----


def huge_cache(device: str, dtype: str, layout: str) -> tuple[Tensor, Tensor, list[int]]:
    """K and V [N, 16, 2, 32] of more than 2^31 elements together, and ids of blocks near and far."""
    size, heads, dim = 16, 2, 32
    block = 2 * size * heads * dim  # K and V
    num_blocks = 2**31 // block + 200
    memory = torch.empty(num_blocks * block, dtype=dtype_of(dtype), device=device)
    token, head = (dim, size * dim) if layout == "HND" else (heads * dim, dim)
    shape, strides = (num_blocks, size, heads, dim), (block, token, head, 1)
    k, v = (memory.as_strided(shape, strides, offset) for offset in (0, block // 2))
    return k, v, [0, num_blocks // 2, num_blocks // 2 + 1, num_blocks - 2, num_blocks - 1]


@clause
def check_beyond_32_bits(target: Target, dtype: str, layout: str = "NHD") -> None:
    """Blocks beyond 2^31 elements give what small ids give, to the bit."""
    spec = Spec(kv_dtype=dtype, seq_lens=(40, 70), query_lens=(1, 3))
    tokens = contents(spec)
    near = build(spec, tokens, device=target.device)
    want = target.attend(near)
    k_cache, v_cache, far = huge_cache(target.device, dtype, layout)
    far = [far[-1], far[1], far[-2], *range(far[2], far[2] + 5)]
    table = torch.full((2, 7), 2**31 - 1, dtype=torch.int32)
    for i, (t, n) in enumerate(zip(tokens, (3, 5), strict=True)):
        for j in range(n):
            block = far[3 * i + j]
            table[i, j] = block
            for cache, content in ((k_cache, t.k), (v_cache, t.v)):
                part = content[16 * j : 16 * (j + 1)].to(target.device)
                bits(cache)[block, : len(part)] = bits(part)
    huge = Call(
        spec, {**near.args, "k_cache": k_cache, "v_cache": v_cache, "block_table": table.to(target.device)}, [], []
    )
    got = pagedkern.paged_attention(**huge.args, return_lse=True, backend=target.name, config=target.config)
    assert_same(Result(*got), want, f"block ids up to {max(far)} of {list(k_cache.shape)} changed the result")


@pytest.mark.parametrize("dtype", ["int8", "float16"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_attention_beyond_32_bits(target: Target, dtype: str, layout: str) -> None:
    check_beyond_32_bits(target, dtype, layout)


def test_write_beyond_32_bits(target: Target) -> None:
    k_cache, v_cache, far = huge_cache(target.device, "float16", "HND")
    k, v = torch.randn(2, 5, 2, 32, dtype=torch.float16, device=target.device)
    slots = torch.tensor([16 * block + i for i, block in enumerate(far)], device=target.device)
    pagedkern.write_kv(k, v, k_cache, v_cache, slots, backend=target.name)
    for i, block in enumerate(far):
        assert torch.equal(k_cache[block, i], k[i])
        assert torch.equal(v_cache[block, i], v[i])


def test_copy_beyond_32_bits(target: Target) -> None:
    k_cache, v_cache, far = huge_cache(target.device, "int8", "NHD")
    for i, block in enumerate(far):
        k_cache[block], v_cache[block] = i + 1, -i - 1
    src = torch.tensor([far[0], far[-1]], device=target.device)
    dst = torch.tensor([far[-2], far[1]], device=target.device)
    pagedkern.copy_blocks([k_cache, v_cache], src, dst, backend=target.name)
    got = [(int(k_cache[b].unique()), int(v_cache[b].unique())) for b in far]
    assert got == [(1, -1), (5, -5), (3, -3), (1, -1), (5, -5)]


# ---- Magnitudes. Scores of a lattice are exact in float32 whatever the order of their sum. ----

LATTICE = Spec(lattice=True, head_dim=64, scale=1.0, seq_lens=(1, 33, 200), query_lens=(1, 5, 2))


@pytest.mark.parametrize("magnitude", [256.0, 2048.0, 2.0**20, 2.0**60])
def test_large_scores(target: Target, magnitude: float) -> None:
    """Scores of 1e4 and far more: exp overflows unless the maximum is subtracted first."""
    check_exact(target, replace(LATTICE, magnitude=magnitude))
    check_exact(target, replace(LATTICE, magnitude=magnitude, query_lens=None))


@pytest.mark.parametrize("q_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("magnitude", [512.0, 8192.0])
def test_scores_that_overflow_half_precision(target: Target, q_dtype: str, magnitude: float) -> None:
    """Scores beyond 65504 with float16 inputs: they are accumulated in float32, so this is exact."""
    spec = replace(LATTICE, q_dtype=q_dtype, magnitude=magnitude, seq_lens=(1, 33, 200))
    check_exact(target, spec, torch.float32)
    check_exact(target, replace(spec, query_lens=None), torch.float32)


def test_float16_products_before_the_scale(target: Target) -> None:
    """<q, k> overflows float16, scale * <q, k> does not."""
    spec = replace(LATTICE, q_dtype="float16", magnitude=8192.0, scale=2.0**-16)
    check_exact(target, spec, torch.float32)


@pytest.mark.parametrize("softcap", [1e-4, 0.01, 1.0, 30.0, 1e6])
@pytest.mark.parametrize("magnitude", [1.0, 1024.0])
def test_softcaps(target: Target, softcap: float, magnitude: float) -> None:
    """A cap far below the scores (tanh is 1), and one far above (tanh is the identity)."""
    for query_lens in (None, (1, 5, 2)):
        check_exact(target, replace(LATTICE, softcap=softcap, magnitude=magnitude, query_lens=query_lens))


@pytest.mark.parametrize("softcap", [1e-46, 1e39, 1e300])
def test_softcaps_beyond_float32(target: Target, softcap: float) -> None:
    for query_lens in (None, (1, 5, 2)):
        check_exact(target, replace(LATTICE, softcap=softcap, query_lens=query_lens), torch.float64)


@pytest.mark.parametrize("scale", [0.0, -1.0, 1e-30, 1e4])
def test_scales(target: Target, scale: float) -> None:
    """0 averages what is seen; none is mistaken for "not given"."""
    check_exact(target, replace(LATTICE, scale=scale))
    check_exact(target, replace(LATTICE, scale=scale, query_lens=None, window=5))


@pytest.mark.parametrize("sink", [-1e4, -80.0, 80.0, 1e4, -math.inf])
def test_sinks(target: Target, sink: float) -> None:
    """A sink that takes everything, one that takes nothing, one that is as if there were none."""
    for query_lens in (None, (1, 5, 34)):
        spec = Spec(sinks=sink, seq_lens=(1, 40, 0), query_lens=query_lens)
        check_exact(target, spec)
        check_whole(target, spec)


@clause
def check_sink_only(target: Target) -> None:
    """A row that sees nothing: out = 0 and lse = sink."""
    spec = Spec(seq_lens=(0, 2), query_lens=(3, 6), sinks=1.0, spare_rows=2)
    call = build(spec, device=target.device)
    got = target.attend(call)
    sinks = head_values(spec)["sinks"].to(target.device)
    for row in (*range(7), 9, 10):
        assert torch.equal(got.out[row], torch.zeros_like(got.out[row])), row
        assert torch.equal(got.lse[row], sinks), row


def test_a_row_that_sees_only_the_sink(target: Target) -> None:
    check_sink_only(target)


@clause
def check_nothing_at_all(target: Target, spec: Spec) -> None:
    call = build(spec, device=target.device)
    got = target.attend(call)
    assert torch.equal(got.out, torch.zeros_like(got.out))
    assert (got.lse == -math.inf).all()


@pytest.mark.parametrize("seq_lens", [(), (0,), (0, 0, 0)])
@pytest.mark.parametrize("ragged", [False, True])
def test_nothing_at_all(target: Target, seq_lens: tuple[int, ...], ragged: bool) -> None:
    """No sequence, or padding only; ragged ones with and without queries."""
    check_nothing_at_all(target, Spec(seq_lens=seq_lens, query_lens=(1,) * len(seq_lens) if ragged else None))
    if ragged:
        for spare_rows in (4, 40):
            spec = Spec(seq_lens=seq_lens, query_lens=(0,) * len(seq_lens), spare_rows=spare_rows)
            check_nothing_at_all(target, spec)
        check_nothing_at_all(target, Spec(seq_lens=(7,) * len(seq_lens), query_lens=(0,) * len(seq_lens)))


@pytest.mark.parametrize("ragged", [False, True])
def test_no_block_and_no_column(target: Target, ragged: bool) -> None:
    """A cache of 0 blocks, a table of 0 columns: padding rows need neither."""

    @clause
    def check() -> None:
        call = build(Spec(seq_lens=(0, 0), query_lens=(1, 2) if ragged else None), device=target.device, spare_blocks=0)
        assert call.args["k_cache"].shape[0] == 0
        target.check_support(call)
        for width in (2, 0):
            call.args["block_table"] = call.args["block_table"][:, :width]
            got = target.attend(call)
            assert torch.equal(got.out, torch.zeros_like(got.out))
            assert (got.lse == -math.inf).all()

    check()


@clause
def check_steep_alibi(target: Target) -> None:
    """Slopes that push all but the nearest tokens below float32, and negative ones that prefer the farthest."""
    spec = Spec(alibi=True, seq_lens=(1, 300, 77), query_lens=(1, 4, 1), head_dim=16)
    for slopes in ([100.0, -3.0, 0.0, 1e-6], [1e4, 2.0**-8, -1e4, 8.0]):
        call = build(spec, device=target.device)
        call.args["alibi_slopes"] = torch.tensor(slopes, device=target.device)
        assert_exact(call, target.attend(call))


def test_steep_alibi(target: Target) -> None:
    check_steep_alibi(target)


@clause
def check_mean(target: Target, spec: Spec) -> None:
    """All scores equal and all values one: out is 1 whatever is seen, and lse the logarithm of the number seen."""
    call = build(spec, device=target.device)
    call.args["q"].zero_()
    for blocks in call.block_ids:
        for block in blocks:
            call.args["v_cache"][block] = 1.0
    got = target.attend(call)
    assert torch.allclose(got.out, torch.ones_like(got.out), rtol=0, atol=1e-5)
    seen = torch.tensor([float(n) for n in spec.seq_lens], device=target.device).log()
    assert torch.allclose(got.lse, seen[:, None].expand_as(got.lse), rtol=1e-6, atol=1e-6)


def test_the_mean_of_equal_values(target: Target) -> None:
    check_mean(target, Spec(seq_lens=(1, 2, 100, 5000)))


@pytest.mark.parametrize("kv_dtype", [*FLOATS, *QUANTIZED])
def test_every_code_of_a_cache(target: Target, kv_dtype: str) -> None:
    """Every finite number that K and V can hold, subnormal and huge ones too, is read as what it is."""

    @clause
    def check() -> None:
        dim = 64 if kv_dtype in FLOATS else 16  # of 65,536 codes, or of 256
        spec = Spec(heads=dim, kv_heads=1, head_dim=dim, kv_dtype=kv_dtype, scale=1.0, seq_lens=(1,))
        dtype = spec.cache_dtype
        integer = torch.uint8 if dtype.itemsize == 1 else torch.int16
        codes = torch.arange(256**dtype.itemsize).to(integer).view(dtype)
        codes = codes[oracle.exact(codes).isfinite()]
        codes = codes[: len(codes) // dim * dim].view(-1, 1, 1, dim)  # one token for each sequence
        codes = codes[:: target.size(1, 1 if kv_dtype in QUANTIZED else 16)]
        tokens = [Tokens(torch.eye(dim)[None], k, k) for k in codes]  # head h reads element h: lse = k[h], out = v
        call = build(spec, tokens, device=target.device)
        got = target.attend(call)
        assert_exact(call, got)
        want = oracle.exact(codes).view(-1, 1, dim)
        unit = call.args.get("k_scale", torch.ones(1)).item(), call.args.get("v_scale", torch.ones(1)).item()
        assert oracle.error(got.lse[:, None], want * unit[0]) <= 1e-6 * float(want.abs().max() * unit[0])
        close = torch.isclose(oracle.exact(got.out), want.expand(-1, dim, -1) * unit[1], rtol=2.0**-23, atol=1e-37)
        assert close.all()

    check()


def test_scores_below_every_sentinel(target: Target) -> None:
    """Scores of -1e30 and less are scores: a running maximum starts at -inf, not at some large negative number."""

    @clause
    def check() -> None:
        for query_lens in (None, (1, 3)):
            spec = Spec(lattice=True, scale=1.0, magnitude=2.0**110, seq_lens=(5, 40), query_lens=query_lens)
            tokens = contents(spec)
            for t in tokens:
                t.q[...], t.k[...] = -(2.0**110), t.k.abs() + 0.5
            call = build(spec, tokens, device=target.device)
            got = target.attend(call)
            assert (got.lse < -1e30).all()
            assert_exact(call, got)

    check()


def test_a_table_of_one_row_for_all(target: Target) -> None:
    """A row stride of 0: sequences that share every block. And queries that share every row."""

    @clause
    def check() -> None:
        call = build(Spec(seq_lens=(40, 40, 40), query_lens=(1, 1, 1)), device=target.device)
        call.args["block_table"] = call.args["block_table"][:1].expand(3, -1)
        call.args["q"] = call.args["q"][:1].expand(3, -1, -1)
        got = target.attend(call)
        assert_exact(call, got)
        assert torch.equal(got.out[0], got.out[2])

    check()


def test_several_threads_at_once(target: Target) -> None:
    """Python threads may call at the same time: each gets the bits that it would get alone."""

    @clause
    def check() -> None:
        specs = [
            Spec(seq_lens=(1500, 3), seed=1),
            Spec(seq_lens=(70, 33), query_lens=(40, 3), seed=2),
            Spec(kv_dtype="int8", q_dtype="float16", seq_lens=(600,), seed=3),
            Spec(heads=16, kv_heads=1, seq_lens=(5, 400), query_lens=(5, 1), seed=4),
        ]
        calls = [build(limited(target, spec, 300_000), device=target.device) for spec in specs] * (
            2 if target.slow else 5
        )
        want = [target.attend(call) for call in calls]

        def attend(call: Call) -> Result:
            options: dict[str, Any] = {"backend": target.name, "config": target.config}
            return Result(*pagedkern.paged_attention(**call.args, return_lse=True, **options))

        with target.threads(), ThreadPoolExecutor(4) as pool:
            got = list(pool.map(attend, calls, timeout=120))
        for mine, alone in zip(got, want, strict=True):
            assert_same(mine, alone, "called from several threads")

    check()


def test_more_sequences_than_anything_else(target: Target) -> None:
    """Grids have limits: 65535 in two of their dimensions."""
    seq_lens = tuple(i % 3 for i in range(target.size(2500, 70)))
    check_no_leak(target, Spec(heads=1, kv_heads=1, head_dim=16, block_size=8, seq_lens=seq_lens), ("nan",))


def test_many_heads(target: Target) -> None:
    heads = target.size(256, 32)
    check_exact(target, Spec(heads=heads, kv_heads=heads, head_dim=16, seq_lens=(3, 20)))
    check_exact(target, Spec(heads=256, kv_heads=2, head_dim=16, seq_lens=(3, 20), query_lens=(2, 7)))


def test_copies_of_every_kind_of_tensor(target: Target) -> None:
    """Element sizes 1 to 8, one dimension or five, block strides of any kind."""
    device = target.device
    caches = [
        torch.randn(9, 4, 2, 3, device=device),
        torch.randn(4, 9, 5, device=device).transpose(0, 1),
        torch.arange(9 * 7, device=device).view(9, 7).to(torch.uint8),
        torch.randn(9, 2, 2, 2, 8, dtype=torch.float64, device=device)[:, ::2],
        torch.randn(18, 33, device=device).bfloat16()[::2, 1:32],
        torch.arange(9, device=device),
    ]
    check_copy(target, caches, [0, 8, 3], [5, 1, 7])


def test_results_are_plain_numbers(target: Target) -> None:
    """Result is what its type says."""
    call = build(Spec(), device=target.device)
    got = target.attend(call)
    assert isinstance(got, Result)
    assert got.out.is_contiguous()
    assert got.lse.is_contiguous()
