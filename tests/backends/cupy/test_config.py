"""What can be tuned, which kernels follow from it, and which copy path the caches allow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pagedkern.backends import load
from pagedkern.backends.base import AttentionCall, Problem
from pagedkern.backends.cupy import config, launch
from pagedkern.backends.cupy.config import CupyConfig, KernelKey
from pagedkern.backends.cupy.launcher import current_launcher
from pagedkern.errors import InvalidArgument, Unsupported

PROBLEM = Problem("cuda", "bfloat16", "bfloat16", 32, 8, 128, 128, 16, 8, 8, 1, 4096)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tile": 48}, "tile"),
        ({"tile": 64.0}, "tile"),
        ({"warps": 3}, "warps"),
        ({"warps": 1}, "warps"),
        ({"tile": 16, "warps": 4}, "warps"),
        ({"stages": 1}, "stages"),
        ({"stages": 9}, "stages"),
        ({"stages": True}, "stages"),
        ({"span": 0}, "span"),
        ({"span": 100}, "span"),
        ({"span": 1 << 31}, "span"),
        ({"num_splits": 0}, "num_splits"),
        ({"decode_tokens": 0}, "decode_tokens"),
        ({"prefill_tile": 128}, "prefill_tile"),
        ({"prefill_warps": 1}, "prefill_warps"),
        ({"prefill_stages": "2"}, "prefill_stages"),
        ({"copy": "fast"}, "copy"),
        ({"shape": 1}, "shape"),
    ],
    ids=str,
)
def test_what_is_out_of_range_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        load("cupy").make_config(fields)


def test_configs_hold_the_default_and_come_back_from_their_fields() -> None:
    backend = load("cupy")
    for problem in (PROBLEM, replace(PROBLEM, max_seqlen_q=64), replace(PROBLEM, q_dtype="float32")):
        made = list(backend.configs(problem))
        assert backend.default_config(problem) in made
        assert len(set(made)) == len(made) > 3
        assert [backend.make_config(c.to_dict()) for c in made] == made


def test_the_default_depends_on_the_model_only() -> None:
    backend, want = load("cupy"), load("cupy").default_config(PROBLEM)
    for change in ({"num_seqs": 999}, {"max_seqlen_k": 1 << 20}, {"max_seqlen_q": 4096}, {"num_tokens": 70_000}):
        assert backend.default_config(replace(PROBLEM, **change)) == want


@pytest.mark.parametrize(
    ("q_dtype", "kv_dtype", "group", "prefill", "shape"),
    [
        ("bfloat16", "bfloat16", 1, False, (True, 16, 1, 4)),
        ("bfloat16", "int8", 16, False, (True, 16, 1, 4)),
        ("float16", "float16", 17, False, (True, 16, 2, 2)),
        ("float16", "float8_e5m2", 128, False, (True, 16, 4, 1)),
        ("float16", "float16", 4, True, (True, 16, 4, 1)),
        ("float32", "float32", 1, False, (False, 1, 1, 4)),
        ("float32", "float32", 3, False, (False, 4, 1, 4)),
        ("float16", "bfloat16", 8, False, (False, 8, 1, 4)),
        ("bfloat16", "float32", 16, False, (False, 8, 2, 2)),
        ("float32", "int8", 1, True, (False, 8, 4, 1)),
    ],
)
def test_rows_and_warps(q_dtype: str, kv_dtype: str, group: int, prefill: bool, shape: tuple[object, ...]) -> None:
    """Tensor cores where both operands have 16 bits; warps share keys until a group fills them with rows."""
    model = KernelKey(q_dtype, kv_dtype, group, 128, 128, False, False)
    made = config.instance(model, CupyConfig(), "async", prefill)
    assert (made.tensor_cores, made.rows, made.row_warps, made.key_warps) == shape


def caches(layout: str, dtype: torch.dtype, dim: int, offset: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    n, size, heads = 3, 16, 2
    token, head = (dim, size * dim) if layout == "HND" else (heads * dim, dim)
    buffers = [torch.zeros(n * size * heads * dim + offset, dtype=dtype) for _ in range(2)]
    made = [x.as_strided((n, size, heads, dim), (size * heads * dim, token, head, 1), offset) for x in buffers]
    return made[0], made[1]


@pytest.mark.skipif(not load("cupy").probe().emulated, reason="the emulation stands for compute capability 9.0")
@pytest.mark.parametrize(
    ("layout", "dtype", "dim", "offset", "wish", "path"),
    [
        ("HND", torch.float16, 64, 0, "auto", "bulk"),
        ("NHD", torch.float16, 64, 0, "auto", "async"),
        ("NHD", torch.float16, 64, 0, "bulk", "bulk"),
        ("HND", torch.float16, 64, 0, "async", "async"),
        ("HND", torch.float16, 64, 0, "plain", "plain"),
        ("HND", torch.float16, 64, 4, "auto", "plain"),
        ("HND", torch.float16, 72, 0, "auto", "bulk"),
        ("HND", torch.int8, 64, 0, "auto", "bulk"),
        ("HND", torch.int8, 72, 0, "auto", "plain"),
        ("NHD", torch.int8, 24, 0, "bulk", "plain"),
        ("HND", torch.float32, 24, 0, "auto", "bulk"),
    ],
)
def test_copy_path(layout: str, dtype: torch.dtype, dim: int, offset: int, wish: str, path: str) -> None:
    k, v = caches(layout, dtype, dim, offset)
    q, none = torch.zeros(1, 2, dim), torch.zeros(1, dtype=torch.int32)
    call = AttentionCall(q, k, v, none[None], none, None, 1, 1.0, True, None, None, None, None, None, None, q, None)
    unit = min(launch._unit(k), launch._unit(v))
    assert launch._copy_path(call, CupyConfig(copy=wish), current_launcher(), unit) == path


def test_contiguous_pieces_of_a_block() -> None:
    """(bytes of a piece, the sizes and strides over the pieces): neighbours are merged, whatever the order."""
    assert launch._runs((16, 2, 64), (128, 64, 1), 2) == (4096, ())
    assert launch._runs((16, 2, 64), (64, 1024, 1), 2) == (4096, ())  # HND seen as NHD
    assert launch._runs((16, 2, 64), (256, 64, 1), 2) == (256, ((16, 512),))
    assert launch._runs((16, 2, 31), (66, 33, 1), 2) == (62, ((32, 66),))
    assert launch._runs((), (), 8) == (8, ())
    assert launch._runs((4, 1, 3), (9, 5, 2), 1) == (1, ((3, 2), (4, 9)))


def test_what_shared_memory_cannot_hold_is_refused() -> None:
    """Before anything is launched, with the bytes."""
    backend = load("cupy")
    if not backend.probe().available:
        pytest.skip(backend.probe().reason)
    device = "cpu" if backend.probe().emulated else "cuda"
    big = torch.zeros(4, 256, 1, 256, device=device)
    table = torch.zeros(1, 4, dtype=torch.int32, device=device)
    q, lens = torch.zeros(1, 1, 256, device=device), torch.ones(1, dtype=torch.int32, device=device)
    call = AttentionCall(q, big, big, table, lens, None, 1, 1.0, True, None, None, None, None, None, None, q, None)
    with pytest.raises(InvalidArgument, match="bytes of shared memory"):
        backend.attention(call, CupyConfig(tile=128, warps=4, stages=8))


def test_more_pairs_than_shared_memory_holds() -> None:
    """Narrower columns first, then a refusal that names the number."""
    backend = load("cupy")
    if not backend.probe().emulated:
        pytest.skip("an allocation for the emulation")
    from pagedkern.backends.base import CopyCall

    many = torch.arange(300_000)
    cache = torch.zeros(300_000, 1, dtype=torch.uint8)
    with pytest.raises(Unsupported, match="300000 pairs"):
        backend.copy_blocks(CopyCall([cache], many, many.flip(0)))
