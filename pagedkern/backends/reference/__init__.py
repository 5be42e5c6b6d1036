"""Backend `reference`: plain torch on any device, complete and exact, written to be read next to the formulas.

It computes in float64, one sequence at a time, so a result depends on its sequence alone. It reads lengths back to the
host, hence it is no candidate for CUDA graphs or for speed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pagedkern.backends import checked
from pagedkern.backends.base import AttentionCall, Config, CopyCall, Probe, Problem, WriteCall
from pagedkern.errors import InvalidArgument

KEY_SPAN = 8192  # tokens gathered at a time, counted from position 0 of the sequence
ROW_SPAN = 256  # query tokens of a sequence scored at a time
QUANTIZED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


@dataclass(frozen=True)
class ReferenceConfig(Config):
    """The reference has nothing to tune."""


class ReferenceBackend:
    """The three operations in torch."""

    name: ClassVar[str] = "reference"

    def probe(self) -> Probe:
        return Probe(True, f"torch {torch.__version__}, any device")

    def supports(self, problem: Problem) -> str | None:
        return None

    def configs(self, problem: Problem) -> Iterable[Config]:
        return [ReferenceConfig()]

    def default_config(self, problem: Problem) -> Config:
        return ReferenceConfig()

    def make_config(self, fields: Mapping[str, object]) -> Config:
        if fields:
            raise InvalidArgument(
                f"config: got {', '.join(map(repr, fields))}, the reference backend has no parameters"
            )
        return ReferenceConfig()

    def attention(self, call: AttentionCall, config: Config) -> None:
        checked.check_attention(call)
        starts = range(len(call.seq_lens) + 1) if call.cu_seqlens_q is None else call.cu_seqlens_q.tolist()
        call.out.zero_()
        if call.sinks is not None:
            call.out.masked_fill_(call.sinks.isnan()[:, None], torch.nan)
        if call.lse is not None:
            call.lse.copy_(
                torch.full_like(call.lse, -torch.inf) if call.sinks is None else call.sinks.expand_as(call.lse)
            )
        for i, seq_len in enumerate(call.seq_lens.tolist()):
            for row in range(starts[i], starts[i + 1], ROW_SPAN):
                end = min(row + ROW_SPAN, starts[i + 1])
                _attend(call, i, slice(row, end), first_position=seq_len - starts[i + 1] + row, seq_len=seq_len)

    def write_kv(self, call: WriteCall) -> None:
        checked.check_write(call)
        kept = call.slot_mapping >= 0
        block_size = call.k_cache.shape[1]
        block, offset = call.slot_mapping[kept] // block_size, call.slot_mapping[kept] % block_size
        for x, cache, scale in ((call.k, call.k_cache, call.k_scale), (call.v, call.v_cache, call.v_scale)):
            _bits(cache)[block, offset] = _bits(_store(x[kept], cache.dtype, scale))

    def copy_blocks(self, call: CopyCall) -> None:
        checked.check_copy(call)
        for cache in call.caches:
            bits = _bits(cache)
            bits[call.dst_blocks] = bits[call.src_blocks]  # indexing on the right copies before anything is written


def _attend(call: AttentionCall, i: int, rows: slice, first_position: int, seq_len: int) -> None:
    """Attention of some consecutive query tokens of sequence i, the first of which stands at `first_position`."""
    num_rows = rows.stop - rows.start
    last_position = first_position + num_rows - 1
    begin = 0 if call.sliding_window is None else max(0, first_position - call.sliding_window + 1)
    end = min(seq_len, last_position + 1) if call.causal else seq_len
    if begin >= end:
        return  # nobody sees anything: `attention` has written what such rows give
    heads, kv_heads = call.q.shape[1], call.k_cache.shape[2]
    q = _exact(call.q[rows]).unflatten(1, (kv_heads, heads // kv_heads)).movedim(0, 2)  # [G, H/G, R, D]
    position = torch.arange(first_position, last_position + 1, device=q.device)  # [R]

    # The running softmax of Milakov and Gimelshein (arXiv:1805.02867): top score, denominator and weighted sum so far.
    top = q.new_full(q.shape[:-1], -torch.inf)  # [G, H/G, R]
    if call.sinks is not None:
        top = call.sinks.double().unflatten(0, q.shape[:2])[..., None].expand_as(top)
    total = (top > -torch.inf).double()
    acc = q.new_zeros(*q.shape[:-1], call.v_cache.shape[-1])  # [G, H/G, R, E]
    for left in range(begin - begin % KEY_SPAN, end, KEY_SPAN):
        span = range(max(begin, left), min(end, left + KEY_SPAN))
        key = torch.arange(span.start, span.stop, device=q.device)  # [K]
        score = _scores(call, i, q, span, key - position[:, None])
        visible = _visible(call, key - position[:, None])  # [R, K]
        score = torch.where(visible, score, -torch.inf)
        new_top = torch.maximum(top, score.amax(-1))
        finite_top = torch.where(new_top == -torch.inf, 0, new_top)
        weight = torch.where(visible, torch.exp(score - finite_top[..., None]), 0)
        decay = torch.where(top == new_top, 1, torch.exp(top - finite_top))  # also of +inf: a sink that takes all
        total = total * decay + weight.sum(-1)
        acc = acc * decay[..., None] + _weighted_sum(
            weight, visible, _gather(call.v_cache, call, i, span, call.v_scale)
        )
        top = new_top

    seen = total != 0
    out = torch.where(seen[..., None], acc / torch.where(seen, total, 1)[..., None], 0)
    call.out[rows] = out.movedim(2, 0).flatten(1, 2).to(call.out.dtype)
    if call.lse is not None:
        call.lse[rows] = (top + total.log()).movedim(2, 0).flatten(1).float()


def _scores(call: AttentionCall, i: int, q: Tensor, span: range, distance: Tensor) -> Tensor:
    """Scores of query rows against the keys of `span`, [G, H/G, R, K]; `distance`: key minus query position, [R, K]."""
    k = _gather(call.k_cache, call, i, span, call.k_scale)  # [G, K, D]
    score = torch.matmul(q, k[:, None].mT) * call.scale
    if call.softcap is not None:
        score = call.softcap * torch.tanh(score / call.softcap)
    if call.alibi_slopes is not None:
        score = score + call.alibi_slopes.double().unflatten(0, q.shape[:2])[..., None, None] * distance
    return score


def _visible(call: AttentionCall, distance: Tensor) -> Tensor:
    """Which keys (columns) each query row sees, bool [R, K]; all the keys given exist."""
    visible = torch.ones_like(distance, dtype=torch.bool)
    if call.causal:
        visible &= distance <= 0
    if call.sliding_window is not None:
        visible &= distance > -call.sliding_window
    return visible


def _weighted_sum(weight: Tensor, visible: Tensor, v: Tensor) -> Tensor:
    """`weight @ v` in which a row is never touched by a value that it does not see, not even by 0 * NaN."""
    finite = v.isfinite()
    result = torch.matmul(weight, torch.where(finite, v, 0)[:, None])  # [G, H/G, R, E]
    for t in (~finite).any(-1).any(0).nonzero().flatten().tolist():  # tokens that hold NaN or Inf: rare
        value = torch.where(finite[:, t], 0, v[:, t])[:, None, None]  # [G, 1, 1, E]
        reached = visible[:, t, None] & ~finite[:, t][:, None, None]
        result = torch.where(reached, result + weight[..., t, None] * value, result)
    return result


def _gather(cache: Tensor, call: AttentionCall, i: int, span: range, scale: Tensor | None) -> Tensor:
    """Tokens `span` of sequence i, [G, K, D] float64, multiplied by the scale of a quantized cache."""
    block_size = cache.shape[1]
    first_block = span.start // block_size
    ids = call.block_table[i, first_block : -(-span.stop // block_size)]
    tokens = _bits(cache)[ids.long()].view(cache.dtype).flatten(0, 1)
    start = span.start - first_block * block_size
    x = _exact(tokens[start : start + len(span)]).transpose(0, 1).contiguous()
    return x if scale is None else x * scale.double()[:, None, None]


def _exact(x: Tensor) -> Tensor:
    """A fresh contiguous float64 copy: the same memory layout, hence the same bits later, whatever x was a view of."""
    return torch.empty(x.shape, dtype=torch.float64, device=x.device).copy_(x)


def _bits(x: Tensor) -> Tensor:
    """float8 as its bytes: torch indexes those on every device, and NaN patterns survive."""
    return x.view(torch.uint8) if x.dtype in QUANTIZED else x


def _store(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """x [T, G, D] in the cache's dtype; quantized ones divide by the scale, round to nearest even and saturate."""
    if dtype not in QUANTIZED:
        return x.to(dtype)
    assert scale is not None
    scaled = x.float() / scale[:, None]
    if dtype == torch.int8:
        return scaled.nan_to_num(nan=0.0).clamp(-128, 127).round().to(dtype)
    limit = torch.finfo(dtype).max
    return scaled.clamp(-limit, limit).to(dtype)
