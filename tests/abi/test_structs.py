"""The structs that Python fills: every field from the batch, null where the header says so, nothing freed too early."""

from __future__ import annotations

import ctypes
import gc
import math
import weakref
from array import array
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

from pagedkern.abi import (
    ABI_VERSION,
    AttentionParamsStruct,
    BatchStruct,
    to_params,
    to_struct,
    validate,
    validate_contents,
)
from pagedkern.errors import InvalidArgument, InvalidType
from tests.abi.makers import CapsuleExporter, view
from tests.abi.test_validate import BOOKKEEPING, DECODE, MIXED


def fields(struct: ctypes.Structure) -> dict[str, Any]:
    return {name: getattr(struct, name) for name, *_ in struct._fields_}


def test_every_field_of_a_batch() -> None:
    places = {
        "block_table": (0x1000, (100, 1)),
        "seq_lens": (0x2000, (1,)),
        "cu_seqlens_q": (0x3000, (1,)),
        "slot_mapping": (0x4000, (1,)),
        "k_cache": (0x5000, (500, 501, 502, 1)),
        "v_cache": (0x6000, (600, 601, 602, 1)),
        "q": (0x7000, (700, 701, 1)),
        "out": (0x8000, (512, 64, 1)),
        "lse": (0x9000, (12, 1)),
    }
    placed = {name: MIXED[name]._replace(ptr=ptr, strides=strides) for name, (ptr, strides) in places.items()}
    assert fields(to_struct(validate(**placed, max_seqlen_q=5))) == {
        "version": ABI_VERSION,
        "struct_size": ctypes.sizeof(BatchStruct),
        "num_seqs": 3,
        "num_tokens": 7,
        "max_seqlen_q": 5,
        "table_width": 5,
        "num_blocks": 10,
        "block_size": 16,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 64,
        "head_dim_v": 32,
        "q_dtype": 3,
        "kv_dtype": 3,
        "device_type": 2,
        "device_id": 0,
        "block_table": 0x1000,
        "seq_lens": 0x2000,
        "cu_seqlens_q": 0x3000,
        "slot_mapping": 0x4000,
        "k_cache": 0x5000,
        "v_cache": 0x6000,
        "q": 0x7000,
        "out": 0x8000,
        "lse": 0x9000,
        "block_table_stride": 100,
        "k_stride_block": 500,
        "k_stride_token": 501,
        "k_stride_head": 502,
        "v_stride_block": 600,
        "v_stride_token": 601,
        "v_stride_head": 602,
        "q_stride_token": 700,
        "q_stride_head": 701,
        "out_stride_token": 512,
        "out_stride_head": 64,
        "lse_stride_token": 12,
    }


def test_what_is_absent_is_null() -> None:
    struct = fields(to_struct(validate(**BOOKKEEPING)))
    given = {"version", "struct_size", "num_seqs", "num_tokens", "max_seqlen_q", "table_width", "block_size"}
    given |= {"device_type", "block_table", "seq_lens", "block_table_stride"}
    assert {name for name, value in struct.items() if value} == given
    assert to_struct(validate(**DECODE)).cu_seqlens_q is None
    assert to_struct(validate(**{**DECODE, "block_table": view("int32", (3, 0), ptr=0x1001)})).block_table is None


def test_strides_of_64_bits() -> None:
    far = view("bfloat16", (10, 16, 2, 64), (2**40, 2**33, -(2**35), 1))
    struct = to_struct(validate(**{**MIXED, "k_cache": far}))
    assert (struct.k_stride_block, struct.k_stride_token, struct.k_stride_head) == (2**40, 2**33, -(2**35))


def test_struct_keeps_its_arrays() -> None:
    exporter = CapsuleExporter((ctypes.c_int32 * 6)(), (2, 3), (3, 1))
    lens = array("i", [1, 2])
    struct = to_struct(validate(block_table=exporter, seq_lens=lens, block_size=4))
    gc.collect()
    assert exporter.deleted == []
    assert struct.block_table == ctypes.addressof(exporter.memory)
    with pytest.raises(BufferError):
        lens.append(3)
    del struct
    gc.collect()
    assert exporter.deleted == [exporter.address]
    lens.append(3)


def test_params_by_default() -> None:
    params = to_params(validate(**MIXED))
    assert fields(params) == {
        "version": ABI_VERSION,
        "struct_size": ctypes.sizeof(AttentionParamsStruct),
        "scale": 0.125,
        "softcap": 0.0,
        "sliding_window": 0,
        "causal": 1,
        "reserved": 0,
        "alibi_slopes": None,
        "sinks": None,
        "k_scale": None,
        "v_scale": None,
    }


def quantized(device: tuple[int, int] = (2, 0)) -> dict[str, Any]:
    caches = {"k_cache": view("int8", (10, 16, 2, 64)), "v_cache": view("int8", (10, 16, 2, 32))}
    arrays = {**MIXED, **caches}
    return {name: v._replace(device_type=device[0], device_id=device[1]) for name, v in arrays.items()}


def test_params_with_everything() -> None:
    params = to_params(
        validate(**quantized()),
        scale=1.5,
        causal=False,
        sliding_window=2**40,
        softcap=30,
        alibi_slopes=view("float32", (8,), ptr=0x1000),
        sinks=view("float32", (8,), ptr=0x2000, device=(2, -1)),
        k_scale=view("float32", (2,), ptr=0x3000),
        v_scale=view("float32", (2,), ptr=0x4000),
    )
    got = fields(params)
    assert (got["scale"], got["softcap"], got["sliding_window"], got["causal"]) == (1.5, 30.0, 2**40, 0)
    assert [got[name] for name in ("alibi_slopes", "sinks", "k_scale", "v_scale")] == [0x1000, 0x2000, 0x3000, 0x4000]


def test_a_number_scales_every_head_on_the_host() -> None:
    params = to_params(validate(**quantized((1, 0))), k_scale=0.25, v_scale=array("f", [0.5, 2.0]))
    gc.collect()
    assert list((ctypes.c_float * 2).from_address(params.k_scale)) == [0.25, 0.25]
    assert list((ctypes.c_float * 2).from_address(params.v_scale)) == [0.5, 2.0]


def test_params_keep_their_arrays() -> None:
    class Floats(array):  # type: ignore[type-arg]
        pass

    sinks = Floats("f", [0.0] * 8)
    alive = weakref.ref(sinks)
    host = {name: v._replace(device_type=1) for name, v in MIXED.items()}
    params = to_params(validate(**host), sinks=sinks)
    del sinks
    gc.collect()
    assert alive() is not None
    del params
    gc.collect()
    assert alive() is None


SCALES = {"k_scale": view("float32", (2,)), "v_scale": view("float32", (2,))}
F8 = view("float32", (8,))


@pytest.mark.parametrize(
    ("arrays", "options", "error", "message"),
    [
        (MIXED, {"scale": math.nan}, InvalidArgument, "scale: got nan, expected a finite float32"),
        (MIXED, {"scale": 1e300}, InvalidArgument, "scale: got 1e+300, expected a finite float32"),
        (MIXED, {"scale": 10**400}, InvalidArgument, "scale: got 1000"),
        (MIXED, {"scale": 10**5000}, InvalidArgument, "scale: got a number of thousands of digits, expected a fin"),
        (MIXED, {"scale": Fraction(10**400)}, InvalidArgument, "scale: got Fraction(1000"),
        (MIXED, {"softcap": -(10**400)}, InvalidArgument, "softcap: got -1000"),
        (MIXED, {"scale": "1"}, InvalidType, "scale: got str, expected a number"),
        (MIXED, {"scale": True}, InvalidType, "scale: got bool, expected a number"),
        (MIXED, {"softcap": 0}, InvalidArgument, "softcap: got 0, expected a finite float32 greater than 0"),
        (MIXED, {"softcap": -1.0}, InvalidArgument, "softcap: got -1.0, expected a finite float32 greater than 0"),
        (
            MIXED,
            {"softcap": 1e-300},
            InvalidArgument,
            "softcap: got 1e-300, expected a finite float32 greater than 0",
        ),
        (MIXED, {"sliding_window": 0}, InvalidArgument, "sliding_window: got 0, expected 1 to"),
        (MIXED, {"sliding_window": 1.5}, InvalidType, "sliding_window: got float 1.5, expected an int"),
        (MIXED, {"causal": 1}, InvalidType, "causal: got int 1, expected True or False"),
        (MIXED, {"sinks": [0.0] * 8}, InvalidType, "sinks: got list, expected a torch tensor"),
        (MIXED, {"sinks": view("float16", (8,))}, InvalidArgument, "sinks: got dtype float16, expected float32"),
        (
            MIXED,
            {"sinks": view("float32", (2,))},
            InvalidArgument,
            "sinks: got shape (2,), expected (8,): num_heads",
        ),
        (
            MIXED,
            {"alibi_slopes": F8._replace(device_type=1)},
            InvalidArgument,
            "alibi_slopes: got an array on cpu, expected",
        ),
        (
            MIXED,
            {"alibi_slopes": F8._replace(device_id=1)},
            InvalidArgument,
            "alibi_slopes: got an array on cuda:1, expected",
        ),
        (
            MIXED,
            {"k_scale": 0.5},
            InvalidArgument,
            "k_scale: got an array or number for a cache of bfloat16, expected",
        ),
        (quantized(), {}, InvalidArgument, "k_scale: got None for a cache of int8, expected a scale"),
        (
            quantized(),
            {**SCALES, "v_scale": None},
            InvalidArgument,
            "v_scale: got None for a cache of int8, expected a",
        ),
        (
            quantized(),
            {**SCALES, "k_scale": 0.5},
            InvalidArgument,
            "k_scale: got a number for a batch on cuda:0, expected",
        ),
        (
            quantized(),
            {**SCALES, "k_scale": F8},
            InvalidArgument,
            "k_scale: got shape (8,), expected (2,): num_kv_head",
        ),
        (
            quantized((1, 0)),
            {"k_scale": math.inf, "v_scale": 1},
            InvalidArgument,
            "k_scale: got inf, expected a finite",
        ),
        (BOOKKEEPING, {}, InvalidArgument, "batch: got one without q, expected one that asks for attention"),
    ],
)
def test_params_that_are_refused(arrays: dict[str, Any], options: dict[str, Any], error: type, message: str) -> None:
    batch = validate(**arrays)
    with pytest.raises(error) as caught:
        to_params(batch, **options)
    assert str(caught.value).startswith(message)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("call", [to_struct, to_params, validate_contents])
@pytest.mark.parametrize("batch", [None, 5, MIXED], ids=["None", "int", "dict"])
def test_what_is_no_batch(call: Callable[..., object], batch: object) -> None:
    with pytest.raises(InvalidType, match=rf"^batch: got {type(batch).__name__}, expected a Batch"):
        call(batch)
