"""The small problem that a candidate must compute before it is timed: made of what kernels get wrong.

Lengths of none, one, and just below, at and above a block and a power of two; queries that are fewer or more than the
tokens; scores so large that a softmax without its maximum overflows; a value in front that must not be lost; NaN in
every slot that nobody may read, also in front of a block's end; garbage in unused table entries; an output full of NaN.
If there is a window it is a short one, with NaN behind it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pagedkern.autotune.space import Workload

GARBAGE = 2**31 - 1  # block id in unused table entries
AT_ONCE = 1 << 19  # scores that the truth is computed for in one go, or those of one KV head
WINDOW = 21  # tokens, of the edge cases: shorter than some of its lengths, no multiple of a block size


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: list[int],
    query_lens: list[int],
    dtype: torch.dtype,
    scale: float = 1.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention over contiguous K and V, computed in a dtype: softmax(q k / sqrt(D)) v, causal.

    Args:
        q: [T, H, D], rows of one sequence after another.
        k, v: [S, L, G, D], multiplied by `scale` first.
        lengths, query_lens: tokens of each sequence, and how many of them, the last ones, have a query.
        sliding_window: tokens that a query sees, its own included.
        softcap: scores s become softcap * tanh(s / softcap).

    Returns [T, H, D]; a row that sees nothing is 0.
    """
    num_kv_heads, head_dim = k.shape[2:]
    group = q.shape[1] // num_kv_heads
    out = torch.zeros_like(q, dtype=dtype)
    row = 0
    for i, (length, count) in enumerate(zip(lengths, query_lens, strict=True)):
        rows = slice(row, row + count)
        row += count
        position = torch.arange(length - count, length, device=q.device)[:, None, None]
        keys_at = torch.arange(length, device=q.device)
        hidden = keys_at > position  # [R, 1, L]
        if sliding_window is not None:
            hidden |= keys_at <= position - sliding_window
        together = max(1, AT_ONCE // max(1, count * group * length))  # KV heads
        for h in range(0, num_kv_heads if length else 0, together):
            some = slice(h, min(h + together, num_kv_heads))
            heads = slice(h * group, some.stop * group)
            keys, values = (x[i, :length, some].to(dtype).transpose(0, 1) * scale for x in (k, v))  # [h, L, D]
            queries = q[rows, heads].to(dtype).unflatten(1, (-1, group)).permute(1, 0, 2, 3)  # [h, R, H/G, D]
            score = queries.flatten(1, 2) @ keys.transpose(1, 2)  # [h, R * H/G, L]
            score = score.mul_(head_dim**-0.5).unflatten(1, (count, group))
            score = score if softcap is None else softcap * (score / softcap).tanh()
            weights = score.masked_fill_(hidden, -math.inf).softmax(-1)
            weights = weights.nan_to_num_(0.0) if count > length else weights  # a row that sees nothing
            found = weights.flatten(1, 2) @ values
            out[rows, heads] = found.unflatten(1, (count, group)).permute(1, 0, 2, 3).flatten(1, 2)
    return out


def lengths_for(block_size: int, decode: bool) -> tuple[list[int], list[int]]:
    """Tokens and query tokens of each sequence of the edge cases."""
    near = [0, 1, 2, block_size - 1, block_size, block_size + 1, 3 * block_size, 63, 64, 65, 129]
    lengths = [n for n in dict.fromkeys(near) if n >= 0]
    if decode:
        return lengths, [1] * len(lengths)
    lengths = [*lengths, 70, 130]
    return lengths, [*(min(n, 37) for n in lengths[:-2]), 1, 3]


def lay_out(
    dense_k: Tensor, dense_v: Tensor, lengths: list[int], block_size: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Contiguous K and V [S, L, G, D] in caches [N, B, G, D], views of HND memory, and their block table [S, W]."""
    device = dense_k.device
    counts = [-(-n // block_size) for n in lengths]
    ids = torch.randperm(sum(counts) + 1, generator=generator, device=device)  # one block is nobody's
    caches = []
    for tensor in (dense_k, dense_v):
        shape = (len(ids), tensor.shape[2], block_size, tensor.shape[3])
        caches.append(poison(tensor.dtype, device).expand(shape).contiguous().transpose(1, 2))
    table = torch.full((len(lengths), max(counts) + 1), GARBAGE, dtype=torch.int32, device=device)
    first = 0
    for i, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        own = ids[first : first + count]
        table[i, :count] = own
        for tensor, cache in zip((dense_k, dense_v), caches, strict=True):
            if length:
                scatter(tensor[i, :length], cache, own)
        first += count
    return caches[0], caches[1], table


def poison(dtype: torch.dtype, device: torch.device) -> Tensor:
    """What stands where nobody may read: NaN, or the largest number of a dtype without one."""
    return torch.tensor(math.nan if dtype.is_floating_point else 127.0, device=device).to(dtype)


def scatter(tokens: Tensor, cache: Tensor, blocks: Tensor) -> None:
    """Put tokens [L, G, D] into blocks of a cache [N, B, G, D]; the rest of the last block stays as it is."""
    if tokens.element_size() == 1:  # torch indexes bytes on every device, float8 not
        tokens, cache = tokens.view(torch.uint8), cache.view(torch.uint8)
    block_size = cache.shape[1]
    full = len(tokens) // block_size
    cache[blocks[:full]] = tokens[: full * block_size].unflatten(0, (full, block_size))
    if full < len(blocks):
        cache[blocks[full], : len(tokens) - full * block_size] = tokens[full * block_size :]


class EdgeCases:
    """The edge cases of one block size on a device, and what must come out."""

    def __init__(
        self,
        workload: Workload,
        dtypes: tuple[torch.dtype, torch.dtype],
        block_size: int,
        generator: torch.Generator,
        cache_scale: float,
    ) -> None:
        """Heads, softcap and kind are the workload's. `dtypes`: of q, of the cache."""
        device, decode = generator.device, workload.kind == "decode"
        heads = (workload.num_heads, workload.num_kv_heads, workload.head_dim)
        self.sliding_window = None if workload.sliding_window is None else min(WINDOW, workload.sliding_window)
        self.lengths, self.query_lens = lengths_for(block_size, decode)
        longest, count = max(self.lengths), len(self.lengths)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        q = random(sum(self.query_lens), heads[0], heads[2])
        q[1::2] *= 20  # scores in the hundreds
        self.q = q.to(dtypes[0])
        k, v = (stored(random(count, longest, *heads[1:]) / cache_scale, dtypes[1]) for _ in range(2))
        self.truth, own = (
            dense(
                self.q, k, v, self.lengths, self.query_lens, dtype, cache_scale, self.sliding_window, workload.softcap
            ).double()
            for dtype in (torch.float64, dtypes[0])
        )
        for i, (length, queries) in enumerate(zip(self.lengths, self.query_lens, strict=True)):
            behind = 0 if self.sliding_window is None else max(0, length - queries + 1 - self.sliding_window)
            k[i, :behind] = v[i, :behind] = poison(dtypes[1], device)
        self.tolerance = 2 * (own - self.truth).abs().max().item() + 1e-6
        self.k_cache, self.v_cache, self.table = lay_out(k, v, self.lengths, block_size, generator)
        self.seq_lens = torch.tensor(self.lengths, dtype=torch.int32, device=device)
        starts = torch.tensor([0, *self.query_lens], device=device).cumsum(0).to(torch.int32)
        self.starts = None if decode else starts
        self.out = torch.empty_like(self.q)


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers as a cache of that dtype holds them."""
    return x.clamp(-127, 127).round().to(dtype) if dtype == torch.int8 else x.to(dtype)
