"""Every bit pattern of every dtype, on every path, against torch and against plain formulas."""

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import pytest
import torch
from torch import Tensor

from pagedkern.backends.base import AttentionCall
from pagedkern.backends.cpu import CpuBackend, CpuConfig
from pagedkern.backends.cpu.convert import chunk, convert_row, kernel_order, reorder_row, widen_row
from pagedkern.backends.cpu.jit import ISAS, target

SMALL = {"float16": 16, "bfloat16": 16, "float8_e4m3fn": 8, "float8_e5m2": 8, "int8": 8}  # bits
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


@cache
def _widener(dtype: str) -> Any:
    @numba.njit
    def run(target_: object, src: int, dst: int, n: int) -> None:
        widen_row(target_, dtype, src, dst, n)

    return run


@cache
def _converter(dtype: str) -> Any:
    @numba.njit
    def run(target_: object, src: int, dst: int, n: int, scale: float) -> None:
        convert_row(target_, dtype, src, dst, n, scale)

    return run


def widen(x: Tensor, isa: str) -> Tensor:
    out = torch.full((x.numel() + 64,), torch.nan)
    _widener(str(x.dtype)[6:])(target("float32", isa), x.data_ptr(), out.data_ptr(), x.numel())
    return out[: x.numel()]


def convert(x: Tensor, dtype: str, isa: str, scale: float = 1.0) -> Tensor:
    out = torch.zeros(x.numel() + 64, dtype=getattr(torch, dtype))
    guard = out[x.numel() :].view(torch.uint8).clone()
    _converter(str(x.dtype)[6:])(target(dtype, isa), x.data_ptr(), out.data_ptr(), x.numel(), scale)
    assert torch.equal(out[x.numel() :].view(torch.uint8), guard), "wrote behind the row"
    return out[: x.numel()]


def patterns(dtype: str) -> Tensor:
    bits = torch.arange(2 ** SMALL[dtype], dtype=torch.int32)
    return bits.to(torch.int16 if SMALL[dtype] == 16 else torch.int8).view(getattr(torch, dtype))


def floats() -> Tensor:
    """All float16 values and their neighbours in float32, ties of every format among them, and random bit patterns."""
    half = patterns("float16").float()
    bits = half.view(torch.int32)
    random = torch.randint(-(2**31), 2**31, (200_003,), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    exact = patterns("bfloat16").float().view(torch.int32)
    near = [bits - 1, bits, bits + 1, exact, exact + 0x8000, exact + 0x7FFF, exact + 0x8001, random]
    return torch.cat(near).view(torch.float32)


def assert_equal_bits(got: Tensor, want: Tensor) -> None:
    """The same bits, but for the payload of NaN."""
    integer = {4: torch.int32, 2: torch.int16, 1: torch.int8}[got.element_size()]
    assert got.dtype == want.dtype
    if got.dtype != torch.int8:
        nan = want.float().isnan()
        assert torch.equal(got.float().isnan(), nan)
        got, want = got[~nan], want[~nan]
    different = (got.view(integer) != want.view(integer)).nonzero().flatten()
    assert not len(different), f"{len(different)} differ, first {got[different[0]]} for {want[different[0]]}"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", SMALL)
def test_widen_every_pattern(dtype: str, isa: str) -> None:
    x = patterns(dtype)
    assert_equal_bits(widen(x, isa), x.float())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("n", [1, 7, 8, 15, 16, 17, 33])
@pytest.mark.parametrize("dtype", ["float32", *SMALL])
def test_widen_reads_and_writes_no_more_than_a_row(dtype: str, n: int, isa: str) -> None:
    x = torch.arange(1, 65).to(getattr(torch, dtype))
    want = torch.cat([x[:n].float(), torch.zeros(-n % target("float32", isa).key.lanes)])
    out = torch.full((96,), torch.nan)
    _widener(dtype)(target("float32", isa), x.data_ptr(), out.data_ptr(), n)
    assert torch.equal(out[: len(want)], want)
    assert out[len(want) :].isnan().all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_to_half_types_as_torch_does(dtype: str, isa: str) -> None:
    x = floats()
    assert_equal_bits(convert(x, dtype, isa), x.to(getattr(torch, dtype)))


def nearest(x: Tensor, dtype: str) -> Tensor:
    """By definition: the closest representable number, of two equally close ones that with the even code."""
    codes = torch.arange(-128, 128, dtype=torch.int16).to(torch.int8)
    values = codes.view(getattr(torch, dtype)).double()
    keep = values.isfinite() & ~((values == 0) & (codes < 0))  # of the zeros, the positive one
    values, order = values[keep].sort()
    codes = codes[keep][order]
    x = x.double().clamp(values[0], values[-1])
    above = torch.searchsorted(values, x).clamp(1, len(values) - 1)
    low, high = x - values[above - 1], values[above] - x
    pick_high = (high < low) | ((high == low) & (codes[above] % 2 == 0))
    found = torch.where(pick_high, codes[above], codes[above - 1])
    if dtype != "int8":
        found = torch.where((found == 0) & x.signbit(), torch.tensor(-128, dtype=torch.int8), found)
    return found.view(getattr(torch, dtype))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_quantize_to_the_nearest(dtype: str, isa: str) -> None:
    x = floats()
    x = torch.cat([x, torch.linspace(-200, 200, 80_001), torch.tensor([torch.inf, -torch.inf])])
    x = x[~x.isnan()]
    assert_equal_bits(convert(x, dtype, isa), nearest(x, dtype))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("source", ["float32", "float16", "bfloat16"])
def test_quantize_divides_by_the_scale(source: str, dtype: str, isa: str) -> None:
    x = patterns(source) if source in SMALL else floats()
    x = x[~x.float().isnan()]
    scale = 0.3
    divided = x.float() / torch.tensor(scale)
    assert_equal_bits(convert(x, dtype, isa, scale), nearest(divided, dtype))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_quantize_nan(dtype: str, isa: str) -> None:
    got = convert(torch.tensor([torch.nan, -torch.nan, 1.0]), dtype, isa).float()
    if dtype == "int8":
        assert got.tolist() == [0, 0, 1]
    else:
        assert got.isnan().tolist() == [True, True, False]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["float32", *SMALL])
@pytest.mark.parametrize("q_dtype", ["float32", "bfloat16"])
def test_kernel_order_and_back(q_dtype: str, dtype: str, isa: str) -> None:
    @numba.njit
    def run(target_: object, row: int, chunks: int, to_kernel: bool) -> None:
        if to_kernel:
            reorder_row(target_, row, chunks, 1)
        else:
            reorder_row(target_, row, chunks, 0)

    to = target(dtype, isa, q_dtype)
    x = torch.arange(128.0)
    y = x.clone()
    run(to, y.data_ptr(), 128 // chunk(to.key), True)
    order = torch.tensor(kernel_order(to.key)).flatten()
    assert torch.equal(y.view(-1, chunk(to.key)), x.view(-1, chunk(to.key))[:, order])
    run(to, y.data_ptr(), 128 // chunk(to.key), False)
    assert torch.equal(x, y)


def one_token(dtype: str, q: Tensor, k: Tensor, v: Tensor, isa: str, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Out [H, E] and lse [H] of rows q [H, D] that see one token, k [D] and v [E], with `scale` for both."""
    out, lse = torch.full((1, len(q), len(v)), torch.nan, dtype=q.dtype), torch.full((1, len(q)), torch.nan)
    one = torch.full((1,), scale) if torch.empty(0, dtype=getattr(torch, dtype)).element_size() == 1 else None
    table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    caches = k.view(1, 1, 1, -1), v.view(1, 1, 1, -1)
    options = (1.0, True, None, None, None, None, one, one, out, lse)
    CpuBackend(isa).attention(AttentionCall(q[None], *caches, table, lens, None, 1, *options), CpuConfig(1024))
    return out[0], lse[0]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("heads", [1, 3, 4, 9])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_every_pattern_as_a_value(dtype: str, heads: int, isa: str) -> None:
    """What one token says comes out as it is: each fits into bfloat16. 256 columns, and some that fill no vector."""
    for width in (256, 200, 75, 1):
        v = patterns(dtype)[-width:]
        out, _ = one_token(dtype, torch.ones(heads, 8, dtype=torch.bfloat16), torch.ones(8).to(v.dtype), v, isa)
        for row in out:
            assert_equal_bits(row + 0.0, v.to(torch.bfloat16) + 0.0)  # -0 may come out as 0


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_every_pattern_as_a_key(dtype: str, isa: str) -> None:
    """Rows of q that pick one element each: the score, which is the lse of a single token, is that element."""
    for width in (256, 200, 75, 1):
        k = patterns(dtype)[-width:]
        finite = k.float().isfinite()
        k = torch.where(finite, k.float(), 0.0).to(k.dtype)  # 0 * NaN of the others would be NaN
        v = torch.ones(4).to(k.dtype)
        _, lse = one_token(dtype, torch.eye(width, dtype=torch.bfloat16), k, v, isa)
        assert_equal_bits(lse + 0.0, k.float() + 0.0)
        for bad in patterns(dtype)[-width:][~finite]:
            _, lse = one_token(dtype, torch.ones(5, width, dtype=torch.bfloat16), torch.full_like(k, bad), v, isa)
            want = torch.nan if bad.float() > 0 else bad.float()  # softmax of an infinite score is inf - inf
            assert_equal_bits(lse, torch.full((5,), float(want)))


@pytest.mark.parametrize("isa", ISAS)
def test_zeros_give_zero(isa: str) -> None:
    zeros = torch.zeros(96, dtype=torch.int8)
    out, lse = one_token("int8", torch.randn(4, 96).to(torch.bfloat16), zeros, zeros, isa)
    assert not out.any()
    assert not lse.any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_scales_near_the_end_of_float32(dtype: str, isa: str) -> None:
    """What the kernels take out of the numbers of a cache is not put into a scale, where it might not fit."""
    one = torch.ones(64).to(getattr(torch, dtype))
    out, lse = one_token(dtype, torch.full((4, 64), 2.0**-119, dtype=torch.bfloat16), one, one, isa, 2.0**127)
    assert torch.equal(out.float(), torch.full((4, 64), 2.0**127))
    assert torch.equal(lse, torch.full((4,), 64 * 2.0**8))
