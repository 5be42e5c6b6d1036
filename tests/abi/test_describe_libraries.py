"""`describe` of torch tensors and NumPy arrays, directly and through their DLPack side."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkern.abi import describe
from pagedkern.errors import InvalidArgument
from tests.abi.makers import Delegate

torch = pytest.importorskip("torch", reason="torch is not installed")
np = pytest.importorskip("numpy", reason="NumPy is not installed")

DTYPES = ["bool", "int8", "uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
DTYPES += ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "uint16", "uint32", "uint64"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_dtypes(dtype: str) -> None:
    tensor = torch.empty(2, 3, 4, dtype=getattr(torch, dtype))
    for got in (describe(tensor, "x"), describe(Delegate(tensor), "x")):
        assert (got.ptr, got.dtype, got.shape, got.strides) == (tensor.data_ptr(), dtype, (2, 3, 4), (12, 4, 1))
        assert (got.device, got.device_type, got.device_id, got.read_only) == ("cpu", 1, 0, False)
        assert got.itemsize == tensor.element_size()
        assert type(got.shape) is type(got.strides) is tuple


def test_torch_tensor_stays_alive() -> None:
    tensor = torch.arange(6, dtype=torch.int32)
    part, address = tensor[2:], tensor.data_ptr()
    got, alive = describe(part, "x"), weakref.ref(part)
    del tensor, part
    gc.collect()
    assert alive() is not None
    assert got.ptr == address + 8
    assert list((ctypes.c_int32 * 4).from_address(got.ptr)) == [2, 3, 4, 5]
    del got
    assert alive() is None


def test_torch_parameter_and_gradient() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    assert describe(parameter, "x").ptr == parameter.data_ptr()
    assert describe(parameter * 2, "x").dtype == "float32"


def test_torch_empty() -> None:
    assert describe(torch.empty(0, 4), "x").shape == (0, 4)
    assert describe(torch.empty(4, 0)[:, ::2], "x").shape == (4, 0)


@given(data=st.data(), shape=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_any_torch_view(data: Any, shape: list[int]) -> None:
    """Slices, permutations and broadcasts: every element is where the view says, by either door."""
    base = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)
    tensor = base.permute(data.draw(st.permutations(range(len(shape)))))
    for axis in range(tensor.ndim):
        start = data.draw(st.integers(0, tensor.shape[axis] - 1))
        tensor = tensor.narrow(axis, start, tensor.shape[axis] - start)
    if data.draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        with pytest.raises(InvalidArgument, match="last dimension"):
            describe(tensor, "x")
        return
    for got in (describe(tensor, "x"), describe(Delegate(tensor), "x")):
        assert (got.ptr, got.shape, got.strides) == (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        index = [data.draw(st.integers(0, n - 1)) for n in tensor.shape]
        address = got.ptr + 4 * sum(i * s for i, s in zip(index, got.strides, strict=True))
        assert ctypes.c_int32.from_address(address).value == tensor[tuple(index)].item()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.empty(2, 3, device="meta"), "on meta"),
        (lambda: torch.eye(3).to_sparse(), "layout torch.sparse_coo"),
        (lambda: torch.zeros(3, dtype=torch.complex64), "dtype torch.complex64"),
        (lambda: torch.zeros(3, dtype=torch.complex64).conj().imag.unsqueeze(-1), "negated"),
        (lambda: torch.zeros(4, 4).t(), "last dimension with a stride of 4"),
        (lambda: torch.zeros(1).expand(4), "last dimension with a stride of 0"),
    ],
    ids=["meta", "sparse", "complex", "negated", "transposed", "broadcast"],
)
def test_torch_tensors_that_are_refused(make: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^v_cache: ") as caught:
        describe(make(), "v_cache")
    assert words in str(caught.value)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_torch_tensors_without_memory_are_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(2, 3)
    with pytest.raises(InvalidArgument, match=r"^q: "):
        describe(fake, "q")
    seen = []

    def inside(x: Any) -> Any:
        with pytest.raises(InvalidArgument, match=r"^q: ") as caught:
            describe(x, "q")
        seen.append(str(caught.value))
        return x

    torch.func.vmap(inside)(torch.zeros(2, 3))
    assert len(seen) == 1


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int32", "int64", "float16", "float32", "float64"])
def test_numpy_dtypes(dtype: str) -> None:
    data = np.zeros((2, 3, 4), dtype)
    got = describe(data, "x")
    assert (got.ptr, got.dtype, got.shape, got.strides) == (data.ctypes.data, dtype, (2, 3, 4), (12, 4, 1))
    assert not got.read_only
    by_buffer = describe(memoryview(data), "x")
    assert by_buffer == got


def test_numpy_views() -> None:
    data = np.arange(24, dtype=np.int32).reshape(4, 6)
    assert describe(data[::-2, 1:4], "x").strides == (-12, 1)
    assert describe(data[1:, 2:], "x").ptr == data.ctypes.data + 32
    assert describe(memoryview(data[1:, 2:]), "x") == describe(data[1:, 2:], "x")
    data.setflags(write=False)
    assert describe(data, "x").read_only
    count = sys.getrefcount(data)
    got = describe(data, "x")
    assert sys.getrefcount(data) > count
    del got
    assert sys.getrefcount(data) == count  # the deleter has run


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: np.zeros(3, ">i4" if sys.byteorder == "little" else "<i4"), "foreign byte order"),
        (lambda: np.zeros(3, "c8"), "dtype"),
        (lambda: np.zeros(3, object), "dtype format 'O'"),
        (lambda: np.zeros(3, "M8[s]"), "exports no buffer"),
        (lambda: np.zeros(3, [("a", "i4"), ("b", "f4")]), "dtype format"),
        (lambda: np.zeros(3, [("a", "i4"), ("b", "i1")])["a"], "multiples of the element's 4 bytes"),
        (lambda: np.zeros((3, 4), "i4").T, "last dimension with a stride of 4"),
    ],
    ids=["big-endian", "complex", "objects", "dates", "records", "field", "transposed"],
)
def test_numpy_arrays_that_are_refused(make: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^x: ") as caught:
        describe(make(), "x")
    assert words in str(caught.value)
