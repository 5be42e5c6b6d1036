"""How fast: the machine's own limits, then each backend beside torch's attention on a contiguous cache."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import pagedkern
from pagedkern.cache import KVCache
from pagedkern.gpucheck import peers
from pagedkern.gpucheck.clock import Clock
from pagedkern.gpucheck.problems import CallShape, CallTensors

GIGA = 1e9


@dataclass(frozen=True)
class Sizes:
    """What limits and small operations are measured on; tests take smaller ones."""

    copy_bytes: int = 2 << 30
    matrix: int = 8192
    layers: int = 32
    blocks: int = 1024  # of 16 tokens, 8 KV heads, head_dim 128, bfloat16
    moved: int = 256  # blocks copied or swapped


def limits(clock: Clock, sizes: Sizes) -> dict[str, float]:
    """Bytes a second (read and written) of a device copy, and operations a second of matrix products."""
    source = torch.empty(sizes.copy_bytes, dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    calls: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(source)}
    for dtype, n in ((torch.bfloat16, sizes.matrix), (torch.float32, sizes.matrix // 2)):
        a = torch.randn(n, n, device=clock.device).to(dtype)
        calls[f"matmul {dtype}".replace("torch.", "")] = partial(torch.matmul, a, a)
    seconds = clock.medians(calls, rounds=7)
    return {
        "copy_gb_per_s": 2 * len(source) / seconds["copy"] / GIGA,
        "bfloat16_tflop_per_s": 2 * sizes.matrix**3 / seconds["matmul bfloat16"] / 1e12,
        "float32_tflop_per_s": 2 * (sizes.matrix // 2) ** 3 / seconds["matmul float32"] / 1e12,
    }


def attention(clock: Clock, backends: Iterable[str], kind: str, shapes: Iterable[CallShape]) -> list[dict[str, Any]]:
    """One row for each shape and backend, torch's own among them: seconds of a call and of its replay as a graph."""
    rows = []
    for shape in shapes:
        rows += _shape(clock, backends, kind, shape)
    return rows


def _shape(clock: Clock, backends: Iterable[str], kind: str, shape: CallShape) -> list[dict[str, Any]]:
    problem = CallTensors(shape, clock.device)
    failed: dict[str, str] = {}
    eager: dict[str, Callable[[], object]] = {}
    for name in backends:
        out = torch.empty(
            len(problem.args["q"]), shape.num_heads, shape.dim_v, dtype=problem.args["q"].dtype, device=clock.device
        )
        eager[name] = partial(pagedkern.paged_attention, **problem.args, out=out, backend=name)
    eager |= peers.of(problem)
    calls: dict[str, Callable[[], object]] = {}
    for name, call in eager.items():
        try:
            call()
            calls[name] = call
            calls[f"{name} graph"] = clock.captured(call)
        except Exception as error:  # the others are still timed
            failed[name] = f"{type(error).__name__}: {error}"[:500]
    seconds = clock.medians(calls)
    rows: list[dict[str, Any]] = []
    for name in eager:
        row: dict[str, Any] = {"kind": kind, "shape": shape.name, "backend": name}
        if name in failed:
            row["failed"] = failed[name]
        if name in seconds:
            row["seconds"] = seconds[name]
            row["graph_seconds"] = seconds.get(f"{name} graph")
            best = min(seconds[name], seconds.get(f"{name} graph", seconds[name]))
            row["gb_per_s"] = shape.kv_bytes / best / GIGA
            row["tflop_per_s"] = shape.flops / best / 1e12
        rows.append(row)
    return rows


def small_operations(clock: Clock, backends: Iterable[str], sizes: Sizes) -> list[dict[str, Any]]:
    """Writing tokens into half of a layer, copying blocks in every layer: bytes read and written a second."""
    cache = _cache(clock, sizes)
    tokens = sizes.blocks * 16 // 2
    k, v = (torch.randn(tokens, 8, 128, device=clock.device).bfloat16() for _ in range(2))
    slots = torch.randperm(2 * tokens, device=clock.device)[:tokens]
    ids = torch.randperm(sizes.blocks, device=clock.device)
    src, dst = ids[: sizes.moved], ids[sizes.moved : 2 * sizes.moved]
    tensors = [x for i in range(sizes.layers) for x in cache.layer(i)]
    rows = []
    for name in backends:
        calls: dict[str, tuple[Callable[[], object], int]] = {
            "write_kv": (partial(pagedkern.write_kv, k, v, *cache.layer(0), slots, backend=name), 2 * 2 * k.nbytes),
            "copy_blocks": (
                partial(pagedkern.copy_blocks, tensors, src, dst, backend=name),
                2 * sizes.moved * cache.bytes_per_block,
            ),
        }
        for operation, (call, moved) in calls.items():
            row: dict[str, Any] = {"kind": operation, "backend": name}
            try:
                row["seconds"] = clock.medians({"": call})[""]
                row["gb_per_s"] = moved / row["seconds"] / GIGA
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {error}"[:500]
            rows.append(row)
    return rows


@dataclass(frozen=True)
class _Swap:
    """A plan that moves blocks 0, 1, 2 ... to or from the host."""

    kind: str
    count: int

    @property
    def moves(self) -> list[tuple[str, array[int], array[int]]]:
        ids = array("q", range(self.count))
        return [(self.kind, ids, ids)]


def swap(clock: Clock, sizes: Sizes) -> list[dict[str, Any]]:
    """Blocks of every layer to pinned host memory and back: bytes a second in one direction."""
    cache = _cache(clock, sizes)
    rows: list[dict[str, Any]] = []
    for kind in ("swap_out", "swap_in"):
        seconds = clock.medians({"": partial(cache.apply, _Swap(kind, sizes.moved))}, rounds=7)[""]
        rate = sizes.moved * cache.bytes_per_block / seconds / GIGA
        rows.append({"kind": kind, "backend": "KVCache", "seconds": seconds, "gb_per_s": rate})
    return rows


def _cache(clock: Clock, sizes: Sizes) -> KVCache:
    device, pool = clock.device, sizes.moved
    return KVCache(sizes.layers, sizes.blocks, 16, 8, 128, dtype=torch.bfloat16, device=device, num_host_blocks=pool)


def configurations(clock: Clock, backends: Iterable[str], shapes: Iterable[CallShape]) -> list[dict[str, Any]]:
    """Every configuration of every backend on a few shapes: what defaults are chosen from."""
    rows = []
    for shape in shapes:
        problem = CallTensors(shape, clock.device)
        for name in backends:
            choice = pagedkern.explain(**problem.args, backend=name)
            for config in choice.implementation.configs(choice.problem):
                row: dict[str, Any] = {"shape": shape.name, "backend": name, "config": config.to_dict()}
                try:
                    call = partial(pagedkern.paged_attention, **problem.args, backend=name, config=config)
                    row["seconds"] = clock.medians({"": call}, rounds=7)[""]
                except Exception as error:
                    row["failed"] = f"{type(error).__name__}: {error}"[:500]
                rows.append(row)
    return rows
