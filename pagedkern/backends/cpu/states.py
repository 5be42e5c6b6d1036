"""Partial results of disjoint sets of keys, joined: `merge_states`."""

from __future__ import annotations

import math
from typing import NamedTuple

from pagedkern.backends.cpu.convert import mix_row
from pagedkern.backends.cpu.jit import TargetValue, inlined, kernel
from pagedkern.backends.cpu.memory import clear, copy, fetch_add, get_f32, put_f32
from pagedkern.backends.cpu.scratch import NOTHING


class Side(NamedTuple):
    """One of the two results. Addresses, strides in bytes."""

    out: int  # [T, H, E], E contiguous
    out_token: int
    out_head: int
    lse: int  # float32 [T, H]
    lse_token: int
    lse_head: int


class Merge(NamedTuple):
    """What the two sides have in common, and where their sum goes."""

    out: int  # [T, H, E], contiguous
    lse: int  # float32 [T, H], contiguous
    rows: int  # T * H
    heads: int
    width: int  # E
    bytes: int  # of a row
    counter: int  # int64, the next run of rows to draw


RUN = 64  # rows drawn at a time


@kernel
def merge(c: Merge, a: Side, b: Side, target: TargetValue) -> None:
    """Join runs of rows until none is left."""
    while True:
        start = RUN * fetch_add(c.counter, 1)
        if start >= c.rows:
            return
        for r in range(start, min(start + RUN, c.rows)):
            _merge_row(c, a, b, r, target)


@inlined
def _merge_row(c: Merge, a: Side, b: Side, r: int, target: TargetValue) -> None:
    """Weights in float64. A side with an infinite lse is empty, and not looked at unless the other one is NaN."""
    token, head = r // c.heads, r % c.heads
    a_row, b_row = a.out + token * a.out_token + head * a.out_head, b.out + token * b.out_token + head * b.out_head
    log_a = float(get_f32(a.lse + token * a.lse_token + head * a.lse_head))
    log_b = float(get_f32(b.lse + token * b.lse_token + head * b.lse_head))
    out, lse = c.out + r * c.bytes, c.lse + 4 * r
    empty_a, empty_b = math.isinf(log_a), math.isinf(log_b)
    if empty_a and empty_b:
        clear(out, c.bytes)
        put_f32(lse, NOTHING)
    elif empty_b and log_a == log_a:
        copy(out, a_row, c.bytes)
        put_f32(lse, log_a)
    elif empty_a and log_b == log_b:
        copy(out, b_row, c.bytes)
        put_f32(lse, log_b)
    else:
        top = max(log_a, log_b)
        weight_a, weight_b = math.exp(log_a - top), math.exp(log_b - top)
        total = weight_a + weight_b
        mix_row(target, a_row, b_row, out, c.width, weight_a / total, weight_b / total)
        put_f32(lse, top + math.log(total))
