"""What is measured: two problems sized for the device, and the candidates for each."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import pagedkern.backends as registry
from pagedkern.autotune.objective import unusual
from pagedkern.autotune.store import device as machine
from pagedkern.autotune.workloads import Model, causal_pairs
from pagedkern.backends.base import ITEMSIZE, Problem

BLOCK_SIZES = (8, 16, 32, 64, 128, 256)  # tokens
COLD = 2  # what is timed rotates over memory of this many times the last-level cache, in two copies at least
MAX_COPIES = 64
MEMORY_SHARE = 0.3  # of the free memory, that the tensors of one problem may take


@dataclass(frozen=True, slots=True)
class Workload:
    """One problem but for its block size: a batch of sequences that ends with `query_len` new tokens each."""

    kind: str  # "decode" or "prefill"
    device: str
    dtype: str  # of q
    kv_dtype: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_seqs: int
    context: int  # tokens of the longest sequence, the new ones included
    query_len: int  # at most `context`
    sliding_window: int | None = None  # tokens seen, the query's own included
    softcap: float | None = None

    @property
    def seq_lens(self) -> list[int]:
        """Ragged, as batches are: from `context` down to three quarters of it, in equal steps."""
        return [
            max(self.query_len, self.context - i * self.context // (4 * self.num_seqs)) for i in range(self.num_seqs)
        ]

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that one call must read: what any query of a sequence sees."""
        return sum(map(self.tokens_read, self.seq_lens)) * self.problem(1).kv_bytes

    def tokens_read(self, length: int) -> int:
        """Tokens of a sequence that its queries see."""
        return length if self.sliding_window is None else min(length, self.sliding_window + self.query_len - 1)

    @property
    def flops(self) -> int:
        """Floating-point operations of the two matrix products of one causal call."""
        seen = sum(causal_pairs(n - self.query_len, n, self.sliding_window) for n in self.seq_lens)
        return 4 * self.num_heads * self.head_dim * seen

    def problem(self, block_size: int) -> Problem:
        """The problem as the operation sees it, with a block table just wide enough."""
        return Problem(
            device=self.device, q_dtype=self.dtype, kv_dtype=self.kv_dtype, num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, head_dim_v=self.head_dim, block_size=block_size,
            num_seqs=self.num_seqs, num_tokens=self.num_seqs * self.query_len, max_seqlen_q=self.query_len,
            max_seqlen_k=-(-self.context // block_size) * block_size, sliding_window=self.sliding_window,
            softcap=self.softcap is not None,
        )  # fmt: skip

    def __str__(self) -> str:
        lens = self.seq_lens
        tokens = f"{lens[0]:,}" if lens[0] == lens[-1] else f"{lens[-1]:,} to {lens[0]:,}"
        batch = f"1 sequence of {tokens} tokens" if len(lens) == 1 else f"{len(lens)} sequences of {tokens} tokens"
        new = f", {self.query_len:,} of them new" if self.query_len < self.context else ", all new"
        new = "" if self.kind == "decode" else new
        heads = f"{self.num_heads} query heads, {self.num_kv_heads} KV heads, head dim {self.head_dim}"
        cache = "" if self.kv_dtype == self.dtype else f", cache {self.kv_dtype}"
        window = "" if self.sliding_window is None else f"; window {self.sliding_window:,}"
        softcap = "" if self.softcap is None else f"; softcap {self.softcap:g}"
        return f"{batch}{new}; {heads}{window}{softcap}; {self.dtype}{cache}"


@dataclass(frozen=True, slots=True)
class Candidate:
    """What can be chosen: a block size, a backend and its configuration."""

    block_size: int
    backend: str
    config: str  # the fields as JSON, keys sorted: hashable, and what is stored
    is_default: bool = field(default=False, compare=False)  # of its backend

    @property
    def fields(self) -> dict[str, object]:
        return dict(json.loads(self.config))

    def __str__(self) -> str:
        return f"{self.backend}({', '.join(f'{k}={v}' for k, v in self.fields.items())})"


@dataclass(frozen=True, slots=True)
class Space:
    """The candidates of one workload in the order of `candidates`, and what is left out with the reason."""

    workload: Workload
    candidates: tuple[Candidate, ...]
    refused: tuple[str, ...]  # "backend, block size: reason"

    @property
    def block_sizes(self) -> list[int]:
        return sorted({c.block_size for c in self.candidates})

    def untuned(self, block_size: int) -> Candidate:
        """What `backend="auto"` takes at a block size when nothing was tuned."""
        return next(c for c in self.candidates if c.block_size == block_size and c.is_default)

    @property
    def baseline(self) -> Candidate:
        """The yardstick of the whole table: the untuned choice at the usual block size, or at the one nearest to it."""
        return self.untuned(min(self.block_sizes, key=unusual))


def problems_of(model: Model, device: str, **sizes: int | None) -> list[Workload]:
    """The problems that stand for a model on a device: see `workloads`, which takes the sizes."""
    heads = model.num_heads, model.num_kv_heads, model.head_dim
    shape = {"heads": heads, "windows": model.windows, "softcap": model.softcap}
    return workloads(device, model.dtype, model.cache_dtype, **shape, **sizes)  # type: ignore[arg-type]


def workloads(
    device: str,
    dtype: str = "bfloat16",
    kv_dtype: str | None = None,
    heads: tuple[int, int, int] = (32, 8, 128),
    num_seqs: int | None = None,
    context: int | None = None,
    prompt: int | None = None,
    num_block_sizes: int = len(BLOCK_SIZES),
    windows: Sequence[int | None] = (None,),
    softcap: float | None = None,
) -> list[Workload]:
    """A decode and a prefill problem for a device, for each window; sizes that are not given are chosen for it.

    `heads` is (query heads, KV heads, head_dim); by default those of Llama 3 8B (arXiv:2407.21783). The lengths are
    primes, so that every block size has a last block which is not full. A window longer than the context passes over
    nothing, but a kernel is still told of it.
    """
    large = device != "cpu"
    shape = Workload("", device, dtype, kv_dtype or dtype, *heads, 1, 1, 1, softcap=softcap)
    context = context or (4093 if large else 2003)
    prompt = prompt or (2039 if large else 509)
    room = (
        MEMORY_SHARE * machine.free_memory(device) / (num_block_sizes + 4)
    )  # a copy each, contiguous K and V, two timed
    fit = max(1, int(room / (context * shape.problem(1).kv_bytes)))
    seqs = num_seqs or min(fit, 32 if large else max(4, min(64, 2 * machine.cpu_threads())))
    decode = replace(shape, kind="decode", num_seqs=seqs, context=context)
    prefill = replace(shape, kind="prefill", num_seqs=num_seqs or (4 if large else 2), context=prompt, query_len=prompt)
    return [replace(problem, sliding_window=window) for problem in (decode, prefill) for window in windows]


def copies(device: str, kv_bytes: int) -> int:
    """How many copies of a workload that reads `kv_bytes` a cache holds."""
    return min(MAX_COPIES, max(2, math.ceil(COLD * machine.last_level_cache(device) / max(1, kv_bytes))))


def region_tokens(workload: Workload, block_sizes: Iterable[int]) -> int:
    """Tokens that one copy of a workload takes in memory that is cut into blocks of any of these sizes: whole blocks
    for each sequence, wherever it begins. No list as long as the batch is made for it."""
    w = workload
    tokens = _tokens(w)
    most = 0
    for b in block_sizes:
        rounded = min(w.num_seqs * -(-w.context // b) * b, tokens + w.num_seqs * b)
        most = max(most, rounded + b)
    return most


def _tokens(workload: Workload) -> int:
    """About how many tokens a workload holds, no fewer than it does: lengths fall from `context` to three quarters of
    it, or all are `context`."""
    w = workload
    tokens = w.num_seqs * w.context
    return tokens - (0 if w.query_len == w.context else w.context * (w.num_seqs - 1) // 8 - w.num_seqs)


def memory(workload: Workload, block_sizes: Iterable[int]) -> int:
    """Bytes that `measure.Bench` takes at its peak, nearly. No list as long as the batch is made for it.

    It counts the contiguous K and V, the rows of q, out and the float64 truth, and the largest of: random numbers in
    the making, the scores of a KV head of a sequence in float64, and what is laid out: one copy at each block size for
    the checks, and those that are timed, which all block sizes share.
    """
    w, sizes = workload, list(block_sizes)
    token = w.problem(1).kv_bytes
    tokens = _tokens(w)
    num_copies = copies(w.device, tokens * token)
    dense = w.num_seqs * w.context * token
    made = 12 * w.num_seqs * w.context * w.num_kv_heads * w.head_dim  # float32, of K or of V: drawn, scaled, rounded
    rows = w.num_seqs * w.query_len * w.num_heads * w.head_dim * (2 * ITEMSIZE[w.dtype] + 3 * 8)
    scores = 3 * 8 * w.query_len * (w.num_heads // w.num_kv_heads) * w.context
    caches = num_copies * region_tokens(w, sizes) * token
    for block_size in sizes:
        width = -(-w.context // block_size)
        blocks = min(w.num_seqs * width, tokens // block_size + w.num_seqs)
        caches += (blocks + 1) * block_size * token + 4 * (num_copies + 1) * w.num_seqs * width
    return dense + rows + max(made, scores, caches)


def usable_backends(device: str, named: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """The backends to measure, in the order in which "auto" prefers them, and why the others are not.

    Emulated backends are measured only if named: their times say nothing about the kernels.
    """
    usable, refused = [], []
    for name in registry.names():
        if named and name not in named:
            continue
        probe = registry.load(name).probe()
        if not probe.available:
            refused.append(f"{name}: {probe.reason}")
        elif probe.emulated and name not in named:
            refused.append(f"{name}: emulated on this machine")
        else:
            usable.append(name)
    return usable, refused


def candidates(workload: Workload, block_sizes: Iterable[int], backends: Sequence[str]) -> Space:
    """Every configuration of every backend at every block size.

    First come those of the backend that is used untuned, at the usual block size before the others; the default of each
    backend comes before its other configurations. The untuned choice belongs to the space whether or not its backend
    was asked for: it is what the others must beat.
    """
    found: list[tuple[int, Candidate]] = []
    refused: dict[str, list[int]] = {}
    for block_size in sorted(set(block_sizes), key=unusual):
        problem = workload.problem(block_size)
        untuned = _untuned(problem)
        for rank, name in enumerate([untuned, *(b for b in backends if b != untuned)] if untuned else []):
            implementation = registry.load(name)
            if (reason := implementation.supports(problem)) is not None:
                refused.setdefault(f"{name}: {reason}", []).append(block_size)
                continue
            default = _text(implementation.default_config(problem).to_dict())
            others = [_text(config.to_dict()) for config in implementation.configs(problem)] if name in backends else []
            for config in dict.fromkeys([default, *others]):
                found.append((rank, Candidate(block_size, name, config, is_default=config == default)))
    found.sort(key=lambda pair: pair[0])
    why = tuple(f"block size {', '.join(map(str, sizes))}: {reason}" for reason, sizes in refused.items())
    return Space(workload, tuple(candidate for _, candidate in found), why)


def _untuned(problem: Problem) -> str | None:
    """The backend of "auto" for a problem that was not tuned."""
    for name in registry.names():
        implementation = registry.load(name)
        probe = implementation.probe()
        if probe.available and not probe.emulated and implementation.supports(problem) is None:
            return name
    return None


def _text(fields: dict[str, int | float | str | bool]) -> str:
    return json.dumps(fields, sort_keys=True)
