"""The arrays of a step, from the allocator's buffers to the device."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from pagedkern import _checks as check
from pagedkern.cache.moves import CPU, PlanLike, host_tensor
from pagedkern.errors import InvalidArgument, InvalidType


class PlannedStep(PlanLike, Protocol):
    """What `inputs` describes: a `Step` of the allocator or a `Batch` of the scheduler, whose arrays are buffers.

    A batch also has `token_ids`, int64 [T], and `logits_rows`, int64.
    """

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


class PlannedBatch(PlannedStep, Protocol):
    """A `Batch` of the scheduler."""

    @property
    def token_ids(self) -> Any: ...  # int64 [T]
    @property
    def logits_rows(self) -> Any: ...  # int64


Known = TypeVar("Known")
"""What only a batch knows: a tensor, or None of a `Step`."""


class StepInputs(NamedTuple, Generic[Known]):
    """A step's arrays on the device of the cache: what `paged_attention` and `write_kv` take, by the names that they
    have there, and what the model takes."""

    block_table: Tensor  # int32 [S, W]
    seq_lens: Tensor  # int32 [S]
    cu_seqlens_q: Tensor  # int32 [S+1]
    max_seqlen_q: int  # most query tokens of one sequence
    slot_mapping: Tensor  # int64 [T]
    token_ids: Known  # int64 [T], the model's input; None of a `Step`, which does not know them
    positions: Tensor  # int64 [T], of each token in its sequence; 0 where seq_lens leave no room for one
    logits_rows: Known  # int64: the tokens whose logits give the next ones, one for each output; None of a `Step`


def step_inputs(step: PlannedStep, device: torch.device) -> StepInputs[Any]:
    """The inputs of a step as tensors: on a CPU over the step's own buffers, on other devices copies."""
    try:
        slots = host_tensor("step: slot_mapping", step.slot_mapping, torch.int64)
        table = host_tensor("step: block_table", step.block_table, torch.int32, ndim=2)
        lens = host_tensor("step: seq_lens", step.seq_lens, torch.int32)
        cu = host_tensor("step: cu_seqlens_q", step.cu_seqlens_q, torch.int32)
        bound = step.max_seqlen_q
    except AttributeError as error:
        raise InvalidType(f"step: got {type(step).__name__}, expected a Step or Batch ({error})") from None
    num_seqs, num_tokens, entries = lens.numel(), slots.numel(), table.numel()
    if entries % num_seqs if num_seqs else entries:
        check.refuse("step: block_table", f"{entries} entries for {num_seqs} sequences", "rows of equal length")
    ids, rows = (_known(step, name) for name in ("token_ids", "logits_rows"))
    if ids is not None and ids.numel() != num_tokens:
        raise InvalidArgument(f"step: token_ids: got {ids.numel()}, expected one for each of {num_tokens} slots")
    places = _positions(lens, cu, num_tokens, bound)
    arrays = {"slot_mapping": slots, "positions": places, "token_ids": ids, "logits_rows": rows}  # int64 comes first
    arrays |= {"block_table": table, "seq_lens": lens, "cu_seqlens_q": cu}
    known = {name: array for name, array in arrays.items() if array is not None}
    placed: dict[str, Any] = dict.fromkeys(arrays) | dict(zip(known, upload(list(known.values()), device), strict=True))
    placed["block_table"] = placed["block_table"].view(num_seqs, -1 if num_seqs else 0)
    return StepInputs(max_seqlen_q=bound, **placed)


def _known(step: object, name: str) -> Tensor | None:
    """What a batch knows beyond a step, int64 on the host."""
    buffer = getattr(step, name, None)
    return None if buffer is None else host_tensor(f"step: {name}", buffer, torch.int64)


def _positions(lens: Tensor, cu: Tensor, num_tokens: int, bound: int) -> Tensor:
    """The position of each token, int64: the queries of a sequence stand at its last positions."""
    num_seqs = lens.numel()
    if cu.numel() != num_seqs + 1:
        raise InvalidArgument(
            f"step: cu_seqlens_q: got {cu.numel()} entries for {num_seqs} sequences, expected {num_seqs + 1}"
        )
    if bound == 1 and num_tokens == num_seqs == int(cu[-1]) and int(cu[0]) == 0:
        return lens.long().sub_(1).clamp_(min=0)
    counts = cu.diff()
    if int(cu[0]) != 0 or int(cu[-1]) > num_tokens or (num_seqs and int(counts.min()) < 0):
        raise InvalidArgument(
            f"step: cu_seqlens_q: got {cu.tolist()}, expected prefix sums from 0 to at most {num_tokens}, the slots"
        )
    number = torch.arange(int(cu[-1]), device=CPU)  # of a token in the step; of sequence i, cu[i] is the first one
    places = (number + (lens - cu[1:]).long().repeat_interleave(counts)).clamp_(min=0)
    return places if len(places) == num_tokens else torch.nn.functional.pad(places, (0, num_tokens - len(places)))


def upload(arrays: list[Tensor], device: torch.device) -> list[Tensor]:
    """Flat arrays of the host on the device. To a GPU in one copy, from pinned memory, which waits for nothing."""
    if device.type == "cpu":
        return arrays
    if device.type != "cuda":
        return [array.to(device) for array in arrays]
    sizes = [array.numel() * array.element_size() for array in arrays]
    staging = torch.empty(sum(sizes), dtype=torch.uint8, device=CPU, pin_memory=True)
    for piece, array in zip(staging.split(sizes), arrays, strict=True):
        piece.copy_(array.view(torch.uint8))
    return unpack(staging.to(device, non_blocking=True), arrays)


def unpack(data: Tensor, arrays: list[Tensor]) -> list[Tensor]:
    """Views of packed bytes, with the lengths and dtypes of `arrays`: the widest dtype comes first."""
    sizes = [array.numel() * array.element_size() for array in arrays]
    return [piece.view(array.dtype) for piece, array in zip(data.split(sizes), arrays, strict=True)]
