"""What sharing costs: samples of one prompt, paged and on contiguous memory, which has to copy what is shared."""

from __future__ import annotations

from array import array
from functools import partial

import pytest
import torch

import pagedkern
from benchmarks import shapes
from benchmarks.meter import Measure
from benchmarks.peers import Missing
from benchmarks.rows import require_backend
from pagedkern.backends import names

CONTIGUOUS = "torch, contiguous"


class Paged:
    """A prompt in the cache, and an allocator that knows it."""

    def __init__(self, sizes: shapes.Cache, device: str) -> None:
        self.sizes = sizes
        self.allocator = pagedkern.BlockAllocator(sizes.blocks, sizes.block_size)
        shape = (sizes.layers, sizes.blocks, sizes.block_size, sizes.kv_heads, sizes.head_dim)
        self.cache = pagedkern.KVCache(*shape, dtype=torch.bfloat16, device=device)
        for i in range(sizes.layers):
            for part in self.cache.layer(i):
                part.normal_()
        self.prompt = self.allocator.create(array("q", range(sizes.prompt)))
        self.allocator.commit(self.allocator.prefill([self.prompt]))

    def branch(self) -> tuple[list[pagedkern.Sequence], pagedkern.Step]:
        """Samples that share the prompt, and their first token: each but one copies the last block."""
        forks = self.allocator.fork(self.prompt, self.sizes.samples)
        step = self.allocator.append(forks, list(range(len(forks))))
        self.cache.apply(step)
        self.allocator.commit(step)
        return forks, step

    def drop(self, forks: list[pagedkern.Sequence]) -> None:
        for seq in forks:
            self.allocator.free(seq)


@pytest.fixture(scope="module")
def paged(size: str, meter: pytest.FixtureRequest) -> Paged:
    return Paged(shapes.cache(size), meter.device)  # type: ignore[attr-defined]


@pytest.mark.parametrize("contender", ["pagedkern", CONTIGUOUS])
def test_branch(contender: str, paged: Paged, measure: Measure) -> None:
    """From a prompt to samples that can each go their own way, all layers, bookkeeping included."""
    sizes = paged.sizes
    measure.benchmark.group = f"branch a prompt of {sizes.prompt:,} tokens into {sizes.samples}, {sizes.layers} layers"
    measure.benchmark.extra_info["row"] = contender
    if contender == CONTIGUOUS:
        size = (sizes.layers, 2, 1, sizes.prompt, sizes.kv_heads, sizes.head_dim)
        prompt = torch.randn(size, device=measure.meter.device).bfloat16()
        samples = prompt.repeat(1, 1, sizes.samples, 1, 1, 1)
        call = partial(samples.copy_, prompt.expand_as(samples))
        measure(measure.meter.timer(call), num_bytes=2 * samples.nbytes)
        return

    def branch() -> None:
        forks, _ = paged.branch()
        paged.drop(forks)

    copied = sizes.samples * sizes.block_size * sizes.token_bytes * sizes.layers
    measure(measure.meter.timer(branch), num_bytes=2 * copied)


@pytest.mark.parametrize("contender", [*names(), CONTIGUOUS])
def test_decode_after_branch(contender: str, paged: Paged, measure: Measure) -> None:
    """The next token of each sample, one layer. The bytes are those of the memory that K and V take: a prompt that is
    shared stands there once, and may come from a cache after the first sample."""
    sizes, device = paged.sizes, measure.meter.device
    measure.benchmark.group = f"branched: the next token of {sizes.samples} samples of {sizes.prompt:,} tokens"
    measure.benchmark.extra_info["row"] = contender
    heads = 4 * sizes.kv_heads
    q = torch.randn(sizes.samples, heads, sizes.head_dim, device=device).bfloat16()
    if contender == CONTIGUOUS:
        k, v = torch.randn(
            2, sizes.samples, sizes.kv_heads, sizes.prompt + 1, sizes.head_dim, device=device
        ).bfloat16()  # fmt: skip
        attend = partial(torch.nn.functional.scaled_dot_product_attention, q[:, :, None], k, v, enable_gqa=True)
        measure(measure.meter.timer(attend), num_bytes=2 * k.nbytes)
        return
    try:
        require_backend(contender)
    except Missing as why:
        pytest.skip(f"{contender}: {why}")
    forks, step = paged.branch()
    inputs = paged.cache.inputs(step)
    call = partial(
        pagedkern.paged_attention, q, *paged.cache.layer(0), inputs.block_table, inputs.seq_lens, backend=contender
    )
    measure(measure.meter.timer(call), num_bytes=(sizes.prompt + sizes.samples * sizes.block_size) * sizes.token_bytes)
    paged.drop(forks)
