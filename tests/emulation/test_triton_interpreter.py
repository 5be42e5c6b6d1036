"""The mended interpreter of Triton against torch, bit for bit, and what it refuses."""

from __future__ import annotations

import os

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("triton compiles for a GPU here", allow_module_level=True)

import triton.language as tl  # noqa: E402
from triton.language.extra.cuda import libdevice  # noqa: E402
from triton.runtime import interpreter as original  # noqa: E402

from tests.emulation import triton_interpreter  # noqa: E402
from tests.emulation.memory import OutOfBounds  # noqa: E402

NARROW = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def all_values(dtype: torch.dtype) -> torch.Tensor:
    """Every bit pattern of a type of one or two bytes."""
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype)
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def some_values(dtype: torch.dtype = torch.float32, size: int = 4096) -> torch.Tensor:
    """Numbers of all magnitudes, with the special ones."""
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(size, generator=generator) * torch.exp2(torch.randint(-30, 30, (size,), generator=generator))
    numbers[:8] = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, 1e38, -1.0])
    return numbers.to(dtype)


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bits; a NaN is a NaN."""
    assert actual.dtype == expected.dtype
    nan = expected.float().isnan()
    assert torch.equal(actual.float().isnan(), nan)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[expected.element_size()]
    assert torch.equal(actual.view(integer)[~nan], expected.view(integer)[~nan])


def narrowed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounded to `dtype`; what torch may saturate, infinities among it, is NaN in e4m3fn."""
    if dtype == torch.float8_e4m3fn:
        x = x.float().masked_fill(x.abs() > 464, float("nan"))  # halfway between the largest, 448, and 480
    return x.to(dtype)


@triton.jit
def unary_kernel(x, out, n, OP: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + i, mask=i < n, other=0.0)
    if OP == "cast":
        r = a.to(out.dtype.element_ty)
    elif OP == "negative":
        r = -a
    elif OP == "abs":
        r = tl.abs(a)
    elif OP == "exp":
        r = tl.exp(a)
    elif OP == "positive":
        r = (a > 0).to(out.dtype.element_ty)
    elif OP == "bits":
        r = a.to(out.dtype.element_ty, bitcast=True)
    elif OP == "tanh":
        r = libdevice.tanh(a)
    elif OP == "rint":
        r = libdevice.rint(a)
    tl.store(out + i, r, mask=i < n)


def unary(x: torch.Tensor, op: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype or x.dtype)
    unary_kernel[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), OP=op, BLOCK=1024)
    return out


@pytest.mark.parametrize("to", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_widening_is_exact(dtype: torch.dtype, to: torch.dtype) -> None:
    if dtype != to:
        same(unary(all_values(dtype), "cast", to), all_values(dtype).to(to))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrowing_rounds_to_nearest_even(dtype: torch.dtype) -> None:
    x = all_values(dtype).float()
    x = x[x.isfinite()].sort().values.unique()
    middles = (x[1:] + x[:-1]) / 2
    for each in (x, middles, torch.nextafter(middles, x[1:]), torch.nextafter(middles, x[:-1]), some_values()):
        same(unary(each, "cast", dtype), narrowed(each, dtype))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16], ids=str)
def test_narrowing_from_two_bytes(dtype: torch.dtype, source: torch.dtype) -> None:
    same(unary(all_values(source), "cast", dtype), narrowed(all_values(source), dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_integers(dtype: torch.dtype) -> None:
    x = torch.arange(-128, 128, dtype=torch.int8)
    same(unary(x, "cast", dtype), x.to(dtype))
    same(unary(x.to(dtype), "cast", torch.int8), x)
    same(unary(x.view(torch.uint8), "cast", dtype), x.view(torch.uint8).to(dtype))
    same(unary(x.to(dtype) + 0.5, "cast", torch.int32), (x.to(dtype) + 0.5).int())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_unary(dtype: torch.dtype) -> None:
    x = some_values(dtype)
    same(unary(x, "negative") + 0, -x + 0)  # Triton 3.6 has 0 - x, whose zero is positive
    same(unary(x, "abs"), x.abs())
    same(unary(x, "positive"), (x > 0).to(dtype))
    same(unary(x, "positive", torch.float32), (x > 0).float())
    same(unary(x, "positive", torch.int32), (x > 0).int())


def test_bits_of_an_integer_are_a_float8() -> None:
    x = all_values(torch.float8_e4m3fn)
    same(unary(x.view(torch.uint8), "bits", torch.float8_e4m3fn), x)
    same(unary(x, "bits", torch.uint8), x.view(torch.uint8))


def test_functions() -> None:
    x = torch.linspace(-12, 12, 1000)
    torch.testing.assert_close(unary(x, "exp"), x.exp(), rtol=3e-7, atol=0)
    torch.testing.assert_close(unary(x, "tanh"), x.tanh(), rtol=3e-7, atol=0)
    same(unary(x, "rint"), x.round())
    with pytest.raises(ValueError, match="fp32"):  # as the compiler has it
        unary(x.bfloat16(), "exp")


@triton.jit
def binary_kernel(x, y, out, n, OP: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + i, mask=i < n, other=0.0)
    b = tl.load(y + i, mask=i < n, other=1.0)
    if OP == "add":
        r = a + b
    elif OP == "sub":
        r = a - b
    elif OP == "mul":
        r = a * b
    elif OP == "div":
        r = a / b
    elif OP == "lt":
        r = a < b
    elif OP == "le":
        r = a <= b
    elif OP == "eq":
        r = a == b
    elif OP == "ne":
        r = a != b
    elif OP == "where":
        r = tl.where(a > b, a, b)
    elif OP == "maximum":
        r = tl.maximum(a, b)
    elif OP == "minimum":
        r = tl.minimum(a, b)
    elif OP == "maximum_nan":
        r = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + i, r, mask=i < n)


BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": lambda a, b: a.float() / b.float(),
    "lt": torch.lt,
    "le": torch.le,
    "eq": torch.eq,
    "ne": torch.ne,
    "where": lambda a, b: torch.where(a > b, a, b),
    "maximum": torch.fmax,
    "minimum": torch.fmin,
    "maximum_nan": torch.maximum,
}


@pytest.mark.parametrize("op", BINARY)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_binary(dtype: torch.dtype, op: str) -> None:
    x = some_values(dtype)
    y = x.flip(0).roll(3)
    expected = BINARY[op](x, y)
    out = torch.empty_like(expected)
    binary_kernel[(4,)](x, y, out, x.numel(), OP=op, BLOCK=1024)
    if "imum" in op:  # which zero is the larger is not defined
        out, expected = out + 0.0, expected + 0.0
    same(out, expected)


def test_no_arithmetic_in_float8() -> None:
    x = all_values(torch.float8_e4m3fn)
    with pytest.raises(TypeError, match="no GPU computes in fp8e4nv"):
        binary_kernel[(1,)](x, x, torch.empty_like(x), 256, OP="add", BLOCK=1024)


@triton.jit
def reduce_kernel(x, out, N: tl.constexpr, OP: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i[:, None] * N + i[None, :])
    if OP == "sum":
        r = tl.sum(a, 1)
    elif OP == "max":
        r = tl.max(a, 1)
    tl.store(out + i, r)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8], ids=str)
def test_reductions(dtype: torch.dtype) -> None:
    x = torch.randint(-8, 9, (16, 16), generator=torch.Generator().manual_seed(2)).to(dtype)
    out = torch.empty(16, dtype=torch.float32)
    reduce_kernel[(1,)](x, out, N=16, OP="max")
    same(out, x.float().amax(1))
    if dtype == torch.bfloat16:
        with pytest.raises(TypeError, match="sum in float32"):
            reduce_kernel[(1,)](x, out, N=16, OP="sum")
    else:
        reduce_kernel[(1,)](x, out, N=16, OP="sum")
        same(out, x.float().sum(1))


@triton.jit
def dot_kernel(
    x, y, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr
):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(x + m[:, None] * K + k[None, :]).to(DTYPE)
    b = tl.load(y + n[None, :] * K + k[:, None]).to(DTYPE)
    c = tl.full([M, N], 1.0, tl.float32)
    tl.store(out + m[:, None] * N + n[None, :], tl.dot(a, b, c, input_precision=PRECISION))


def dot(x: torch.Tensor, y: torch.Tensor, dtype: tl.dtype, precision: str = "ieee") -> torch.Tensor:
    out = torch.empty(x.shape[0], y.shape[0])
    dot_kernel[(1,)](x, y, out, x.shape[0], y.shape[0], x.shape[1], PRECISION=precision, DTYPE=dtype)
    return out


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8], ids=str)
def test_dot_accumulates_in_float32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randint(-16, 17, (size, 256), generator=generator).to(dtype) for size in (4, 16))
    to = {torch.float32: tl.float32, torch.float16: tl.float16}.get(dtype, tl.bfloat16)
    same(dot(x, y, to), x.float() @ y.float().T + 1)  # whole numbers below 2^24: exact in any order


def test_dot_of_float8_operands() -> None:
    x = all_values(torch.float8_e5m2).float().nan_to_num(0, 0, 0).to(torch.float8_e5m2).view(2, 128)
    y = torch.eye(16, 128).to(torch.float8_e5m2)
    same(dot(x, y, tl.float8e5), x.float() @ y.float().T + 1)


def test_dot_loses_precision_only_when_told() -> None:
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(4))
    y = torch.eye(16, 32)
    same(dot(x, y, tl.float32), x[:, :16] + 1)
    assert 1e-4 < (dot(x, y, tl.float32, "tf32") - x[:, :16] - 1).abs().max() < 2e-3


def test_dot_is_as_large_as_cuda_wants_it() -> None:
    with pytest.raises(AssertionError, match="K >= 16"):
        dot(torch.ones(4, 8).half(), torch.ones(16, 8).half(), tl.float16)


@triton.jit
def loop_kernel(out, n, step):
    for i in range(n):
        tl.store(out + i, i.to(tl.int64) * step)
    for i in tl.range(n, 2 * n):
        tl.store(out + i, (i * step).to(tl.int64))
    i = 0
    while i < 2:
        tl.store(out + 2 * n + i, i)
        i += 1


def test_loop_variables_are_int32() -> None:
    out = torch.empty(8, dtype=torch.int64)
    loop_kernel[(1,)](out, 3, 2**30)
    expected = torch.tensor([0, 1, 2, 3, 4, 5, 0, 1]) * torch.tensor([2**30] * 6 + [1, 1])
    expected[3:6] = expected[3:6].int()  # overflows, as on a GPU
    assert out.tolist() == expected.tolist()


@triton.jit
def argument_kernel(out, x, n: tl.int64, small, flag):
    tl.store(out, x * 3.0)
    tl.store(out + 1, (n * 2**20).to(tl.float64))
    tl.store(out + 2, (small * 2**20).to(tl.float64))
    if flag:
        tl.store(out + 3, 1.0)


def test_arguments_have_the_types_of_the_compiler() -> None:
    out = torch.zeros(4, dtype=torch.float64)
    argument_kernel[(1,)](out, 0.1, 2**11, 2**11, True)
    assert out.tolist() == [(torch.tensor(0.1) * 3.0).item(), 2.0**31, -(2.0**31), 1.0]


@triton.jit
def load_kernel(x, out, n, size, OTHER: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    if OTHER is None:
        a = tl.load(x + i, mask=i < n)
    else:
        a = tl.load(x + i, mask=i < n, other=OTHER)
    tl.store(out + i, a, mask=i < size)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_what_a_masked_load_leaves_out_is_undefined(dtype: torch.dtype) -> None:
    out = torch.empty(16, dtype=dtype)
    load_kernel[(1,)](torch.ones(8).to(dtype), out, 8, 16, OTHER=None, BLOCK=16)
    assert out.float().isnan().tolist() == [False] * 8 + [True] * 8
    load_kernel[(1,)](torch.ones(8).to(dtype), out, 8, 16, OTHER=0.0, BLOCK=16)
    assert out.tolist() == [1.0] * 8 + [0.0] * 8


def test_out_of_bounds_is_an_error() -> None:
    x, out = torch.zeros(16)[4:12], torch.zeros(16)
    load_kernel[(1,)](x, out, 12, 16, OTHER=0.0, BLOCK=16)
    with pytest.raises(
        OutOfBounds, match=r"load_kernel.*load of 4 bytes.*byte 48 .*'x', whose storage is .* -16 to 47"
    ):
        load_kernel[(1,)](x, out, 13, 16, OTHER=0.0, BLOCK=16)
    with pytest.raises(OutOfBounds, match=r"store of 4 bytes .*byte 64 .*'out'"):
        load_kernel[(1,)](x, out, 12, 17, OTHER=0.0, BLOCK=32)


@triton.jit
def pointer_kernel(table, out):
    pointer = tl.load(table + tl.program_id(0)).to(tl.pointer_type(tl.float32))
    tl.store(out + tl.program_id(0), tl.load(pointer))


def test_pointers_from_tables() -> None:
    tensors = [torch.full((4,), float(i)) for i in range(3)]
    out = torch.empty(3)
    pointer_kernel[(3,)](torch.tensor([each.data_ptr() for each in tensors]), out)
    assert out.tolist() == [0, 1, 2]
    with pytest.raises(OutOfBounds):
        pointer_kernel[(1,)](torch.tensor([64]), out)
    with pytest.raises(OutOfBounds, match="no multiple"):
        pointer_kernel[(1,)](torch.tensor([tensors[0].data_ptr() + 2]), out)


@triton.jit
def hint_kernel(x, out, offset, BLOCK: tl.constexpr, MULTIPLE: tl.constexpr):
    first = tl.multiple_of(offset, MULTIPLE)
    i = tl.multiple_of(first + tl.arange(0, BLOCK), MULTIPLE)
    tl.store(out + tl.arange(0, BLOCK), tl.load(x + i))


def test_hints_are_checked() -> None:
    out = torch.empty(16)
    hint_kernel[(1,)](torch.arange(32.0), out, 8, BLOCK=16, MULTIPLE=8)
    assert out[0] == 8
    with pytest.raises(ValueError, match=r"multiples of \[16\]"):
        hint_kernel[(1,)](torch.arange(32.0), out, 8, BLOCK=16, MULTIPLE=16)


@triton.jit
def order_kernel(counter, out):
    tl.store(out + tl.program_id(0), tl.atomic_add(counter, 1))


def test_programs_run_in_no_particular_order() -> None:
    counter, out = torch.zeros(1, dtype=torch.int32), torch.empty(32, dtype=torch.int32)
    order_kernel[(32,)](counter, out)
    assert out.tolist() != sorted(out.tolist()) == list(range(32))


@triton.jit
def shapes_kernel(x, counts, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    a, n = tl.load(x + i), tl.load(counts + i)
    tl.store(out + i, tl.sum(a[:, None] * n[None, :] + a[None, :] - n, axis=1))
    tl.store(out + BLOCK + i, 1 - n * tl.load(counts))


def test_shapes_twice() -> None:
    """What is worked out once holds for whatever comes later with the same types."""
    for x in (torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0.5, 8.0, 1.0, 2.0])):
        n, out = x.to(torch.int32) + 3, torch.empty(2, 4)
        shapes_kernel[(1,)](x, n, out, BLOCK=4)
        assert torch.equal(out[0], (x[:, None] * n[None] + x[None] - n[None]).sum(1))
        assert torch.equal(out[1], (1 - n * n[0]).float())


@pytest.mark.parametrize("dtype", [tl.float32, tl.bfloat16, tl.int32, tl.uint8], ids=str)
def test_numbers_that_are_equal_stay_what_they_are(dtype: tl.dtype) -> None:
    """A number beside a tensor becomes what Triton makes of it, whatever equal one of another kind came before."""
    builder = original.interpreter_builder
    short, long = original.interpreter_semantic, original.TritonSemantic(builder)
    with triton_interpreter._language():
        block = tl.block_type(dtype, [4])
        tensor = tl.tensor(triton_interpreter.packed([1, 2, 3, 4], dtype), block)
        for number in (0, 0.0, -0.0, False, 1, 1.0, True, 2, 2.0, 1, -0.0):
            for division in (False, True):
                options = (False, False, True, division)
                for pair in ((tensor, number), (number, tensor)):
                    for got, want in zip(
                        short.binary_op_type_checking_impl(*pair, *options),
                        long.binary_op_type_checking_impl(*pair, *options),
                        strict=True,
                    ):
                        assert got.type == want.type
                        assert got.handle.data.tobytes() == want.handle.data.tobytes()


@triton.jit
def device_function(a, SCALE: tl.constexpr):
    return a * SCALE, a.shape[0]


@triton.jit
def calling_kernel(out, BLOCK: tl.constexpr):
    a, n = device_function(tl.zeros([BLOCK], tl.float32) + 1, 3)
    tl.store(out + tl.arange(0, BLOCK), a + n)


def test_device_functions_and_the_language_afterwards() -> None:
    before = (tl.load, tl.range, tl.tensor.__dict__.get("__index__"))
    out = torch.empty(4)
    calling_kernel[(1,)](out, BLOCK=4)
    assert out.tolist() == [7.0] * 4
    assert before == (tl.load, tl.range, tl.tensor.__dict__.get("__index__"))
