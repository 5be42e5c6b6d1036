"""Whether each backend computes what the float64 reference does on a fixed sample, and keeps the contract's clauses."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import pagedkern
from pagedkern.gpucheck.problems import CallShape, CallTensors, sample, shrunk

EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def check(backend: str, device: str, emulated: bool, every: int = 1) -> dict[str, Any]:
    """Run a backend on every n-th shape of the sample; `failed` lists the shape and what was wrong with it."""
    failed: list[dict[str, str]] = []
    shapes = [shrunk(shape) if emulated else shape for shape in sample()[::every]]
    for shape in shapes:
        try:
            wrong = attention(backend, device, shape)
        except Exception as error:  # named in the report, like a wrong number
            wrong = f"{type(error).__name__}: {error}"
        if wrong:
            failed.append({"shape": shape.name, "wrong": wrong[:500]})
    for name, small_operation in (("write_kv", write_kv), ("copy_blocks", copy_blocks)):
        try:
            wrong = small_operation(backend, device)
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        if wrong:
            failed.append({"shape": name, "wrong": wrong[:500]})
    return {"checked": len(shapes) + 2, "failed": failed}


def attention(backend: str, device: str, shape: CallShape) -> str | None:
    """What is wrong with the backend's attention on a shape, or None.

    Exact up to rounding; every element written; the same bits when repeated, in another layout and placement, with a
    wider bound on query lengths, and for each sequence alone.
    """
    problem = CallTensors(shape, device)
    want_out, want_lse = pagedkern.paged_attention(**problem.args, return_lse=True, backend="reference")
    out = torch.full_like(want_out, math.nan)
    _, lse = pagedkern.paged_attention(**problem.args, out=out, return_lse=True, backend=backend)
    if out.isnan().any() or lse.isnan().any():
        return f"{int(out.isnan().sum())} of {out.numel()} elements are NaN or were never written"
    # Rounding of the inputs' dtype, once for the weights and once for the result, on values of some units.
    bound = 4 * EPSILON[shape.q_dtype] * float(want_out.abs().max()) + 1e-5
    error = float((out.double() - want_out.double()).abs().max()) if out.numel() else 0.0
    if error > bound:
        return f"out is wrong by {error:.2e}, expected {bound:.2e}"
    finite = want_lse.isfinite()
    if not torch.equal(lse[~finite], want_lse[~finite]):
        return "lse is not -inf where a row sees nothing"
    error = float((lse[finite] - want_lse[finite]).abs().max()) if finite.any() else 0.0
    unit = 1e-5 if shape.q_dtype == "float32" else EPSILON[shape.q_dtype]  # scores of 16-bit operands may round there
    bound = unit * max(1.0, float(want_lse[finite].abs().max())) if finite.any() else 0.0
    if error > bound:
        return f"lse is wrong by {error:.2e}, expected {bound:.2e}"
    choice = pagedkern.explain(**problem.args, backend=backend)
    pinned: dict[str, Any] = {"backend": backend, "config": choice.config}
    moved = _moved(problem)
    if not same(pagedkern.paged_attention(**moved, **pinned), out):
        return "bits change when blocks are placed elsewhere in the other layout"
    if shape.query_lens is not None:
        wide = {**problem.args, "max_seqlen_q": len(out) + 7}
        if not same(pagedkern.paged_attention(**wide, **pinned), out):
            return "bits change with a looser max_seqlen_q"
    return _alone(problem, out, pinned)


def _moved(problem: CallTensors) -> dict[str, Any]:
    """The same call with every block elsewhere and the other memory order."""
    args = dict(problem.args)
    num_blocks = len(args["k_cache"])
    generator = torch.Generator("cpu").manual_seed(5)
    to = torch.randperm(num_blocks, generator=generator, device="cpu").to(problem.device)
    for name in ("k_cache", "v_cache"):
        old = args[name]
        n, size, heads, dim = old.shape
        if old.is_contiguous():
            new = old.new_empty(n, heads, size, dim).transpose(1, 2)
        else:
            new = old.new_empty(n, size, heads, dim)
        bits = torch.uint8 if old.element_size() == 1 else old.dtype
        new.view(bits)[to] = old.view(bits)
        args[name] = new
    table = args["block_table"]
    known = (table >= 0) & (table < num_blocks)
    args["block_table"] = torch.where(known, to[table.clamp(0, num_blocks - 1).long()].to(torch.int32), table)
    return args


def _alone(problem: CallTensors, out: Tensor, pinned: dict[str, Any]) -> str | None:
    """Each sequence by itself must give the bits that it gave in the batch."""
    args = problem.args
    lens = problem.shape.query_lens or (1,) * len(problem.shape.seq_lens)
    row = 0
    for i, n in enumerate(lens):
        alone = {**args, "q": args["q"][row : row + n], "block_table": args["block_table"][i : i + 1]}
        alone["seq_lens"] = args["seq_lens"][i : i + 1]
        if "cu_seqlens_q" in alone:
            alone["cu_seqlens_q"] = torch.tensor([0, n], dtype=torch.int32, device=problem.device)
            alone["max_seqlen_q"] = n
        if not same(pagedkern.paged_attention(**alone, **pinned), out[row : row + n]):
            return f"sequence {i} has other bits alone than in the batch"
        row += n
    return None


def write_kv(backend: str, device: str) -> str | None:
    """Slots get what the reference writes, to the bit (scales are powers of two), and nothing else changes."""
    for kv_dtype in ("float32", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2"):
        shape = CallShape(
            "write", (40, 7), num_kv_heads=2, num_heads=2, head_dim=72, q_dtype="bfloat16", kv_dtype=kv_dtype
        )
        problem = CallTensors(shape, device)
        k, v = (torch.randn(3, 2, 72, device=device).bfloat16() for _ in range(2))
        slots = torch.tensor([5, -1, 33], device=device)
        factors = {"k_scale": (0.25, 0.5), "v_scale": (2.0, 0.125)} if "k_scale" in problem.args else {}
        scales: dict[str, Any] = {
            name: torch.tensor(values, dtype=torch.float32, device=device) for name, values in factors.items()
        }
        results = []
        for name in ("reference", backend):
            caches = [problem.args[c].clone() for c in ("k_cache", "v_cache")]
            pagedkern.write_kv(k, v, caches[0], caches[1], slots, **scales, backend=name)
            results.append(caches)
        if not all(same(a, b) for a, b in zip(*results, strict=True)):
            return f"a cache of {kv_dtype} differs from what the reference writes"
    return None


def copy_blocks(backend: str, device: str) -> str | None:
    """Independent pairs, a chain and a cycle, as if all were read before any is written."""
    caches = [torch.randn(12, *rest, device=device) for rest in ((16, 2, 64), (3,))]
    src, dst = (torch.tensor(ids, device=device) for ids in ([0, 1, 2, 7, 8, 11], [1, 2, 3, 8, 7, 5]))
    want = [cache.clone() for cache in caches]
    for cache in want:
        cache[dst] = cache[src]
    pagedkern.copy_blocks(caches, src, dst, backend=backend)
    if not all(same(a, b) for a, b in zip(caches, want, strict=True)):
        return "copied blocks differ from a copy by torch"
    return None


def same(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit, NaN included."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))
