"""FlashInfer's paged kernels, over the same cache: pip install flashinfer-python (written for 0.7).

They take the block table in CSR form, which is made and planned outside of the clock.
"""

from __future__ import annotations

import torch

from benchmarks.meter import Meter
from benchmarks.peers import required, without
from benchmarks.timer import Timer
from pagedkern.abi import to_csr
from pagedkern.gpucheck.problems import CallTensors

WORKSPACE = 256 << 20  # bytes
TENSOR_CORES_FROM = 4  # query heads for each KV head


def attention(problem: CallTensors, meter: Meter) -> Timer:
    flashinfer = required("flashinfer", "flashinfer-python", "cuda", meter)
    without(problem, "float32", "quantized")
    return meter.timer(call(flashinfer, problem))


def call(flashinfer, problem: CallTensors):  # type: ignore[no-untyped-def]
    shape, args = problem.shape, problem.args
    q, device = args["q"], args["q"].device
    csr = to_csr(args["block_table"].cpu(), args["seq_lens"].cpu(), shape.block_size)
    pages = [torch.tensor(part, dtype=torch.int32, device=device) for part in csr]
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    dtypes = {"q_data_type": q.dtype, "kv_data_type": args["k_cache"].dtype}
    workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
    if shape.query_lens is None:
        cores = shape.num_heads // shape.num_kv_heads >= TENSOR_CORES_FROM
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, shape.layout, use_tensor_cores=cores)
        wrapper.plan(*pages, *heads, shape.block_size, **dtypes)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, shape.layout)
        wrapper.plan(args["cu_seqlens_q"], *pages, *heads, shape.block_size, causal=True, **dtypes)
    caches = tuple(args[name] for name in ("k_cache", "v_cache"))
    if shape.layout == "HND":  # [blocks, heads, block_size, head_dim] is what it takes, not the logical shape
        caches = tuple(cache.transpose(1, 2) for cache in caches)
    return lambda: wrapper.run(q, caches)
