"""What the operations on a paged KV cache mean, said in float64 as plainly as possible: the judge of every backend.

It imports torch and the standard library, never pagedkern. Speed is no concern, and neither is wrong input: the
arguments are those of the calls in `pagedkern`, assumed to be valid. What no query may see is never read.

Shapes: S sequences, T query tokens, H query heads, G KV heads, D head_dim of Q and K, E head_dim of V, N blocks,
B tokens a block, W width of the block table.

The attention of one query row with what it sees (`attend_row`), after Vaswani et al. 2017 (scaled dot product), Gemma 2
(softcap), Press et al. 2022 (ALiBi), Beltagy et al. 2020 (sliding window), Xiao et al. 2024 and gpt-oss (a sink: a
score that takes part in the softmax but has no value):

    s_j = scale * <q, k_j>;   s_j = softcap * tanh(s_j / softcap);   s_j += slope * (j - p)
    lse = log(sum of exp(s_j) + exp(sink));   out = sum of exp(s_j - lse) * v_j

exp(-inf) is 0, and a sink of +inf takes everything: out = 0, lse = +inf. A row whose scores are all -inf is like one
that sees nothing. NaN in a score or a sink gives NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

INF = math.inf


@dataclass(frozen=True)
class Seen:
    """The part of one sequence that any of its queries sees, gathered from the blocks and multiplied by its scales."""

    rows: range  # of q, out and lse
    position: int  # of the first row in the sequence; negative if there are more queries than tokens
    start: int  # position of k[0] and v[0]
    k: Tensor  # float64 [n, G, D]
    v: Tensor  # float64 [n, G, E]


def paged_attention(
    q: Tensor,  # [T, H, D]
    k_cache: Tensor,  # [N, B, G, D]
    v_cache: Tensor,  # [N, B, G, E]
    block_table: Tensor,  # [S, W]
    seq_lens: Tensor,  # [S]
    *,
    cu_seqlens_q: Tensor | None = None,  # [S+1]
    scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,  # [H]
    sinks: Tensor | None = None,  # [H]
    k_scale: float | Tensor | None = None,  # or [G]
    v_scale: float | Tensor | None = None,  # or [G]
) -> tuple[Tensor, Tensor]:
    """Attention in float64: `out` [T, H, E] and `lse` [T, H], both on the CPU."""
    num_tokens, num_heads, head_dim = q.shape
    scale = head_dim**-0.5 if scale is None else scale
    slopes = torch.zeros(num_heads, dtype=torch.float64) if alibi_slopes is None else exact(alibi_slopes)
    sink = torch.full((num_heads,), -INF, dtype=torch.float64) if sinks is None else exact(sinks)

    out = torch.zeros(num_tokens, num_heads, v_cache.shape[3], dtype=torch.float64)
    out[:, sink.isnan()] = math.nan
    lse = sink.repeat(num_tokens, 1)  # what a row that sees nothing keeps
    for part in sequences(
        k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, causal, sliding_window, k_scale, v_scale
    ):
        end = part.start + len(part.k)
        for row in part.rows:
            position = part.position + row - part.rows.start
            seen = visible(position, end, causal, sliding_window)
            if seen:
                mine = slice(seen.start - part.start, seen.stop - part.start)
                distance = torch.arange(seen.start - position, seen.stop - position, dtype=torch.float64)
                out[row], lse[row] = attend_row(
                    exact(q[row]), part.k[mine], part.v[mine], distance, scale, softcap, slopes, sink
                )
    return out, lse


def attend_row(
    q: Tensor,  # [H, D]
    k: Tensor,  # [n, G, D], the tokens that this row sees and no other
    v: Tensor,  # [n, G, E]
    distance: Tensor,  # [n], j - p
    scale: float,
    softcap: float | None,
    slopes: Tensor,  # [H]
    sink: Tensor,  # [H], -inf where there is none
) -> tuple[Tensor, Tensor]:
    """The formula of the head of this file for one query token: out [H, E] and lse [H]."""
    num_heads, num_kv_heads = q.shape[0], k.shape[1]
    q = q.view(num_kv_heads, num_heads // num_kv_heads, -1)  # head h reads KV head h // (H / G)
    s = scale * torch.einsum("gmd,ngd->gmn", q, k).reshape(num_heads, -1)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    s = s + slopes[:, None] * distance
    m = torch.maximum(s.amax(dim=1), sink)
    base = torch.where(m == -INF, 0, m)
    weight = torch.exp(s - base[:, None])
    total = weight.sum(dim=1) + torch.where(sink == INF, 1, torch.exp(sink - base))
    out = torch.einsum("gmn,nge->gme", weight.view(*q.shape[:2], -1), v).reshape(num_heads, -1)
    return out / torch.where(total == 0, 1, total)[:, None], m + torch.log(total)


def visible(position: int, seq_len: int, causal: bool, sliding_window: int | None) -> range:
    """The tokens that a query at `position` sees: they are always neighbours of one another."""
    first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
    end = min(seq_len, position + 1) if causal else seq_len
    return range(first, max(first, end))


def sequences(
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None,
    causal: bool,
    sliding_window: int | None,
    k_scale: float | Tensor | None,
    v_scale: float | Tensor | None,
) -> Iterator[Seen]:
    """Each sequence that has queries, with what they see. The queries stand at the last positions of their sequence."""
    lengths = [int(n) for n in seq_lens.tolist()]
    starts = list(range(len(lengths) + 1)) if cu_seqlens_q is None else [int(n) for n in cu_seqlens_q.tolist()]
    for i, length in enumerate(lengths):
        rows = range(starts[i], starts[i + 1])
        if rows:
            position = length - len(rows)
            start = min(visible(position, length, causal, sliding_window).start, length)
            k = gather(k_cache, block_table[i], range(start, length), k_scale)
            v = gather(v_cache, block_table[i], range(start, length), v_scale)
            yield Seen(rows, position, start, k, v)


def gather(cache: Tensor, blocks: Tensor, tokens: range, scale: float | Tensor | None) -> Tensor:
    """float64 [len(tokens), G, head_dim]: the tokens of one sequence, multiplied by the scale of their KV head."""
    block_size = cache.shape[1]
    j = torch.arange(tokens.start, tokens.stop, device=cache.device)
    x = exact(cache[blocks[j // block_size].long(), j % block_size])
    return x if scale is None else x * exact(torch.as_tensor(scale)).reshape(-1, 1)


def exact(x: Tensor) -> Tensor:
    """The same numbers in float64 on the CPU."""
    return x.to("cpu").to(torch.float64)


# ---- The same computation by torch in the inputs' dtype: what the error of a backend is compared with. ----


def torch_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Dense attention of each sequence over contiguous K and V with torch's own operations: `out` in q's dtype, `lse`.

    Every operation runs in q's dtype, as eager attention of a model in that dtype does; K and V of a quantized cache
    are brought to that dtype first. `compute_dtype` replaces it where q's dtype cannot hold the scores at all.
    """
    dtype = compute_dtype or q.dtype
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, head_dim_v = v_cache.shape[2:]
    scale = head_dim**-0.5 if scale is None else scale
    sink = torch.full((num_heads,), -INF) if sinks is None else sinks.cpu()

    out = torch.zeros(num_tokens, num_heads, head_dim_v, dtype=q.dtype)
    lse = sink.to(torch.float32).repeat(num_tokens, 1)
    for part in sequences(
        k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, causal, sliding_window, k_scale, v_scale
    ):
        n, rows = len(part.k), slice(part.rows.start, part.rows.stop)
        queries = q[rows].cpu().to(dtype).transpose(0, 1)  # [H, rows, D]
        k, v = (
            x.to(dtype).transpose(0, 1).repeat_interleave(num_heads // num_kv_heads, dim=0).contiguous()
            for x in (part.k, part.v)
        )  # [H, n, D], [H, n, E]
        p = part.position + torch.arange(len(part.rows))[:, None]
        j = part.start + torch.arange(n)
        mask = torch.ones(len(part.rows), n, dtype=torch.bool)
        if causal:
            mask &= j <= p
        if sliding_window is not None:
            mask &= j > p - sliding_window

        s = queries @ k.transpose(1, 2) * scale  # [H, rows, n]
        if softcap is not None:
            s = torch.tanh(s / softcap) * softcap
        if alibi_slopes is not None:
            s = s + (exact(alibi_slopes)[:, None, None] * (j - p)).to(dtype)
        s = s.masked_fill(~mask, -INF)
        s = torch.cat([s, sink.to(dtype)[:, None, None].expand(-1, len(part.rows), 1)], dim=2)
        weight = torch.softmax(s, dim=2)[:, :, :-1].masked_fill(~mask, 0)  # a row that sees nothing is NaN before
        out[rows] = (weight @ v).transpose(0, 1).to(q.dtype)
        lse[rows] = torch.logsumexp(s, dim=2).transpose(0, 1).to(torch.float32)
    return out, lse


def error(got: Tensor, want: Tensor) -> float:
    """The largest absolute difference over the whole of a result, in float64; equal infinities differ by nothing.

    NaN differs from every number by infinity. One norm over the call, since torch is lucky in single elements: the
    error of a correctly rounded one may be many times its own.
    """
    if got.shape != want.shape:
        raise ValueError(f"shapes differ: {tuple(got.shape)} and {tuple(want.shape)}")
    a, b = exact(got), exact(want)
    difference = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs()).nan_to_num(nan=INF, posinf=INF)
    return float(difference.max()) if difference.numel() else 0.0


# ---- The small operations around attention. ----


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys from the attention over each, in float64: out [T, H, E], lse [T, H].

    An infinite lse, of either sign, marks a side that has seen nothing.
    """
    logs = [torch.where(exact(x) == INF, -INF, exact(x)) for x in (lse_a, lse_b)]
    lse = torch.logaddexp(*logs)
    out = torch.zeros(out_a.shape, dtype=torch.float64)
    for part, log in zip((out_a, out_b), logs, strict=True):
        weight = torch.exp(log - lse)[..., None]
        out += torch.where((log == -INF)[..., None], 0.0, weight * exact(part))
    return out, lse


def write_kv(
    k: Tensor,  # [T, G, D]
    v: Tensor,  # [T, G, E]
    k_cache: Tensor,  # [N, B, G, D]
    v_cache: Tensor,  # [N, B, G, E]
    slot_mapping: Tensor,  # [T], -1 = write nothing
    *,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The caches after the write, as new contiguous tensors."""
    results = []
    for x, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        after = cache.clone(memory_format=torch.contiguous_format)
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                after[slot // cache.shape[1], slot % cache.shape[1]] = store(x[token], scale, cache.dtype)
        results.append(after)
    return results[0], results[1]


def store(x: Tensor, scale: float | Tensor | None, dtype: torch.dtype) -> Tensor:
    """[G, D] as a cache of that dtype holds it: converted, or divided by the scale of its head and quantized."""
    if scale is None:
        return x.to(dtype)
    quotient = exact(x) / exact(torch.as_tensor(scale)).reshape(-1, 1)
    return quantize(quotient, dtype).to(x.device)


def quantize(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The representable number nearest to each x (float64), ties to the even code, too large to the largest finite.

    NaN stays NaN in float8 and becomes 0 in int8. Done by looking through all 256 codes, with no arithmetic on bits.
    """
    codes = torch.arange(256, dtype=torch.uint8)
    values = exact(codes.view(dtype))
    finite = values.isfinite() & ~((values == 0) & (codes != 0))  # one zero is enough
    values, order = values[finite].sort()
    codes = codes[finite][order]
    above = torch.searchsorted(values, x.nan_to_num(nan=0.0, posinf=INF, neginf=-INF)).clamp(1, len(values) - 1)
    below = above - 1
    to_below, to_above = x - values[below], values[above] - x
    take_below = (to_below < to_above) | ((to_below == to_above) & (codes[below] % 2 == 0))
    nearest = codes[torch.where(take_below, below, above)]
    if dtype == torch.int8:
        return torch.where(x.isnan(), 0, nearest).view(dtype)
    return torch.where(x.isnan(), torch.full_like(nearest, 0x7F), nearest).view(dtype)


def copy_blocks(caches: Sequence[Tensor], src_blocks: Tensor, dst_blocks: Tensor) -> list[Tensor]:
    """The caches after copying, as new contiguous tensors: every source is read before any destination is written."""
    results = []
    for cache in caches:
        after = cache.clone(memory_format=torch.contiguous_format)
        after[dst_blocks] = cache[src_blocks]
        results.append(after)
    return results
