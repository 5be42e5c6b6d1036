"""`describe` of Python buffers, DLPack capsules and `__cuda_array_interface__`, and what it refuses."""

from __future__ import annotations

import ctypes
import gc
import mmap
import struct
import sys
import weakref
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkern.abi import DEVICE_CUDA, DEVICE_CUDA_MANAGED, ITEMSIZE, describe
from pagedkern.abi.arrayview import contiguous_strides
from pagedkern.errors import InvalidArgument, InvalidType
from tests.abi.makers import CapsuleExporter, CudaArray, view

I32 = ctypes.c_int32
FOREIGN = ">" if sys.byteorder == "little" else "<"


# Python buffers


@pytest.mark.parametrize(
    ("code", "dtype"),
    [
        ("b", "int8"),
        ("B", "uint8"),
        ("h", "int16"),
        ("H", "uint16"),
        ("i", "int32"),
        ("I", "uint32"),
        ("l", "int64"),
        ("q", "int64"),
        ("Q", "uint64"),
        ("f", "float32"),
        ("d", "float64"),
    ],
)
def test_array(code: str, dtype: str) -> None:
    data = array(code, [1, 2, 3])
    got = describe(data, "x")
    assert got.ptr == data.buffer_info()[0]
    assert (got.dtype, got.shape, got.strides, got.read_only) == (dtype, (3,), (1,), False)
    assert (got.device, got.device_type, got.device_id, got.on_host, got.stream) == ("cpu", 1, 0, True, None)
    assert (got.ndim, got.size, got.itemsize) == (1, 3, data.itemsize)


def test_bytes_are_read_only() -> None:
    got = describe(b"abc", "x")
    assert (got.dtype, got.shape, got.read_only) == ("uint8", (3,), True)
    assert ctypes.string_at(got.ptr, 3) == b"abc"
    assert not describe(bytearray(b"abc"), "x").read_only


def test_ctypes_arrays() -> None:
    data = (I32 * 3 * 2)()
    got = describe(data, "x")
    assert (got.ptr, got.dtype, got.shape, got.strides) == (ctypes.addressof(data), "int32", (2, 3), (3, 1))
    assert describe((ctypes.c_long * 2)(), "x").dtype == f"int{8 * ctypes.sizeof(ctypes.c_long)}"
    assert describe((ctypes.c_char * 2)(), "x").dtype == "uint8"
    assert describe((I32 * 3 * 0)(), "x").shape == (0, 3)


def test_memoryview_of_two_dimensions_and_mmap() -> None:
    data = array("i", range(6))
    got = describe(memoryview(data).cast("B").cast("i", (2, 3)), "x")
    assert (got.ptr, got.shape, got.strides) == (data.buffer_info()[0], (2, 3), (3, 1))
    assert describe(memoryview(bytearray(4)).cast("?"), "x").dtype == "bool"
    with mmap.mmap(-1, 4096) as pages:
        assert describe(pages, "x").shape == (4096,)


def test_a_view_pins_its_buffer() -> None:
    data = array("i", [1])
    got = describe(data, "x")
    with pytest.raises(BufferError):
        data.append(2)
    del got
    data.append(2)


def test_a_view_outlives_the_name_of_its_owner() -> None:
    got = describe(array("i", [41, 42]), "x")
    gc.collect()
    assert list((I32 * 2).from_address(got.ptr)) == [41, 42]


def test_views_pass_through_and_compare_without_their_owners() -> None:
    one = view("int32", (2, 3))
    assert describe(one, "x") is one
    other = one._replace(owner=object())
    assert one == other
    assert not one != other  # noqa: SIM202 (`!=` is a method of its own)
    assert hash(one) == hash(other)
    assert one != one._replace(ptr=1)
    assert repr(one) == "ArrayView(int32 [2, 3], strides [3, 1], at 0x70000000 on cuda:0)"


@given(code=st.sampled_from("bBhHiIlLqQfd"), shape=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_any_buffer_shape(code: str, shape: list[int]) -> None:
    size = struct.calcsize(code)
    total = 1
    for n in shape:
        total *= n
    memory = bytearray(total * size)
    got = describe(memoryview(memory).cast("B").cast(code, shape), "x")
    assert got.shape == tuple(shape)
    assert got.itemsize == size
    last = sum((n - 1) * s for n, s in zip(got.shape, got.strides, strict=True))
    assert last == total - 1
    ctypes.c_uint8.from_address(got.ptr + last * size).value = 7  # the last element's first byte
    assert memory[(total - 1) * size] == 7


# DLPack


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("knows_versions", [True, False])
def test_capsule_is_consumed_once_and_deleted_once(versioned: bool, knows_versions: bool) -> None:
    memory = (I32 * 12)(*range(12))
    exporter = CapsuleExporter(
        memory, (2, 3), (6, 1), byte_offset=8, versioned=versioned, knows_versions=knows_versions
    )
    got = describe(exporter, "x")
    assert (got.dtype, got.shape, got.strides) == ("int32", (2, 3), (6, 1))
    assert got.ptr == ctypes.addressof(memory) + 8
    assert exporter.capsule_name == (b"used_dltensor_versioned" if versioned else b"used_dltensor")
    assert exporter.asked == [{"max_version": (1, 0), "copy": False} if knows_versions else {}]
    second = got._replace(shape=(1, 3))
    del got
    assert exporter.deleted == []  # the second view still uses the memory
    del second
    assert exporter.deleted == [exporter.address]
    del exporter.capsule
    gc.collect()
    assert exporter.deleted == [exporter.address]


def test_each_description_takes_a_capsule_of_its_own() -> None:
    exporter = CapsuleExporter((I32 * 3)(), (3,), (1,))
    for n in range(1, 4):
        describe(exporter, "x")
        assert exporter.deleted == [exporter.address] * n


def test_null_strides_and_scalars() -> None:
    assert describe(CapsuleExporter((I32 * 24)(), (2, 3, 4), versioned=False), "x").strides == (12, 4, 1)
    scalar = describe(CapsuleExporter((I32 * 1)(), ()), "x")
    assert (scalar.shape, scalar.strides, scalar.size) == ((), (), 1)


def test_without_a_deleter_the_view_keeps_the_exporter() -> None:
    exporter = CapsuleExporter((I32 * 3)(), (3,), has_deleter=False)
    got, alive = describe(exporter, "x"), weakref.ref(exporter)
    del exporter
    gc.collect()
    assert alive() is not None
    del got
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(
    ("code", "bits", "dtype"),
    [
        (0, 8, "int8"),
        (1, 64, "uint64"),
        (2, 16, "float16"),
        (4, 16, "bfloat16"),
        (6, 8, "bool"),
        (10, 8, "float8_e4m3fn"),
        (11, 8, "float8_e4m3fnuz"),
        (12, 8, "float8_e5m2"),
        (13, 8, "float8_e5m2fnuz"),
    ],
)
def test_dlpack_dtypes(code: int, bits: int, dtype: str) -> None:
    got = describe(CapsuleExporter((ctypes.c_uint64 * 4)(), (4,), (1,), dtype=(code, bits, 1)), "x")
    assert got.dtype == dtype
    assert ITEMSIZE[dtype] * 8 == bits


@pytest.mark.parametrize("dtype", [(5, 64, 1), (2, 32, 4), (3, 64, 1), (0, 4, 1), (17, 4, 1), (2, 128, 1)])
@pytest.mark.parametrize("versioned", [True, False])
def test_unknown_dlpack_dtypes_are_refused_and_given_back(dtype: tuple[int, int, int], versioned: bool) -> None:
    exporter = CapsuleExporter((ctypes.c_uint64 * 4)(), (2,), (1,), dtype=dtype, versioned=versioned)
    with pytest.raises(InvalidArgument, match=r"^table: got dtype DLPack \(code .* expected bool, int8"):
        describe(exporter, "table")
    gc.collect()  # the traceback held the frame
    assert exporter.deleted == [exporter.address]


def test_another_major_version_is_given_back_unread() -> None:
    exporter = CapsuleExporter((I32 * 3)(), (3,), (1,), version=(2, 0))
    exporter.record.tensor.ndim = 1 << 20  # whoever reads on, crashes
    exporter.record.tensor.shape = ctypes.POINTER(ctypes.c_int64)()
    with pytest.raises(InvalidArgument, match=r"x: got DLPack version 2\.0, expected 1\.x"):
        describe(exporter, "x")
    gc.collect()
    assert exporter.deleted == [exporter.address]


def test_read_only_and_copied_flags() -> None:
    assert describe(CapsuleExporter((I32 * 3)(), (3,), (1,), flags=1), "x").read_only
    with pytest.raises(InvalidArgument, match="made a copy"):
        describe(CapsuleExporter((I32 * 3)(), (3,), (1,), flags=2), "x")


def test_a_used_capsule_is_refused() -> None:
    exporter = CapsuleExporter((I32 * 3)(), (3,), (1,))
    first = describe(exporter, "x")
    exporter.__class__ = type("Again", (CapsuleExporter,), {"__dlpack__": lambda self, **_: self.capsule})
    with pytest.raises(InvalidArgument, match="not yet consumed"):
        describe(exporter, "x")
    del first
    assert exporter.deleted == [exporter.address]


@pytest.mark.parametrize("kind", [DEVICE_CUDA, DEVICE_CUDA_MANAGED, 10])
def test_stream_reaches_gpu_exporters_only(kind: int) -> None:
    gpu = CapsuleExporter(0x7000_0000, (3,), (1,), device=(kind, 3))
    got = describe(gpu, "x", stream=42)
    assert gpu.asked == [{"max_version": (1, 0), "copy": False, "stream": 42}]
    assert (got.device_type, got.device_id, got.on_host) == (kind, 3, False)
    host = CapsuleExporter((I32 * 3)(), (3,), (1,))
    describe(host, "x", stream=42)
    assert "stream" not in host.asked[0]


def test_an_exporter_that_declines_is_asked_for_its_buffer() -> None:
    class Declines(array):  # type: ignore[type-arg]
        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

        def __dlpack__(self, **_: object) -> object:
            raise BufferError("not today")

    assert describe(Declines("i", [1, 2]), "x").dtype == "int32"

    class OnlyDeclines:
        __dlpack_device__ = Declines.__dlpack_device__
        __dlpack__ = Declines.__dlpack__

    with pytest.raises(InvalidArgument, match=r"^x: got .*OnlyDeclines, which refuses to export: not today$"):
        describe(OnlyDeclines(), "x")


# __cuda_array_interface__


def test_cuda_array() -> None:
    exporter = CudaArray(stream=7, data=(0x7000_0000, True))
    got = describe(exporter, "x")
    assert (got.ptr, got.dtype, got.shape, got.strides) == (0x7000_0000, "int32", (2, 3), (3, 1))
    assert (got.device_type, got.device_id, got.device) == (DEVICE_CUDA, -1, "cuda")
    assert (got.read_only, got.stream, got.owner) == (True, 7, exporter)
    assert describe(CudaArray(strides=(96, 4)), "x").strides == (24, 1)
    assert describe(CudaArray(shape=(0, 3), data=(0, False)), "x").size == 0
    assert describe(CudaArray(shape=()), "x").strides == ()
    legacy = CudaArray()
    del legacy.__cuda_array_interface__["strides"]
    assert describe(legacy, "x").stream is None


def test_cuda_array_says_which_gpu_the_way_cupy_and_numba_do() -> None:
    class Device:
        id = 3

    class Context:
        device = Device()

    cupy_like, numba_like = CudaArray(), CudaArray()
    cupy_like.device = Device()  # type: ignore[attr-defined]
    numba_like.context = Context()  # type: ignore[attr-defined]
    assert describe(cupy_like, "x").device == describe(numba_like, "x").device == "cuda:3"


@pytest.mark.parametrize(
    ("interface", "words"),
    [
        ({"typestr": f"{FOREIGN}i4"}, "foreign byte order"),
        ({"typestr": "<c8"}, "dtype typestr '<c8'"),
        ({"typestr": "|V2"}, "dtype typestr"),
        ({"typestr": "<i3"}, "dtype typestr"),
        ({"typestr": "i"}, "malformed"),
        ({"data": None}, "malformed"),
        ({"shape": None}, "malformed"),
        ({"mask": object()}, "masked array"),
        ({"stream": 0}, "stream 0"),
        ({"strides": (4, 8)}, "last dimension with a stride of 2 elements"),
        ({"strides": (12, 6)}, "multiples of the element's 4 bytes"),
        ({"data": (0, False)}, "without memory"),
        ({"data": ("a", False)}, "malformed"),
        ({"data": (1.5, False)}, "malformed"),
        ({"data": (-8, False)}, "malformed (ValueError('-8 is out of range'))"),
        ({"data": (2**64, False)}, "malformed"),
        ({"data": (1,)}, "malformed"),
        ({"shape": (-2, 3)}, "malformed (ValueError('-2 is out of range'))"),
        ({"shape": (1.5, 3)}, "malformed"),
        ({"shape": (2**63, 3)}, "malformed"),
        ({"strides": 5}, "malformed"),
        ({"strides": "ab"}, "malformed"),
        ({"strides": ()}, "malformed (ValueError('0 strides for 2 dimensions'))"),
        ({"strides": (4,)}, "malformed (ValueError('1 strides for 2 dimensions'))"),
        ({"strides": (12, 4, 4)}, "malformed (ValueError('3 strides for 2 dimensions'))"),
        ({"strides": (2**63, 4)}, "malformed"),
        ({"stream": "default"}, "malformed"),
    ],
)
def test_cuda_arrays_that_are_refused(interface: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^k_cache: ") as caught:
        describe(CudaArray(**interface), "k_cache")
    assert words in str(caught.value)


@pytest.mark.parametrize("interface", [5, "text", [1]])
def test_a_cuda_interface_that_is_no_mapping(interface: object) -> None:
    class Odd:
        __cuda_array_interface__ = interface

    with pytest.raises(InvalidArgument, match=r"^q: its __cuda_array_interface__ is malformed"):
        describe(Odd(), "q")


@pytest.mark.parametrize("device", [None, 5, (1,), (1, 0, 0), "ab", ("cpu", 0), (1.5, 0)], ids=str)
def test_a_malformed_dlpack_device(device: object) -> None:
    exporter = CapsuleExporter((I32 * 2)(), (2,))
    exporter.device = device  # type: ignore[assignment]
    with pytest.raises(InvalidArgument, match=r"^q: its __dlpack_device__ returned .*, expected two integers"):
        describe(exporter, "q")
    assert exporter.asked == []  # no capsule that nobody would give back


# What is no array


@pytest.mark.parametrize(
    "obj", [[1, 2], (1,), 1.5, 3, None, "text", {}, True, range(3), object(), 1j], ids=lambda obj: type(obj).__name__
)
def test_what_exports_no_array(obj: object) -> None:
    with pytest.raises(
        InvalidType, match=rf"^seq_lens: got {type(obj).__name__}, expected a torch tensor or an object that"
    ):
        describe(obj, "seq_lens")


@pytest.mark.parametrize("kind", [CapsuleExporter, CudaArray, array])
def test_a_class_is_no_array(kind: type) -> None:
    with pytest.raises(InvalidType, match=rf"^q: got the class {kind.__name__}, expected a torch tensor"):
        describe(kind, "q")


@pytest.mark.parametrize(
    ("obj", "words"),
    [
        ((I32.__ctype_be__ * 2)() if sys.byteorder == "little" else (I32.__ctype_le__ * 2)(), "foreign byte order"),
        (memoryview(array("i", range(8)))[::2], "last dimension with a stride of 2 elements"),
        (memoryview(array("i", range(8)))[::-1], "last dimension with a stride of -1 elements"),
        (array("u" if sys.version_info < (3, 13) else "w", "text"), "dtype format"),
        ((ctypes.c_void_p * 2)(), "dtype format"),
        ((ctypes.c_longdouble * 2)(), "dtype format"),
        ((type("Pair", (ctypes.Structure,), {"_fields_": [("a", I32), ("b", I32)]}) * 2)(), "dtype format"),
    ],
    ids=["big-endian", "every-other", "reversed", "unicode", "pointers", "long-double", "records"],
)
def test_buffers_that_are_refused(obj: object, words: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^q: ") as caught:
        describe(obj, "q")
    assert words in str(caught.value)


def test_a_released_memoryview_is_refused() -> None:
    released = memoryview(array("i", [1]))
    released.release()
    with pytest.raises(InvalidArgument, match="q: got memoryview, which exports no buffer"):
        describe(released, "q")


def test_contiguous_strides() -> None:
    assert contiguous_strides((2, 3, 4)) == (12, 4, 1)
    assert contiguous_strides(()) == ()
    assert contiguous_strides((2, 0, 4)) == (4, 4, 1)
