"""Makes calls: a small `Spec` says what, `contents` draws the tokens, `build` places them into a cache full of poison.

Everything that no query may see is poison: unused slots, unallocated blocks, gaps between strides, tokens behind the
window, table tails, the entries of released windows, queries of padding rows. The judge (`reference/oracle.py`) and the
backends get the very same arguments.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reference import oracle

QUANTIZED = ("float8_e4m3fn", "float8_e5m2", "int8")
LAYOUTS = ("NHD", "HND", "interleaved", "fused", "heads_first", "mixed", "odd")
Q_LAYOUTS = ("plain", "fused", "odd")
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Spec:
    """One attention call, apart from where its tokens lie. Two equal specs are the same call to the bit."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    head_dim_v: int | None = None  # None: head_dim
    q_dtype: str = "float32"
    kv_dtype: str | None = None  # None: q_dtype
    block_size: int = 16
    seq_lens: tuple[int, ...] = (1, 17, 64)
    query_lens: tuple[int, ...] | None = None  # None: decode without cu_seqlens_q
    spare_rows: int = 0  # rows of q past cu_seqlens_q[-1]
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    alibi: bool = False
    sinks: float | None = None  # added to random sinks; None: no sinks
    scale: float | None = None
    scale_kind: str = "heads"  # of k_scale and v_scale: "heads", "number"; quantized caches only
    layout: str = "NHD"  # of the cache: one of LAYOUTS
    q_layout: str = "plain"  # one of Q_LAYOUTS
    lattice: bool = False  # q and k are such that every order of summation gives the same score in float32
    magnitude: float = 1.0  # of q
    seed: int = 0

    @property
    def dim_v(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def cache_dtype(self) -> torch.dtype:
        return dtype_of(self.kv_dtype or self.q_dtype)

    @property
    def quantized(self) -> bool:
        return self.kv_dtype in QUANTIZED

    def __str__(self) -> str:
        """The arguments that differ from the default: the id of a test, and what to paste after `Spec(`."""
        default = Spec()
        parts = (f"{name}={value!r}" for name, value in vars(self).items() if value != getattr(default, name))
        return ",".join(parts).replace(" ", "") or "default"


@dataclass(frozen=True)
class Tokens:
    """The content of one sequence, on the CPU."""

    q: Tensor  # [q_len, H, D]
    k: Tensor  # [seq_len, G, D], as the cache stores it
    v: Tensor  # [seq_len, G, E]


@dataclass
class Call:
    """The arguments of one `paged_attention` call, and what else the checks want to know about it."""

    spec: Spec
    args: dict[str, Any]  # every argument that the oracle takes too
    buffers: list[Tensor]  # the memory behind q, the caches and the metadata, poison included
    block_ids: list[list[int]]  # the real blocks of each sequence, those behind the window left out (-1)

    def oracle(self) -> tuple[Tensor, Tensor]:
        return oracle.paged_attention(**self.args)

    def torch(self, compute_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        return oracle.torch_attention(**self.args, compute_dtype=compute_dtype)

    @property
    def num_tokens(self) -> int:
        return int(self.args["q"].shape[0])

    def problem_fields(self) -> dict[str, Any]:
        """What `pagedkern.backends.base.Problem` is made of."""
        spec, table = self.spec, self.args["block_table"]
        decode = spec.query_lens is None
        return {
            "device": self.args["q"].device.type,
            "q_dtype": spec.q_dtype,
            "kv_dtype": spec.kv_dtype or spec.q_dtype,
            "num_heads": spec.heads,
            "num_kv_heads": spec.kv_heads,
            "head_dim": spec.head_dim,
            "head_dim_v": spec.dim_v,
            "block_size": spec.block_size,
            "num_seqs": table.shape[0],
            "num_tokens": self.num_tokens,
            "max_seqlen_q": 1 if decode else self.num_tokens,
            "max_seqlen_k": table.shape[1] * spec.block_size,
            "causal": spec.causal,
            "sliding_window": spec.window,
            "softcap": spec.softcap is not None,
            "alibi": spec.alibi,
            "sinks": spec.sinks is not None,
        }


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def bits(x: Tensor) -> Tensor:
    """The same memory as integers: NaN compares, and float8 can be written anywhere."""
    return x.view(BITS[x.element_size()])


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def contents(spec: Spec) -> list[Tokens]:
    """The tokens of each sequence; those of sequence i depend on the seed, i and the shapes only."""
    query_lens = spec.query_lens or (1,) * len(spec.seq_lens)
    return [_tokens(spec, i, q, n) for i, (q, n) in enumerate(zip(query_lens, spec.seq_lens, strict=True))]


def _tokens(spec: Spec, i: int, q_len: int, seq_len: int) -> Tokens:
    generator = torch.Generator().manual_seed(1_000_003 * spec.seed + i)
    q_shape, k_shape = (q_len, spec.heads, spec.head_dim), (seq_len, spec.kv_heads, spec.head_dim)
    v_shape = (seq_len, spec.kv_heads, spec.dim_v)
    if spec.lattice:
        q, k = (torch.randint(-2, 3, shape, generator=generator) / 2 for shape in (q_shape, k_shape))
    else:
        q, k = (torch.randn(shape, generator=generator) for shape in (q_shape, k_shape))
    v = torch.randn(v_shape, generator=generator)
    if spec.kv_dtype == "int8":
        k, v = ((x * 40).round().clamp(-128, 127) for x in (k, v))
    return Tokens((q * spec.magnitude).to(dtype_of(spec.q_dtype)), k.to(spec.cache_dtype), v.to(spec.cache_dtype))


def head_values(spec: Spec) -> dict[str, Any]:
    """`alibi_slopes`, `sinks`, `k_scale` and `v_scale`, as far as the spec asks for them."""
    generator = torch.Generator().manual_seed(7_777_777 + spec.seed)
    slopes = torch.rand(spec.heads, generator=generator) * 0.5
    sinks = torch.randn(spec.heads, generator=generator)
    unit = 1 / 40 if spec.kv_dtype == "int8" else 1.0
    k_scale = 0.25 * unit * (1 + torch.randperm(spec.kv_heads, generator=generator) % 8)
    v_scale = 0.5 * unit * (1 + torch.randperm(spec.kv_heads, generator=generator) % 8)
    values: dict[str, Any] = {}
    if spec.alibi:
        values["alibi_slopes"] = slopes
    if spec.sinks is not None:
        values["sinks"] = sinks + spec.sinks
    if spec.quantized:
        numbers = spec.scale_kind == "number"
        values["k_scale"] = 0.25 * unit if numbers else k_scale
        values["v_scale"] = 0.5 * unit if numbers else v_scale
    return values


def build(
    spec: Spec,
    tokens: Sequence[Tokens] | None = None,
    *,
    device: str = "cpu",
    fill: str = "nan",
    placement: int = 0,
    poisoned: bool = True,
    spare_blocks: int = 3,
) -> Call:
    """Place the tokens into a cache filled with `fill` ("nan", "inf", "mixed", "zero"), blocks permuted by `placement`.

    `poisoned` also puts garbage into the table entries that are never followed and poison into the queries that see
    nothing; without it both are zero.
    """
    tokens = contents(spec) if tokens is None else tokens
    rng = random.Random(placement)
    size = spec.block_size
    first_seen = [_first_seen(spec, t) for t in tokens]
    spans = [range(first // size, -(-len(t.k) // size)) for first, t in zip(first_seen, tokens, strict=True)]
    num_blocks = sum(map(len, spans)) + spare_blocks
    free = rng.sample(range(num_blocks), num_blocks)
    block_ids = [[-1] * span.start + [free.pop() for _ in span] for span in spans]

    k_cache, v_cache, buffers = lay_out(spec, num_blocks, device, fill)
    for t, ids, first in zip(tokens, block_ids, first_seen, strict=True):
        j = torch.arange(first, len(t.k), device=device)
        if len(j):
            blocks = torch.tensor(ids, device=device)[j // size]
            bits(k_cache)[blocks, j % size] = bits(t.k[first:].to(device))
            bits(v_cache)[blocks, j % size] = bits(t.v[first:].to(device))

    table = _table(block_ids, num_blocks, random.Random(f"{placement} {fill}"), poisoned).to(device)
    q = _queries(spec, tokens, device, fill if poisoned else "zero")
    args: dict[str, Any] = {
        "q": q,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_table": table,
        "seq_lens": torch.tensor([len(t.k) for t in tokens], dtype=torch.int32, device=device),
        "cu_seqlens_q": None,
        "scale": spec.scale,
        "causal": spec.causal,
        "sliding_window": spec.window,
        "softcap": spec.softcap,
    }
    if spec.query_lens is not None:
        lens = torch.tensor([0] + [len(t.q) for t in tokens])
        args["cu_seqlens_q"] = lens.cumsum(0).to(torch.int32).to(device)
    args |= {n: x.to(device) if isinstance(x, Tensor) else x for n, x in head_values(spec).items()}
    metadata = [_whole(x) for n, x in args.items() if isinstance(x, Tensor) and n not in ("q", "k_cache", "v_cache")]
    buffers = [*buffers, _whole(q), *metadata]
    return Call(spec, args, buffers, block_ids)


def _first_seen(spec: Spec, t: Tokens) -> int:
    """The first token that any query of the sequence sees: those before it are behind the window."""
    if spec.window is None or not len(t.q):
        return 0
    return min(len(t.k), max(0, len(t.k) - len(t.q) - spec.window + 1))


def _table(block_ids: Sequence[Sequence[int]], num_blocks: int, rng: random.Random, poisoned: bool) -> Tensor:
    """int32 [S, W], a slice of a wider one; what is never followed holds garbage (or 0)."""
    width = max((len(ids) for ids in block_ids), default=0) + 2
    wide = torch.zeros(len(block_ids), width + 3, dtype=torch.int32)
    for row, ids in enumerate(block_ids):
        for j in range(width + 3):
            known = ids[j] if j < len(ids) else -1
            garbage = rng.choice(
                (-1, 2**31 - 1, -(2**31), num_blocks, rng.randrange(2**31), rng.randrange(num_blocks or 1))
            )
            wide[row, j] = known if known >= 0 else garbage * poisoned
    return wide[:, :width]


def poison(shape: Sequence[int], dtype: torch.dtype, fill: str, device: str = "cpu") -> Tensor:
    """A tensor of NaN, of infinities or of both by turns, or the largest numbers of a dtype that has none."""
    if fill == "zero":
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    n = 1
    for size in shape:
        n *= size
    if dtype == torch.int8:
        values = torch.tensor([127, -128, 127])
    else:
        top = torch.inf if dtype != torch.float8_e4m3fn else 448.0
        values = torch.tensor({"nan": [torch.nan], "inf": [top, -top], "mixed": [torch.nan, top, -top]}[fill])
    pattern = values.to(dtype).to(device)
    repeated = bits(pattern).repeat(-(-n // len(pattern)))[:n]
    return repeated.view(dtype).view(tuple(shape))


def lay_out(spec: Spec, num_blocks: int, device: str, fill: str) -> tuple[Tensor, Tensor, list[Tensor]]:
    """K and V cache of logical shape [N, B, G, D] and [N, B, G, E] as views of poisoned buffers, in `spec.layout`."""
    n, size, heads, d, e = num_blocks, spec.block_size, spec.kv_heads, spec.head_dim, spec.dim_v
    nhd, hnd = _nhd, _hnd
    if spec.layout in ("interleaved", "fused"):  # K and V in one buffer
        both = d + e
        buffer = poison((n * size * heads * both,), spec.cache_dtype, fill, device)
        if spec.layout == "interleaved":  # K of a block, then V of that block
            k_strides, v_strides = ((size * heads * both, heads * x, x, 1) for x in (d, e))
            v_offset = size * heads * d
        else:  # K of a token and head, then V of that token and head
            k_strides = v_strides = (size * heads * both, heads * both, both, 1)
            v_offset = d
        k = buffer.as_strided((n, size, heads, d), k_strides)
        v = buffer.as_strided((n, size, heads, e), v_strides, v_offset)
        return k, v, [buffer]
    strides = {
        "NHD": (nhd, nhd),
        "HND": (hnd, hnd),
        "mixed": (nhd, hnd),
        "heads_first": (_heads_first, _heads_first),
        "odd": (_odd, _odd),
    }[spec.layout]
    views, buffers = [], []
    for dim, of in zip((d, e), strides, strict=True):
        buffer = poison((2 + n * (size * (heads * (dim + 1) + 3) + 5),), spec.cache_dtype, fill, device)
        offset = 1 if spec.layout == "odd" else 0  # odd: nothing is aligned
        views.append(buffer.as_strided((n, size, heads, dim), of(n, size, heads, dim), offset))
        buffers.append(buffer)
    return views[0], views[1], buffers


def _nhd(n: int, size: int, heads: int, dim: int) -> tuple[int, ...]:
    return (size * heads * dim, heads * dim, dim, 1)


def _hnd(n: int, size: int, heads: int, dim: int) -> tuple[int, ...]:
    return (size * heads * dim, dim, size * dim, 1)


def _heads_first(n: int, size: int, heads: int, dim: int) -> tuple[int, ...]:
    return (size * dim, dim, n * size * dim, 1)


def _odd(n: int, size: int, heads: int, dim: int) -> tuple[int, ...]:
    token = heads * (dim + 1) + 3
    return (size * token + 5, token, dim + 1, 1)


def _queries(spec: Spec, tokens: Sequence[Tokens], device: str, fill: str) -> Tensor:
    """q in `spec.q_layout`; the rows that see nothing and the gaps between rows hold poison."""
    rows = sum(len(t.q) for t in tokens) + spec.spare_rows
    heads, dim, dtype = spec.heads, spec.head_dim, dtype_of(spec.q_dtype)
    if spec.q_layout == "fused":  # a slice of [T, (H + 2G) * D]
        q = poison((rows, heads + 2 * spec.kv_heads, dim), dtype, fill, device)[:, :heads]
    elif spec.q_layout == "odd":
        q = poison((rows, heads + 1, dim + 3), dtype, fill, device)[:, 1:, 1 : dim + 1]
    else:
        q = poison((rows, heads, dim), dtype, fill, device)
    row = 0
    for t in tokens:
        blind = len(t.q) - len(t.k) if spec.causal else 0  # the first of more queries than tokens see nothing
        start = max(0, min(blind, len(t.q))) if len(t.k) else len(t.q)
        q[row + start : row + len(t.q)] = t.q[start:].to(device)
        row += len(t.q)
    return q


def _whole(x: Tensor) -> Tensor:
    """All the memory behind a tensor, as one vector."""
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())
