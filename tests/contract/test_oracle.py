"""The judge is judged: against numbers worked out by hand, torch's own attention in float64, and identities."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from reference import oracle
from tests.contract.pairwise import pairwise
from tests.contract.problems import LAYOUTS, Spec, build, contents

LN2, LN3 = math.log(2), math.log(3)


def by_hand(**options: Any) -> tuple[list[float], list[float]]:
    """Two blocks of two tokens, one head of two dimensions; keys with scores 0, ln 2, ln 3; values 6, 12, 18."""
    k = torch.tensor([[[LN3, 0.0], [math.nan, math.nan]], [[0.0, 9.0], [LN2, 9.0]]], dtype=torch.float64)
    v = torch.tensor([[[18.0, 0.0], [math.nan, math.nan]], [[6.0, 0.0], [12.0, 0.0]]], dtype=torch.float64)
    num_queries = options.pop("num_queries", 1)
    q = torch.tensor([1.0, 0.0], dtype=torch.float64).expand(num_queries, 1, 2)
    out, lse = oracle.paged_attention(
        q,
        k[:, :, None],
        v[:, :, None],
        torch.tensor([[1, 0, -1]]),
        torch.tensor([3]),
        cu_seqlens_q=torch.tensor([0, num_queries]),
        scale=options.pop("scale", 1.0),
        **options,
    )
    return out[:, 0, 0].tolist(), lse[:, 0].tolist()


@pytest.mark.parametrize(
    ("options", "out", "lse"),
    [
        ({}, [(6 + 2 * 12 + 3 * 18) / 6], [math.log(6)]),
        ({"num_queries": 3}, [6, (6 + 24) / 3, 14], [0, LN3, math.log(6)]),
        ({"num_queries": 3, "causal": False}, [14, 14, 14], [math.log(6)] * 3),
        ({"num_queries": 5}, [0, 0, 6, 10, 14], [-math.inf, -math.inf, 0, LN3, math.log(6)]),
        ({"sliding_window": 1}, [18], [LN3]),
        ({"sliding_window": 2}, [(2 * 12 + 3 * 18) / 5], [math.log(5)]),
        ({"scale": 0.0}, [12], [LN3]),
        ({"scale": 2.0}, [(6 + 4 * 12 + 9 * 18) / 14], [math.log(14)]),
        ({"sinks": torch.tensor([math.log(6)])}, [7], [math.log(12)]),
        ({"alibi_slopes": torch.tensor([LN2])}, [(6 / 4 + 12 + 3 * 18) / (1 / 4 + 1 + 3)], [math.log(4.25)]),
        ({"k_scale": 2.0, "v_scale": torch.tensor([0.5])}, [(6 + 48 + 162) / 14 / 2], [math.log(14)]),
        ({"softcap": 1e9}, [14], [math.log(6)]),
        (
            {"softcap": LN2, "scale": 1e9},
            [(6 + 2 * 12 + 2 * 18) / 5],
            [math.log(5)],
        ),
    ],
    ids=str,
)
def test_numbers_worked_out_by_hand(options: dict[str, Any], out: list[float], lse: list[float]) -> None:
    got_out, got_lse = by_hand(**options)
    assert got_out == pytest.approx(out, rel=1e-7)
    assert got_lse == pytest.approx(lse, rel=1e-7)


@pytest.mark.parametrize(
    "row",
    pairwise(
        {
            "heads": (2, 6, 14),
            "dims": ((16, 16), (24, 40)),
            "block_size": (1, 8, 7),
            "lens": (((5, 33), (5, 3)), ((9, 40), None), ((12, 12), (12, 1))),
            "causal": (True, False),
            "window": (None, 1, 6),
            "layout": LAYOUTS,
        }
    ),
    ids=str,
)
def test_equals_torch_attention_in_float64(row: dict[str, Any]) -> None:
    """torch's own kernel, given dense K and V and a mask, knows nothing of this project."""
    (dim, dim_v), (seq_lens, query_lens) = row.pop("dims"), row.pop("lens")
    spec = Spec(kv_heads=2, head_dim=dim, head_dim_v=dim_v, seq_lens=seq_lens, query_lens=query_lens, **row)
    tokens = contents(spec)
    out, _ = build(spec, tokens).oracle()
    start = 0
    for t in tokens:
        n, rows = len(t.k), len(t.q)
        p, j = torch.arange(n - rows, n)[:, None], torch.arange(n)
        mask = (j <= p) if spec.causal else torch.ones(rows, n, dtype=torch.bool)
        if spec.window:
            mask = mask & (p - j < spec.window)
        q, k, v = (x.double().transpose(0, 1)[None] for x in (t.q, t.k, t.v))
        want = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)
        assert torch.allclose(out[start : start + rows], want, rtol=0, atol=1e-12)
        start += rows


def test_torch_in_float64_equals_the_oracle() -> None:
    """The comparison of clause 1 is the same computation: in float64 nothing but rounding is left of its error."""
    for spec in (
        Spec(
            seq_lens=(20, 5, 0, 40), query_lens=(3, 9, 2, 1), spare_rows=2, window=9, softcap=2.0, alibi=True, sinks=0.5
        ),
        Spec(kv_dtype="int8", seq_lens=(20, 1, 0), causal=False, scale=0.1),
        Spec(heads=14, seq_lens=(300, 41), query_lens=(1, 41)),
    ):
        call = build(spec)
        want_out, want_lse = call.oracle()
        call.args["q"] = call.args["q"].double()
        out, lse = call.torch()
        assert oracle.error(out, want_out) < 1e-12
        assert oracle.error(lse, want_lse) < 1e-5  # kept in float32


@pytest.mark.parametrize("split", [0, 1, 17, 40])
def test_merging_parts_gives_the_whole(split: int) -> None:
    spec = Spec(seq_lens=(40,))
    tokens = contents(spec)
    parts = [
        build(spec, [replace(t, k=t.k[cut], v=t.v[cut]) for t in tokens]).oracle()
        for cut in (slice(split), slice(split, None))
    ]
    out, lse = oracle.merge_states(parts[0][0], parts[0][1], parts[1][0], parts[1][1])
    want_out, want_lse = build(spec, tokens).oracle()
    assert torch.allclose(out, want_out, rtol=0, atol=1e-14)
    assert torch.allclose(lse, want_lse, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_quantize_is_what_torch_does_within_range(dtype: torch.dtype) -> None:
    """Apart from saturation, where torch's own conversion of some versions gives NaN or infinity."""
    top = float(torch.finfo(dtype).max)
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    codes = codes[codes.isfinite()].sort().values
    middles = (codes[1:] + codes[:-1]) / 2
    x = torch.cat([codes, middles, middles * 1.0001, middles * 0.9999, torch.randn(1000) * 10]).clamp(-top, top)
    got = oracle.quantize(x.double(), dtype)
    assert torch.equal(got.float(), x.to(dtype).float())


# fmt: off
QUANTIZED_BY_HAND: dict[torch.dtype, dict[float, float]] = {
    torch.int8: {
        0.49: 0, 0.5: 0, 1.5: 2, 2.5: 2, -0.5: 0, -1.5: -2,  # ties to even
        127.4: 127, 127.5: 127, 1e30: 127, -128.4: -128, -1e30: -128, math.inf: 127, -math.inf: -128, math.nan: 0,
    },
    torch.float8_e4m3fn: {
        448: 448, 449: 448, 1e30: 448, math.inf: 448, -math.inf: -448, 17: 16, 19: 20,
        2.0**-9: 2.0**-9, 2.0**-10: 0, 2.0**-11: 0, 1.5 * 2.0**-9: 2.0**-8,
    },
    torch.float8_e5m2: {
        57344: 57344, 6e4: 57344, 1e30: 57344, -math.inf: -57344, 9: 8, 11: 12,
        2.0**-16: 2.0**-16, 2.0**-17: 0, 3 * 2.0**-17: 2.0**-15,
    },
}
# fmt: on


@pytest.mark.parametrize("dtype", QUANTIZED_BY_HAND, ids=str)
def test_quantize_by_hand(dtype: torch.dtype) -> None:
    x = torch.tensor(list(QUANTIZED_BY_HAND[dtype]), dtype=torch.float64)
    assert oracle.quantize(x, dtype).double().tolist() == list(QUANTIZED_BY_HAND[dtype].values())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_nan_stays_nan_in_float8(dtype: torch.dtype) -> None:
    assert oracle.quantize(torch.tensor([math.nan], dtype=torch.float64), dtype).float().isnan().all()


def test_error_is_the_largest_difference() -> None:
    def of(got: list[float], want: list[float]) -> float:
        return oracle.error(torch.tensor(got), torch.tensor(want))

    inf, nan = math.inf, math.nan
    assert of([1.0, 2.0], [1.0, 2.5]) == 0.5
    assert of([inf, -inf, nan], [inf, -inf, nan]) == 0
    assert of([0.0], [nan]) == of([nan], [0.0]) == of([inf], [-inf]) == of([1.0], [inf]) == inf
    assert of([], []) == 0
    with pytest.raises(ValueError, match="shapes differ"):
        oracle.error(torch.zeros(2), torch.zeros(1, 2))


def test_an_exact_sum() -> None:
    """A mean over 999 equal scores, compared with rational arithmetic."""
    v = torch.randint(-1000, 1000, (1000, 1, 1), generator=torch.Generator().manual_seed(0)).double()
    cache = v.view(125, 8, 1, 1)
    zero = torch.zeros(1, 1, 1, dtype=torch.float64)
    out, _ = oracle.paged_attention(zero, cache * 0, cache, torch.arange(125)[None], torch.tensor([999]))
    want = Fraction(sum(int(x) for x in v[:999, 0, 0].tolist()), 999)
    assert out.item() == pytest.approx(float(want), rel=1e-14)


def test_copy_reads_before_it_writes() -> None:
    cache = torch.arange(4.0)[:, None]
    (after,) = oracle.copy_blocks([cache], torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0]))
    assert after[:, 0].tolist() == [2, 0, 1, 3]
    assert cache[:, 0].tolist() == [0, 1, 2, 3]


def _kv(*values: float) -> Tensor:
    return torch.tensor(values)[:, None, None]


def test_write_by_hand() -> None:
    k_cache, v_cache = torch.full((2, 2, 1, 1), -7, dtype=torch.int8), torch.full((2, 2, 1, 1), 9.0)
    k, v = oracle.write_kv(
        _kv(3.0, 5.0, 1e9), _kv(1.0, 2.0, 3.0), k_cache, v_cache, torch.tensor([2, -1, 1]), k_scale=2.0
    )
    assert k.flatten().tolist() == [-7, 127, 2, -7]  # 3 / 2 = 1.5 to even
    assert v.flatten().tolist() == [9, 3, 1, 9]
