"""Checks of numbers that live on the device: what `debug=True` adds on every backend, at the price of a
synchronisation.

The error names the argument, the place in it and the value: `BlockIndexError` for block ids, lengths and slots,
`InvalidArgument` for others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagedkern.backends.base import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    AttentionCall,
    CopyCall,
    MergeCall,
    WriteCall,
)
from pagedkern.errors import BlockIndexError, InvalidArgument


def _first(mask: Tensor) -> list[int] | None:
    """Index of the first true element, or None. Synchronises."""
    hits = mask.nonzero()
    return hits[0].tolist() if len(hits) else None


def check_attention(call: AttentionCall) -> None:
    """Lengths, query offsets and every block id that the call would follow.

    Ids past `ceil(seq_len / B)` and ids wholly behind the sliding window of all the sequence's queries are not
    followed, so they may hold anything.
    """
    num_blocks, block_size = call.k_cache.shape[:2]
    width = call.block_table.shape[1]
    lens = call.seq_lens.long()
    if at := _first((lens < 0) | (lens > width * block_size)):
        i = at[0]
        raise BlockIndexError(
            f"seq_lens[{i}]: got {int(lens[i])} for sequence {i}, expected 0 to {width * block_size} "
            f"(block_table has {width} columns of {block_size} tokens)"
        )
    q_lens = check_query_lens(call)
    first_needed = torch.zeros_like(lens)
    if call.sliding_window is not None:
        first_needed = (lens - q_lens - call.sliding_window + 1).clamp_(min=0)
    column = torch.arange(width, device=lens.device)[None, :] * block_size  # first token of each column
    used = (column < lens[:, None]) & (column + block_size > first_needed[:, None]) & (q_lens > 0)[:, None]
    bad = used & ((call.block_table < 0) | (call.block_table >= num_blocks))
    if at := _first(bad):
        i, j = at
        raise BlockIndexError(
            f"block_table[{i}, {j}]: got {int(call.block_table[i, j])} for sequence {i}, tokens {j * block_size} to "
            f"{min((j + 1) * block_size, int(lens[i])) - 1}, expected 0 to {num_blocks - 1}"
        )


def check_query_lens(call: AttentionCall) -> Tensor:
    """Query tokens of each sequence, int64 [S]; checks that `cu_seqlens_q` are prefix sums within the rows of q."""
    cu = call.cu_seqlens_q
    if cu is None:
        return torch.ones_like(call.seq_lens, dtype=torch.int64)
    cu = cu.long()
    if int(cu[0]) != 0:
        raise BlockIndexError(f"cu_seqlens_q[0]: got {int(cu[0])}, expected 0")
    q_lens = cu.diff()
    if at := _first((q_lens < 0) | (q_lens > call.max_seqlen_q)):
        i = at[0]
        raise BlockIndexError(
            f"cu_seqlens_q[{i + 1}]: got {int(cu[i + 1])} after {int(cu[i])}, so sequence {i} has {int(q_lens[i])} "
            f"query tokens, expected 0 to {call.max_seqlen_q} (max_seqlen_q)"
        )
    if int(cu[-1]) > len(call.q):
        raise BlockIndexError(f"cu_seqlens_q[-1]: got {int(cu[-1])}, expected 0 to {len(call.q)} (the rows of q)")
    return q_lens


def check_write(call: WriteCall) -> None:
    """Every slot is -1 or inside the cache."""
    num_slots = call.k_cache.shape[0] * call.k_cache.shape[1]
    if at := _first((call.slot_mapping < -1) | (call.slot_mapping >= num_slots)):
        i = at[0]
        raise BlockIndexError(
            f"slot_mapping[{i}]: got {int(call.slot_mapping[i])} for token {i}, expected -1 or 0 to {num_slots - 1}"
        )


def check_copy(call: CopyCall) -> None:
    """Every block id is inside every cache, and no destination occurs twice."""
    num_blocks = min((len(cache) for cache in call.caches), default=0)
    for name, ids in (("src_blocks", call.src_blocks), ("dst_blocks", call.dst_blocks)):
        if at := _first((ids < 0) | (ids >= num_blocks)):
            i = at[0]
            raise BlockIndexError(f"{name}[{i}]: got {int(ids[i])}, expected 0 to {num_blocks - 1}")
    order = call.dst_blocks.sort().values
    if at := _first(order[1:] == order[:-1]):
        raise BlockIndexError(f"dst_blocks: got block {int(order[at[0]])} twice, expected each destination once")


def check_scale(name: str, scale: Tensor) -> None:
    """Every scale of a quantized cache is a positive normal number. float32 [G]: few, so this is cheap on a CPU."""
    for head, value in enumerate(scale.tolist()):
        if not SMALLEST_SCALE <= value <= LARGEST_SCALE:
            raise InvalidArgument(
                f"{name}[{head}]: got {value} for KV head {head}, expected a positive number, {SMALLEST_SCALE:.3g} to "
                f"{LARGEST_SCALE:.3g}"
            )


def check_merge(call: MergeCall) -> None:
    """No lse is +inf, by which some libraries mark a row that has seen nothing."""
    for name, lse in (("lse_a", call.lse_a), ("lse_b", call.lse_b)):
        if at := _first(lse == torch.inf):
            token, head = at
            raise InvalidArgument(
                f"{name}[{token}, {head}]: got inf for token {token}, head {head}, expected a number, or -inf where "
                "nothing was seen"
            )
