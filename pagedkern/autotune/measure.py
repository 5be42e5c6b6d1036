"""The tensors of a workload, the check that a candidate computes it, and the clock.

The problem that is timed is also hostile: unused slots and one unused block hold NaN, unused table entries hold
garbage, the output is NaN before the check. The truth is attention in float64, computed from the formula. Before that,
a candidate must compute the small problem of `hostile`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from pagedkern import ops
from pagedkern.autotune.clock import GpuClock, cpu_seconds
from pagedkern.autotune.hostile import GARBAGE, Hostile, dense, poison, scatter, stored
from pagedkern.autotune.space import Candidate, Space, copies
from pagedkern.autotune.store import device as machine

SCALES = {"int8": 0.03, "float8_e4m3fn": 0.25, "float8_e5m2": 0.25}  # of a quantized cache
PRODUCT = {"cpu": 1024, "cuda": 8192}  # rows and columns of the matrix product that is timed


class Bench:
    """One workload laid out at every block size of a space, on the device, each `copies` times."""

    def __init__(self, space: Space, seed: int) -> None:
        self.workload = w = space.workload
        self.copies = copies(w.device, w.kv_bytes)
        self._generator = torch.Generator(w.device).manual_seed(seed)
        self._dtypes = getattr(torch, w.dtype), getattr(torch, w.kv_dtype)
        self._scale = SCALES.get(w.kv_dtype, 1.0)
        self._q = self._random(w.num_seqs * w.query_len, w.num_heads, w.head_dim).to(self._dtypes[0])
        self._k, self._v = (  # [S, L, G, D]
            stored(self._random(w.num_seqs, w.context, w.num_kv_heads, w.head_dim) / self._scale, self._dtypes[1])
            for _ in range(2)
        )
        self._out = torch.empty_like(self._q)
        self._lens = torch.tensor(w.seq_lens, dtype=torch.int32, device=w.device)
        starts = torch.arange(w.num_seqs + 1, dtype=torch.int32, device=w.device) * w.query_len
        self._starts = None if w.kind == "decode" else starts
        self._truth = self._dense(torch.float64)
        own_error = (self._dense(self._dtypes[0]).double() - self._truth).abs().max().item()
        self.tolerance = 2 * own_error + 1e-6
        self._caches = {b: self._lay_out(b) for b in space.block_sizes}
        self._turn = dict.fromkeys(space.block_sizes, 0)
        del self._k, self._v
        self._cut: dict[int | None, Tensor] = {}  # lengths at a context, kept for the graphs that read them
        self._clock = GpuClock()
        self._hostile: dict[int, Hostile] = {}  # by block size, made on first use
        self._reader: Reader | None = None
        self._product: Tensor | None = None

    def prepare(self, candidate: Candidate) -> None:
        """Run a candidate on the first sequence alone: the same kernels, compiled, in a part of the time.

        The hostile problem of its block size is made here, too: no budget counts this.
        """
        try:
            self._hostile_at(candidate.block_size)
            self._launch(candidate, 1)
            if self.workload.device == "cuda":
                torch.cuda.synchronize()
        except Exception:  # `check` runs it again, and says what is wrong
            pass

    def check(self, candidate: Candidate) -> str | None:
        """Run a candidate on the hostile and on the whole problem. None if it is right, else what is wrong."""
        self._out.fill_(math.nan)
        try:
            hostile = self._hostile_at(candidate.block_size)
            hostile.out.fill_(math.nan)
            self._launch_hostile(candidate, hostile)
            if wrong := _wrong(hostile.out, hostile.truth, hostile.tolerance):
                return f"{wrong}, on hostile lengths"
            self._launch(candidate)
            return _wrong(self._out, self._truth, self.tolerance)
        except Exception as failure:  # whatever a kernel raises costs it the race, not the run
            return f"{type(failure).__name__}: {failure}".partition("\n")[0][:200]

    def sample(self, candidate: Candidate, repeats: int, context: int | None = None) -> float:
        """Seconds of a call: the mean of `repeats` in a row, each on K and V that are not in the processor's cache.

        `context` cuts longer sequences.
        """
        if context not in self._cut:
            self._cut[context] = self._lens if context is None else self._lens.clamp(max=context)
        lens = self._cut[context]

        def launch() -> None:
            self._launch(candidate, lens=lens)

        if self.workload.device == "cpu":
            return cpu_seconds(launch, repeats)
        # A graph repeats the same calls: it must go through all the copies, or some would stay in the cache.
        return self._clock.seconds(launch, max(repeats, self.copies), (candidate, context))

    def read_bandwidth(self) -> float:
        """Bytes per second of the plainest thing that reads memory."""
        self._reader = self._reader or Reader(self.workload.device)
        return self._reader.sample()

    def product_rate(self) -> float:
        """Floating-point operations per second of a product of two square matrices in the workload's dtype."""
        size = PRODUCT[self.workload.device]
        if self._product is None:
            self._product = torch.ones(size, size, dtype=self._dtypes[0], device=self.workload.device)
            self._product @ self._product
        x = self._product
        return 2 * size**3 / _once(self.workload.device, lambda: x @ x)

    def _launch(self, candidate: Candidate, num_seqs: int | None = None, lens: Tensor | None = None) -> None:
        """Call attention on the first sequences of the batch; None is all of them."""
        caches = self._caches[candidate.block_size]
        k_cache, v_cache, table = caches[self._turn[candidate.block_size] % len(caches)]
        self._turn[candidate.block_size] += 1
        scale = None if self._scale == 1.0 else self._scale
        num_seqs = self.workload.num_seqs if num_seqs is None else num_seqs
        rows = num_seqs * self.workload.query_len
        lens = self._lens if lens is None else lens
        starts = None if self._starts is None else self._starts[: num_seqs + 1]
        ops.paged_attention(
            self._q[:rows], k_cache, v_cache, table[:num_seqs], lens[:num_seqs], cu_seqlens_q=starts,
            max_seqlen_q=self.workload.query_len, sliding_window=self.workload.sliding_window,
            softcap=self.workload.softcap, k_scale=scale, v_scale=scale, out=self._out[:rows],
            backend=candidate.backend, config=candidate.fields,
        )  # fmt: skip

    def _launch_hostile(self, candidate: Candidate, batch: Hostile) -> None:
        scale = None if self._scale == 1.0 else self._scale
        ops.paged_attention(
            batch.q, batch.k_cache, batch.v_cache, batch.table, batch.seq_lens, cu_seqlens_q=batch.starts,
            max_seqlen_q=max(batch.query_lens), sliding_window=batch.sliding_window, softcap=self.workload.softcap,
            k_scale=scale, v_scale=scale, out=batch.out, backend=candidate.backend, config=candidate.fields,
        )  # fmt: skip

    def _hostile_at(self, block_size: int) -> Hostile:
        if block_size not in self._hostile:
            self._hostile[block_size] = Hostile(self.workload, self._dtypes, block_size, self._generator, self._scale)
        return self._hostile[block_size]

    def _lay_out(self, block_size: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """The caches [N, B, G, D] as views of HND memory, and a table for each copy of the workload in them."""
        w = self.workload
        counts = [-(-n // block_size) for n in w.seq_lens]
        num_blocks = self.copies * sum(counts) + 1  # one is nobody's
        ids = torch.randperm(num_blocks, generator=self._generator, device=w.device)
        shape = (num_blocks, w.num_kv_heads, block_size, w.head_dim)
        caches = [poison(x.dtype, x.device).expand(shape).contiguous().transpose(1, 2) for x in (self._k, self._v)]
        entries = []
        first = 0
        for _ in range(self.copies):
            table = torch.full((w.num_seqs, max(counts)), GARBAGE, dtype=torch.int32, device=w.device)
            for i, (length, count) in enumerate(zip(w.seq_lens, counts, strict=True)):
                table[i, :count] = ids[first : first + count]
                for tokens, cache in zip((self._k, self._v), caches, strict=True):
                    scatter(tokens[i, :length], cache, ids[first : first + count])
                first += count
            entries.append((caches[0], caches[1], table))
        return entries

    def _dense(self, dtype: torch.dtype) -> Tensor:
        w = self.workload
        lens = [w.query_len] * w.num_seqs
        return dense(self._q, self._k, self._v, w.seq_lens, lens, dtype, self._scale, w.sliding_window, w.softcap)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator, device=self.workload.device)


class Reader:
    """Reads a buffer larger than any cache with the fastest reduction that torch has on the device."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._x = torch.ones(machine.last_level_cache(device), device=device)  # of four bytes each
        rows = self._x[: len(self._x) // 4096 * 4096].view(-1, 4096)
        column = torch.ones(4096, device=device)
        ways: list[Callable[[], object]] = [
            self._x.sum,
            lambda: torch.linalg.vector_norm(self._x),
            lambda: rows @ column,
        ]
        times = [min(_once(device, way) for _ in range(3)) for way in ways]
        self._way = ways[times.index(min(times))]

    def sample(self) -> float:
        """Bytes per second."""
        return self._x.nbytes / _once(self._device, self._way)


def _once(device: str, run: Callable[[], object]) -> float:
    return cpu_seconds(run, 1) if device == "cpu" else GpuClock().seconds(run, 1)


def _wrong(out: Tensor, truth: Tensor, tolerance: float) -> str | None:
    error = (out.double() - truth).abs().max().item()
    return None if error <= tolerance else f"wrong by {error:.1e}, accepted is {tolerance:.1e}"
