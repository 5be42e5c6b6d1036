"""Writing new K and V into their slots, and copying whole blocks."""

from __future__ import annotations

from typing import NamedTuple

from pagedkern.backends.cpu.convert import convert_row
from pagedkern.backends.cpu.jit import TargetValue, inlined, kernel
from pagedkern.backends.cpu.memory import copy, fetch_add, get_f32, get_i64


class Rows(NamedTuple):
    """New rows of K or V and the cache they go to. Addresses, strides in bytes."""

    src: int  # [T, G, D]
    src_token: int
    src_head: int
    dst: int  # [N, B, G, D]
    dst_block: int
    dst_slot: int
    dst_head: int
    scale: int  # float32 [G]; 0: none
    width: int  # D
    bytes: int  # of a row, if source and cache have one dtype; else 0


class Write(NamedTuple):
    """What K and V have in common."""

    slots: int  # int64 [T]
    tokens: int
    kv_heads: int
    blocks: int
    block_size: int
    src_code: int  # `convert.CODES`
    counter: int  # int64, the next run of tokens to draw


class Copies(NamedTuple):
    """Blocks to copy in some caches. Addresses, strides in bytes.

    A block is `rows` runs of `run` bytes each, whose places are described by the dimensions that its record names. The
    caches' runs, cut into pieces of at most PIECE bytes, are shared out: PARTS items for each block of each cache.
    """

    records: int  # int64 [caches, RECORD]
    caches: int
    src: int  # int64 [pairs]
    dst: int  # int64 [pairs]
    pairs: int
    staged: int  # memory for `pairs` blocks without gaps; 0: from cache to cache
    out: int  # with `staged`: whether blocks are taken out of the cache
    counter: int  # int64, the next item to draw


# The record of a cache: int64 fields, byte offsets
R_CACHE, R_BLOCK = 0, 8  # address, block stride
R_RUN, R_ROWS = 16, 24  # bytes of a run, number of them
R_DIMS, R_COUNT = 32, 40  # address of int64 [count, 2]: size and stride of each dimension of the rows, innermost first
RECORD = 48

PARTS = 8
PIECE = 1 << 16  # bytes
RUN = 64  # tokens drawn at a time


@kernel
def find_bad_slot(c: Write, _target: TargetValue) -> int:
    """The first token whose slot is neither -1 nor in the cache; -1 if there is none."""
    for t in range(c.tokens):
        slot = get_i64(c.slots + 8 * t)
        if slot < -1 or slot >= c.blocks * c.block_size:
            return t
    return -1


@kernel
def write(c: Write, k: Rows, v: Rows, target: TargetValue) -> None:
    """Store runs of tokens until none is left."""
    while True:
        start = RUN * fetch_add(c.counter, 1)
        if start >= c.tokens:
            return
        for t in range(start, min(start + RUN, c.tokens)):
            slot = get_i64(c.slots + 8 * t)
            if slot >= 0:
                _write_token(c, k, t, slot, target)
                _write_token(c, v, t, slot, target)


@inlined
def _write_token(c: Write, x: Rows, t: int, slot: int, target: TargetValue) -> None:
    for h in range(c.kv_heads):
        src = x.src + t * x.src_token + h * x.src_head
        dst = x.dst + slot // c.block_size * x.dst_block + slot % c.block_size * x.dst_slot + h * x.dst_head
        if x.bytes:
            copy(dst, src, x.bytes)
        else:
            _convert(c.src_code, src, dst, x.width, get_f32(x.scale + 4 * h) if x.scale else 1.0, target)


@inlined
def _convert(code: int, src: int, dst: int, width: int, scale: float, target: TargetValue) -> None:
    if code == 0:
        convert_row(target, "float32", src, dst, width, scale)
    elif code == 1:
        convert_row(target, "float16", src, dst, width, scale)
    else:
        convert_row(target, "bfloat16", src, dst, width, scale)


@kernel
def copy_blocks(c: Copies, _target: TargetValue) -> None:
    """Copy parts of blocks until none is left."""
    while True:
        item = fetch_add(c.counter, 1)
        if item >= c.caches * c.pairs * PARTS:
            return
        part, block = item % PARTS, item // PARTS
        _copy_part(c, c.records + block // c.pairs * RECORD, block % c.pairs, part)


@inlined
def _copy_part(c: Copies, record: int, pair: int, part: int) -> None:
    run, rows = get_i64(record + R_RUN), get_i64(record + R_ROWS)
    src = get_i64(record + R_CACHE) + get_i64(c.src + 8 * pair) * get_i64(record + R_BLOCK)
    dst = get_i64(record + R_CACHE) + get_i64(c.dst + 8 * pair) * get_i64(record + R_BLOCK)
    staged = c.staged + pair * run * rows
    pieces = (run + PIECE - 1) // PIECE
    for i in range(rows * pieces * part // PARTS, rows * pieces * (part + 1) // PARTS):
        row, start = i // pieces, i % pieces * PIECE
        size, at = min(PIECE, run - start), _place(record, row) + start
        if not c.staged:
            copy(dst + at, src + at, size)
        elif c.out:
            copy(staged + row * run + start, src + at, size)
        else:
            copy(dst + at, staged + row * run + start, size)


@inlined
def _place(record: int, row: int) -> int:
    """Where a row of a block begins, from the beginning of the block."""
    at, dims = 0, get_i64(record + R_DIMS)
    for n in range(get_i64(record + R_COUNT)):
        size = get_i64(dims + 16 * n)
        at += row % size * get_i64(dims + 16 * n + 8)
        row //= size
    return at
