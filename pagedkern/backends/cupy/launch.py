"""From tensors to launches: fills the ABI's structs and the plans of instance.cuh, sizes grids. Trusts `ops`.

Grids, workspaces and instances follow from shapes, strides, alignment and the configuration; nothing on the device is
read. Memory comes from torch's allocator on the current stream, so calls can be captured and may run side by side.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from math import gcd

import torch
from torch import Tensor

from pagedkern.abi import ABI_VERSION, DTYPE_CODES
from pagedkern.abi.structs import AttentionParamsStruct, BatchStruct
from pagedkern.backends.base import AttentionCall, CopyCall, WriteCall
from pagedkern.backends.cupy import config as configuration
from pagedkern.backends.cupy.config import CupyConfig, KernelKey
from pagedkern.backends.cupy.instance import (
    COPY_CACHES,
    COPY_DIMS,
    AttentionPlan,
    CopyPlan,
    Instance,
    WritePlan,
)
from pagedkern.backends.cupy.launcher import Launcher, current_launcher
from pagedkern.errors import InvalidArgument, Unsupported

NAMES = {getattr(torch, name): name for name in DTYPE_CODES}
BATCH_BYTES, PARAMS_BYTES = ctypes.sizeof(BatchStruct), ctypes.sizeof(AttentionParamsStruct)
COLUMN, COPY_SHARED = 4096, 48 << 10  # bytes: widest column of copy_blocks, and shared memory that it takes by choice
PARTIAL_BYTES = 128 << 20  # of partial results, after which the next sequences are another launch


# ---- Attention ----


def attention(call: AttentionCall, config: CupyConfig) -> None:
    """Decode, a merge if keys are split, and prefill if some sequence may have that many queries."""
    run, heads, kv_heads = current_launcher(), call.q.shape[1], call.k_cache.shape[2]
    model = KernelKey(
        NAMES[call.q.dtype], NAMES[call.k_cache.dtype], heads // kv_heads, call.q.shape[2], call.v_cache.shape[3],
        call.softcap is not None, call.alibi_slopes is not None,
    )  # fmt: skip
    k_unit, v_unit = _unit(call.k_cache), _unit(call.v_cache)
    copy = _copy_path(call, config, run, min(k_unit, v_unit))
    batch, params = _batch(call), _params(call)
    arrays = tuple(x for name in _ARRAYS if (x := getattr(call, name)) is not None)
    num_seqs, width = call.block_table.shape
    max_seqlen_k = width * call.k_cache.shape[1]

    decode = configuration.instance(model, config, copy, False)
    tokens = max(1, min(config.decode_tokens, call.max_seqlen_q))
    splits = max(1, min(config.num_splits, -(-max_seqlen_k // decode.span)))
    plan = AttentionPlan(
        splits=splits,
        row_tiles=-(-tokens * model.group // decode.block_rows),
        decode_tokens=config.decode_tokens,
        partial_tokens=tokens,
        k_unit=k_unit,
        v_unit=v_unit,
    )
    _decode(run, decode, batch, params, plan, arrays, call.q)
    if call.max_seqlen_q > config.decode_tokens and num_seqs:
        prefill = configuration.instance(model, config, copy, True)
        plan.splits = 1
        tiles = -(-len(call.q) * model.group // prefill.block_rows) + num_seqs
        _attend(run, prefill, (tiles, kv_heads, 1), batch, params, plan, arrays, call.q.device)


def _decode(
    run: Launcher,
    instance: Instance,
    batch: BatchStruct,
    params: AttentionParamsStruct,
    plan: AttentionPlan,
    arrays: tuple[Tensor, ...],
    q: Tensor,
) -> None:
    """Launch as many sequences at once as have room for the partial results of their splits, which are then merged."""
    at_once, rows = max(1, batch.num_seqs), plan.partial_tokens * batch.num_heads * plan.splits  # of one sequence
    if plan.splits > 1:
        at_once = max(1, min(at_once, PARTIAL_BYTES // (4 * rows * (batch.head_dim_v + 2))))
        partial = q.new_empty((at_once * rows, batch.head_dim_v), dtype=torch.float32)
        state = q.new_empty((at_once * rows, 2), dtype=torch.float32)
        plan.partial_out, plan.partial_state = partial.data_ptr(), state.data_ptr()
        arrays += (partial, state)
    for first in range(0, max(1, batch.num_seqs), at_once):
        plan.first_sequence, count = first, min(at_once, batch.num_seqs - first)
        grid = (max(1, count * plan.row_tiles), batch.num_kv_heads, plan.splits)
        _attend(run, instance, grid, batch, params, plan, arrays, q.device)
        if plan.splits > 1 and count:
            kernel = run.kernel("merge.cu", "merge", {}, q.device)
            grid = (count * plan.partial_tokens, -(-batch.num_heads // 4), 1)
            run.launch(kernel, grid, 128, 0, (batch, params, plan), arrays, q.device)


def _attend(
    run: Launcher,
    instance: Instance,
    grid: tuple[int, int, int],
    batch: BatchStruct,
    params: AttentionParamsStruct,
    plan: AttentionPlan,
    arrays: tuple[Tensor, ...],
    device: torch.device,
) -> None:
    shared, limit = instance.shared_bytes, run.shared_limit(device)
    if shared > limit:
        raise InvalidArgument(
            f"config: got tiles and stages that take {shared} bytes of shared memory for {instance.dim_k} and "
            f"{instance.dim_v} elements a head, expected {limit} on this device"
        )
    plan.instance = instance.struct
    macros = {} if run.generic else {"PAGEDKERN_INSTANCE": instance.macro}
    kernel = run.kernel("attention.cu", "attention", macros, device)
    run.launch(kernel, grid, instance.threads, shared, (batch, params, plan), arrays, device)


_ARRAYS = (
    "q", "k_cache", "v_cache", "block_table", "seq_lens", "cu_seqlens_q", "alibi_slopes", "sinks", "k_scale", "v_scale",
    "out", "lse",
)  # fmt: skip


def _batch(call: AttentionCall) -> BatchStruct:
    q, k, v, table, out, lse = call.q, call.k_cache, call.v_cache, call.block_table, call.out, call.lse
    num_blocks, block_size, kv_heads, head_dim = k.shape
    return BatchStruct(
        ABI_VERSION, BATCH_BYTES, table.shape[0], q.shape[0], call.max_seqlen_q, table.shape[1], num_blocks, block_size,
        q.shape[1], kv_heads, head_dim, v.shape[3], DTYPE_CODES[NAMES[q.dtype]], DTYPE_CODES[NAMES[k.dtype]],
        *_place(q), table.data_ptr(), call.seq_lens.data_ptr(), _pointer(call.cu_seqlens_q), None, k.data_ptr(),
        v.data_ptr(), q.data_ptr(), out.data_ptr(), _pointer(lse), table.stride(0), *k.stride()[:3], *v.stride()[:3],
        *q.stride()[:2], *out.stride()[:2], 0 if lse is None else lse.stride(0),
    )  # fmt: skip


def _params(call: AttentionCall) -> AttentionParamsStruct:
    return AttentionParamsStruct(
        ABI_VERSION, PARAMS_BYTES, call.scale, call.softcap or 0.0, call.sliding_window or 0, call.causal, 0,
        *map(_pointer, (call.alibi_slopes, call.sinks, call.k_scale, call.v_scale)),
    )  # fmt: skip


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _place(x: Tensor) -> tuple[int, int]:
    """The ABI's device type and id."""
    return (2, x.device.index) if x.is_cuda else (1, 0)


def _copy_path(call: AttentionCall, config: CupyConfig, run: Launcher, unit: int) -> str:
    """How tiles reach shared memory: as the configuration wishes, as far as rows aligned to `unit` bytes allow."""
    k, v = call.k_cache, call.v_cache
    if config.copy == "plain" or unit < 16:
        return "plain"
    whole_rows = k.shape[3] * k.itemsize % 16 == v.shape[3] * v.itemsize % 16 == 0
    if config.copy == "async" or not whole_rows or run.capability(call.q.device) < 90:
        return "async"
    contiguous = k.stride(1) == k.shape[3] and v.stride(1) == v.shape[3]  # a block of one head, as in HND
    return "bulk" if contiguous or config.copy == "bulk" else "async"


def _unit(x: Tensor) -> int:
    """Bytes, at most 16, to which every row (all but the last dimension given) is aligned."""
    unit = gcd(16, x.data_ptr())
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size > 1:
            unit = gcd(unit, stride * x.itemsize)
    return unit


# ---- The small operations ----


def write_kv(call: WriteCall) -> None:
    run, tensors = current_launcher(), (call.k, call.v, call.k_cache, call.v_cache)
    num_tokens = len(call.slot_mapping)
    if not num_tokens:
        return
    k, v = call.k_cache, call.v_cache
    batch = BatchStruct(
        version=ABI_VERSION, struct_size=BATCH_BYTES, num_tokens=num_tokens, num_blocks=k.shape[0],
        block_size=k.shape[1], num_kv_heads=k.shape[2], head_dim=k.shape[3], head_dim_v=v.shape[3],
        kv_dtype=DTYPE_CODES[NAMES[k.dtype]], slot_mapping=call.slot_mapping.data_ptr(), k_cache=k.data_ptr(),
        v_cache=v.data_ptr(), k_stride_block=k.stride(0), k_stride_token=k.stride(1), k_stride_head=k.stride(2),
        v_stride_block=v.stride(0), v_stride_token=v.stride(1), v_stride_head=v.stride(2),
    )  # fmt: skip
    batch.device_type, batch.device_id = _place(k)
    plan = WritePlan(
        *map(_pointer, (call.k, call.v, call.k_scale, call.v_scale)), *call.k.stride()[:2], *call.v.stride()[:2],
        DTYPE_CODES[NAMES[call.k.dtype]], gcd(*map(_unit, tensors), *(x.shape[-1] * x.itemsize for x in (k, v))),
    )  # fmt: skip
    arrays = (*tensors, call.slot_mapping, *(x for x in (call.k_scale, call.v_scale) if x is not None))
    kernel = run.kernel("write_kv.cu", "write_kv", {}, k.device)
    run.launch(kernel, (num_tokens, 1, 1), 128, 0, (batch, plan), arrays, k.device)


def copy_blocks(call: CopyCall) -> None:
    """One launch for all caches of equal layout, in groups of COPY_CACHES."""
    run, pairs = current_launcher(), len(call.src_blocks)
    groups: dict[tuple[object, ...], list[Tensor]] = {}
    for cache in call.caches:
        if pairs and cache.numel():
            key = (_runs(cache.shape[1:], cache.stride()[1:], cache.itemsize), cache.stride(0) * cache.itemsize)
            groups.setdefault((*key, _unit(cache.unsqueeze(-1))), []).append(cache)
    for (runs, stride_block, unit), caches in groups.items():
        for start in range(0, len(caches), COPY_CACHES):
            _copy(run, call, caches[start : start + COPY_CACHES], runs, stride_block, unit)  # type: ignore[arg-type]


def _copy(
    run: Launcher,
    call: CopyCall,
    caches: list[Tensor],
    layout: tuple[int, tuple[tuple[int, int], ...]],
    stride_block: int,
    unit: int,
) -> None:
    device, pairs = call.src_blocks.device, len(call.src_blocks)
    run_bytes, dims = layout
    unit = gcd(unit, run_bytes, *(stride for _, stride in dims))
    limit = run.shared_limit(device)
    while unit > 1 and pairs * unit > limit:
        unit //= 2
    if pairs * unit > limit or len(dims) > COPY_DIMS:
        raise Unsupported(
            f"copy_blocks: got {pairs} pairs of blocks of {len(dims)} strided dimensions, expected {limit} pairs "
            f"and {COPY_DIMS} dimensions in one call"
        )
    column = max(unit, min(COLUMN, run_bytes, max(COPY_SHARED, pairs * unit) // pairs) // unit * unit)
    padded = [*dims, *((1, 0) for _ in range(COPY_DIMS - len(dims)))]
    runs = 1
    for size, _ in dims:
        runs *= size
    plan = CopyPlan(
        call.src_blocks.data_ptr(), call.dst_blocks.data_ptr(), pairs, stride_block, run_bytes, runs,
        tuple(size for size, _ in padded), tuple(stride for _, stride in padded), column, unit,
        tuple(cache.data_ptr() for cache in caches),
    )  # fmt: skip
    grid = (runs * -(-run_bytes // column), len(caches), 1)
    kernel = run.kernel("copy_blocks.cu", "copy_blocks", {}, device)
    arrays = (*caches, call.src_blocks, call.dst_blocks)
    run.launch(kernel, grid, 128, pairs * column, (plan,), arrays, device)


@lru_cache(maxsize=256)
def _runs(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Bytes of the contiguous pieces of a block, and the (size, stride in bytes) over them, merged, innermost first."""
    dims = sorted((stride * itemsize, size) for size, stride in zip(shape, strides, strict=True) if size > 1)
    piece = itemsize
    while dims and dims[0][0] == piece:
        piece *= dims.pop(0)[1]
    merged: list[tuple[int, int]] = []
    for stride, size in dims:
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1] = (merged[-1][0] * size, merged[-1][1])
        else:
            merged.append((size, stride))
    return piece, tuple(merged)
