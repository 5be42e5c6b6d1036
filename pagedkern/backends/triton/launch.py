"""From calls to kernels: arguments, grids and constants, and the same for compilation ahead of time.

Nothing here reads the device. Workspaces come from torch's allocator, which keeps freed memory for each device and
stream by itself, and gives a graph that is being captured memory of the graph's own pool.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagedkern.backends.base import AttentionCall, CopyCall, WriteCall
from pagedkern.backends.triton.config import TritonConfig, ceil_power, padded, split_columns
from pagedkern.backends.triton.decode import PARTIAL, merge_kernel, split_kernel
from pagedkern.backends.triton.prefill import prefill_kernel
from pagedkern.backends.triton.store import WORDS, copy_kernel, write_kernel

KINDS = {torch.int8: "int8", torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2"}
TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
LONGEST_WINDOW = 2**30  # tokens; positions are int32
MERGE_CHUNK = 16
WRITE_ROWS = 32
MOVED_PAIRS = 64  # pairs of blocks that one program of copy_kernel takes at most
CACHES = 8  # that copy_kernel takes at a time
WORD_DTYPES = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


class Launch(NamedTuple):
    """One kernel launch."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    warps: int
    stages: int

    def run(self) -> None:
        self.kernel[self.grid](*self.arguments, num_warps=self.warps, num_stages=self.stages, enable_fp_fusion=True)


@cache
def interpreted() -> bool:
    """Whether Triton interprets kernels rather than compiling them."""
    return bool(triton.knobs.runtime.interpret)


@lru_cache(maxsize=64)
def native_fp8(device: torch.device) -> bool:
    """Whether the device converts float8_e4m3fn by itself."""
    return not interpreted() and torch.cuda.get_device_capability(device) >= (8, 9)


def attention(call: AttentionCall, config: TritonConfig) -> None:
    with _on(call.q.device):
        for launch in attention_launches(call, config, native_fp8(call.q.device)):
            launch.run()


def attention_launches(call: AttentionCall, config: TritonConfig, native: bool) -> Iterator[Launch]:
    """The launches of a call, in order: split kernel, merge kernel, prefill kernel, as far as it needs them."""
    q, out, cu = call.q, call.out, call.cu_seqlens_q
    num_tokens, heads, head_dim = q.shape
    num_seqs, width = call.block_table.shape
    _, block_size, kv_heads, head_dim_v = call.v_cache.shape
    if num_tokens == 0:
        return
    k_cache, v_cache, kind = _codes(call.k_cache, call.v_cache)
    window = None if call.sliding_window is None else min(call.sliding_window, LONGEST_WINDOW)
    queries = max(1, min(call.max_seqlen_q, config.split_queries))
    strides = (*q.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3], *out.stride()[:2])
    aligns = (_align(q, 2), _align(k_cache, 3), _align(v_cache, 3), _align(out, 2))
    narrow = call.k_cache.dtype == q.dtype or kind
    operand = TRITON_DTYPES[q.dtype if narrow else torch.float32]
    columns = split_columns(head_dim, operand == tl.float32)
    shape = (kv_heads, heads // kv_heads, head_dim, head_dim_v, *columns, padded(head_dim_v), block_size)
    precision = "tf32" if config.allow_tf32 else "ieee"
    tables = (call.block_table, call.seq_lens, cu)
    factors = (call.alibi_slopes, call.sinks, call.k_scale, call.v_scale, call.scale, call.softcap, window)
    numbers = (*strides, call.block_table.stride(0))

    longest = width * block_size if window is None else min(width * block_size, window + queries + config.span)
    splits = min(config.num_splits, max(1, -(-longest // config.span)))
    row_tiles = -(-queries * shape[1] // config.rows)
    work = None
    if splits > 1:
        work = q.new_empty(num_seqs * queries * heads * splits * (head_dim_v + PARTIAL.value), dtype=torch.float32)
    programs = (num_seqs + (cu is not None)) * splits * kv_heads * row_tiles
    yield Launch(
        split_kernel,
        (programs,),
        (q, k_cache, v_cache, *tables, out, call.lse, work, *factors, *numbers,
         num_seqs, num_tokens, queries, splits, row_tiles,
         *shape, config.rows, config.tile, config.num_splits, config.span // config.tile, *aligns,
         call.causal, queries > 1, kind, native, operand, precision, config.stages),
        config.warps,
        config.stages,
    )  # fmt: skip
    if work is not None and num_seqs:
        yield Launch(
            merge_kernel,
            (num_seqs * queries, heads),
            (work, call.seq_lens, cu, out, call.lse, call.sinks, window, *out.stride()[:2], queries, splits,
             heads, head_dim_v, padded(head_dim_v), config.span, ceil_power(config.num_splits),
             min(MERGE_CHUNK, ceil_power(config.num_splits)), aligns[3]),
            4,
            1,
        )  # fmt: skip
    if call.max_seqlen_q > config.split_queries:
        tiles = num_tokens * shape[1] // config.prefill_rows + num_seqs
        yield Launch(
            prefill_kernel,
            (tiles, kv_heads),
            (q, k_cache, v_cache, *tables, out, call.lse, *factors, *numbers, num_seqs, config.split_queries + 1,
             *shape, config.prefill_rows, config.prefill_tile, *aligns,
             call.causal, kind, native, operand, precision, config.prefill_stages),
            config.prefill_warps,
            config.prefill_stages,
        )  # fmt: skip


def write_kv(call: WriteCall) -> None:
    with _on(call.k.device):
        for launch in write_launches(call):
            launch.run()


def write_launches(call: WriteCall) -> Iterator[Launch]:
    """The launch of a call, if there is a token."""
    num_tokens, kv_heads, head_dim = call.k.shape
    head_dim_v = call.v.shape[2]
    if num_tokens == 0:
        return
    k_cache, v_cache, kind = _codes(call.k_cache, call.v_cache)
    yield Launch(
        write_kernel,
        (-(-num_tokens * kv_heads // WRITE_ROWS),),
        (call.k, call.v, k_cache, v_cache, call.slot_mapping, call.k_scale, call.v_scale,
         *call.k.stride()[:2], *call.v.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3], num_tokens,
         kv_heads, head_dim, head_dim_v, padded(head_dim), padded(head_dim_v), k_cache.shape[1], WRITE_ROWS,
         _align(call.k, 2), _align(call.v, 2), _align(k_cache, 3), _align(v_cache, 3), kind),
        4,
        1,
    )  # fmt: skip


def copy_blocks(call: CopyCall) -> None:
    if len(call.src_blocks) == 0:
        return
    with _on(call.src_blocks.device):
        for launch in copy_launches(call):
            launch.run()


def copy_launches(call: CopyCall) -> Iterator[Launch]:
    """One launch for up to eight caches of equal geometry; three for each of them that many pairs of blocks need: then
    the sources go through a copy, since blocks that are read and written do not fit into the registers of a program."""
    num_pairs = len(call.src_blocks)
    groups: dict[_Geometry, list[int]] = {}
    for cache_ in call.caches:
        for part in _parts(cache_):
            groups.setdefault(_geometry(part), []).append(part.data_ptr())
    for geometry, addresses in groups.items():
        for i in range(0, len(addresses), CACHES):
            yield from _copies(call, geometry, addresses[i : i + CACHES], num_pairs)


class _Geometry(NamedTuple):
    """What a block looks like: words of `size` bytes in up to three dimensions; strides in words."""

    size: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: int


def _copies(call: CopyCall, geometry: _Geometry, addresses: list[int], num_pairs: int) -> Iterator[Launch]:
    num_words = math.prod(geometry.shape)
    pairs = next(n for n in (1, 4, 16, MOVED_PAIRS) if n >= min(num_pairs, MOVED_PAIRS))
    saved = None
    if num_pairs > MOVED_PAIRS:
        saved = call.src_blocks.new_empty(len(addresses) * num_pairs * num_words * geometry.size, dtype=torch.uint8)
    for mode in ("move",) if saved is None else ("save", "restore"):
        yield Launch(
            copy_kernel,
            (-(-num_words * pairs // WORDS.value), len(addresses), -(-num_pairs // pairs)),
            (call.src_blocks, call.dst_blocks, *addresses, *[0] * (CACHES - len(addresses)),
             0 if saved is None else saved.data_ptr(), num_pairs, num_words, *geometry.shape[1:], geometry.block,
             *geometry.strides, WORD_DTYPES[geometry.size], pairs, mode),
            4,
            1,
        )  # fmt: skip


def _parts(cache_: Tensor) -> Iterator[Tensor]:
    """The cache, or parts of it, each with at most three dimensions in a block that cannot be walked as one."""
    if cache_.numel() == 0:
        return
    if len(_dimensions(cache_)) <= 3:
        yield cache_
        return
    for part in cache_.unbind(1):
        yield from _parts(part)


def _dimensions(cache_: Tensor) -> list[tuple[int, int]]:
    """(size, stride) in bytes of a block's dimensions, the outermost first; neighbours walked as one are one."""
    size = cache_.element_size()
    found = [(size, 1)]
    for stride, length in sorted(zip(cache_.stride()[1:], cache_.shape[1:], strict=True)):
        if length == 1:
            continue
        inner_length, inner_stride = found[-1]
        if stride * size == inner_length * inner_stride:
            found[-1] = (inner_length * length, inner_stride)
        else:
            found.append((length, stride * size))
    return found[::-1]


def _geometry(cache_: Tensor) -> _Geometry:
    dimensions = _dimensions(cache_)
    run = dimensions.pop()[0]  # bytes that lie side by side
    block = cache_.stride(0) * cache_.element_size()
    word = math.gcd(8, cache_.data_ptr(), run, block, *(stride for _, stride in dimensions))
    dimensions = [(1, 0)] * (2 - len(dimensions)) + dimensions
    shape = (*(length for length, _ in dimensions), run // word)
    return _Geometry(word, shape, (*(stride // word for _, stride in dimensions), 1), block // word)


def _codes(k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor, str]:
    """The caches as the kernels load them, and the KIND of their numbers: float8 as bytes, since Triton has no pointer
    to float8_e4m3fn for compute capability 8.0."""
    kind = KINDS.get(k_cache.dtype, "")
    if kind.startswith("float8"):
        return k_cache.view(torch.uint8), v_cache.view(torch.uint8), kind
    return k_cache, v_cache, kind


def _align(x: Tensor, dims: int) -> int:
    """The largest power of two, up to 16 bytes, that divides address and the first `dims` strides, in elements."""
    size = x.element_size()
    bits = 16 | x.data_ptr()
    for stride in x.stride()[:dims]:
        bits |= stride * size
    return max(1, (bits & -bits) // size)


def _on(device: torch.device) -> Any:
    """Make the device current, which Triton launches on, if it is not."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
