"""Clause 6: on a GPU a call can be captured into a CUDA graph and replayed for other lengths, tables and tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import pagedkern
from tests.contract.problems import Call, Spec, bits, build
from tests.contract.targets import Refused, Result, Target

SPECS = {
    "decode": Spec(seq_lens=(300, 40, 1), head_dim=64),
    "mixed": Spec(seq_lens=(300, 40, 20), query_lens=(1, 17, 20), head_dim=64, sinks=0.5),
    "int8": Spec(seq_lens=(300, 40, 1), head_dim=64, kv_dtype="int8", q_dtype="bfloat16", scale_kind="number"),
}


def refill(call: Call, other: Call) -> None:
    """Put another call's content into the memory of this one: replaying a graph reads the same addresses."""
    for name, x in call.args.items():
        if isinstance(x, torch.Tensor):
            y = other.args[name]
            bits(x)[tuple(slice(n) for n in y.shape)] = bits(y)


@pytest.mark.parametrize("name", SPECS)
def test_captured_and_replayed(target: Target, name: str) -> None:
    if target.device != "cuda":
        pytest.skip(f"CUDA graphs need a CUDA device, {target.name} runs on {target.device} here")
    spec = SPECS[name]
    call = build(spec, device=target.device)
    try:
        target.check_support(call)
    except Refused:
        return
    out = torch.empty_like(target.attend(call).out)  # warm: compiled, loaded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = pagedkern.paged_attention(**call.args, out=out, return_lse=True, backend=target.name)
    shorter = replace(spec, seq_lens=(17, 20, 0), query_lens=spec.query_lens and (1, 17, 20))
    for variant in (spec, replace(spec, seed=1), replace(shorter, seed=2)):
        other = build(variant, device=target.device, spare_blocks=3)
        want = target.attend(other)
        refill(call, other)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(bits(out), bits(want.out))
        assert torch.equal(bits(Result(out, lse).lse), bits(want.lse))


def test_no_synchronisation(target: Target) -> None:
    if target.device != "cuda":
        pytest.skip(f"synchronisation needs a CUDA device, {target.name} runs on {target.device} here")
    call = build(SPECS["mixed"], device=target.device)
    target.attend(call)
    torch.cuda.set_sync_debug_mode("error")
    try:
        pagedkern.paged_attention(**call.args, return_lse=True, backend=target.name)
        k, v = call.args["k_cache"][0, :2].clone(), call.args["v_cache"][0, :2].clone()
        slots = torch.zeros(2, dtype=torch.int64, device=target.device)
        pagedkern.write_kv(k, v, call.args["k_cache"], call.args["v_cache"], slots, backend=target.name)
        pagedkern.copy_blocks([call.args["k_cache"]], slots[:1], slots[:1] + 1, backend=target.name)
    finally:
        torch.cuda.set_sync_debug_mode("default")
