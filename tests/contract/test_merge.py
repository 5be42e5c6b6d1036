"""merge_states: exact, whole, and nothing of an empty side in the result; by the CPU's kernel, and by torch."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

import pagedkern
from pagedkern.errors import InvalidArgument
from reference import oracle
from tests.contract.problems import bits, dtype_of
from tests.contract.targets import torch_threads

INF, NAN = math.inf, math.nan


@pytest.fixture(params=["kernel", "torch", *(["cuda"] if torch.cuda.is_available() else [])])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where partial results lie, and who merges them: on a CPU without the backend `cpu` torch does, as on a GPU."""
    if request.param == "cuda":
        return "cuda"
    if request.param == "torch":
        left = {name: place for name, place in pagedkern.backends._LOCATIONS.items() if name != "cpu"}
        monkeypatch.setattr(pagedkern.backends, "_LOCATIONS", left)
    return "cpu"


def states(shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(shape, generator=generator).to(dtype)
    lse = torch.randn(shape[:2], generator=generator) * 5
    return out.to(device), lse.to(device)


MERGED = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 2e-2}  # two units in the last place of numbers below 4


@pytest.mark.parametrize("dtype", MERGED)
def test_merge(device: str, dtype: str) -> None:
    a, b = (states((33, 5, 24), dtype_of(dtype), seed, device) for seed in (1, 2))
    before = [bits(x).clone() for x in (*a, *b)]
    out, lse = pagedkern.merge_states(*a, *b)
    want_out, want_lse = oracle.merge_states(*a, *b)
    assert (out.dtype, lse.dtype) == (dtype_of(dtype), torch.float32)
    assert oracle.error(out, want_out) <= MERGED[dtype]
    assert oracle.error(lse, want_lse) <= 2e-6
    assert all(torch.equal(bits(x), old) for x, old in zip((*a, *b), before, strict=True))


def test_merge_is_symmetric_and_has_a_neutral_element(device: str) -> None:
    a, b = (states((9, 4, 16), torch.float32, seed, device) for seed in (1, 2))
    ab, ba = pagedkern.merge_states(*a, *b), pagedkern.merge_states(*b, *a)
    assert torch.equal(ab[0], ba[0])
    assert torch.equal(ab[1], ba[1])
    for unseen in (0.0, math.nan, math.inf):  # what out holds where nothing was seen does not matter
        nothing = torch.full_like(a[0], unseen), torch.full_like(a[1], -math.inf)
        for merged in (pagedkern.merge_states(*a, *nothing), pagedkern.merge_states(*nothing, *a)):
            assert torch.equal(merged[0], a[0])
            assert torch.equal(merged[1], a[1])
        out, lse = pagedkern.merge_states(*nothing, *nothing)
        assert torch.equal(out, torch.zeros_like(out))
        assert (lse == -math.inf).all()


@pytest.mark.parametrize("far", [90.0, 1e4, 1e30])
def test_merge_of_sides_far_apart(device: str, far: float) -> None:
    """No overflow: the side that is far above takes everything."""
    a, b = (states((9, 4, 16), torch.float32, seed, device) for seed in (1, 2))
    for shift_a, shift_b, winner in ((far, 0.0, a), (0.0, -far, a), (-far, 0.0, b), (0.0, far, b)):
        out, lse = pagedkern.merge_states(a[0], a[1] + shift_a, b[0], b[1] + shift_b)
        assert torch.allclose(out, winner[0], rtol=0, atol=1e-6)
        assert torch.equal(lse, torch.maximum(a[1] + shift_a, b[1] + shift_b))


def test_merge_of_views(device: str) -> None:
    """Strides are free: a transposed [H, T, E], a slice, an expanded lse."""
    a, b = (states((9, 4, 16), torch.float32, seed, device) for seed in (1, 2))
    strided = torch.empty(4, 9, 20, device=device).transpose(0, 1)[..., 2:18].copy_(a[0])
    lse = a[1].t().contiguous().t()
    got, want = pagedkern.merge_states(strided, lse, *b), pagedkern.merge_states(*a, *b)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_merge_of_nothing(device: str) -> None:
    nothing = states((0, 4, 16), torch.float32, 1, device)
    out, lse = pagedkern.merge_states(*nothing, *nothing)
    assert (out.shape, lse.shape) == ((0, 4, 16), (0, 4))


def test_merge_of_three_parts_in_any_order(device: str) -> None:
    parts = [states((9, 4, 16), torch.float32, seed, device) for seed in (1, 2, 3)]
    results = []
    for i, j, k in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        results.append(pagedkern.merge_states(*pagedkern.merge_states(*parts[i], *parts[j]), *parts[k]))
    for out, lse in results[1:]:
        assert torch.allclose(out, results[0][0], rtol=0, atol=2e-6)
        assert torch.allclose(lse, results[0][1], rtol=0, atol=2e-6)


EMPTY = (-INF, INF)


@pytest.mark.parametrize("mark", EMPTY)
@pytest.mark.parametrize("dtype", MERGED)
def test_an_empty_side_leaves_no_trace(device: str, dtype: str, mark: float) -> None:
    """The other side comes out to the bit (-0.0, infinities and NaN of its own too), whatever the empty one holds."""
    a = states((9, 4, 24), dtype_of(dtype), 1, device)
    a[0][3] = torch.tensor([-0.0, INF, -INF, NAN] * 6, dtype=dtype_of(dtype))
    for unseen in (0.0, NAN, INF, -INF, 1e4):
        nothing = torch.full_like(a[0], unseen), torch.full_like(a[1], mark)
        for out, lse in (pagedkern.merge_states(*a, *nothing), pagedkern.merge_states(*nothing, *a)):
            assert torch.equal(bits(out), bits(a[0]))
            assert torch.equal(lse, a[1])
        for other in EMPTY:
            out, lse = pagedkern.merge_states(*nothing, torch.full_like(a[0], NAN), torch.full_like(a[1], other))
            assert torch.equal(bits(out), torch.zeros_like(bits(out)))
            assert (lse == -INF).all()


@pytest.mark.parametrize("seed", range(40))
def test_random_marks(device: str, seed: int) -> None:
    """Numbers, both marks of an empty side, and NaN, at random, any strides: as the oracle has it."""
    rng = random.Random(seed)
    shape = (rng.choice([1, 7, 100]), rng.choice([1, 3]), rng.choice([1, 8, 20, 33]))
    dtype = rng.choice(list(MERGED))
    sides = [states(shape, dtype_of(dtype), 2 * seed + i, device) for i in range(2)]
    for number, (out, lse) in enumerate(sides):
        generator = torch.Generator().manual_seed(1000 * seed + number)
        which = torch.randint(0, 6, lse.shape, generator=generator).to(device)
        for code, value in ((0, -INF), (1, INF), (2, NAN if rng.random() < 0.3 else -INF)):
            lse[which == code] = value
        out[lse.isinf()] = rng.choice([NAN, INF, 0.0])
    if rng.random() < 0.5:
        sides[0] = (sides[0][0].transpose(0, 1).contiguous().transpose(0, 1), sides[0][1].t().contiguous().t())
    if rng.random() < 0.5:
        sides[1] = (torch.stack([sides[1][0]] * 2, -1)[..., 0], torch.stack([sides[1][1]] * 2, -1)[..., 0])
    out, lse = pagedkern.merge_states(*sides[0], *sides[1])
    want_out, want_lse = oracle.merge_states(*sides[0], *sides[1])
    assert torch.equal(out.isnan().cpu(), want_out.isnan())
    assert oracle.error(out, want_out) <= MERGED[dtype]
    assert oracle.error(lse, want_lse) <= 2e-6
    swapped = pagedkern.merge_states(*sides[1], *sides[0])
    assert torch.equal(bits(out)[~out.isnan()], bits(swapped[0])[~out.isnan()])
    assert torch.equal(lse.nan_to_num(nan=7.0), swapped[1].nan_to_num(nan=7.0))


def test_nan_is_not_hidden(device: str) -> None:
    """An lse that is NaN makes its row NaN, also beside an empty side; a NaN that was seen stays."""
    (out, lse), other = states((4, 2, 8), torch.float32, 1, device), states((4, 2, 8), torch.float32, 2, device)
    lse[0, 0] = NAN
    out[1, 1, 3] = NAN
    for log in (other[1], torch.full_like(lse, -INF), torch.full_like(lse, INF)):
        merged_out, merged_lse = pagedkern.merge_states(out, lse, other[0], log)
        assert merged_out[0, 0].isnan().all()
        assert merged_lse.isnan().nonzero().tolist() == [[0, 0]]
        assert merged_out[1:].isnan().nonzero().tolist() == [[0, 1, 3]]


@pytest.mark.parametrize("name", ["lse_a", "lse_b"])
def test_debug_refuses_infinity(device: str, name: str) -> None:
    (out_a, lse_a), (out_b, lse_b) = (states((5, 3, 8), torch.float32, seed, device) for seed in (1, 2))
    sides = {"lse_a": lse_a, "lse_b": lse_b}
    sides["lse_a"][0], sides["lse_b"][1] = -INF, -INF
    pagedkern.merge_states(out_a, lse_a, out_b, lse_b, debug=True)
    sides[name][4, 2] = INF
    with pytest.raises(
        InvalidArgument, match=rf"{name}\[4, 2\]: got inf for token 4, head 2, expected a number, or -inf"
    ):
        pagedkern.merge_states(out_a, lse_a, out_b, lse_b, debug=True)


def test_both_ways_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's kernel, whatever the number of threads, and torch: one unit in the last place, the same strides."""
    a, b = (states((300, 4, 40), torch.bfloat16, seed, "cpu") for seed in (1, 2))
    by_kernel = pagedkern.merge_states(*a, *b)
    with torch_threads(3):
        threaded = pagedkern.merge_states(*a, *b)
    assert all(torch.equal(bits(x), bits(y)) for x, y in zip(by_kernel, threaded, strict=True))
    monkeypatch.setattr(pagedkern.backends, "_LOCATIONS", {"reference": pagedkern.backends._LOCATIONS["reference"]})
    by_torch = pagedkern.merge_states(*a, *b)
    assert (bits(by_kernel[0]).int() - bits(by_torch[0]).int()).abs().max() <= 1
    assert torch.allclose(by_kernel[1], by_torch[1], rtol=0, atol=1e-6)
    assert [x.stride() for x in by_kernel] == [x.stride() for x in by_torch]
