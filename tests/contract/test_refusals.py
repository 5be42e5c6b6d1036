"""Clause 7: a wrong call is refused with the argument, what was given and what was expected, and changes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import pagedkern
from pagedkern.errors import BlockIndexError, InvalidArgument, PagedKernError
from tests.contract import wrong_calls, wrong_scales
from tests.contract.problems import Spec, bits, build
from tests.contract.targets import Target
from tests.contract.wrong import Arguments, Wrong

MARK = pytest.mark.parametrize


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor with memory in an argument dictionary, as the whole memory behind it."""
    if isinstance(value, Tensor):
        if value.layout is torch.strided and value.device.type != "meta":
            yield torch.empty(0, dtype=value.dtype, device=value.device).set_(value.untyped_storage())
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors(item)


def check_refused(call: Callable[..., object], right: Arguments, wrong: Wrong) -> None:
    with torch.device(_device(right)):
        arguments = wrong.apply(right)
    before = [bits(x).clone() for x in tensors([right, arguments])]
    with pytest.raises(wrong.error) as caught:
        call(**arguments)
    message = str(caught.value)
    assert re.match(rf"{wrong.name}\b", message), f"does not begin with the argument {wrong.name}: {message}"
    for word in wrong.words:
        assert word in message, f"does not say {word!r}: {message}"
    after = [bits(x) for x in tensors([right, arguments])]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True)), "a refused call changed something"


def _device(arguments: Arguments) -> torch.device:
    return next(tensors(arguments), torch.empty(0)).device


def right(target: Target, make: Callable[[], Arguments]) -> Arguments:
    """The arguments of a right call on the target's device, for its backend."""
    with torch.device(target.device):
        return {"backend": target.name, **make()}


@MARK("wrong", wrong_calls.ATTENTION, ids=str)
def test_paged_attention(target: Target, wrong: Wrong) -> None:
    check_refused(pagedkern.paged_attention, right(target, wrong_calls.right_attention), wrong)


SEEN_WITHOUT_COMPUTING = [
    w for w in wrong_calls.ATTENTION if w.name not in ("out", "return_lse", "debug") and not w.in_memory
]


@MARK("wrong", SEEN_WITHOUT_COMPUTING, ids=str)
def test_explain(target: Target, wrong: Wrong) -> None:
    """It refuses what `paged_attention` refuses, but for numbers in memory."""
    arguments = right(target, wrong_calls.right_attention)
    del arguments["out"]
    check_refused(pagedkern.explain, arguments, wrong)


@MARK("wrong", wrong_calls.WRITE, ids=str)
def test_write_kv(target: Target, wrong: Wrong) -> None:
    check_refused(pagedkern.write_kv, right(target, wrong_calls.right_write), wrong)


@MARK("wrong", wrong_calls.COPY, ids=str)
def test_copy_blocks(target: Target, wrong: Wrong) -> None:
    check_refused(pagedkern.copy_blocks, right(target, wrong_calls.right_copy), wrong)


@MARK("wrong", wrong_calls.MERGE, ids=str)
def test_merge_states(wrong: Wrong) -> None:
    check_refused(pagedkern.merge_states, wrong_calls.right_merge(), wrong)


@MARK("wrong", wrong_calls.KV_CACHE, ids=str)
def test_kv_cache(wrong: Wrong) -> None:
    check_refused(pagedkern.KVCache, wrong_calls.right_kv_cache(), wrong)


@MARK("index", [-1, 2, 1.0, None, True])
def test_a_layer_that_is_not_there(index: Any) -> None:
    cache = pagedkern.KVCache(**wrong_calls.right_kv_cache())
    with pytest.raises(InvalidArgument, match=r"index.*0 to 1"):
        cache.layer(index)


def test_the_right_calls_are_right(target: Target) -> None:
    """What the wrong calls differ from is accepted: they are refused for the one thing that was changed."""
    arguments = right(target, wrong_calls.right_attention)
    pagedkern.paged_attention(**arguments)
    with torch.device(target.device):
        arguments |= {**wrong_scales.quantized_caches(), "k_scale": 0.5, "v_scale": torch.ones(2)}
    pagedkern.paged_attention(**arguments)
    pagedkern.write_kv(**right(target, wrong_calls.right_write))
    pagedkern.copy_blocks(**right(target, wrong_calls.right_copy))
    pagedkern.merge_states(**wrong_calls.right_merge())
    pagedkern.KVCache(**wrong_calls.right_kv_cache())


RIGHT = {
    "paged_attention": wrong_calls.right_attention,
    "write_kv": wrong_calls.right_write,
    "copy_blocks": wrong_calls.right_copy,
}


@MARK("op", RIGHT)
def test_an_argument_that_does_not_exist(target: Target, op: str) -> None:
    with pytest.raises(TypeError, match="sliding_widow"):
        getattr(pagedkern, op)(**right(target, RIGHT[op]), sliding_widow=3)


# ---- Numbers on the device, checked with debug=True. ----


def _set(name: str, index: Any, value: int) -> Callable[[Arguments], None]:
    def change(args: Arguments) -> None:
        args[name][index] = value

    return change


BIG = 2**31 - 1
BAD_NUMBERS: list[tuple[str, Callable[[Arguments], None], tuple[str, ...]]] = [
    # sequence 1 has tokens 0 .. 15 in column 0 only; sequence 2 has 31 tokens in both
    ("block_table", _set("block_table", (1, 0), 6), ("sequence 1", "block_table[1, 0]", "got 6", "0 to 5")),
    (
        "block_table",
        _set("block_table", (2, 1), -1),
        ("sequence 2", "block_table[2, 1]", "got -1", "16 to 30", "0 to 5"),
    ),
    ("block_table", _set("block_table", (0, 1), BIG), ("sequence 0", "block_table[0, 1]", f"got {BIG}", "16 to 19")),
    ("block_table", _set("block_table", (0, 0), -(2**31)), ("sequence 0", "block_table[0, 0]", f"got {-(2**31)}")),
    ("seq_lens", _set("seq_lens", 1, -1), ("sequence 1", "got -1", "0 to 32")),
    ("seq_lens", _set("seq_lens", 2, 33), ("sequence 2", "got 33", "0 to 32")),
    ("seq_lens", _set("seq_lens", 0, BIG), ("sequence 0", f"got {BIG}", "0 to 32")),
    ("cu_seqlens_q", _set("cu_seqlens_q", 0, 1), ("cu_seqlens_q[0]", "got 1")),
    ("cu_seqlens_q", _set("cu_seqlens_q", 2, 0), ("sequence 1", "-1")),
    ("cu_seqlens_q", _set("cu_seqlens_q", 3, 8), ("got 8", "7")),
    ("cu_seqlens_q", _set("cu_seqlens_q", 1, -3), ("sequence 0", "-3")),
]


@MARK(("name", "change", "words"), BAD_NUMBERS)
def test_debug_finds_bad_numbers(
    target: Target, name: str, change: Callable[[Arguments], None], words: tuple[str, ...]
) -> None:
    arguments = right(target, wrong_calls.right_attention)
    change(arguments)
    check_refused(pagedkern.paged_attention, arguments, Wrong(name, "", {"debug": True}, words, BlockIndexError))


def test_debug_finds_more_queries_than_max_seqlen_q(target: Target) -> None:
    arguments = right(target, wrong_calls.right_attention)
    wrong = Wrong("cu_seqlens_q", "", {"debug": True, "max_seqlen_q": 3}, ("sequence 1", "4", "3"), BlockIndexError)
    check_refused(pagedkern.paged_attention, arguments, wrong)


@MARK("slot", [-2, 96, 2**40, -(2**62)])
def test_debug_finds_bad_slots(target: Target, slot: int) -> None:
    arguments = right(target, wrong_calls.right_write)
    arguments["slot_mapping"][3] = slot
    words = ("slot_mapping[3]", "token 3", f"got {slot}", "0 to 95")
    check_refused(pagedkern.write_kv, arguments, Wrong("slot_mapping", "", {"debug": True}, words, BlockIndexError))


@MARK("name", ["src_blocks", "dst_blocks"])
@MARK("block", [-1, 6, 2**40])
def test_debug_finds_bad_blocks_to_copy(target: Target, name: str, block: int) -> None:
    arguments = right(target, wrong_calls.right_copy)
    arguments[name][1] = block
    words = (f"{name}[1]", f"got {block}", "0 to 5")
    check_refused(pagedkern.copy_blocks, arguments, Wrong(name, "", {"debug": True}, words, BlockIndexError))


def test_debug_finds_a_destination_given_twice(target: Target) -> None:
    arguments = right(target, wrong_calls.right_copy)
    arguments["dst_blocks"][1] = 3
    check_refused(
        pagedkern.copy_blocks,
        arguments,
        Wrong("dst_blocks", "", {"debug": True}, ("3", "twice", "once"), BlockIndexError),
    )


@MARK(
    "spec",
    [
        Spec(seq_lens=(1, 0, 17, 90)),
        Spec(seq_lens=(80, 5, 0, 40), query_lens=(13, 9, 2, 0), window=5, block_size=8, spare_rows=3),
        Spec(seq_lens=(1, 0, 30, 90), window=10, block_size=8),
    ],
    ids=str,
)
def test_debug_accepts_what_is_never_followed(target: Target, spec: Spec) -> None:
    """Garbage behind the end of a row, released windows and padding rows are legal and change no result."""
    call = build(spec, device=target.device)
    want, got = target.attend(call), target.attend(call, debug=True)
    assert torch.equal(bits(got.out), bits(want.out))
    assert torch.equal(bits(got.lse), bits(want.lse))


def test_the_table_is_long_enough() -> None:
    """At least 60 wrong calls, none of them twice."""
    for calls in (wrong_calls.ATTENTION, wrong_calls.WRITE, wrong_calls.COPY, wrong_calls.MERGE, wrong_calls.KV_CACHE):
        assert len({str(w) for w in calls}) == len(calls) >= 20
        assert all(issubclass(w.error, PagedKernError) and w.words for w in calls)
