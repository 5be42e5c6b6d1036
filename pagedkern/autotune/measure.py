"""The tensors of a workload, the check that a candidate computes it, and the clock.

The problem that is timed is also hostile: unused slots and one unused block hold NaN, unused table entries hold
garbage, the output is NaN before the check. The truth is attention in float64, computed here from the formula.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from pagedkern import ops
from pagedkern.autotune.space import Candidate, Space, copies
from pagedkern.autotune.store import device as machine

GARBAGE = 2**31 - 1  # block id in unused table entries
SCALES = {"int8": 0.03, "float8_e4m3fn": 0.25, "float8_e5m2": 0.25}  # of a quantized cache


class Bench:
    """One workload laid out at every block size of a space, on the device, each `copies` times."""

    def __init__(self, space: Space, seed: int) -> None:
        self.workload = w = space.workload
        self.copies = copies(w.device, w.kv_bytes)
        self._generator = torch.Generator(w.device).manual_seed(seed)
        dtype, kv_dtype = getattr(torch, w.dtype), getattr(torch, w.kv_dtype)
        self._scale = SCALES.get(w.kv_dtype, 1.0)
        self._q = self._random(w.num_seqs * w.query_len, w.num_heads, w.head_dim).to(dtype)
        self._k, self._v = (  # [S, L, G, D]
            _stored(self._random(w.num_seqs, w.context, w.num_kv_heads, w.head_dim) / self._scale, kv_dtype)
            for _ in range(2)
        )
        self._out = torch.empty_like(self._q)
        self._lens = torch.tensor(w.seq_lens, dtype=torch.int32, device=w.device)
        starts = torch.arange(w.num_seqs + 1, dtype=torch.int32, device=w.device) * w.query_len
        self._starts = None if w.kind == "decode" else starts
        self._truth = self._dense(torch.float64)
        own_error = (self._dense(dtype).double() - self._truth).abs().max().item()
        self.tolerance = 2 * own_error + 1e-6
        self._caches = {b: self._lay_out(b) for b in space.block_sizes}
        self._turn = dict.fromkeys(space.block_sizes, 0)
        del self._k, self._v
        self._reader: _Reader | None = None

    def prepare(self, candidate: Candidate) -> None:
        """Run a candidate on the first sequence alone: the same kernels, compiled, in a part of the time."""
        try:
            self._launch(candidate, 1)
            if self.workload.device == "cuda":
                torch.cuda.synchronize()
        except Exception:  # `check` runs it again, and says what is wrong
            pass

    def check(self, candidate: Candidate) -> str | None:
        """Run a candidate on the whole problem. None if it is right, else what is wrong."""
        self._out.fill_(math.nan)
        try:
            self._launch(candidate)
            error = (self._out.double() - self._truth).abs().max().item()
        except Exception as failure:  # whatever a kernel raises costs it the race, not the run
            return f"{type(failure).__name__}: {failure}".partition("\n")[0][:200]
        if not error <= self.tolerance:
            return f"wrong by {error:.1e}, accepted is {self.tolerance:.1e}"
        return None

    def sample(self, candidate: Candidate, repeats: int) -> float:
        """Seconds of a call: the mean of `repeats` in a row, each on K and V that are not in the processor's cache."""
        return _seconds(self.workload.device, lambda: self._launch(candidate), repeats)

    def read_bandwidth(self) -> float:
        """Bytes per second of the plainest thing that reads memory."""
        self._reader = self._reader or _Reader(self.workload.device)
        return self._reader.sample()

    def _launch(self, candidate: Candidate, num_seqs: int | None = None) -> None:
        """Call attention on the first sequences of the batch; None is all of them."""
        caches = self._caches[candidate.block_size]
        turn = self._turn[candidate.block_size]
        self._turn[candidate.block_size] = (turn + 1) % len(caches)
        k_cache, v_cache, table = caches[turn]
        scale = None if self._scale == 1.0 else self._scale
        rows = None if num_seqs is None else num_seqs * self.workload.query_len
        starts = self._starts if self._starts is None or num_seqs is None else self._starts[: num_seqs + 1]
        ops.paged_attention(
            self._q[:rows], k_cache, v_cache, table[:num_seqs], self._lens[:num_seqs], cu_seqlens_q=starts,
            max_seqlen_q=self.workload.query_len, k_scale=scale, v_scale=scale, out=self._out[:rows],
            backend=candidate.backend, config=candidate.fields,
        )  # fmt: skip

    def _lay_out(self, block_size: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """The caches [N, B, G, D] as views of HND memory, and a table for each copy of the workload in them."""
        w = self.workload
        counts = [-(-n // block_size) for n in w.seq_lens]
        num_blocks = self.copies * sum(counts) + 1  # one is nobody's
        ids = torch.randperm(num_blocks, generator=self._generator, device=w.device)
        caches = []
        for dense in (self._k, self._v):
            shape = (num_blocks, w.num_kv_heads, block_size, w.head_dim)
            poison = torch.tensor(math.nan if dense.is_floating_point() else 127.0, device=w.device).to(dense.dtype)
            caches.append(poison.expand(shape).contiguous().transpose(1, 2))
        entries = []
        first = 0
        for _ in range(self.copies):
            table = torch.full((w.num_seqs, max(counts)), GARBAGE, dtype=torch.int32, device=w.device)
            for i, (length, count) in enumerate(zip(w.seq_lens, counts, strict=True)):
                table[i, :count] = ids[first : first + count]
                for dense, cache in zip((self._k, self._v), caches, strict=True):
                    _scatter(dense[i, :length], cache, ids[first : first + count])
                first += count
            entries.append((caches[0], caches[1], table))
        return entries

    def _dense(self, dtype: torch.dtype) -> Tensor:
        """Attention over the contiguous K and V, computed in a dtype: softmax(q k / sqrt(D)) v, causal. [T, H, D]."""
        w = self.workload
        group = w.num_heads // w.num_kv_heads
        out = torch.empty_like(self._q, dtype=dtype)
        for i, length in enumerate(w.seq_lens):
            rows = slice(i * w.query_len, (i + 1) * w.query_len)
            position = torch.arange(length - w.query_len, length, device=w.device)[:, None, None]
            hidden = torch.arange(length, device=w.device) > position  # [R, 1, L]
            for h in range(w.num_kv_heads):
                heads = slice(h * group, (h + 1) * group)
                k, v = (x[i, :length, h].to(dtype) * self._scale for x in (self._k, self._v))  # [L, D]
                score = self._q[rows, heads].to(dtype) @ k.T * w.head_dim**-0.5  # [R, H/G, L]
                out[rows, heads] = score.masked_fill(hidden, -math.inf).softmax(-1) @ v
        return out

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator, device=self.workload.device)


class _Reader:
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
        times = [min(_seconds(device, way, 1) for _ in range(3)) for way in ways]
        self._way = ways[times.index(min(times))]

    def sample(self) -> float:
        """Bytes per second."""
        return self._x.nbytes / _seconds(self._device, self._way, 1)


def _seconds(device: str, run: Callable[[], object], repeats: int) -> float:
    if device == "cpu":
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - start) / repeats
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3 / repeats


def _stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.clamp(-127, 127).round().to(dtype) if dtype == torch.int8 else x.to(dtype)


def _scatter(tokens: Tensor, cache: Tensor, blocks: Tensor) -> None:
    """Put tokens [L, G, D] into blocks of a cache [N, B, G, D]; the rest of the last block stays as it is."""
    if tokens.element_size() == 1:  # torch indexes bytes on every device, float8 not
        tokens, cache = tokens.view(torch.uint8), cache.view(torch.uint8)
    block_size = cache.shape[1]
    full = len(tokens) // block_size
    cache[blocks[:full]] = tokens[: full * block_size].unflatten(0, (full, block_size))
    if full < len(blocks):
        cache[blocks[full], : len(tokens) - full * block_size] = tokens[full * block_size :]
