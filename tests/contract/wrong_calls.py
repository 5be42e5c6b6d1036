"""Wrong calls of every operation, each with the error that it must give and words that its message must contain.

A message begins with the name of the argument at fault; the words are what was given and what was expected. `change`
gives the arguments that differ from those of a right call; where it is a function, it makes them from the right ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagedkern.errors import InvalidType
from tests.contract.wrong import NO_NUMBERS, NUMBER, Arguments, Change, Wrong
from tests.contract.wrong_scales import scales


def replaced(name: str, how: Callable[[Any], Any]) -> Change:
    """One argument made from the right one."""
    return lambda a: {name: how(a[name])}


def of_wrong_type(*names: str) -> list[Wrong]:
    """A list, a number, a string or None where a tensor belongs."""
    values: list[Any] = [[1, 2, 3], 7, "tensor"]
    return [
        Wrong(n, f"a {type(x).__name__}", {n: x}, (type(x).__name__, "tensor"), InvalidType)
        for n in names
        for x in values
    ]


def elsewhere(*names: str) -> list[Wrong]:
    """On another device than the other arguments. (meta stands for one.)"""
    return [Wrong(n, "on another device", replaced(n, methodcaller("to", "meta")), ("meta",)) for n in names]


def of_dtype(name: str, accepted: str, *dtypes: torch.dtype) -> list[Wrong]:
    def wrong(dtype: torch.dtype) -> Wrong:
        words = (str(dtype).removeprefix("torch."), accepted)
        return Wrong(name, f"of {dtype}", replaced(name, methodcaller("to", dtype)), words)

    return [wrong(dtype) for dtype in dtypes]


def of_rank(name: str, *ranks: int) -> list[Wrong]:
    """With another number of dimensions."""

    def reshaped(x: Tensor, rank: int) -> Tensor:
        return x.reshape(*(1,) * (rank - x.ndim), *x.shape) if rank > x.ndim else x.flatten(0, x.ndim - rank)

    return [
        Wrong(name, f"{rank} dimensions", replaced(name, partial(reshaped, rank=rank)), ("shape", "dimensions"))
        for rank in ranks
    ]


def not_contiguous(*names: str) -> list[Wrong]:
    """The last dimension with a stride of 2."""

    def strided(x: Tensor) -> Tensor:
        return torch.stack([x] * 2, dim=-1).flatten(-2)[..., ::2]

    return [Wrong(n, "last dimension strided", replaced(n, strided), ("stride", "contiguous")) for n in names]


def numbers(name: str, accepted: str, values: list[Any], types: list[Any]) -> list[Wrong]:
    """Host numbers out of range, and things that are no such number."""
    wrong = [Wrong(name, repr(x), {name: x}, (str(x), accepted)) for x in values]
    return wrong + [Wrong(name, repr(x), {name: x}, (type(x).__name__, accepted), InvalidType) for x in types]


def cut(name: str, what: str, index: Any, *words: str) -> Wrong:
    """One argument sliced, so that its shape no longer fits."""
    return Wrong(name, what, replaced(name, lambda x: x[index].contiguous()), words)


def caches() -> list[Wrong]:
    """k_cache and v_cache, for `paged_attention` and `write_kv`."""
    odd = (torch.float64, torch.int32, torch.uint8, torch.bool, torch.complex64)
    return [
        *of_wrong_type("k_cache", "v_cache"),
        *of_dtype("k_cache", "float8_e4m3fn", *odd),
        *of_dtype("v_cache", "float32", torch.float16, torch.float64),
        *of_rank("k_cache", 3, 5),
        *of_rank("v_cache", 3),
        *not_contiguous("k_cache", "v_cache"),
        *elsewhere("v_cache"),
        cut("v_cache", "fewer blocks", slice(5), "[5, 16, 2, 48]", "k_cache", "[6, 16, 2"),
        cut("v_cache", "another block size", (slice(None), slice(8)), "[6, 8, 2, 48]", "k_cache", "[6, 16, 2"),
        cut(
            "v_cache", "fewer KV heads", (slice(None), slice(None), slice(1)), "[6, 16, 1, 48]", "k_cache", "[6, 16, 2"
        ),
        Wrong("k_cache", "block size 0", _empty_caches(1), ("[6, 0, 2, 32]", "at least 1")),
        Wrong("k_cache", "no KV head", _empty_caches(2), ("[6, 16, 0, 32]", "at least 1")),
        Wrong("v_cache", "head_dim 0", lambda a: {"v_cache": a["v_cache"][..., :0]}, ("[6, 16, 2, 0]", "at least 1")),
    ]


def _empty_caches(dim: int) -> Change:
    return lambda a: {name: a[name].narrow(dim, 0, 0) for name in ("k_cache", "v_cache")}


def backend_names(backend: str = "backend") -> list[Wrong]:
    return [
        Wrong(backend, "unknown", {backend: "tritno"}, ("'tritno'", "'auto'", "'reference'", "'cpu'")),
        Wrong(backend, "empty", {backend: ""}, ("''", "'auto'")),
        Wrong(backend, "None", {backend: None}, ("NoneType", "'auto'"), InvalidType),
        Wrong(backend, "a number", {backend: 3}, ("int", "'auto'"), InvalidType),
    ]


def _caches_elsewhere(args: Arguments) -> Arguments:
    return {name: args[name].to("meta") for name in ("k_cache", "v_cache")}


def _out(make: Callable[[], Tensor]) -> Change:
    return lambda a: {"out": make()}


WINDOW, CAP = "integer >= 1", "positive finite number"
ATTENTION: list[Wrong] = [
    *of_wrong_type("q", "block_table", "seq_lens", "cu_seqlens_q", "alibi_slopes", "sinks", "out"),
    Wrong("q", "None", {"q": None}, ("NoneType", "tensor"), InvalidType),
    *of_dtype("q", "bfloat16", torch.float64, torch.int32, torch.int8, torch.float8_e4m3fn, torch.bool),
    *of_rank("q", 1, 2, 4),
    *not_contiguous("q", "block_table", "seq_lens", "cu_seqlens_q", "alibi_slopes", "sinks", "out"),
    cut("q", "another head_dim than K", (slice(None), slice(None), slice(24)), "24", "32", "k_cache"),
    cut("q", "heads that the KV heads do not divide", (slice(None), slice(3)), "3", "multiple", "2", "k_cache"),
    cut("q", "no head", (slice(None), slice(0)), "0", "multiple", "2"),
    Wrong("q", "rows that are not one for each sequence", {"cu_seqlens_q": None}, ("7", "3", "cu_seqlens_q")),
    Wrong("q", "requires grad", lambda a: {"q": a["q"].clone().requires_grad_()}, ("grad",)),
    Wrong("q", "sparse", lambda a: {"q": a["q"].to_sparse()}, ("sparse", "strided")),
    *caches(),
    Wrong("k_cache", "on another device", _caches_elsewhere, ("meta",)),
    *elsewhere("block_table", "seq_lens", "cu_seqlens_q", "alibi_slopes", "sinks", "out"),
    *of_dtype("block_table", "int32", torch.int64, torch.float32, torch.int16),
    *of_rank("block_table", 1, 3),
    *of_dtype("seq_lens", "int32", torch.int64, torch.float32),
    *of_rank("seq_lens", 2),
    cut("seq_lens", "another number of sequences than the table", slice(2), "[2]", "[3]", "num_seqs"),
    *of_dtype("cu_seqlens_q", "int32", torch.int64, torch.float32),
    *of_rank("cu_seqlens_q", 2),
    cut("cu_seqlens_q", "one too few", slice(3), "[3]", "[4]", "num_seqs + 1"),
    *numbers(
        "max_seqlen_q",
        "integer >= 0",
        [-1, np.int32(-3)],
        [1.5, 2.0, "3", True, NUMBER, [3], np.float32(3), *NO_NUMBERS],
    ),
    *numbers(
        "scale",
        "finite number",
        [math.nan, math.inf, -math.inf, 1e39, -1e39, np.float32("nan"), np.float64(1e39)],
        ["x", NUMBER, True, [1.0], 1j, *NO_NUMBERS],
    ),
    *numbers("causal", "True or False", [], [1, 0, None, "yes"]),
    *numbers(
        "sliding_window",
        WINDOW,
        [0, -1, -(2**40), np.int64(0), np.int8(-1)],
        [2.5, 4.0, True, "4", NUMBER, (4, 0), np.float64(4), *NO_NUMBERS],
    ),
    *numbers(
        "softcap", CAP, [0, 0.0, -1.0, math.nan, math.inf, np.float32(-2)], ["x", NUMBER, True, [5.0], *NO_NUMBERS]
    ),
    *of_dtype("alibi_slopes", "float32", torch.float16, torch.float64),
    *of_rank("alibi_slopes", 2),
    cut("alibi_slopes", "too few", slice(3), "[3]", "[4]", "num_heads"),
    *of_dtype("sinks", "float32", torch.bfloat16, torch.int32),
    *of_rank("sinks", 2),
    cut("sinks", "too few", slice(2), "[2]", "[4]", "num_heads"),
    *scales("k_scale", "v_scale"),
    *of_dtype("out", "float32", torch.float16, torch.float64),
    *of_rank("out", 2, 4),
    cut("out", "too few rows", slice(6), "[6, 4, 48]", "[7, 4, 48]"),
    cut("out", "too few heads", (slice(None), slice(2)), "[7, 2, 48]", "[7, 4, 48]"),
    Wrong("out", "head_dim of K, not of V", _out(lambda: torch.zeros(7, 4, 32)), ("[7, 4, 32]", "[7, 4, 48]")),
    Wrong("out", "expanded", _out(lambda: torch.zeros(1, 4, 48).expand(7, 4, 48)), ("memory of its own",)),
    Wrong(
        "out",
        "rows that overlap",
        _out(lambda: torch.zeros(999).as_strided((7, 4, 48), (48, 48, 1))),
        ("memory of its own",),
    ),
    Wrong(
        "out",
        "heads that overlap",
        _out(lambda: torch.zeros(999).as_strided((7, 4, 48), (99, 24, 1))),
        ("memory of its own",),
    ),
    Wrong(
        "out",
        "memory of q",
        lambda a: {"q": (x := torch.zeros(7, 4, 48))[..., :32], "out": x},
        ("q", "memory of its own"),
    ),
    Wrong(
        "out",
        "memory of v_cache",
        lambda a: {"out": a["v_cache"].view(-1, 4, 48)[:7]},
        ("v_cache", "memory of its own"),
    ),
    *numbers("return_lse", "True or False", [], [1, None, "yes"]),
    *numbers("debug", "True or False", [], [1, None]),
    *backend_names(),
    Wrong("config", "with backend='auto'", {"backend": "auto", "config": {}}, ("auto", "named backend")),
    Wrong("config", "unknown field", {"config": {"no_such_field": 1}}, ("no_such_field",)),
    Wrong("config", "a list", {"config": [1, 2]}, ("list", "mapping"), InvalidType),
    Wrong("config", "a field that is no plain value", {"config": {"x": NUMBER}}, ("plain",), InvalidType),
]

WRITE: list[Wrong] = [
    *of_wrong_type("k", "v", "slot_mapping"),
    *of_dtype("k", "bfloat16", torch.float64, torch.int8, torch.float8_e5m2, torch.int32),
    *of_dtype("v", "float32", torch.float16, torch.float64),
    *of_rank("k", 2, 4),
    *of_rank("v", 2),
    *not_contiguous("k", "v", "slot_mapping"),
    cut("k", "fewer heads than the cache", (slice(None), slice(1)), "[5, 1, 32]", "[5, 2, 32]"),
    cut("k", "another head_dim than the cache", (slice(None), slice(None), slice(16)), "[5, 2, 16]", "[5, 2, 32]"),
    cut("v", "fewer tokens than k", slice(4), "[4, 2, 48]", "[5, 2, 48]"),
    cut("v", "another head_dim than the cache", (slice(None), slice(None), slice(32)), "[5, 2, 32]", "[5, 2, 48]"),
    *elsewhere("k", "v", "slot_mapping"),
    *of_dtype("slot_mapping", "int64 or torch.int32", torch.int16, torch.uint8, torch.float32),
    *of_rank("slot_mapping", 2),
    cut("slot_mapping", "fewer slots than tokens", slice(4), "[4]", "[5]"),
    *caches(),
    *scales("k_scale", "v_scale"),
    Wrong("k_cache", "expanded", lambda a: {"k_cache": a["k_cache"][:1].expand(6, -1, -1, -1)}, ("memory of its own",)),
    Wrong(
        "v_cache", "expanded", lambda a: {"v_cache": a["v_cache"][:, :1].expand(-1, 16, -1, -1)}, ("memory of its own",)
    ),
    Wrong("k", "requires grad", lambda a: {"k": a["k"].clone().requires_grad_()}, ("grad",)),
    *numbers("debug", "True or False", [], [1, None]),
    *backend_names(),
]

COPY: list[Wrong] = [
    Wrong("caches", "a tensor", lambda a: {"caches": a["caches"][0]}, ("Tensor", "list"), InvalidType),
    Wrong("caches", "None", {"caches": None}, ("NoneType", "list"), InvalidType),
    Wrong("caches", "a number in the list", {"caches": [3]}, ("caches[0]", "int", "tensor"), InvalidType),
    Wrong(
        "caches", "a list in the list", lambda a: {"caches": [a["caches"][0], [1]]}, ("caches[1]", "list"), InvalidType
    ),
    Wrong("caches", "no dimension", lambda a: {"caches": [torch.tensor(1.0)]}, ("caches[0]", "shape")),
    Wrong(
        "caches", "on two devices", lambda a: {"caches": [*a["caches"], torch.zeros(6, device="meta")]}, ("meta", "cpu")
    ),
    Wrong(
        "caches", "expanded", lambda a: {"caches": [torch.zeros(1, 4).expand(6, 4)]}, ("caches[0]", "memory of its own")
    ),
    *of_wrong_type("src_blocks", "dst_blocks"),
    *of_dtype("src_blocks", "int64 or torch.int32", torch.int16, torch.float32),
    *of_dtype("dst_blocks", "int64 or torch.int32", torch.int8, torch.float64),
    *of_rank("src_blocks", 2),
    *of_rank("dst_blocks", 2),
    *elsewhere("src_blocks", "dst_blocks"),
    cut("dst_blocks", "fewer than sources", slice(1), "[1]", "[2]"),
    *numbers("debug", "True or False", [], [1, None]),
    *backend_names(),
]


def _empty_by_inf(name: str) -> Change:
    def change(a: Arguments) -> Arguments:
        lse = a[name].clone()
        lse[2, 3] = math.inf
        return {name: lse, "debug": True}

    return change


MERGE: list[Wrong] = [
    *of_wrong_type("out_a", "lse_a", "out_b", "lse_b"),
    *of_dtype("out_a", "bfloat16", torch.float64, torch.int32),
    *of_dtype("out_b", "float32", torch.float16),
    *of_dtype("lse_a", "float32", torch.float64, torch.float16),
    *of_dtype("lse_b", "float32", torch.float64),
    *of_rank("out_a", 2, 4),
    *of_rank("lse_b", 1, 3),
    *elsewhere("lse_a", "out_b", "lse_b"),
    cut("out_b", "fewer rows", slice(6), "[6, 4, 48]", "[7, 4, 48]"),
    cut("lse_a", "fewer rows", slice(6), "[6, 4]", "[7, 4]"),
    cut("lse_b", "fewer heads", (slice(None), slice(3)), "[7, 3]", "[7, 4]"),
    *numbers("debug", "True or False", [], [1, None]),
    *(
        Wrong(
            n, "+inf, to debug", _empty_by_inf(n), (f"{n}[2, 3]", "token 2, head 3", "got inf", "-inf"), in_memory=True
        )
        for n in ("lse_a", "lse_b")
    ),
]

COUNT = "integer >= 1"
KV_CACHE: list[Wrong] = [
    *(w for n in ("num_layers", "num_blocks", "block_size", "num_kv_heads", "head_dim") for w in
      numbers(n, COUNT, [0, -1], [1.5, 16.0, "16", None, True, NUMBER])),
    *numbers("head_dim_v", COUNT, [0, -8], [1.5, "16"]),
    *numbers("num_host_blocks", "integer >= 0", [-1], [0.5, None]),
    Wrong("dtype", "a string", {"dtype": "float16"}, ("str", "torch.dtype"), InvalidType),
    Wrong("dtype", "int32", {"dtype": torch.int32}, ("int32", "float8_e4m3fn")),
    Wrong("dtype", "float64", {"dtype": torch.float64}, ("float64", "bfloat16")),
    Wrong("layout", "unknown", {"layout": "NDH"}, ("'NDH'", "'HND'", "'NHD'")),
    Wrong("layout", "None", {"layout": None}, ("None", "'HND'")),
    Wrong("layout", "a list", {"layout": ["HND"]}, ("HND",)),
    Wrong("device", "unknown", {"device": "gpu"}, ("'gpu'", "device")),
    Wrong("device", "a float", {"device": 1.5}, ("1.5", "device")),
]  # fmt: skip


def right_attention() -> Arguments:
    """Three sequences with 1, 4 and 2 queries; every argument given that can be."""
    return {
        "q": torch.randn(7, 4, 32),
        "k_cache": torch.randn(6, 16, 2, 32),
        "v_cache": torch.randn(6, 16, 2, 48),
        "block_table": torch.tensor([[0, 1], [2, 3], [4, 5]], dtype=torch.int32),
        "seq_lens": torch.tensor([20, 16, 31], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 1, 5, 7], dtype=torch.int32),
        "alibi_slopes": torch.ones(4),
        "sinks": torch.ones(4),
        "out": torch.full((7, 4, 48), math.nan),
    }


def right_write() -> Arguments:
    return {
        "k": torch.randn(5, 2, 32),
        "v": torch.randn(5, 2, 48),
        "k_cache": torch.randn(6, 16, 2, 32),
        "v_cache": torch.randn(6, 16, 2, 48),
        "slot_mapping": torch.tensor([0, 95, -1, 17, 40]),
    }


def right_copy() -> Arguments:
    caches = [torch.randn(6, 16, 2, 32), torch.randn(6, 4)]
    return {"caches": caches, "src_blocks": torch.tensor([0, 5]), "dst_blocks": torch.tensor([3, 1])}


def right_merge() -> Arguments:
    return {
        "out_a": torch.randn(7, 4, 48),
        "lse_a": torch.randn(7, 4),
        "out_b": torch.randn(7, 4, 48),
        "lse_b": torch.randn(7, 4),
    }


def right_kv_cache() -> Arguments:
    return {
        "num_layers": 2,
        "num_blocks": 3,
        "block_size": 16,
        "num_kv_heads": 2,
        "head_dim": 8,
        "dtype": torch.float32,
        "device": "cpu",
    }
