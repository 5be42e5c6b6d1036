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
from triton.compiler import CompiledKernel

from pagedkern.backends.base import AttentionCall, CopyCall, WriteCall
from pagedkern.backends.triton.config import TritonConfig, ceil_power, padded, split_columns
from pagedkern.backends.triton.decode import PARTIAL, merge_kernel, split_kernel
from pagedkern.backends.triton.disk import compiling
from pagedkern.backends.triton.prefill import prefill_kernel
from pagedkern.backends.triton.store import WORDS, copy_kernel, write_kernel

KINDS = {torch.int8: "int8", torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2"}
TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
LONGEST_WINDOW = 2**30  # tokens; positions are int32
MERGE_CHUNK = 16
WRITE_ROWS = 32
MERGE_WARPS = WRITE_WARPS = COPY_WARPS = 4
MOVED_PAIRS = 64  # pairs of blocks that one program of copy_kernel takes at most
CACHES = 8  # that copy_kernel takes at a time
WORD_DTYPES = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


class Launch(NamedTuple):
    """One kernel launch, its arguments in the order of the kernel's parameters."""

    kernel: Any
    grid: tuple[int, int, int]
    tensors: tuple[Tensor | None, ...]
    numbers: tuple[int | float | None, ...]  # compiled for their being there, not for their value
    constants: tuple[Any, ...]  # compiled for
    warps: int
    stages: int

    def run(self) -> None:
        """Launch on the current device and stream.

        Triton finds the compiled kernel by looking at every argument, which takes longer than the launch. What decides
        here is known to be less: the constants, which tensors and numbers there are, dtypes, and 16-byte alignment.
        """
        device = None if self.tensors[0] is None else self.tensors[0].device
        kinds = [None if x is None else (x.dtype, x.data_ptr() & 15 == 0) for x in self.tensors]
        given = [x is None for x in self.numbers]
        key = (self.kernel.fn, self.warps, self.stages, device, self.constants, *kinds, *given)
        kernel = _compiled.get(key)
        if kernel is not None:
            kernel[self.grid](*self.tensors, *self.numbers, *self.constants)
            return
        kernel = self._compile_and_run() if interpreted() else compiling(self._compile_and_run)
        if isinstance(kernel, CompiledKernel):  # the interpreter returns nothing
            _compiled[key] = kernel

    def _compile_and_run(self) -> Any:
        return self.kernel[self.grid](
            *self.tensors, *self.numbers, *self.constants,
            num_warps=self.warps, num_stages=self.stages, enable_fp_fusion=True, maxnreg=_registers(self.warps),
        )  # fmt: skip


_compiled: dict[tuple[Any, ...], CompiledKernel] = {}


def _registers(warps: int) -> int:
    """Registers of a thread. Left to itself, ptxas spills a few to let more programs reside on a multiprocessor."""
    return min(255, 65536 // (32 * warps))


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
    k_cache, v_cache, _ = _codes(call.k_cache, call.v_cache)
    window = None if call.sliding_window is None else min(call.sliding_window, LONGEST_WINDOW)
    plan = _plan(
        config, q.dtype, call.k_cache.dtype, heads, kv_heads, head_dim, head_dim_v, block_size,
        num_tokens, num_seqs, width, call.max_seqlen_q, window, cu is not None, call.causal, native,
        (_align(q, 2), _align(k_cache, 3), _align(v_cache, 3), _align(out, 2)),
    )  # fmt: skip
    out_row, out_head, _ = out.stride()
    tensors = (q, k_cache, v_cache, call.block_table, call.seq_lens, cu, out, call.lse)
    factors = (call.alibi_slopes, call.sinks, call.k_scale, call.v_scale)
    numbers = (
        call.scale, call.softcap, window, *q.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3], out_row,
        out_head, call.block_table.stride(0),
    )  # fmt: skip
    work = None
    if plan.work:
        work = q.new_empty(plan.work, dtype=torch.float32)
    yield Launch(
        split_kernel, plan.split_grid, (*tensors, work, *factors), (*numbers, *plan.split_numbers),
        plan.split_constants, config.warps, config.stages,
    )  # fmt: skip
    if plan.work:
        yield Launch(
            merge_kernel, plan.merge_grid, (work, call.seq_lens, cu, out, call.lse, call.sinks),
            (window, out_row, out_head, *plan.merge_numbers), plan.merge_constants, MERGE_WARPS, 1,
        )  # fmt: skip
    if plan.prefill_grid is not None:
        yield Launch(
            prefill_kernel, plan.prefill_grid, (*tensors, *factors), (*numbers, num_seqs, config.split_queries + 1),
            plan.prefill_constants, config.prefill_warps, config.prefill_stages,
        )  # fmt: skip


class _Plan(NamedTuple):
    """What shapes, dtypes and configuration decide about a call."""

    work: int  # float32 numbers of the workspace; 0: no sequence can have more than one span
    split_grid: tuple[int, int, int]
    split_numbers: tuple[int, ...]
    split_constants: tuple[Any, ...]
    merge_grid: tuple[int, int, int]
    merge_numbers: tuple[int, ...]
    merge_constants: tuple[Any, ...]
    prefill_grid: tuple[int, int, int] | None  # None: no sequence is there that could have so many query tokens
    prefill_constants: tuple[Any, ...]


@lru_cache(maxsize=4096)
def _plan(
    config: TritonConfig, q_dtype: torch.dtype, kv_dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int,
    head_dim_v: int, block_size: int, num_tokens: int, num_seqs: int, width: int, max_seqlen_q: int, window: int | None,
    ragged: bool, causal: bool, native: bool, aligns: tuple[int, int, int, int],
) -> _Plan:  # fmt: skip
    group, columns_v, kind = heads // kv_heads, padded(head_dim_v), KINDS.get(kv_dtype, "")
    operand = TRITON_DTYPES[q_dtype if kv_dtype == q_dtype or kind else torch.float32]
    columns = split_columns(head_dim, operand == tl.float32)
    shape = (kv_heads, group, head_dim, head_dim_v, *columns, columns_v, block_size)
    products = (kind, native, operand, "tf32" if config.allow_tf32 else "ieee")

    queries = max(1, min(max_seqlen_q, config.split_queries))
    longest = width * block_size  # tokens that the queries of a sequence may see
    if window is not None:
        longest = min(longest, window + queries + config.span)
    splits = min(config.num_splits, max(1, -(-longest // config.span)))
    row_tiles = -(-queries * group // config.rows)
    parts = ceil_power(config.num_splits)
    tiles = num_tokens * group // config.prefill_rows + num_seqs
    return _Plan(
        num_seqs * queries * heads * splits * (head_dim_v + PARTIAL.value) if splits > 1 else 0,
        ((num_seqs + ragged) * splits * kv_heads * row_tiles, 1, 1),
        (num_seqs, num_tokens, queries, splits, row_tiles),
        (*shape, config.rows, config.tile, config.num_splits, config.span // config.tile, *aligns, causal, queries > 1,
         *products, config.stages),
        (num_seqs * queries, heads, 1),
        (queries, splits),
        (heads, head_dim_v, columns_v, config.span, parts, min(MERGE_CHUNK, parts), aligns[3]),
        (tiles, kv_heads, 1) if num_seqs and max_seqlen_q > config.split_queries else None,
        (*shape, config.prefill_rows, config.prefill_tile, *aligns, causal, *products, config.prefill_stages),
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
        (-(-num_tokens * kv_heads // WRITE_ROWS), 1, 1),
        (call.k, call.v, k_cache, v_cache, call.slot_mapping, call.k_scale, call.v_scale),
        (*call.k.stride()[:2], *call.v.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3], num_tokens),
        (kv_heads, head_dim, head_dim_v, padded(head_dim), padded(head_dim_v), k_cache.shape[1], WRITE_ROWS,
         _align(call.k, 2), _align(call.v, 2), _align(k_cache, 3), _align(v_cache, 3), kind),
        WRITE_WARPS,
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
            (call.src_blocks, call.dst_blocks),
            (*addresses, *[0] * (CACHES - len(addresses)), 0 if saved is None else saved.data_ptr(), num_pairs,
             num_words, *geometry.shape[1:], geometry.block, *geometry.strides),
            (WORD_DTYPES[geometry.size], pairs, mode),
            COPY_WARPS,
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
