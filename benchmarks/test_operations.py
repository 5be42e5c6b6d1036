"""The small operations around attention: writing K and V, copying blocks, merging partial results, swapping."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import pagedkern
from benchmarks import shapes
from benchmarks.meter import Measure, Meter
from benchmarks.peers import Missing
from benchmarks.rows import require_backend
from pagedkern.backends import names

TORCH = "torch indexing"
CONTENDERS = (*names(), TORCH)


@pytest.fixture(scope="module")
def sizes(size: str) -> shapes.Cache:
    return shapes.cache(size)


@pytest.fixture(scope="module")
def cache(sizes: shapes.Cache, meter: Meter) -> pagedkern.KVCache:
    shape = (sizes.layers, sizes.blocks, sizes.block_size, sizes.kv_heads, sizes.head_dim)
    host = sizes.blocks // 4
    made = pagedkern.KVCache(*shape, dtype=torch.bfloat16, device=meter.device, num_host_blocks=host)
    for i in range(sizes.layers):
        for part in made.layer(i):
            part.normal_()
    return made


def run(measure: Measure, group: str, contender: str, call: Callable[[], object], num_bytes: int) -> None:
    measure.benchmark.group = group
    measure.benchmark.extra_info["row"] = contender
    if contender != TORCH:
        try:
            require_backend(contender)
            call()
        except Missing as why:
            pytest.skip(f"{contender}: {why}")
    measure(measure.meter.timer(call), num_bytes=num_bytes)


@pytest.mark.parametrize("contender", CONTENDERS)
def test_write_kv(contender: str, cache: pagedkern.KVCache, sizes: shapes.Cache, measure: Measure) -> None:
    """New K and V scattered into one layer: read once, written once."""
    device = measure.meter.device
    size = (sizes.tokens, sizes.kv_heads, sizes.head_dim)
    k, v = (torch.randn(size, device=device).bfloat16() for _ in range(2))
    slots = torch.randperm(sizes.blocks * sizes.block_size, device=device)[: sizes.tokens]
    caches = cache.layer(0)

    def by_indexing() -> None:
        block, offset = slots // sizes.block_size, slots % sizes.block_size
        for new, part in zip((k, v), caches, strict=True):
            part[block, offset] = new

    own = partial(pagedkern.write_kv, k, v, *caches, slots, backend=contender)
    call = by_indexing if contender == TORCH else own
    run(measure, f"write_kv of {sizes.tokens:,} tokens", contender, call, 2 * sizes.tokens * sizes.token_bytes)


@pytest.mark.parametrize("contender", CONTENDERS)
def test_copy_blocks(contender: str, cache: pagedkern.KVCache, sizes: shapes.Cache, measure: Measure) -> None:
    """A quarter of the blocks copied in every layer."""
    moved = sizes.blocks // 4
    ids = torch.randperm(sizes.blocks, device=measure.meter.device)
    src, dst = ids[:moved], ids[moved : 2 * moved]
    tensors = [part for i in range(sizes.layers) for part in cache.layer(i)]

    def by_indexing() -> None:
        for part in tensors:
            part[dst] = part[src]

    call = by_indexing if contender == TORCH else partial(pagedkern.copy_blocks, tensors, src, dst, backend=contender)
    group = f"copy_blocks, {moved} blocks in {sizes.layers} layers"
    run(measure, group, contender, call, 2 * moved * cache.bytes_per_block)


def test_merge_states(sizes: shapes.Cache, measure: Measure) -> None:
    """Two partial results of so many tokens into one."""
    size = (sizes.tokens, 4 * sizes.kv_heads, sizes.head_dim)
    parts: list[Tensor] = []
    for _ in range(2):
        parts += [torch.randn(size, device=measure.meter.device), torch.randn(size[:2], device=measure.meter.device)]
    moved = 3 * (parts[0].nbytes + parts[1].nbytes)
    measure.benchmark.group = f"merge_states of {sizes.tokens:,} tokens"
    measure.benchmark.extra_info["row"] = "pagedkern"
    measure(measure.meter.timer(partial(pagedkern.merge_states, *parts)), num_bytes=moved)


@dataclass(frozen=True)
class Moves:
    """A plan that moves blocks 0, 1, 2 ... to or from the host."""

    kind: str
    count: int

    @property
    def moves(self) -> list[Any]:
        ids = array("q", range(self.count))
        return [(self.kind, ids, ids)]


@pytest.mark.parametrize("kind", ["swap_out", "swap_in"])
def test_swap(kind: str, cache: pagedkern.KVCache, sizes: shapes.Cache, measure: Measure) -> None:
    """A quarter of the blocks to host memory, and back: bytes read and written."""
    plan = Moves(kind, sizes.blocks // 4)
    measure.benchmark.group = f"swap of {plan.count} blocks in {sizes.layers} layers"
    measure.benchmark.extra_info["row"] = kind
    measure(measure.meter.timer(partial(cache.apply, plan)), num_bytes=2 * plan.count * cache.bytes_per_block)
