"""The tensors of a workload, the check that a candidate computes it, and the clock.

Each block size is laid out when it is asked for. What is checked are edge cases: unused slots and one unused block hold
NaN, unused table entries hold garbage, the output is NaN before the check. The truth is attention in float64, computed
from the formula. Before that, a candidate must compute the small problem of `edge_cases`. What is timed has the same
lengths and strides, on K and V that are not in the processor's cache: see `Pool`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from pagedkern import ops
from pagedkern.autotune.clock import GpuClock, cpu_seconds
from pagedkern.autotune.edge_cases import GARBAGE, EdgeCases, dense, poison, scatter, stored
from pagedkern.autotune.space import COLD, Candidate, Space, Workload, copies, region_tokens
from pagedkern.autotune.store import device as machine

SCALES = {"int8": 0.03, "float8_e4m3fn": 0.25, "float8_e5m2": 0.25}  # of a quantized cache
PRODUCT = {"cpu": 1024, "cuda": 8192}  # rows and columns of the matrix product that is timed


class Bench:
    """One workload on the device: its truth, its layouts at the block sizes that were asked for, and the clock."""

    def __init__(self, space: Space, seed: int) -> None:
        self.workload = w = space.workload
        self._block_sizes = tuple(space.block_sizes)
        self._seed = seed
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
        self._checked: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # by block size: K, V, table
        self._pool: Pool | None = None
        self._cut: dict[int | None, Tensor] = {}  # lengths at a context, kept for the graphs that read them
        self._clock = GpuClock()
        self._edge_cases: dict[int, EdgeCases] = {}  # by block size
        self._product: Tensor | None = None

    def open(self) -> None:
        """Nothing is left to do: it is made whole."""

    def end_at(self, seconds: float) -> None:
        """In this process no call can be cut short."""

    def lay_out(self, block_size: int) -> None:
        """Make what candidates of a block size are checked on."""
        if block_size not in self._checked:
            generator = torch.Generator(self.workload.device).manual_seed(hash((self._seed, block_size)) & (2**63 - 1))
            self._checked[block_size] = self._lay_out(block_size, generator)
            self._edge_cases[block_size] = EdgeCases(self.workload, self._dtypes, block_size, generator, self._scale)

    def reserve(self) -> None:
        """Make what candidates are timed on."""
        self._pool = self._pool or Pool(self.workload, self._block_sizes, self._k, self._seed)

    def compile_ahead(self, candidates: Sequence[Candidate], seconds: float) -> Mapping[Candidate, str]:
        """In one process nothing is compiled at the same time."""
        return {}

    def prepare(self, candidate: Candidate) -> None:
        """Run a candidate on the first sequence alone: the same kernels, compiled, in a part of the time."""
        try:
            self.lay_out(candidate.block_size)
            self._launch(candidate, self._checked[candidate.block_size], num_seqs=1)
            if self.workload.device == "cuda":
                torch.cuda.synchronize()
        except Exception:  # `check` runs it again, and says what is wrong
            pass

    def check(self, candidate: Candidate) -> str | None:
        """Run a candidate on the edge cases and on the whole problem. None if it is right, else what is wrong."""
        self._out.fill_(math.nan)
        try:
            self.lay_out(candidate.block_size)
            edges = self._edge_cases[candidate.block_size]
            edges.out.fill_(math.nan)
            self._launch_edge_cases(candidate, edges)
            if wrong := _wrong(edges.out, edges.truth, edges.tolerance):
                return f"{wrong}, on edge cases"
            self._launch(candidate, self._checked[candidate.block_size])
            return _wrong(self._out, self._truth, self.tolerance)
        except Exception as failure:  # whatever a kernel raises costs it the race, not the run
            return f"{type(failure).__name__}: {failure}".partition("\n")[0][:200]

    def sample(self, candidate: Candidate, repeats: int, context: int | None = None) -> float:
        """Seconds of a call: the mean of `repeats` in a row, each on K and V that are not in the processor's cache.

        `context` cuts longer sequences.
        """
        if context not in self._cut:
            self._cut[context] = self._lens if context is None else self._lens.clamp(max=context)
        lens, pool = self._cut[context], self._pool
        if pool is None:
            self.reserve()
            return self.sample(candidate, repeats, context)

        def launch() -> None:
            self._launch(candidate, pool.next(candidate.block_size), lens=lens)

        if self.workload.device == "cpu":
            return cpu_seconds(launch, repeats)
        # A graph repeats the same calls: it must go through all the copies, or some would stay in the cache.
        return self._clock.seconds(launch, max(repeats, pool.copies), (candidate, context))

    def read_bandwidth(self) -> float:
        """Bytes per second of the plainest thing that reads memory."""
        return reader(self.workload.device).sample()

    def product_rate(self) -> float:
        """Floating-point operations per second of a product of two square matrices in the workload's dtype."""
        size = PRODUCT[self.workload.device]
        if self._product is None:
            self._product = torch.ones(size, size, dtype=self._dtypes[0], device=self.workload.device)
            self._product @ self._product
        x = self._product
        return 2 * size**3 / _once(self.workload.device, lambda: x @ x)

    def _launch(
        self,
        candidate: Candidate,
        caches: tuple[Tensor, Tensor, Tensor],
        num_seqs: int | None = None,
        lens: Tensor | None = None,
    ) -> None:
        """Call attention on the first sequences of the batch; None is all of them. `caches`: K, V and their table."""
        k_cache, v_cache, table = caches
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

    def _launch_edge_cases(self, candidate: Candidate, batch: EdgeCases) -> None:
        scale = None if self._scale == 1.0 else self._scale
        ops.paged_attention(
            batch.q, batch.k_cache, batch.v_cache, batch.table, batch.seq_lens, cu_seqlens_q=batch.starts,
            max_seqlen_q=max(batch.query_lens), sliding_window=batch.sliding_window, softcap=self.workload.softcap,
            k_scale=scale, v_scale=scale, out=batch.out, backend=candidate.backend, config=candidate.fields,
        )  # fmt: skip

    def _lay_out(self, block_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """The caches [N, B, G, D] as views of HND memory, and their table."""
        w = self.workload
        counts = [-(-n // block_size) for n in w.seq_lens]
        ids = torch.randperm(sum(counts) + 1, generator=generator, device=w.device)  # one block is nobody's
        shape = (len(ids), w.num_kv_heads, block_size, w.head_dim)
        caches = [poison(x.dtype, x.device).expand(shape).contiguous().transpose(1, 2) for x in (self._k, self._v)]
        table = torch.full((w.num_seqs, max(counts)), GARBAGE, dtype=torch.int32, device=w.device)
        first = 0
        for i, (length, count) in enumerate(zip(w.seq_lens, counts, strict=True)):
            table[i, :count] = ids[first : first + count]
            for tokens, into in zip((self._k, self._v), caches, strict=True):
                scatter(tokens[i, :length], into, ids[first : first + count])
            first += count
        return caches[0], caches[1], table

    def _dense(self, dtype: torch.dtype) -> Tensor:
        w = self.workload
        lens = [w.query_len] * w.num_seqs
        return dense(self._q, self._k, self._v, w.seq_lens, lens, dtype, self._scale, w.sliding_window, w.softcap)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator, device=self.workload.device)


class Pool:
    """K and V in memory that is at least `COLD` times as large as the last-level cache, for the clock.

    It is cut into copies of the workload that are used in turn, whatever the block size, so that what a call reads was
    not read for as long as possible. Every block size is a view of the same memory, with tables of its own: laying out
    all of them costs what one costs. What it holds is random, for the time does not depend on it.
    """

    def __init__(self, workload: Workload, block_sizes: Sequence[int], like: Tensor, seed: int) -> None:
        """`like`: K or V as it is stored, of which the memory is filled."""
        self._workload = w = workload
        self.copies = copies(w.device, w.kv_bytes)
        self._region = region_tokens(w, block_sizes)  # of one copy
        token = w.num_kv_heads * w.head_dim
        self._memory = [
            torch.empty(self.copies * self._region * token, dtype=like.dtype, device=w.device) for _ in "kv"
        ]
        pattern = like.reshape(-1)
        for tensor in self._memory:
            for piece in tensor.split(len(pattern)):
                piece.copy_(pattern[: len(piece)])
        self._generator = torch.Generator(w.device).manual_seed(seed)
        self._views: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}
        self._turn = 0

    def next(self, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """The next copy in turn: the caches [N, B, G, D] as views of HND memory, and its table."""
        if block_size not in self._views:
            self._views[block_size] = self._made(block_size)
        self._turn += 1
        return self._views[block_size][self._turn % self.copies]

    def _made(self, block_size: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        w = self._workload
        counts = [-(-n // block_size) for n in w.seq_lens]
        num_blocks = self.copies * self._region // block_size
        shape = (num_blocks, w.num_kv_heads, block_size, w.head_dim)
        caches = [x[: math.prod(shape)].view(shape).transpose(1, 2) for x in self._memory]
        entries = []
        for copy in range(self.copies):
            begin, end = -(-copy * self._region // block_size), (copy + 1) * self._region // block_size
            ids = begin + torch.randperm(end - begin, generator=self._generator, device=w.device)
            table = torch.full((w.num_seqs, max(counts)), GARBAGE, dtype=torch.int32, device=w.device)
            first = 0
            for i, count in enumerate(counts):
                table[i, :count] = ids[first : first + count]
                first += count
            entries.append((caches[0], caches[1], table))
        return entries


class Reader:
    """Reads a buffer larger than any cache with the fastest reduction that torch has on the device."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._x = torch.ones(COLD * machine.last_level_cache(device) // 4, device=device)  # of four bytes each
        rows = self._x[: len(self._x) // 4096 * 4096].view(-1, 4096)
        column = torch.ones(4096, device=device)
        ways: list[Callable[[], object]] = [
            self._x.sum,
            lambda: torch.linalg.vector_norm(self._x),
            lambda: rows @ column,
        ]
        times = [min(_once(device, way) for _ in range(2)) for way in ways]
        self._way = ways[times.index(min(times))]

    def sample(self) -> float:
        """Bytes per second."""
        return self._x.nbytes / _once(self._device, self._way)


@cache
def reader(device: str) -> Reader:
    """The one of a device, which several problems share."""
    return Reader(device)


def _once(device: str, run: Callable[[], object]) -> float:
    return cpu_seconds(run, 1) if device == "cpu" else GpuClock().seconds(run, 1)


def _wrong(out: Tensor, truth: Tensor, tolerance: float) -> str | None:
    error = (out.double() - truth).abs().max().item()
    return None if error <= tolerance else f"wrong by {error:.1e}, expected {tolerance:.1e}"
