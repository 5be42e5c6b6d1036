"""From sums to results: spans set aside and merged, the division by the sum, `out` and `lse` written."""

from __future__ import annotations

import math

from pagedkern.backends.cpu.convert import narrow_row, reorder_row
from pagedkern.backends.cpu.jit import TargetValue, inlined
from pagedkern.backends.cpu.memory import clear, copy, get_f32, get_i64, put_f32
from pagedkern.backends.cpu.micro import axpy_row
from pagedkern.backends.cpu.plan import G_HEADS, G_PARTIAL, G_SPANS, Args
from pagedkern.backends.cpu.scratch import HEAD, NOTHING, Work, count_rows, find_row


@inlined
def save_span(c: Args, w: Work, group: int, index: int, own: int) -> None:
    """Put O, maximum and sum of one span aside."""
    rows = get_i64(group + G_HEADS) * count_rows(c, group)
    size = HEAD + w.o_row
    at = w.partials + (get_i64(group + G_PARTIAL) + index * rows) * size
    for r in range(rows):
        put_f32(at + r * size, get_f32(own + w.at_m + 4 * r))
        put_f32(at + r * size + 4, get_f32(own + w.at_l + 4 * r))
        put_f32(at + r * size + 8, get_f32(own + w.at_exact + 4 * r))
        copy(at + r * size + HEAD, own + w.at_o + r * w.o_row, w.o_row)


@inlined
def merge_spans(c: Args, w: Work, group: int, own: int, target: TargetValue) -> None:
    """Add up the spans of a group, first to last."""
    rows, spans = get_i64(group + G_HEADS) * count_rows(c, group), get_i64(group + G_SPANS)
    size = HEAD + w.o_row
    at = w.partials + get_i64(group + G_PARTIAL) * size
    clear(own + w.at_o, rows * w.o_row)
    for r in range(rows):
        top, total, exact = NOTHING, 0.0, 0.0
        for s in range(spans):
            top = max(top, get_f32(at + (s * rows + r) * size))
        for s in range(spans):
            part = at + (s * rows + r) * size
            m, l = get_f32(part), get_f32(part + 4)  # noqa: E741
            factor = math.exp(m - top) if m > NOTHING else l  # nothing seen: l is 0, or NaN from a NaN key
            total += factor * l
            exact += factor * get_f32(part + 8)
            axpy_row(target, own + w.at_o + r * w.o_row, part + HEAD, w.o_row // (4 * w.lanes), factor)
        put_f32(own + w.at_m + 4 * r, top)
        put_f32(own + w.at_l + 4 * r, total)
        put_f32(own + w.at_exact + 4 * r, exact)


@inlined
def _sink_weight(sink: float, top: float) -> float:
    """exp(sink - top), NaN of a NaN. An infinite sink is the top itself, or nothing."""
    if sink == NOTHING:
        return 0.0
    return 1.0 if sink == math.inf else math.exp(sink - top)


@inlined
def finish_group(c: Args, w: Work, group: int, own: int, target: TargetValue) -> None:
    """Divide by the sum, the sink included, and write out and lse."""
    for r in range(get_i64(group + G_HEADS) * count_rows(c, group)):
        token, head = find_row(c, group, r)
        m, total = float(get_f32(own + w.at_m + 4 * r)), float(get_f32(own + w.at_l + 4 * r))
        exact = float(get_f32(own + w.at_exact + 4 * r))
        top, factor = m, 1.0
        if c.sinks:
            sink = float(get_f32(c.sinks + 4 * head))
            top = sink if sink > m else m  # m, if the sink is NaN: its weight will tell
            factor = math.exp(m - top) if m > NOTHING else total
            weight = _sink_weight(sink, top)
            total, exact = factor * total + weight, factor * exact + weight
        if c.lse:
            lse = top + math.log(exact) if exact != 0.0 else NOTHING
            put_f32(c.lse + token * c.lse_token + head * c.lse_head, lse)
        factor = factor / total if total != 0.0 else 0.0
        if c.v_scale:
            factor *= get_f32(c.v_scale + 4 * (head * c.kv_heads // c.heads))
        row, dst = own + w.at_o + r * w.o_row, c.out + token * c.out_token + head * c.out_head
        reorder_row(target, row, w.o_row // (4 * w.chunk), 0)
        if c.q_code == 0:
            narrow_row(target, "float32", row, dst, c.e, factor)
        elif c.q_code == 1:
            narrow_row(target, "float16", row, dst, c.e, factor)
        else:
            narrow_row(target, "bfloat16", row, dst, c.e, factor)
