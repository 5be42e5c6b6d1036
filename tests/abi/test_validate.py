"""`validate`: every rule that descriptors tell. The arrays have no memory: whoever reads one crashes."""

from __future__ import annotations

import dataclasses
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkern.abi import ArrayView, Batch, validate
from pagedkern.abi.batch import overlaps_itself
from pagedkern.errors import InvalidArgument, InvalidType
from tests.abi.makers import CudaArray, view

# 3 sequences, 7 query tokens, 10 blocks of 16 tokens, table of 5 entries, 8 heads, 2 KV heads, head_dim 64 and 32.
MIXED: dict[str, Any] = {
    "block_table": view("int32", (3, 5)),
    "seq_lens": view("int32", (3,)),
    "cu_seqlens_q": view("int32", (4,)),
    "slot_mapping": view("int64", (7,)),
    "k_cache": view("bfloat16", (10, 16, 2, 64)),
    "v_cache": view("bfloat16", (10, 16, 2, 32)),
    "q": view("bfloat16", (7, 8, 64)),
    "out": view("bfloat16", (7, 8, 32)),
    "lse": view("float32", (7, 8)),
}
DECODE: dict[str, Any] = {
    **MIXED,
    "cu_seqlens_q": None,
    "slot_mapping": view("int64", (3,)),
    "q": view("bfloat16", (3, 8, 64)),
    "out": view("bfloat16", (3, 8, 32)),
    "lse": view("float32", (3, 8)),
}
BOOKKEEPING: dict[str, Any] = {
    "block_table": view("int32", (3, 5)),
    "seq_lens": view("int32", (3,)),
    "block_size": 16,
}


def test_mixed_batch() -> None:
    batch = validate(**MIXED, max_seqlen_q=5)
    assert {f: getattr(batch, f) for f in MIXED} == MIXED
    numbers = {f.name: getattr(batch, f.name) for f in dataclasses.fields(Batch) if f.name not in MIXED}
    assert numbers == {
        "num_seqs": 3,
        "num_tokens": 7,
        "max_seqlen_q": 5,
        "width": 5,
        "num_blocks": 10,
        "block_size": 16,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 64,
        "head_dim_v": 32,
        "device_type": 2,
        "device_id": 0,
    }
    assert (batch.device, batch.quantized) == ("cuda:0", False)


def test_decode_batch_has_one_query_a_sequence() -> None:
    batch = validate(**DECODE)
    assert (batch.num_seqs, batch.num_tokens, batch.max_seqlen_q) == (3, 3, 1)
    assert validate(**MIXED).max_seqlen_q == 0  # not known


def test_bookkeeping_needs_no_caches() -> None:
    batch = validate(**BOOKKEEPING)
    assert (batch.num_seqs, batch.num_tokens, batch.num_blocks, batch.head_dim) == (3, 3, None, 0)
    assert validate(**BOOKKEEPING, num_blocks=10).num_blocks == 10
    assert validate(**BOOKKEEPING, cu_seqlens_q=view("int32", (4,))).num_tokens == 0  # not known


def test_a_batch_that_only_writes() -> None:
    only = {name: MIXED[name] for name in ("k_cache", "v_cache", "slot_mapping")}
    batch = validate(**only)
    assert (batch.num_seqs, batch.num_tokens, batch.max_seqlen_q, batch.width) == (0, 7, 0, 0)


def test_nothing_at_all_to_do_is_legal() -> None:
    empty = {
        **DECODE,
        "block_table": view("int32", (0, 5), ptr=0),
        "seq_lens": view("int32", (0,), ptr=0),
        "slot_mapping": view("int64", (0,), ptr=0),
        "q": view("bfloat16", (0, 8, 64), ptr=0),
        "out": view("bfloat16", (0, 8, 32), ptr=0),
        "lse": view("float32", (0, 8), ptr=0),
    }
    assert validate(**empty).num_seqs == 0
    assert validate(**{**DECODE, "block_table": view("int32", (3, 0), ptr=0)}).width == 0


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"])
def test_cache_dtypes(dtype: str) -> None:
    caches = {"k_cache": view(dtype, (10, 16, 2, 64)), "v_cache": view(dtype, (10, 16, 2, 32))}
    assert validate(**{**MIXED, **caches}).quantized == (dtype not in ("float32", "float16", "bfloat16"))


@pytest.mark.parametrize("block_size", [1, 3, 24, 256])
@pytest.mark.parametrize("heads", [(1, 1), (7, 1), (15, 3), (128, 1)])
def test_any_block_size_and_group(block_size: int, heads: tuple[int, int]) -> None:
    h, g = heads
    batch = validate(
        block_table=view("int32", (3, 5)),
        seq_lens=view("int32", (3,)),
        k_cache=view("int8", (10, block_size, g, 72)),
        v_cache=view("int8", (10, block_size, g, 8)),
        q=view("float32", (3, h, 72)),
    )
    assert (batch.block_size, batch.num_heads, batch.num_kv_heads) == (block_size, h, g)


def test_strides_are_free() -> None:
    hnd = {
        "k_cache": view("bfloat16", (10, 16, 2, 64), (4096, 64, 1024, 1)),
        "v_cache": view("bfloat16", (10, 16, 2, 32), (-(2**40), 0, 512, 1)),
        "q": view("bfloat16", (7, 8, 64), (8 * 64 + 2 * 96, 64, 1)),  # a slice of fused QKV
        "out": view("bfloat16", (7, 8, 32), (32, 7 * 32, 1)),  # heads before tokens
        "block_table": view("int32", (3, 5), (100, 1)),
        "lse": view("float32", (7, 8), (16, 1)),
    }
    assert validate(**{**MIXED, **hnd}).k_cache == hnd["k_cache"]


def test_an_exporter_that_does_not_name_its_gpu_takes_the_others() -> None:
    batch = validate(**{**DECODE, "k_cache": view("bfloat16", (10, 16, 2, 64), device=(2, -1))})
    assert batch.device_id == 0
    both = {"block_table": CudaArray(shape=(3, 5)), "seq_lens": CudaArray(shape=(3,)), "block_size": 4}
    assert validate(**both).device == "cuda"
    unnamed = {"k_cache": view("bfloat16", (10, 16, 2, 64), device=(2, -1))}
    with pytest.raises(InvalidArgument, match=r"^seq_lens: got an array on cuda:1, expected cuda:0, where v_cache is$"):
        validate(**{**DECODE, **unnamed, "seq_lens": view("int32", (3,), device=(2, 1))})


def test_host_arrays() -> None:
    table = memoryview(array("i", range(6))).cast("B").cast("i", (2, 3))
    batch = validate(block_table=table, seq_lens=array("i", [1, 2]), slot_mapping=array("q", [0, 1]), block_size=8)
    assert (batch.width, batch.device, batch.num_tokens) == (3, "cpu", 2)


I32, I64 = ("int32", "int64")
WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    # base, what is changed, the message
    (MIXED, {"block_table": [[1, 2], [3, 4]]}, "block_table: got list, expected a torch tensor or an object"),
    (MIXED, {"seq_lens": 3.5}, "seq_lens: got float, expected a torch tensor or an object"),
    (MIXED, {"q": "text"}, "q: got str, expected a torch tensor"),
    (MIXED, {"block_table": view(I64, (3, 5))}, "block_table: got dtype int64, expected int32"),
    (MIXED, {"block_table": view("float32", (3, 5))}, "block_table: got dtype float32, expected int32"),
    (MIXED, {"block_table": view(I32, (15,))}, "block_table: got shape (15,), expected [num_seqs, width]"),
    (MIXED, {"block_table": None}, "block_table: got None although seq_lens is given"),
    (MIXED, {"seq_lens": None}, "seq_lens: got None although block_table is given"),
    (MIXED, {"seq_lens": view(I64, (3,))}, "seq_lens: got dtype int64, expected int32"),
    (MIXED, {"seq_lens": view(I32, (3, 1))}, "seq_lens: got shape (3, 1), expected [num_seqs]"),
    (
        MIXED,
        {"seq_lens": view(I32, (4,))},
        "seq_lens: got num_seqs 4 (shape (4,)), expected 3 as in block_table",
    ),
    (
        MIXED,
        {"seq_lens": view(I32, (3,), device=(1, 0))},
        "seq_lens: got an array on cpu, expected cuda:0, where k_ca",
    ),
    (MIXED, {"seq_lens": view(I32, (3,), device=(2, 1))}, "seq_lens: got an array on cuda:1, expected cuda:0"),
    (MIXED, {"seq_lens": view(I32, (3,), device=(3, 0))}, "seq_lens: got an array on cuda_host, expected cuda:0"),
    (MIXED, {"seq_lens": view(I32, (3,), ptr=0x7002)}, "seq_lens: got address 0x7002, expected a multiple of 4"),
    (MIXED, {"cu_seqlens_q": view(I64, (4,))}, "cu_seqlens_q: got dtype int64, expected int32"),
    (
        MIXED,
        {"cu_seqlens_q": view(I32, (3,))},
        "cu_seqlens_q: got num_seqs + 1 3 (shape (3,)), expected 4 as in block_table",
    ),
    (
        MIXED,
        {"cu_seqlens_q": view(I32, (0,))},
        "cu_seqlens_q: got num_seqs + 1 0 (shape (0,)), expected 4 as in block_table",
    ),
    (MIXED, {"cu_seqlens_q": None}, "q: got 7 tokens, expected 3: one for each sequence of block_table"),
    (MIXED, {"slot_mapping": view(I32, (7,))}, "slot_mapping: got dtype int32, expected int64"),
    (
        MIXED,
        {"slot_mapping": view(I64, (6,))},
        "slot_mapping: got num_tokens 6 (shape (6,)), expected 7 as in q",
    ),
    (
        DECODE,
        {"q": None, "out": None, "lse": None, "slot_mapping": view(I64, (4,))},
        "slot_mapping: got 4 tokens, expected",
    ),
    (MIXED, {"k_cache": None}, "k_cache: got None although v_cache is given"),
    (MIXED, {"v_cache": None}, "v_cache: got None although k_cache is given"),
    (MIXED, {"k_cache": None, "v_cache": None}, "k_cache: got None although q is given"),
    (
        MIXED,
        {"k_cache": view("float64", (10, 16, 2, 64))},
        "k_cache: got dtype float64, expected float32 or float16",
    ),
    (MIXED, {"k_cache": view("uint8", (10, 16, 2, 64))}, "k_cache: got dtype uint8, expected float32 or"),
    (
        MIXED,
        {"v_cache": view("float16", (10, 16, 2, 32))},
        "v_cache: got dtype float16, expected that of k_cache, bf",
    ),
    (
        MIXED,
        {"k_cache": view("bfloat16", (10, 16, 128))},
        "k_cache: got shape (10, 16, 128), expected [num_blocks, b",
    ),
    (
        MIXED,
        {"v_cache": view("bfloat16", (9, 16, 2, 32))},
        "v_cache: got num_blocks 9 (shape (9, 16, 2, 32)), expected 10 as in k_cache",
    ),
    (
        MIXED,
        {"v_cache": view("bfloat16", (10, 8, 2, 32))},
        "v_cache: got block_size 8 (shape (10, 8, 2, 32)), expected 16 as in k_cache",
    ),
    (
        MIXED,
        {"v_cache": view("bfloat16", (10, 16, 4, 32))},
        "v_cache: got num_kv_heads 4 (shape (10, 16, 4, 32)), expected 2 as in k_cache",
    ),
    (
        MIXED,
        {"k_cache": view("bfloat16", (10, 0, 2, 64))},
        "k_cache: got block_size 0 (shape (",
    ),
    (MIXED, {"k_cache": view("bfloat16", (10, 16, 0, 64))}, "k_cache: got num_kv_heads 0 (shape ("),
    (MIXED, {"k_cache": view("bfloat16", (10, 16, 2, 0))}, "k_cache: got head_dim 0 (shape ("),
    (MIXED, {"v_cache": view("bfloat16", (10, 16, 2, 0))}, "v_cache: got head_dim_v 0 (shape ("),
    (
        MIXED,
        {"k_cache": view("bfloat16", (10, 16, 2, 64), read_only=True)},
        "k_cache: got read-only memory although slot_",
    ),
    (
        MIXED,
        {"v_cache": view("bfloat16", (10, 16, 2, 32), read_only=True)},
        "v_cache: got read-only memory although slot_",
    ),
    (MIXED, {"q": view("float64", (7, 8, 64))}, "q: got dtype float64, expected float32 or float16 or bfloat16"),
    (MIXED, {"q": view("int8", (7, 8, 64))}, "q: got dtype int8, expected float32 or float16 or bfloat16"),
    (
        MIXED,
        {"k_cache": view("int8", (2**31, 16, 2, 64)), "v_cache": view("int8", (2**31, 16, 2, 32))},
        "k_cache: got 2147483648 blocks, expected at most 2^31 - 1 (ids are int32)",
    ),
    (MIXED, {"q": view("bfloat16", (7, 512))}, "q: got shape (7, 512), expected [num_tokens, num_heads, head_dim]"),
    (
        MIXED,
        {"q": view("bfloat16", (7, 8, 80))},
        "q: got head_dim 80 (shape (7, 8, 80)), expected 64 as in k_cache",
    ),
    (
        MIXED,
        {"q": view("bfloat16", (7, 5, 64)), "out": None, "lse": None},
        "q: got 5 heads, expected a multiple of the 2 KV heads of k_cache",
    ),
    (MIXED, {"q": view("bfloat16", (7, 0, 64))}, "q: got num_heads 0 (shape ("),
    (MIXED, {"q": None}, "q: got None although out is given"),
    (MIXED, {"q": None, "out": None}, "q: got None although lse is given"),
    (MIXED, {"out": view("float32", (7, 8, 32))}, "out: got dtype float32, expected that of q, bfloat16"),
    (
        MIXED,
        {"out": view("bfloat16", (7, 8, 64))},
        "out: got head_dim_v 64 (shape (7, 8, 64)), expected 32 as in v_cache",
    ),
    (
        MIXED,
        {"out": view("bfloat16", (6, 8, 32))},
        "out: got num_tokens 6 (shape (6, 8, 32)), expected 7 as in q",
    ),
    (
        MIXED,
        {"out": view("bfloat16", (7, 8, 32), read_only=True)},
        "out: got read-only memory, expected memory that c",
    ),
    (
        MIXED,
        {"out": view("bfloat16", (7, 8, 32), (0, 32, 1))},
        "out: got elements that share memory (shape (7, 8, 32), ",
    ),
    (MIXED, {"out": view("bfloat16", (7, 8, 32), (256, 16, 1))}, "out: got elements that share memory"),
    (MIXED, {"lse": view("bfloat16", (7, 8))}, "lse: got dtype bfloat16, expected float32"),
    (
        MIXED,
        {"lse": view("float32", (8, 7))},
        "lse: got num_tokens 8 (shape (8, 7)), expected 7 as in q",
    ),
    (MIXED, {"lse": view("float32", (7, 8), (4, 1))}, "lse: got elements that share memory"),
    (MIXED, {"lse": view("float32", (7, 8), read_only=True)}, "lse: got read-only memory"),
    (
        MIXED,
        {"block_size": 8},
        "k_cache: got block_size 16 (shape (10, 16, 2, 64)), expected 8 as in block_size",
    ),
    (
        MIXED,
        {"num_blocks": 9},
        "k_cache: got num_blocks 10 (shape (10, 16, 2, 64)), expected 9 as in num_blocks",
    ),
    (MIXED, {"max_seqlen_q": -1}, "max_seqlen_q: got -1, expected 0 to 9223372036854775807"),
    (MIXED, {"max_seqlen_q": 1.0}, "max_seqlen_q: got float 1.0, expected an int"),
    (MIXED, {"max_seqlen_q": True}, "max_seqlen_q: got bool True, expected an int"),
    (BOOKKEEPING, {"block_size": None}, "block_size: got None and no caches to take it from, expected an int"),
    (BOOKKEEPING, {"block_size": 0}, "block_size: got 0, expected 1 to"),
    (BOOKKEEPING, {"block_size": -16}, "block_size: got -16, expected 1 to"),
    (BOOKKEEPING, {"block_size": "16"}, "block_size: got str '16', expected an int"),
    (BOOKKEEPING, {"num_blocks": 2**31}, "num_blocks: got 2147483648, expected 0 to 2147483647"),
    (BOOKKEEPING, {"num_blocks": -1}, "num_blocks: got -1, expected 0 to"),
    ({}, {"cu_seqlens_q": view(I32, (4,)), "block_size": 4}, "block_table: got None although cu_seqlens_q is given"),
    ({}, {"block_size": 4}, "block_table, slot_mapping, k_cache: got None for every array, expected at least one"),
]


@pytest.mark.parametrize(("base", "changed", "message"), WRONG, ids=[message[:50] for _, _, message in WRONG])
def test_wrong_batches(base: dict[str, Any], changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        validate(**{**base, **changed})
    assert str(caught.value).startswith(message)
    assert isinstance(caught.value, InvalidType) == any(
        t in message for t in ("list", "float,", "str", "float 1", "bool")
    )
    assert "expected" in str(caught.value)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(-12, 12)), min_size=1, max_size=3))
def test_overlap_is_never_missed(dims: list[tuple[int, int]]) -> None:
    shape, strides = zip(*dims, strict=True)
    addresses = [0]
    for n, step in dims:
        addresses = [a + i * step for a in addresses for i in range(n)]
    shared = len(set(addresses)) < len(addresses)
    nested = all(
        abs(a) >= abs(b) * n or abs(b) >= abs(a) * m
        for i, (m, a) in enumerate(dims)
        for n, b in dims[:i]
        if m > 1 and n > 1
    )
    said = overlaps_itself(view("float32", shape, strides))
    assert said or not shared
    if nested and not shared and len(dims) == 2:
        assert not said


def test_batches_are_frozen() -> None:
    batch = validate(**MIXED)
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.num_seqs = 4  # type: ignore[misc]
    with pytest.raises(AttributeError):
        batch.q.ptr = 4  # type: ignore[misc,union-attr]
    assert isinstance(batch.q, ArrayView)
