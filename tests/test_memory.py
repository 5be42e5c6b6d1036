"""What memory the operations may write: never read-only memory, never what they read by another name."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import pagedkern
from pagedkern import InvalidArgument
from pagedkern._torch_ops import _overlap

SHAPE = (4, 8, 2, 16)  # blocks, block size, KV heads, head_dim


def decode(q: Any = None, k_cache: Any = None, **options: Any) -> Any:
    """One query over two tokens of block 0."""
    q = torch.zeros(1, 2, 16) if q is None else q
    k_cache = torch.zeros(SHAPE) if k_cache is None else k_cache
    table, lens = torch.zeros(len(q), 1, dtype=torch.int32), torch.full((len(q),), 2, dtype=torch.int32)
    return pagedkern.paged_attention(q, k_cache, torch.zeros(SHAPE), table, lens, **options)


def write(k_cache: Any, v_cache: Any) -> None:
    ones = torch.ones(1, 2, 16)
    pagedkern.write_kv(ones, ones, k_cache, v_cache, torch.tensor([0]))


def frozen(shape: tuple[int, ...]) -> Any:
    array = np.zeros(shape, dtype=np.float32)
    array.flags.writeable = False
    return array


def mapped(shape: tuple[int, ...]) -> Any:
    """A file mapped read-only: writing there ends the process."""
    file = tempfile.TemporaryFile()  # noqa: SIM115  # the map keeps it
    file.write(bytes(4 * int(np.prod(shape))))
    file.flush()
    return np.memmap(file, dtype=np.float32, mode="r", shape=shape)


@pytest.mark.parametrize("make", [frozen, mapped])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("k_cache", lambda make: write(make(SHAPE), torch.zeros(SHAPE))),
        ("v_cache", lambda make: write(torch.zeros(SHAPE), make(SHAPE))),
        ("out", lambda make: decode(out=make((1, 2, 16)))),
        ("caches[0]", lambda make: pagedkern.copy_blocks([make(SHAPE)], torch.tensor([0]), torch.tensor([1]))),
        ("caches[0]", lambda make: pagedkern.copy_blocks([make((3, 4, 5)).T], torch.tensor([0]), torch.tensor([1]))),
    ],
)
def test_read_only_memory_is_not_written(name: str, call: Callable[[Any], None], make: Callable[..., Any]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        call(make)
    assert str(caught.value).startswith(f"{name}: got a read-only ")


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_read_only_memory_may_be_read() -> None:
    assert decode(q=mapped((1, 2, 16)), k_cache=mapped(SHAPE)).shape == (1, 2, 16)


def test_overlap_across_imports() -> None:
    """Two arrays of one buffer come in as two storages, and still overlap."""
    buffer = np.zeros((5, 2, 16), dtype=np.float32)
    with pytest.raises(InvalidArgument, match="out: got memory that overlaps q"):
        decode(q=buffer[0:4], out=buffer[1:5])
    decode(q=buffer[0:2], out=buffer[2:4])


def test_caches_that_overlap() -> None:
    buffer = torch.zeros(5, *SHAPE[1:])
    with pytest.raises(InvalidArgument, match="v_cache: got memory that overlaps k_cache"):
        write(buffer[:4], buffer[1:])
    fused = torch.zeros(4, 8, 2, 32)
    write(fused[..., :16], fused[..., 16:])
    assert fused.sum() == 2 * 32


def pairs() -> list[Any]:
    """(a, b) that do not overlap though their extents cross, and ones that do in a single element."""
    kv = torch.zeros(6, 2, 8, 2, 16)
    by_token = torch.zeros(6, 8, 2, 2, 16)
    row = torch.zeros(7, 3 * 64)
    block = torch.zeros(5, 2 * 96)
    other_order = block[:, 96:].view(5, 4, 3, 8).transpose(1, 2)
    return [
        (kv[:, 0], kv[:, 1], False),
        (kv[:3, 0], kv[3:, 0], False),
        (kv[:4, 0], kv[3:, 0], True),
        (by_token[:, :, 0], by_token[:, :, 1], False),
        (by_token[..., :8], by_token[..., 8:], False),
        (by_token[..., :9], by_token[..., 8:], True),
        (row[:, :64].view(7, 4, 16), row[:, 64:128].view(7, 4, 16), False),
        (row[:, :64].view(7, 4, 16), row[:, 63:127].view(7, 4, 16), True),
        (block[:, :96].view(5, 3, 4, 8), other_order, False),
        (row[:4], row[1:5], True),
    ]


@pytest.mark.parametrize("number", range(10))
def test_overlap_is_exact_for_slices(number: int) -> None:
    a, b, expected = pairs()[number]
    whole = a._base if a._base is not None else a
    whole.zero_()
    a.fill_(1)
    assert bool((b == 1).any()) == expected  # what the memory itself says
    assert _overlap(a, b) == _overlap(b, a) == expected


def test_copying_a_cache_that_is_named_twice() -> None:
    cache = torch.arange(4.0)[:, None].expand(4, 3).clone()
    pagedkern.copy_blocks([cache, cache], torch.tensor([0, 1]), torch.tensor([1, 0]))
    assert cache[:, 0].tolist() == [1, 0, 2, 3]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scale": "0.5"}, "scale: got str"),
        ({"scale": 10**400}, "scale: got an integer beyond float64"),
        ({"sliding_window": 2**63}, "sliding_window: got 9223372036854775808, expected .* at most"),
        ({"backend": "cpu", "config": {"span": float("nan")}}, "config: got span=nan, expected a finite number"),
        ({"backend": "cpu", "config": {"x;y=1": 2}}, "config: got an unknown field 'x;y=1'"),
        ({"backend": "cpu", "config": {"span": "a'b"}}, "config"),
    ],
)
def test_numbers_at_the_edge(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        decode(**options)


@pytest.mark.parametrize("value", [10**400, 1e39, 1e-46, float("inf")])
def test_scales_that_float32_cannot_hold(value: float) -> None:
    cache = torch.zeros(SHAPE, dtype=torch.int8)
    with pytest.raises(InvalidArgument, match="k_scale: got "):
        pagedkern.write_kv(
            torch.ones(1, 2, 16), torch.ones(1, 2, 16), cache, cache.clone(), torch.tensor([0]), k_scale=value
        )
    assert not cache.any()
