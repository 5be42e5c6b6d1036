"""The arrays of a step, from the allocator's buffers to the device."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pagedkern import _arguments as check
from pagedkern.cache.moves import Plan, host_tensor
from pagedkern.errors import InvalidType


class PlannedStep(Plan, Protocol):
    """What `inputs` describes: a `Step` of the allocator or a `Batch` of the scheduler, whose arrays are buffers."""

    @property
    def block_table(self) -> Any: ...  # int32 [S, W]
    @property
    def seq_lens(self) -> Any: ...  # int32 [S]
    @property
    def cu_seqlens_q(self) -> Any: ...  # int32 [S+1]
    @property
    def max_seqlen_q(self) -> int: ...
    @property
    def slot_mapping(self) -> Any: ...  # int64 [T]


class StepInputs(NamedTuple):
    """A step's arrays on the device of the cache, named as `paged_attention` and `write_kv` name them."""

    block_table: Tensor  # int32 [S, W]
    seq_lens: Tensor  # int32 [S]
    cu_seqlens_q: Tensor  # int32 [S+1]
    max_seqlen_q: int  # most query tokens of one sequence
    slot_mapping: Tensor  # int64 [T]


def step_inputs(step: PlannedStep, device: torch.device) -> StepInputs:
    """On a CPU over the step's own buffers, else copied."""
    try:
        arrays = [
            host_tensor("step: slot_mapping", step.slot_mapping, torch.int64),
            host_tensor("step: block_table", step.block_table, torch.int32, ndim=2),
            host_tensor("step: seq_lens", step.seq_lens, torch.int32),
            host_tensor("step: cu_seqlens_q", step.cu_seqlens_q, torch.int32),
        ]
        bound = step.max_seqlen_q
    except AttributeError as error:
        raise InvalidType(f"step: got {type(step).__name__}, accepted is a Step or Batch ({error})") from None
    num_seqs, entries = arrays[2].numel(), arrays[1].numel()
    if entries % num_seqs if num_seqs else entries:
        check.refuse("step: block_table", f"{entries} entries for {num_seqs} sequences", "rows of equal length")
    slots, table, lens, cu = upload(arrays, device)
    return StepInputs(table.view(num_seqs, -1 if num_seqs else 0), lens, cu, bound, slots)


def upload(arrays: list[Tensor], device: torch.device) -> list[Tensor]:
    """Flat arrays of the host on the device. To a GPU in one copy, from pinned memory, which waits for nothing."""
    if device.type == "cpu":
        return arrays
    if device.type != "cuda":
        return [array.to(device) for array in arrays]
    sizes = [array.numel() * array.element_size() for array in arrays]
    staging = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    for piece, array in zip(staging.split(sizes), arrays, strict=True):
        piece.copy_(array.view(torch.uint8))
    return unpack(staging.to(device, non_blocking=True), arrays)


def unpack(data: Tensor, arrays: list[Tensor]) -> list[Tensor]:
    """Views of packed bytes, with the lengths and dtypes of `arrays`: the widest dtype comes first."""
    sizes = [array.numel() * array.element_size() for array in arrays]
    return [piece.view(array.dtype) for piece, array in zip(data.split(sizes), arrays, strict=True)]
