"""Numbers that live in tensors and lead out of the cache: each is named, and no wild memory is read or written."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedkern.backends.base import CopyCall, WriteCall
from pagedkern.backends.cpu import MAX_SPAN, CpuBackend, CpuConfig, launch
from pagedkern.errors import BlockIndexError, InvalidArgument
from tests.backends.cpu.helpers import attend
from tests.contract.problems import Call, Spec, build, same_bits

HUGE = 2**31 - 1


def call_with(spec: Spec, name: str, at: tuple[int, ...] | int, value: int) -> Call:
    call = build(spec)
    call.args[name] = call.args[name].clone()
    call.args[name][at] = value
    return call


@pytest.mark.parametrize("value", [-1, -7, HUGE, -HUGE])
@pytest.mark.parametrize("at", [(0, 0), (1, 3), (1, 62)])
def test_block_ids(at: tuple[int, int], value: int) -> None:
    spec = Spec(seq_lens=(5, 1000), block_size=16)
    with pytest.raises(BlockIndexError, match=re.escape(f"block_table[{at[0]}, {at[1]}] is {value} (sequence {at[0]}")):
        attend(call_with(spec, "block_table", at, value))


def test_the_first_block_past_the_last() -> None:
    call = build(Spec(seq_lens=(5,)))
    blocks = call.args["k_cache"].shape[0]
    call.args["block_table"] = torch.tensor([[blocks]], dtype=torch.int32)
    with pytest.raises(BlockIndexError, match=f"is {blocks} .* expected 0 to {blocks - 1}"):
        attend(call)


def test_block_ids_behind_the_window_are_not_looked_at() -> None:
    spec = Spec(seq_lens=(1000,), window=100, block_size=16)
    call, want = build(spec), attend(build(spec))
    for value in (-1, HUGE):
        call.args["block_table"] = call.args["block_table"].clone()
        call.args["block_table"][0, : 900 // 16] = value
        assert same_bits(attend(call).out, want.out)


@pytest.mark.parametrize("value", [-1, 1_000_000])
def test_lengths(value: int) -> None:
    with pytest.raises(BlockIndexError, match=re.escape(f"seq_lens[1] is {value}, expected 0 to")):
        attend(call_with(Spec(), "seq_lens", 1, value))


@pytest.mark.parametrize(("at", "value"), [(0, 1), (1, -1), (2, 0), (3, 900)])
def test_query_starts(at: int, value: int) -> None:
    spec = Spec(query_lens=(1, 17, 3))
    with pytest.raises(BlockIndexError, match=re.escape(f"cu_seqlens_q[{at}] is {value}, expected prefix sums")):
        attend(call_with(spec, "cu_seqlens_q", at, value))


def new_rows(slots: list[int]) -> tuple[WriteCall, Tensor, Tensor]:
    n = len(slots)
    k_cache, v_cache = torch.full((4, 8, 2, 16), torch.nan), torch.full((4, 8, 2, 24), torch.nan)
    k, v = torch.randn(n, 2, 16), torch.randn(n, 2, 24)
    return WriteCall(k, v, k_cache, v_cache, torch.tensor(slots), None, None), k_cache, v_cache


@pytest.mark.parametrize("slot", [32, -2, 2**62, -(2**62)])
def test_slots(slot: int) -> None:
    call, k_cache, v_cache = new_rows([3, -1, 31, slot, 5])
    with pytest.raises(BlockIndexError, match=re.escape(f"slot_mapping[3] is {slot}, expected -1")):
        CpuBackend().write_kv(call)
    assert k_cache.isnan().all(), "K was written before all slots were checked"
    assert v_cache.isnan().all(), "V was written before all slots were checked"


@pytest.mark.parametrize("name", ["src_blocks", "dst_blocks"])
@pytest.mark.parametrize("block", [-1, 4, 2**62])
def test_copies(name: str, block: int) -> None:
    caches = [torch.randn(9, 2), torch.randn(4, 2)]
    before = [c.clone() for c in caches]
    ids = {"src_blocks": torch.tensor([0, 1]), "dst_blocks": torch.tensor([2, 3])}
    ids[name][1] = block
    with pytest.raises(BlockIndexError, match=re.escape(f"{name}[1]: got {block}, expected 0 to 3")):
        CpuBackend().copy_blocks(CopyCall(caches, ids["src_blocks"], ids["dst_blocks"]))
    assert all(torch.equal(a, b) for a, b in zip(caches, before, strict=True)), "copied before all ids were checked"


def test_a_destination_given_twice() -> None:
    cache = torch.randn(4, 2)
    before = cache.clone()
    with pytest.raises(BlockIndexError, match="dst_blocks: got block 2 twice, expected each destination once"):
        CpuBackend().copy_blocks(CopyCall([cache], torch.tensor([0, 1, 3]), torch.tensor([2, 3, 2])))
    assert torch.equal(cache, before)


class Then:
    """A kernel after whose first run something happens: another thread that comes just then, each time."""

    def __init__(self, entry: Any, happens: Callable[[], object]) -> None:
        self.entry, self.happens, self.happened = entry, happens, False

    def get(self, target: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            result = self.entry.get(target)(*args)
            if not self.happened:
                self.happened = True
                self.happens()
            return result

        return run


@pytest.mark.parametrize(
    ("spec", "name", "value"),
    [
        (Spec(seq_lens=(1000, 5)), "seq_lens", [990, 6]),
        (Spec(seq_lens=(1000, 17), query_lens=(3, 5)), "cu_seqlens_q", [0, 5, 8]),
    ],
    ids=["seq_lens", "cu_seqlens_q"],
)
def test_lengths_that_change_during_the_call(
    spec: Spec, name: str, value: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work is counted, memory taken, and the work planned: all of it by the lengths of one moment."""
    call = build(spec)
    want = attend(call)
    given = call.args[name] = call.args[name].clone()
    then = Then(launch.PLAN, lambda: given.copy_(torch.tensor(value)))
    monkeypatch.setattr(launch, "PLAN", then)
    got = attend(call)
    assert then.happened
    assert given.tolist() == value
    assert same_bits(got.out, want.out)
    assert same_bits(got.lse, want.lse)


def test_a_block_id_that_is_wrong_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by the kernel, gone when it is looked for: still refused, and nothing is said about entry -1."""
    call = call_with(Spec(seq_lens=(5,)), "block_table", (0, 0), HUGE)
    monkeypatch.setattr(launch, "ATTEND", Then(launch.ATTEND, lambda: call.args["block_table"].zero_()))
    with pytest.raises(BlockIndexError, match="block_table was written during the call"):
        attend(call)


def test_slots_that_change_during_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    call, k_cache, v_cache = new_rows([3, 9])
    slots = call.slot_mapping
    monkeypatch.setattr(launch, "FIND_BAD_SLOT", Then(launch.FIND_BAD_SLOT, lambda: slots.copy_(torch.tensor([4, 20]))))
    CpuBackend().write_kv(call)
    assert slots.tolist() == [4, 20]
    for cache, new in ((k_cache, call.k), (v_cache, call.v)):
        flat = cache.flatten(0, 1)
        assert same_bits(flat[[3, 9]], new)
        assert flat.isnan().any(dim=2).any(dim=1).sum() == 30, "only the slots that were checked are written"


def test_block_ids_of_copies_that_change_during_the_call() -> None:
    src, dst = torch.tensor([0]), torch.tensor([2])

    class Caches(list[Tensor]):
        rounds = 0

        def __iter__(self) -> Iterator[Tensor]:
            """The first round checks the ids, the second copies."""
            self.rounds += 1
            if self.rounds == 2:
                src[0], dst[0] = 1, 3
            return super().__iter__()

    cache = torch.randn(4, 2)
    want = cache[[0, 1, 0, 3]]
    caches = Caches([cache])
    CpuBackend().copy_blocks(CopyCall(caches, src, dst))
    assert caches.rounds == 2
    assert torch.equal(cache, want)


@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex64, torch.complex32, torch.bool, torch.uint16])
@pytest.mark.parametrize("strided", [False, True])
def test_copies_of_any_dtype(dtype: torch.dtype, strided: bool) -> None:
    """To the bit, NaN with a payload included."""
    size = dtype.itemsize
    ends = [0x01, 0x00] if dtype is torch.bool else [0x7F, 0xF5]  # the last bytes of NaN in each float format
    raw = torch.tensor([*range(1, 200)] * 10)[: 4 * 6 * size].to(torch.uint8).reshape(4, 6, size)
    raw = raw % 2 if dtype is torch.bool else raw
    raw[0, 0] = torch.tensor(ends * size)[:size].flip(0)
    cache = raw.view(dtype).reshape(4, 6)
    view = cache[:, ::2] if strided else cache
    want = raw.clone()
    want[3, :: 2 if strided else 1] = raw[0, :: 2 if strided else 1]
    CpuBackend().copy_blocks(CopyCall([view], torch.tensor([0]), torch.tensor([3])))
    assert torch.equal(raw, want)


@pytest.mark.parametrize("span", [0, -64, 63, 100, 64.0, "64", True, MAX_SPAN + 64, 64 * 10**30])
def test_config(span: object) -> None:
    with pytest.raises(InvalidArgument, match=r"config\.span: got"):
        CpuConfig(span)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"config\.span: got"):
        CpuBackend().make_config({"span": span})


def test_the_longest_span() -> None:
    call = build(Spec(seq_lens=(1000,)))
    assert same_bits(attend(call, span=MAX_SPAN).out, attend(call, span=1024).out)


def test_config_fields() -> None:
    with pytest.raises(InvalidArgument, match="unknown field 'spam', expected span"):
        CpuBackend().make_config({"spam": 1})
    assert CpuBackend().make_config(CpuConfig(2048).to_dict()) == CpuConfig(2048)
