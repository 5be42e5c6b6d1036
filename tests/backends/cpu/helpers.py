"""Calls of the CPU backend itself, past the front, so that a test can choose the path of the processor."""

from __future__ import annotations

import torch

from pagedkern.backends.base import AttentionCall
from pagedkern.backends.cpu import CpuBackend, CpuConfig
from tests.contract.problems import Call, dtype_of
from tests.contract.targets import Result


def attend(call: Call, backend: CpuBackend | None = None, span: int = 1024) -> Result:
    """Run one call into poisoned outputs."""
    args = dict(call.args)
    q, k_cache, v_cache = args["q"], args["k_cache"], args["v_cache"]
    out = torch.full((q.shape[0], q.shape[1], v_cache.shape[3]), torch.nan, dtype=q.dtype)
    lse = torch.full((q.shape[0], q.shape[1]), torch.nan)
    quantized = dtype_of(call.spec.kv_dtype or call.spec.q_dtype).itemsize == 1
    scale = args.get("scale")
    cu = args.get("cu_seqlens_q")

    def per_head(x: object) -> torch.Tensor | None:
        if not quantized:
            return None
        if isinstance(x, torch.Tensor):
            return x
        return torch.full((k_cache.shape[2],), 1.0 if x is None else float(x))  # type: ignore[arg-type]

    launched = AttentionCall(
        q, k_cache, v_cache, args["block_table"], args["seq_lens"], cu, q.shape[0],
        q.shape[2] ** -0.5 if scale is None else scale, args.get("causal", True), args.get("sliding_window"),
        args.get("softcap"), args.get("alibi_slopes"), args.get("sinks"), per_head(args.get("k_scale")),
        per_head(args.get("v_scale")), out, lse,
    )  # fmt: skip
    (backend or CpuBackend()).attention(launched, CpuConfig(span))
    return Result(out, lse)
