"""Numbers that live in tensors and lead out of the cache: each is named, and no wild memory is read or written."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from pagedkern.backends.base import CopyCall, WriteCall
from pagedkern.backends.cpu import CpuBackend, CpuConfig
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
    with pytest.raises(BlockIndexError, match=f"is {blocks} .* accepted is 0 to {blocks - 1}"):
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
    with pytest.raises(BlockIndexError, match=re.escape(f"seq_lens[1] is {value}, accepted is 0 to")):
        attend(call_with(Spec(), "seq_lens", 1, value))


@pytest.mark.parametrize(("at", "value"), [(0, 1), (1, -1), (2, 0), (3, 900)])
def test_query_starts(at: int, value: int) -> None:
    spec = Spec(query_lens=(1, 17, 3))
    with pytest.raises(BlockIndexError, match=re.escape(f"cu_seqlens_q[{at}] is {value}, accepted are prefix sums")):
        attend(call_with(spec, "cu_seqlens_q", at, value))


def new_rows(slots: list[int]) -> tuple[WriteCall, Tensor, Tensor]:
    n = len(slots)
    k_cache, v_cache = torch.full((4, 8, 2, 16), torch.nan), torch.full((4, 8, 2, 24), torch.nan)
    k, v = torch.randn(n, 2, 16), torch.randn(n, 2, 24)
    return WriteCall(k, v, k_cache, v_cache, torch.tensor(slots), None, None), k_cache, v_cache


@pytest.mark.parametrize("slot", [32, -2, 2**62, -(2**62)])
def test_slots(slot: int) -> None:
    call, k_cache, v_cache = new_rows([3, -1, 31, slot, 5])
    with pytest.raises(BlockIndexError, match=re.escape(f"slot_mapping[3] is {slot}, accepted is -1")):
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
    with pytest.raises(BlockIndexError, match=re.escape(f"{name}[1] is {block}, accepted is 0 to")):
        CpuBackend().copy_blocks(CopyCall(caches, ids["src_blocks"], ids["dst_blocks"]))
    assert all(torch.equal(a, b) for a, b in zip(caches, before, strict=True)), "copied before all ids were checked"


@pytest.mark.parametrize("span", [0, -64, 63, 100, 64.0, "64", True])
def test_config(span: object) -> None:
    with pytest.raises(InvalidArgument, match=r"config\.span: got"):
        CpuConfig(span)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"config\.span: got"):
        CpuBackend().make_config({"span": span})


def test_config_fields() -> None:
    with pytest.raises(InvalidArgument, match="unknown field 'spam', accepted are span"):
        CpuBackend().make_config({"spam": 1})
    assert CpuBackend().make_config(CpuConfig(2048).to_dict()) == CpuConfig(2048)
