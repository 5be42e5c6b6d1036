"""The fixed sample that is checked, the shapes that are timed, and the tensors of both.

A cache is laid out as an engine would find it: blocks in random order, NaN in every slot that no sequence holds,
garbage in the unused entries of the block table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from pagedkern.autotune.edge_cases import GARBAGE, poison, stored

UNIT = {"int8": 1 / 40, "float8_e4m3fn": 0.25, "float8_e5m2": 0.25}  # k_scale and v_scale of a quantized cache


@dataclass(frozen=True)
class CallShape:
    """One attention call: its name, lengths and model shape."""

    name: str
    seq_lens: tuple[int, ...]
    query_lens: tuple[int, ...] | None = None  # None: decode
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    head_dim_v: int | None = None  # None: head_dim
    q_dtype: str = "bfloat16"
    kv_dtype: str | None = None  # None: q_dtype
    block_size: int = 16
    layout: str = "HND"
    features: tuple[str, ...] = ()  # keys of FEATURES

    @property
    def dim_v(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that the call has to read at the least."""
        itemsize = getattr(torch, self.kv_dtype or self.q_dtype).itemsize
        return sum(self.seq_lens) * self.num_kv_heads * (self.head_dim + self.dim_v) * int(itemsize)

    @property
    def flops(self) -> int:
        """Multiplications and additions of both matrix products, visible pairs only."""
        pairs = sum(n * q - q * (q - 1) // 2 for n, q in zip(self.seq_lens, self.query_lens or (), strict=False))
        return 2 * pairs * self.num_heads * (self.head_dim + self.dim_v)


FEATURES: dict[str, dict[str, Any]] = {
    "window": {"sliding_window": 50},
    "softcap": {"softcap": 5.0},
    "alibi": {"alibi_slopes": 0.1},  # spread over the heads by `CallTensors`
    "sinks": {"sinks": 1.0},
    "not causal": {"causal": False},
}

DECODE = (
    CallShape("1 x 32768", (32768,)),
    CallShape("8 x 8192", (8192,) * 8),
    CallShape("64 x 1024", (1024,) * 64),
    CallShape("256 x 2048", (2048,) * 256),
    CallShape("32 x 4096, no GQA", (4096,) * 32, num_kv_heads=32),
    CallShape("64 x 4096, float8", (4096,) * 64, kv_dtype="float8_e4m3fn"),
)
PREFILL = (
    CallShape("prompt of 8192", (8192,), (8192,)),
    CallShape("4 chunks of 1024 after 7168", (8192,) * 4, (1024,) * 4),
)


def sample() -> list[CallShape]:
    """What is checked: every dtype, head_dims of each kind, groups, lengths around every boundary, every feature."""
    small = CallShape("", (1, 17, 0, 300, 2500), None, 8, 2, 64)
    mixed = replace(small, seq_lens=(1, 90, 0, 47, 700), query_lens=(1, 33, 0, 2, 200))
    shapes = []
    for base, kind in ((small, "decode"), (mixed, "mixed")):
        for q, kv in (
            ("float32", None),
            ("float16", None),
            ("bfloat16", None),
            ("bfloat16", "int8"),
            ("float16", "float8_e4m3fn"),
            ("bfloat16", "float8_e5m2"),
            ("float16", "float32"),
        ):
            shapes.append(replace(base, name=f"{kind} {q}/{kv or q}", q_dtype=q, kv_dtype=kv))
        for dim, dim_v in ((16, 16), (72, 72), (128, 128), (192, 128), (256, 256)):
            shapes.append(replace(base, name=f"{kind} head_dim {dim}/{dim_v}", head_dim=dim, head_dim_v=dim_v))
        for heads, kv_heads in ((3, 3), (14, 2), (16, 1), (128, 1)):
            shapes.append(
                replace(base, name=f"{kind} {heads}/{kv_heads} heads", num_heads=heads, num_kv_heads=kv_heads)
            )
        for block_size, layout in ((8, "NHD"), (24, "HND"), (128, "NHD")):
            name = f"{kind} blocks of {block_size} {layout}"
            shapes.append(replace(base, name=name, block_size=block_size, layout=layout))
        for features in (*((name,) for name in FEATURES), tuple(FEATURES)[:-1]):
            for q in ("float32", "bfloat16"):
                shapes.append(replace(base, name=f"{kind} {'+'.join(features)} {q}", features=features, q_dtype=q))
    return shapes


def shrunk(shape: CallShape) -> CallShape:
    """A shape that an interpreter can do: contexts and queries of at most some dozens of tokens."""
    lens = [max(1, min(n, 40 + n % 7)) if n else 0 for n in shape.seq_lens[:4]]
    query_lens = None
    if shape.query_lens is not None:
        query_lens = tuple(min(n, q, 20) for n, q in zip(lens, shape.query_lens, strict=False))
    return replace(shape, seq_lens=tuple(lens), query_lens=query_lens)


class CallTensors:
    """The tensors of one shape; `args` are the arguments of `paged_attention`."""

    def __init__(self, shape: CallShape, device: str, seed: int = 0) -> None:
        self.shape, self.device = shape, device
        self._generator = torch.Generator(device).manual_seed(seed)
        widths = [-(-n // shape.block_size) for n in shape.seq_lens]
        num_blocks = sum(widths) + 1  # one that nobody owns
        table = torch.full((len(widths), max(widths, default=0) + 1), GARBAGE, dtype=torch.int32, device="cpu")
        generator = torch.Generator("cpu").manual_seed(seed)
        ids = torch.randperm(num_blocks, generator=generator, device="cpu").to(torch.int32)
        for row, (width, start) in enumerate(zip(widths, accumulate(widths, initial=0), strict=False)):
            table[row, :width] = ids[start : start + width]
        q_dtype = getattr(torch, shape.q_dtype)
        num_tokens = len(widths) if shape.query_lens is None else sum(shape.query_lens)
        self.args: dict[str, Any] = {
            "q": self._random(num_tokens, shape.num_heads, shape.head_dim).to(q_dtype),
            "k_cache": self._cache(num_blocks, shape.head_dim),
            "v_cache": self._cache(num_blocks, shape.dim_v),
            "block_table": table.to(device),
            "seq_lens": torch.tensor(shape.seq_lens, dtype=torch.int32, device=device),
        }
        self._poison(ids, widths)
        if shape.query_lens is not None:
            starts = torch.tensor([*accumulate(shape.query_lens, initial=0)], dtype=torch.int32, device=device)
            self.args |= {"cu_seqlens_q": starts, "max_seqlen_q": max(shape.query_lens)}
        if (shape.kv_dtype or "") in UNIT:
            unit = UNIT[shape.kv_dtype or ""]
            scales = unit * (1 + torch.arange(shape.num_kv_heads, device=device) % 3).float()
            self.args |= {"k_scale": scales, "v_scale": 0.5 * scales}
        for name in shape.features:
            self.args |= FEATURES[name]
        for name in ("alibi_slopes", "sinks"):
            if name in self.args:
                steps = torch.arange(1, shape.num_heads + 1, device=device, dtype=torch.float32)
                self.args[name] = steps * (self.args[name] / shape.num_heads)

    def dense(self) -> tuple[Tensor, Tensor, Tensor]:
        """Contiguous q [S, H, R, D], k [S, G, L, D] and v [S, G, L, E] of sequences of equal length, for torch's own
        attention; the caches must be of a float dtype."""
        shape = self.shape
        length, width = shape.seq_lens[0], -(-shape.seq_lens[0] // shape.block_size)
        blocks = self.args["block_table"][:, :width].long()
        k, v = (
            self.args[name][blocks].flatten(1, 2)[:, :length].transpose(1, 2).contiguous()
            for name in ("k_cache", "v_cache")
        )
        q = self.args["q"].unflatten(0, (len(shape.seq_lens), -1)).transpose(1, 2).contiguous()
        return q, k, v

    def _random(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self._generator, dtype=torch.float32, device=self.device)

    def _cache(self, num_blocks: int, dim: int) -> Tensor:
        shape = self.shape
        dtype = getattr(torch, shape.kv_dtype or shape.q_dtype)
        order = (num_blocks, shape.num_kv_heads, shape.block_size, dim)
        if shape.layout == "NHD":
            order = (num_blocks, shape.block_size, shape.num_kv_heads, dim)
        memory = torch.empty(order, dtype=dtype, device=self.device)
        for part in memory.split(256):  # bounded memory: random numbers are float32
            part.copy_(stored(self._random(*part.shape) / UNIT.get(shape.kv_dtype or "", 1.0), dtype))
        return memory if shape.layout == "NHD" else memory.transpose(1, 2)

    def _poison(self, ids: Tensor, widths: list[int]) -> None:
        """NaN (the largest number, of a dtype that has none) in the block that nobody owns and past each last token."""
        size = self.shape.block_size
        places = [(int(ids[-1]), 0)]
        for start, width, n in zip(accumulate(widths, initial=0), widths, self.shape.seq_lens, strict=False):
            if n % size:
                places.append((int(ids[start + width - 1]), n % size))
        for name in ("k_cache", "v_cache"):
            cache = self.args[name]
            fill = poison(cache.dtype, cache.device)
            for block, first in places:
                cache[block, first:].copy_(fill.expand_as(cache[block, first:]))
