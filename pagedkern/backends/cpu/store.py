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
