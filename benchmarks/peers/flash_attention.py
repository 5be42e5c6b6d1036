"""FlashAttention's decode kernel with a block table: pip install flash-attn (written for 2.8).

Its pages are multiples of 256 tokens, so the tokens are laid out anew.
"""

from __future__ import annotations

import torch

from benchmarks.meter import Meter
from benchmarks.peers import Missing, required, without
from benchmarks.timer import Timer
from pagedkern.gpucheck.problems import CallTensors

PAGE = 256  # tokens


def attention(problem: CallTensors, meter: Meter) -> Timer:
    flash_attn = required("flash_attn", "flash-attn", "cuda", meter)
    without(problem, "float32", "quantized")
    if len(set(problem.shape.query_lens or (1,))) > 1:
        raise Missing("query lengths differ")
    return meter.timer(call(flash_attn, problem))


def call(flash_attn, problem: CallTensors):  # type: ignore[no-untyped-def]
    q, k, v = problem.dense()  # [S, H, R, D], [S, G, L, D]
    num_seqs, kv_heads, length, _ = k.shape
    width = -(-length // PAGE)
    table = torch.randperm(num_seqs * width, device=q.device).view(num_seqs, width).to(torch.int32)
    caches = []
    for tokens in (k, v):
        padded = torch.nn.functional.pad(tokens, (0, 0, 0, width * PAGE - length))
        pages = padded.view(num_seqs, kv_heads, width, PAGE, -1).permute(0, 2, 3, 1, 4).flatten(0, 1)
        cache = torch.empty_like(pages, memory_format=torch.contiguous_format)
        cache[table.flatten().long()] = pages
        caches.append(cache)
    rows = q.transpose(1, 2).contiguous()
    lens = problem.args["seq_lens"]
    attend = flash_attn.flash_attn_with_kvcache
    return lambda: attend(rows, *caches, cache_seqlens=lens, block_table=table, causal=True)
