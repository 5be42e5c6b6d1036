"""From tensors to launches: addresses, strides, grids, workspace, and the kernels compiled for them.

A kernel's parameters are numbers only. Numba would take an array apart again at every launch, its shape and strides one
by one. Everything runs on torch's current stream; nothing waits.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import Any

import torch
from numba import cuda, float32, int32, int64, types, uint8, void
from numba.core import config as numba_config
from torch import Tensor

from pagedkern.backends.base import AttentionCall, CopyCall, WriteCall
from pagedkern.backends.numba_cuda import store
from pagedkern.backends.numba_cuda.config import Constants, NumbaCudaConfig, decode_rows
from pagedkern.backends.numba_cuda.decode import decode_kernel, merge_kernel
from pagedkern.backends.numba_cuda.dtypes import FORMATS
from pagedkern.backends.numba_cuda.prefill import prefill_kernel

EMULATED = bool(numba_config.ENABLE_CUDASIM)  # type: ignore[attr-defined]
THREADS = 128  # of a block of `write` and `copy`
STAGED_BYTES = 64 << 20  # workspace of one launch of `copy`, unless one cache needs more

pointer = types.CPointer


# ---- Signatures ------------------------------------------------------------------------------------------------------


def signatures(c: Constants) -> dict[str, Any]:
    """The signatures of the kernels for these constants, by name."""
    q, code, number, floats = (
        pointer(FORMATS[c.q_dtype].code),
        pointer(FORMATS[c.kv_dtype].code),
        int64,
        pointer(float32),
    )
    cache_ = (code, number, number, number)
    inputs = (q, number, number, *cache_, *cache_, pointer(int32), number, pointer(int32), pointer(int32))
    options = (floats, floats, float32, float32, number)  # k_scale, slopes, scale, softcap, window
    results = (q, number, number, floats, number, number)
    return {
        "decode": void(*inputs, *options, number, floats, floats),
        "merge": void(floats, floats, number, number, number, number, pointer(int32), floats, floats, *results),
        "prefill": void(*inputs, *options, number, floats, floats, *results),
    }


def write_signature(dtype: str, kv_dtype: str) -> Any:
    new, code, floats = pointer(FORMATS[dtype].code), pointer(FORMATS[kv_dtype].code), pointer(float32)
    strides = (int64, int64, int64)
    tokens = (new, int64, int64)
    return void(pointer(int64), int64, *tokens, *tokens, code, *strides, code, *strides, floats, floats)


def copy_signature() -> Any:
    dims = types.UniTuple(int64, store.DIMS + 1)
    caches = types.UniTuple(pointer(uint8), store.CACHES)
    return void(caches, int64, dims, dims, int64, pointer(int64), pointer(int64), int64, pointer(uint8))


# ---- Kernels, compiled on first use and kept on disk -----------------------------------------------------------------

FACTORIES: dict[str, Callable[[Constants], Callable[..., None]]] = {
    "decode": decode_kernel,
    "merge": merge_kernel,
    "prefill": prefill_kernel,
}


@cache
def attention_kernel(name: str, c: Constants, device: int) -> Any:
    return _compiled(signatures(c)[name], c.threads, c)(FACTORIES[name](c))


@cache
def write_kernel(
    dtype: str, kv_dtype: str, dims: tuple[int, int], vectors: tuple[int, int], block_size: int, device: int
) -> Any:
    function = store.write_kernel(dtype, kv_dtype, dims, vectors, block_size, THREADS)
    return _compiled(write_signature(dtype, kv_dtype), THREADS, (dtype, kv_dtype, dims, vectors, block_size))(function)


@cache
def copy_kernel(number: int, vector: int, device: int) -> Any:
    return _compiled(copy_signature(), THREADS, vector)(store.copy_kernels(vector, THREADS)[number])


def _compiled(signature: Any, threads: int, made_for: object) -> Any:
    """A decorator that compiles at once, by way of PTX: what `benchmarks/numba_cuda_aot.py` looks at is what runs.

    `made_for`: the constants of the function that is compiled. As `cuda.jit(signature, cache=True)`, but for the cache.
    """
    options = {"lto": False, "launch_bounds": launch_bounds(threads)}
    if EMULATED:
        return cuda.jit(signature, **options)

    def compile_(function: Callable[..., None]) -> Any:
        from pagedkern.backends.numba_cuda.disk import KernelCache  # the simulator lacks what it imports

        dispatcher = cuda.jit(function, **options)
        dispatcher._cache = KernelCache(function, made_for, options)
        dispatcher.compile(tuple(signature.args))
        dispatcher._specialized = True  # launches need not look at the types of arguments
        dispatcher.disable_compile()
        return dispatcher

    return compile_


def launch_bounds(threads: int) -> tuple[int, int]:
    """Threads of a block, and blocks that shall fit on a multiprocessor: 8 warps leave a thread all 255 registers.

    Left to itself ptxas stops at 96 or 128 and spills a few of them.
    """
    return threads, max(1, 8 * 32 // threads)


def _launch(get: Callable[[], Any], grid: tuple[int, ...], threads: int, device: torch.device, *args: Any) -> None:
    """Run a kernel on torch's current stream. A tensor becomes the address of its first element, None is null."""
    if EMULATED:  # the simulator looks at the tensors themselves, to find accesses outside of them
        get()[grid, threads](*args)
        return
    with cuda.gpus[device.index]:
        stream = _stream(torch.cuda.current_stream(device).cuda_stream)
        _configured(get(), grid, threads, stream)(*map(_address, args))


@lru_cache(maxsize=1024)
def _configured(kernel: Any, grid: tuple[int, ...], threads: int, stream: Any) -> Any:
    """A kernel ready to be launched; Numba's advice about small grids is for those who choose them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kernel[grid, threads, stream]


@cache
def _stream(handle: int) -> Any:
    return cuda.external_stream(handle) if handle else 0


def _address(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.data_ptr()
    if isinstance(x, tuple):
        return tuple(map(_address, x))
    return 0 if x is None else x


# ---- Operations ------------------------------------------------------------------------------------------------------


def attention(call: AttentionCall, config: NumbaCudaConfig) -> None:
    """See `base.AttentionCall`. Decodes and merges; another launch computes the longer queries if there may be any."""
    q, k, v, out, lse = call.q, call.k_cache, call.v_cache, call.out, call.lse
    num_tokens, heads, _ = q.shape
    num_seqs, kv_heads = call.seq_lens.shape[0], k.shape[2]
    if num_tokens == 0:
        return
    group, device = heads // kv_heads, q.device.index or 0
    c, wide = constants(call, config)
    starts, slopes, sinks, seq_lens = (
        x if x is None else x.contiguous() for x in (call.cu_seqlens_q, call.alibi_slopes, call.sinks, call.seq_lens)
    )
    k_scale, v_scale = (x if x is None else x.contiguous() for x in (call.k_scale, call.v_scale))
    table = call.block_table
    inputs = (
        q, q.stride(0), q.stride(1), k, *k.stride()[:3], v, *v.stride()[:3], table, table.stride(0), seq_lens, starts,
        k_scale, slopes, float(call.scale), float(call.softcap or 1.0), call.sliding_window or 0,
    )  # fmt: skip
    results = (out, out.stride(0), out.stride(1), lse, *(lse.stride() if lse is not None else (0, 0)))

    longest = min(call.max_seqlen_q, c.decode_tokens)
    tiles = max(1, -(-longest * group // c.rows))
    splits = min(c.splits, max(1, -(-table.shape[1] * c.block_size // c.span)))
    places = num_seqs * tiles * kv_heads * splits * c.rows
    sums = torch.empty(places, c.head_dim_v, dtype=torch.float32, device=q.device)
    state = torch.empty(places, 2, dtype=torch.float32, device=q.device)
    if num_seqs:
        _launch(
            partial(attention_kernel, "decode", c, device), (num_seqs * tiles, splits, kv_heads), c.threads, q.device,
            *inputs, tiles, sums, state,
        )  # fmt: skip
    _launch(
        partial(attention_kernel, "merge", c, device), (num_seqs * tiles + 1, kv_heads), c.threads, q.device,
        sums, state, splits, tiles, num_seqs, num_tokens, starts, v_scale, sinks, *results,
    )  # fmt: skip
    if call.max_seqlen_q > c.decode_tokens and num_seqs:
        grid = (-(-num_tokens * group // wide.rows) + num_seqs, kv_heads)
        _launch(
            partial(attention_kernel, "prefill", wide, device), grid, wide.threads, q.device,
            *inputs, num_seqs, v_scale, sinks, *results,
        )  # fmt: skip


def constants(call: AttentionCall, config: NumbaCudaConfig) -> tuple[Constants, Constants]:
    """What the kernels for decode and for prefill are compiled for."""
    q, k, v = call.q, call.k_cache, call.v_cache
    group = q.shape[1] // k.shape[2]
    decode = Constants(
        q_dtype=_name(q.dtype), kv_dtype=_name(k.dtype), head_dim=q.shape[2], head_dim_v=v.shape[3], group=group,
        block_size=k.shape[1], causal=call.causal, window=call.sliding_window is not None,
        softcap=call.softcap is not None, alibi=call.alibi_slopes is not None, sinks=call.sinks is not None,
        lse=call.lse is not None, ragged=call.cu_seqlens_q is not None,
        q_vector=_vector(q), k_vector=_vector(k), v_vector=_vector(v),
        threads=config.threads, keys=config.keys, rows=decode_rows(config, group), decode_tokens=1,
        span=config.span, splits=config.splits,
    ).fitted()  # fmt: skip
    decode = replace(decode, decode_tokens=max(1, decode.rows // group))
    return decode, replace(decode, keys=config.keys, rows=config.prefill_rows).fitted()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _vector(x: Tensor, most: int = 16) -> int:
    """How many elements may be loaded at once, wherever a row of the last dimension begins: up to `most` bytes."""
    item = x.element_size()
    places = [x.data_ptr(), x.shape[-1] * item]
    places += [stride * item for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1]
    return min(most, math.gcd(most, *places)) // item


def common_vector(x: Tensor, y: Tensor) -> int:
    """How many elements both of two tensors may be accessed in at once."""
    return min(_vector(x), _vector(y))


def write_kv(call: WriteCall) -> None:
    """See `base.WriteCall`."""
    k, v, k_cache, v_cache = call.k, call.v, call.k_cache, call.v_cache
    tokens = call.slot_mapping.shape[0]
    if tokens == 0:
        return
    vectors = common_vector(k, k_cache), common_vector(v, v_cache)
    k_scale, v_scale = (x if x is None else x.contiguous() for x in (call.k_scale, call.v_scale))
    device, dims = k.device.index or 0, (k.shape[2], v.shape[2])
    _launch(
        partial(write_kernel, _name(k.dtype), _name(k_cache.dtype), dims, vectors, k_cache.shape[1], device),
        (tokens,), THREADS, k.device,
        call.slot_mapping.contiguous(), k.shape[1], k, *k.stride()[:2], v, *v.stride()[:2],
        k_cache, *k_cache.stride()[:3], v_cache, *v_cache.stride()[:3], k_scale, v_scale,
    )  # fmt: skip


# ---- Copies ----------------------------------------------------------------------------------------------------------


def copy_blocks(call: CopyCall) -> None:
    """See `base.CopyCall`. Caches of one geometry share a launch."""
    src, dst = call.src_blocks.contiguous(), call.dst_blocks.contiguous()
    pairs = src.shape[0]
    if pairs == 0:
        return
    groups: dict[Any, list[Tensor]] = {}
    for whole in call.caches:
        for part in _parts(whole):
            groups.setdefault(_geometry(part), []).append(part)
    for (vector, block_stride, shape, strides, size), caches in groups.items():
        room = max(1, STAGED_BYTES // (pairs * size * vector))
        for first in range(0, len(caches), min(room, store.CACHES)):
            some = caches[first : first + min(room, store.CACHES)]
            staged = torch.empty(pairs * len(some) * size * vector, dtype=torch.uint8, device=src.device)
            grid = (pairs, len(some), min(65535, -(-size // (4 * THREADS))))
            pointers = tuple(some + some[:1] * (store.CACHES - len(some)))
            for number in range(2):
                _launch(
                    partial(copy_kernel, number, vector, src.device.index or 0), grid, THREADS, src.device,
                    pointers, block_stride, shape, strides, size, src, dst, pairs, staged,
                )  # fmt: skip


def _parts(x: Tensor) -> Iterator[Tensor]:
    """The cache as tensors whose blocks have few enough dimensions after joining those that lie in one another."""
    if x.numel() == 0:
        return
    if len(_joined(x)) <= store.DIMS:
        yield x
        return
    for part in x.unbind(1):
        yield from _parts(part)


def _joined(x: Tensor) -> list[tuple[int, int]]:
    """Sizes and strides, in elements, of the dimensions of a block, innermost first, as few as describe it."""
    dims: list[tuple[int, int]] = []
    for size, stride in sorted(zip(x.shape[1:], x.stride()[1:], strict=True), key=lambda dim: dim[1]):
        if size == 1:
            continue
        if dims and dims[-1][0] * dims[-1][1] == stride:
            dims[-1] = (dims[-1][0] * size, dims[-1][1])
        else:
            dims.append((size, stride))
    return dims or [(1, 1)]


def _geometry(x: Tensor) -> tuple[int, int, tuple[int, ...], tuple[int, ...], int]:
    """Bytes that a thread moves at a time, block stride in bytes, and a block as sizes in such vectors and strides in
    bytes, innermost first, with the number of vectors."""
    item = x.element_size()
    dims = [(size, stride * item) for size, stride in _joined(x)]
    if dims[0][1] == item:
        dims[0] = (dims[0][0] * item, 1)
    else:
        dims.insert(0, (item, 1))
    block_stride = x.stride(0) * item
    vector = math.gcd(16, x.data_ptr(), dims[0][0], *(stride for _, stride in dims[1:]))
    if x.shape[0] > 1:
        vector = math.gcd(vector, block_stride)
    dims[0] = (dims[0][0] // vector, vector)
    dims += [(1, 0)] * (store.DIMS + 1 - len(dims))
    shape, strides = zip(*dims, strict=True)
    return vector, block_stride, shape, strides, math.prod(shape)
