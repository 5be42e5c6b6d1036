"""torch's own attention over the same tokens: contiguous, and paged by flex_attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pagedkern.gpucheck.problems import CallTensors

PAGE = 128  # tokens: flex_attention's default block, the smallest page that its kernels take
COMPILED_FOR = ("8 x 8192", "prompt of 8192")  # shapes: each compilation takes many seconds


def of(problem: CallTensors) -> dict[str, Callable[[], Tensor]]:
    """The peers that can compute a problem: sequences of equal length, a cache of q's dtype."""
    if problem.shape.kv_dtype is not None:
        return {}
    calls = {"torch": contiguous(problem)}
    if problem.shape.name in COMPILED_FOR:
        calls["torch flex"] = flex_paged(problem, compiled=problem.device == "cuda")
    return calls


def contiguous(problem: CallTensors) -> Callable[[], Tensor]:
    """`scaled_dot_product_attention`; the keys are gathered beforehand."""
    q, k, v = problem.dense()
    rows, length = q.shape[2], k.shape[2]
    mask = None
    if 1 < rows < length:
        mask = torch.ones(rows, length, dtype=torch.bool, device=q.device).tril(length - rows)
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(q, k, v, attn_mask=mask, is_causal=rows == length, enable_gqa=True)


def flex_paged(problem: CallTensors, compiled: bool) -> Callable[[], Tensor]:
    """`flex_attention` over torch's experimental `PagedAttention`."""
    from torch.nn.attention.experimental._paged_attention import PagedAttention
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = problem.dense()
    num_seqs, _, rows, _ = q.shape
    length, device = k.shape[2], q.device.type
    width = -(-length // PAGE)
    pages = PagedAttention(num_seqs * width, PAGE, num_seqs, device=device)
    k_cache, v_cache = (x.new_zeros(1, x.shape[1], num_seqs * width * PAGE, x.shape[3]) for x in (k, v))
    lens = torch.full((num_seqs,), length, device=device)
    each = torch.arange(num_seqs, device=device)
    for i in range(num_seqs):
        pages.reserve(each[i : i + 1], lens[i : i + 1])
    pages.assign(each, torch.arange(length, device=device).expand(num_seqs, -1), k, v, k_cache, v_cache)

    def causal(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return key <= row + (length - rows)

    mask = create_block_mask(causal, num_seqs, None, rows, width * PAGE, device=device, BLOCK_SIZE=PAGE)
    mask = pages.convert_logical_block_mask(mask, kv_len=lens)
    attend = torch.compile(flex_attention) if compiled else flex_attention
    return lambda: attend(q, k_cache, v_cache, block_mask=mask, enable_gqa=True)
