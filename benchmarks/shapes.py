"""The problems of each size: "tiny" for a test, "small" for a CPU and minutes, "full" for a GPU or patience."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pagedkern.gpucheck import problems
from pagedkern.gpucheck.problems import CallShape

SIZES = ("tiny", "small", "full")
BLOCK_SIZES = {"tiny": (16, 32), "small": (8, 16, 32, 64, 128, 256), "full": (8, 16, 32, 64, 128, 256)}

_TINY = CallShape("2 x 48", (48, 48), num_heads=4, num_kv_heads=2, head_dim=64, q_dtype="float32")
_SMALL = CallShape("8 x 2048", (2048,) * 8)


def decode(size: str) -> list[CallShape]:
    """One query token for each sequence."""
    if size == "tiny":
        return [_TINY, replace(_TINY, kv_dtype="int8")]
    if size == "full":
        return list(problems.DECODE)
    dtypes = [replace(_SMALL, q_dtype="float32"), _SMALL, replace(_SMALL, q_dtype="float16")]
    quantized = [replace(_SMALL, kv_dtype=name) for name in ("int8", "float8_e4m3fn")]
    one = replace(_SMALL, name="1 x 16384", seq_lens=(16384,))
    many = replace(_SMALL, name="64 x 256", seq_lens=(256,) * 64)
    no_groups = replace(_SMALL, name="8 x 512, no GQA", seq_lens=(512,) * 8, num_kv_heads=32)
    return [*dtypes, *quantized, one, many, no_groups]


def prefill(size: str) -> list[CallShape]:
    """Prompts, and chunks of prompts."""
    if size == "tiny":
        return [replace(_TINY, name="2 chunks of 16 after 32", query_lens=(16, 16))]
    if size == "full":
        return list(problems.PREFILL)
    prompt = replace(_SMALL, name="prompt of 1024", seq_lens=(1024,), query_lens=(1024,), num_heads=16, num_kv_heads=4)
    chunks = replace(prompt, name="4 chunks of 128 after 896", seq_lens=(1024,) * 4, query_lens=(128,) * 4)
    return [replace(prompt, q_dtype="float32"), prompt, chunks]


def varied(size: str) -> CallShape:
    """The decode problem that is laid out at every block size."""
    return _TINY if size == "tiny" else replace(_SMALL, seq_lens=(2047,) * 8) if size == "small" else problems.DECODE[2]


def title(shape: CallShape) -> str:
    """What tells a problem apart from others: its name and its dtypes."""
    dtypes = shape.q_dtype if shape.kv_dtype is None else f"{shape.q_dtype}, cache {shape.kv_dtype}"
    return f"{shape.name.partition(', float8')[0]}, {dtypes}"


@dataclass(frozen=True)
class Cache:
    """The cache of the small operations and of sharing: bfloat16, or float32 where it is tiny."""

    layers: int
    blocks: int
    block_size: int
    kv_heads: int
    head_dim: int
    prompt: int  # tokens that samples share; not a multiple of the block size
    samples: int
    tokens: int  # written at once

    @property
    def token_bytes(self) -> int:
        """K and V of one token in one layer, two bytes an element."""
        return 2 * 2 * self.kv_heads * self.head_dim


def cache(size: str) -> Cache:
    if size == "tiny":
        return Cache(2, 64, 16, 2, 32, prompt=40, samples=3, tokens=32)
    if size == "small":
        return Cache(4, 1024, 16, 8, 128, prompt=2040, samples=8, tokens=4096)
    return Cache(32, 4096, 16, 8, 128, prompt=8184, samples=16, tokens=32768)
