"""The small kernels: writing the K and V of new tokens into their slots, and copying blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda, int64

from pagedkern.backends.numba_cuda.device import copy_vector, inlined, load_vector, store_vector
from pagedkern.backends.numba_cuda.dtypes import FORMATS

CACHES = 16  # caches of one geometry that one launch of `copy` serves
DIMS = 4  # dimensions within a block, besides the bytes of an element


def write_kernel(
    dtype: str, kv_dtype: str, dims: tuple[int, int], vectors: tuple[int, int], block_size: int, threads: int
) -> Callable[..., None]:
    """Converts and stores new tokens. Grid: one block for each token.

    `dims` are D and E, `vectors` the elements that a thread moves at a time of K and of V.
    """
    IN, OUT = FORMATS[dtype].code, FORMATS[kv_dtype].code
    widen, narrow = FORMATS[dtype].widen, FORMATS[kv_dtype].narrow
    SAME, QUANTIZED = dtype == kv_dtype, FORMATS[kv_dtype].size == 1
    BLOCK = block_size

    def storing(DIM: int, VECTOR: int) -> Callable[..., Any]:
        VECTORS = DIM // VECTOR

        @inlined
        def store(x, x_start, x_head, cache, cache_start, cache_head, scale, kv_heads):
            """All heads of one token; a quantized cache holds x / scale. Equal dtypes are copied, NaN bits and all."""
            codes = cuda.local.array(VECTOR, IN)
            stored = cuda.local.array(VECTOR, OUT)
            for i in range(cuda.threadIdx.x, kv_heads * VECTORS, threads):
                head, d = i // VECTORS, i % VECTORS * VECTOR
                at = cache_start + head * cache_head + d
                if SAME:
                    copy_vector(cache, at, x, x_start + head * x_head + d, VECTOR)
                else:
                    load_vector(codes, 0, x, x_start + head * x_head + d, VECTOR)
                    for n in range(VECTOR):
                        value = widen(codes[n])
                        if QUANTIZED:
                            value /= scale[head]
                        stored[n] = narrow(value)
                    store_vector(cache, at, stored, 0, VECTOR)

        return store

    store_k, store_v = (storing(dim, vector) for dim, vector in zip(dims, vectors, strict=True))

    def write(
        slots, kv_heads, k, k_token, k_head, v, v_token, v_head,
        k_cache, kc_block, kc_slot, kc_head, v_cache, vc_block, vc_slot, vc_head, k_scale, v_scale,
    ):  # fmt: skip
        token = int64(cuda.blockIdx.x)
        slot = slots[token]
        if slot >= 0:
            block, offset = slot // BLOCK, slot % BLOCK
            store_k(
                k, token * k_token, k_head, k_cache, block * kc_block + offset * kc_slot, kc_head, k_scale, kv_heads
            )
            store_v(
                v, token * v_token, v_head, v_cache, block * vc_block + offset * vc_slot, vc_head, v_scale, kv_heads
            )

    return write


def copy_kernels(vector: int, threads: int) -> tuple[Callable[..., None], Callable[..., None]]:
    """`gather` and `scatter`, which together copy blocks as if every source were read before anything is written.

    A source that is nobody's destination can be read at any time: `scatter` copies it. The others stand in the way of
    someone: `gather`, which runs first, puts them into `staged`, and `scatter` takes them from there. Grid: (pair,
    cache, part of the block). Sizes and strides are in bytes, a thread moves `vector` of them at a time.
    """
    move = copy_vector  # what a kernel closes over is part of its key on disk, what is global is not

    @inlined
    def is_written(block, dst, pairs):
        """Whether a block is the destination of any pair. All threads of the block look, each at some."""
        found = 0
        for i in range(cuda.threadIdx.x, pairs, threads):
            if dst[i] == block:
                found = 1
        return cuda.syncthreads_or(found) != 0

    @inlined
    def place_of(i, shape, strides):
        """Where vector i of a block lies, from the block's start, in bytes."""
        at = int64(0)
        for n in range(DIMS + 1):
            at += i % shape[n] * strides[n]
            i //= shape[n]
        return at

    def gather(caches, block_stride, shape, strides, size, src, dst, pairs, staged):
        pair, cache = int64(cuda.blockIdx.x), caches[cuda.blockIdx.y]
        if is_written(src[pair], dst, pairs):
            to = (pair * cuda.gridDim.y + cuda.blockIdx.y) * size * vector
            for i in range(int64(cuda.blockIdx.z) * threads + cuda.threadIdx.x, size, threads * cuda.gridDim.z):
                at = src[pair] * block_stride + place_of(i, shape, strides)
                move(staged, to + i * vector, cache, at, vector)

    def scatter(caches, block_stride, shape, strides, size, src, dst, pairs, staged):
        pair, cache = int64(cuda.blockIdx.x), caches[cuda.blockIdx.y]
        was_staged = is_written(src[pair], dst, pairs)
        begin = (pair * cuda.gridDim.y + cuda.blockIdx.y) * size * vector
        for i in range(int64(cuda.blockIdx.z) * threads + cuda.threadIdx.x, size, threads * cuda.gridDim.z):
            place = place_of(i, shape, strides)
            to = dst[pair] * block_stride + place
            if was_staged:
                move(cache, to, staged, begin + i * vector, vector)
            else:
                move(cache, to, cache, src[pair] * block_stride + place, vector)

    return gather, scatter
