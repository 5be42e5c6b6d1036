"""Attention over the block table: what one thread does with the items of work that it draws.

Layout of a thread's scratch memory: `Scratch`. All sums are float32, in an order fixed by the sequence alone.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from pagedkern.backends.cpu.convert import narrow_row, reorder_row, widen_row
from pagedkern.backends.cpu.jit import TargetValue, inlined, kernel
from pagedkern.backends.cpu.memory import clear, copy, fetch_add, get_f32, get_i32, get_i64, put_f32, put_i64
from pagedkern.backends.cpu.micro import (
    TILE,
    accumulate,
    add_special,
    axpy_row,
    pack_row,
    prefetch_rows,
    scores,
    softcap_row,
    softmax_row,
)
from pagedkern.backends.cpu.plan import (
    C_BAD,
    C_NEXT,
    C_WORKERS,
    G_COUNT,
    G_DONE,
    G_HEAD,
    G_LENGTH,
    G_PARTIAL,
    G_POSITION,
    G_SEQ,
    G_SPANS,
    G_TOKEN,
    GROUP_SIZE,
    I_GROUP,
    I_INDEX,
    I_SPAN,
    ITEM_SIZE,
    Args,
    seen_from,
    seen_to,
)

S_ROW = 4 * TILE  # bytes of one row of scores
P_ROW = 2 * TILE  # bytes of one row of weights as bfloat16
NAMES = 16 * TILE  # bytes of the addresses of one tile
HEAD = 64  # bytes before O in a row of partial results: maximum and sum
NOTHING = float("-inf")


class Work(NamedTuple):
    """The plan of a call, the memory of its threads, and where what lies in the scratch of one: offsets in bytes."""

    groups: int
    items: int
    n_items: int
    counters: int
    partials: int
    scratch: int
    scratch_size: int  # bytes for each thread
    chunk: int  # elements of one chunk of a cache row
    lanes: int  # elements of one vector
    item: int  # bytes of one element of a cache
    pairs: int  # whether pairs of bfloat16 are multiplied: `TargetKey.dot`
    q_row: int  # bytes of a row of Q, whole chunks
    o_row: int  # bytes of a row of O, whole chunks
    lines: int  # cache lines of a cache row
    at_o: int  # float32 [rows, padded E]
    at_s: int  # float32 [rows, TILE]
    at_p: int  # bfloat16 [rows, TILE]: weights
    at_m: int  # float32 [rows]: running maximum
    at_l: int  # float32 [rows]: running sum
    at_alpha: int  # float32 [rows]: factor for what was summed before this tile
    at_names: int  # int64 [2, 2, TILE]: for this tile and the next, address of each token's K, then of its V
    at_packed: int  # int64 [TILE]: address of each token's packed V
    at_zero: int  # a cache row of zeros
    at_pack: int  # float32 [TILE, padded E]


@kernel
def attend(c: Args, w: Work, target: TargetValue) -> None:
    """Draw items until none is left. Run by every thread of the call at once."""
    own = w.scratch + w.scratch_size * fetch_add(w.counters + C_WORKERS, 1)
    clear(own + w.at_zero, w.at_pack - w.at_zero)
    names, ahead = own + w.at_names, own + w.at_names + NAMES
    item = _draw(w)
    good = _name_first_tile(c, w, item, names, own)
    for t in range(0, TILE, 4):
        prefetch_rows(4, names + 8 * t, w.lines)
    while item and good and not get_i64(w.counters + C_BAD):
        group, following = w.groups + get_i64(item + I_GROUP) * GROUP_SIZE, _draw(w)
        tiles = _span(c, w, item, following, names, ahead, own, target)
        good = tiles >= 0
        if tiles % 2:
            names, ahead = ahead, names
        spans = get_i64(group + G_SPANS)
        if spans > 1:
            _save(c, w, group, get_i64(item + I_INDEX), own)
        if good and (spans == 1 or fetch_add(group + G_DONE, 1) == spans - 1):
            if spans > 1:
                _merge(c, w, group, own, target)
            _finish(c, w, group, own, target)
        item = following
    if not good:
        put_i64(w.counters + C_BAD, 1)


@inlined
def _draw(w: Work) -> int:
    """The record of the next item of work, 0 if there is none left."""
    n = fetch_add(w.counters + C_NEXT, 1)
    return w.items + n * ITEM_SIZE if n < w.n_items else 0


@inlined
def _range(c: Args, group: int, span: int) -> tuple[int, int]:
    """The tokens that rows of a group see, from the first to behind the last, within one span (-1: all)."""
    position = get_i64(group + G_POSITION)
    lo = seen_from(c, position)
    hi = seen_to(c, position + get_i64(group + G_COUNT) - 1, get_i64(group + G_LENGTH))
    return (max(lo, span * c.span), min(hi, (span + 1) * c.span)) if span >= 0 else (lo, hi)


@inlined
def _name_first_tile(c: Args, w: Work, item: int, names: int, own: int) -> bool:
    """`_name_tokens` for the first tile of an item, zeros if there is none."""
    if item == 0:
        _name_zeros(w, names, names + 8 * TILE, 0, TILE, own)
        return True
    group = w.groups + get_i64(item + I_GROUP) * GROUP_SIZE
    lo, hi = _range(c, group, get_i64(item + I_SPAN))
    return _name_tokens(c, w, group, lo // TILE * TILE, lo, max(lo, hi), names, own)


@inlined
def _span(c: Args, w: Work, item: int, following: int, names: int, ahead: int, own: int, target: TargetValue) -> int:
    """Fill O, maximum and sum of a group's rows from one span of keys; returns the tiles taken, -1 at a wrong block id.

    `names` holds those of the item's first tile. They change places with `ahead` after each tile; in the end the first
    tile of the following item is named, and on its way.
    """
    group = w.groups + get_i64(item + I_GROUP) * GROUP_SIZE
    rows = get_i64(group + G_COUNT) * (c.heads // c.kv_heads)
    clear(own + w.at_o, rows * w.o_row)
    for r in range(rows):
        put_f32(own + w.at_m + 4 * r, NOTHING)
        put_f32(own + w.at_l + 4 * r, 0.0)
    lo, hi = _range(c, group, get_i64(item + I_SPAN))
    if hi <= lo:
        return 0 if _name_first_tile(c, w, following, names, own) else -1
    _load_queries(c, w, group, own, target)
    tiles = 0
    for j in range(lo // TILE * TILE, hi, TILE):
        if j + TILE < hi:
            good = _name_tokens(c, w, group, j + TILE, j + TILE, hi, ahead, own)
        else:
            good = _name_first_tile(c, w, following, ahead, own)
        if not good:
            return -1
        _scores(c, w, rows, names, ahead, own, target)
        _weights(c, w, group, j, own, target)
        if _rows_agree(c, group, j):
            _sum_values(c, w, rows, names, ahead, own, target)
        else:
            _sum_packed_values(c, w, group, j, names, own, target)
        names, ahead = ahead, names
        tiles += 1
    return tiles


@inlined
def _rows_agree(c: Args, group: int, j: int) -> bool:
    """Whether all query tokens of a group see the same tokens of the tile that begins at j."""
    first, length = get_i64(group + G_POSITION), get_i64(group + G_LENGTH)
    last = first + get_i64(group + G_COUNT) - 1
    same_from = max(seen_from(c, first), j) == max(seen_from(c, last), j)
    return same_from and min(seen_to(c, first, length), j + TILE) == min(seen_to(c, last, length), j + TILE)


@inlined
def _load_queries(c: Args, w: Work, group: int, own: int, target: TargetValue) -> None:
    """Q of a group as `scores` wants it: row = token * (heads of a KV head) + head."""
    per_kv = c.heads // c.kv_heads
    rows = get_i64(group + G_COUNT) * per_kv
    clear(own, rows * w.q_row)
    for r in range(rows):
        token, head = get_i64(group + G_TOKEN) + r // per_kv, get_i64(group + G_HEAD) * per_kv + r % per_kv
        src, dst = c.q + token * c.q_token + head * c.q_head, own + r * w.q_row
        if w.pairs:
            copy(dst, src, 2 * c.d)
            continue
        if c.q_code == 0:
            widen_row(target, "float32", src, dst, c.d)
        elif c.q_code == 1:
            widen_row(target, "float16", src, dst, c.d)
        else:
            widen_row(target, "bfloat16", src, dst, c.d)
        reorder_row(target, dst, w.q_row // (4 * w.chunk), 1)


@inlined
def _name_tokens(c: Args, w: Work, group: int, j: int, lo: int, hi: int, names: int, own: int) -> bool:
    """Addresses of K, then of V, of the tokens j..j+TILE-1, outside [lo, hi) of zeros; False at a wrong block id."""
    table = c.table + get_i64(group + G_SEQ) * c.table_row
    head = get_i64(group + G_HEAD)
    keys, values = names - 8 * j, names + 8 * (TILE - j)
    _name_zeros(w, keys, values, j, min(lo, j + TILE), own)
    t, stop = lo, min(hi, j + TILE)
    while t < stop:
        block, slot = get_i32(table + 4 * (t // c.block_size)), t % c.block_size
        if block < 0 or block >= c.blocks:
            return False
        k = c.k + block * c.k_block + slot * c.k_slot + head * c.k_head
        v = c.v + block * c.v_block + slot * c.v_slot + head * c.v_head
        for x in range(min(c.block_size - slot, stop - t)):
            put_i64(keys + 8 * (t + x), k + x * c.k_slot)
            put_i64(values + 8 * (t + x), v + x * c.v_slot)
        t += c.block_size - slot
    _name_zeros(w, keys, values, max(hi, j), j + TILE, own)
    return True


@inlined
def _name_zeros(w: Work, keys: int, values: int, first: int, last: int, own: int) -> None:
    for t in range(first, last):
        put_i64(keys + 8 * t, own + w.at_zero)
        put_i64(values + 8 * t, own + w.at_zero)


@inlined
def _scores(c: Args, w: Work, rows: int, names: int, ahead: int, own: int, target: TargetValue) -> None:
    """S = Q K', and meanwhile the first half of the next tile is prefetched."""
    for t in range(0, TILE, 4):
        prefetch_rows(2, ahead + 4 * t, w.lines)
        keys, s = names + 8 * t, own + w.at_s + 4 * t
        r = 0
        while r + 4 <= rows:
            scores(target, 4, 4, own + r * w.q_row, w.q_row, keys, c.d, s + r * S_ROW, S_ROW)
            r += 4
        q, s = own + r * w.q_row, s + r * S_ROW
        if rows - r == 3:
            scores(target, 3, 4, q, w.q_row, keys, c.d, s, S_ROW)
        elif rows - r == 2:
            scores(target, 2, 4, q, w.q_row, keys, c.d, s, S_ROW)
        elif rows - r == 1:
            scores(target, 1, 4, q, w.q_row, keys, c.d, s, S_ROW)


@inlined
def _weights(c: Args, w: Work, group: int, j: int, own: int, target: TargetValue) -> None:
    """Scores to softmax weights, row by row, with everything that depends on the row: mask, softcap, ALiBi."""
    per_kv = c.heads // c.kv_heads
    kv_head, length = get_i64(group + G_HEAD), get_i64(group + G_LENGTH)
    scale = c.scale * c.unit
    if c.k_scale:
        scale *= get_f32(c.k_scale + 4 * kv_head)
    for r in range(get_i64(group + G_COUNT) * per_kv):
        s, position = own + w.at_s + r * S_ROW, get_i64(group + G_POSITION) + r // per_kv
        first = min(max(seen_from(c, position) - j, 0), TILE)
        last = min(max(seen_to(c, position, length) - j, 0), TILE)
        slope = get_f32(c.alibi + 4 * (kv_head * per_kv + r % per_kv)) if c.alibi else 0.0
        factor = scale
        if c.cap > 0.0:
            softcap_row(target, s, scale, c.cap)
            factor = 1.0
        m, l = own + w.at_m + 4 * r, own + w.at_l + 4 * r  # noqa: E741
        put_f32(
            own + w.at_alpha + 4 * r,
            softmax_row(target, s, own + w.at_p + r * P_ROW, first, last, slope, j - position, factor, m, l),
        )


@inlined
def _sum_values(c: Args, w: Work, rows: int, names: int, ahead: int, own: int, target: TargetValue) -> None:
    """O = O * alpha + P V, straight from the cache: every row sees the same tokens of this tile.

    Meanwhile the second half of the next tile is prefetched.
    """
    values = names + 8 * TILE
    ahead += 4 * TILE
    for r in range(0, rows, 4):
        o, a, n = own + w.at_o + r * w.o_row, own + w.at_alpha + 4 * r, min(4, rows - r)
        s = own + w.at_s + r * S_ROW
        p = own + w.at_p + r * P_ROW if w.pairs else s
        e = 0
        while e < c.e:
            left = c.e - e
            if left >= 4 * w.lanes:
                if n == 4:
                    accumulate(target, 4, "wide", p, values, e * w.item, o + 4 * e, w.o_row, a, 0, ahead)
                elif n == 3:
                    accumulate(target, 3, "wide", p, values, e * w.item, o + 4 * e, w.o_row, a, 0, ahead)
                elif n == 2:
                    accumulate(target, 2, "wide", p, values, e * w.item, o + 4 * e, w.o_row, a, 0, ahead)
                else:
                    accumulate(target, 1, "wide", p, values, e * w.item, o + 4 * e, w.o_row, a, 0, ahead)
                e += 4 * w.lanes
            else:
                part = min(left, w.chunk)
                for x in range(n):
                    accumulate(target, 1, "chunk", s + x * S_ROW, values, e * w.item, o + x * w.o_row + 4 * e,
                               w.o_row, a + 4 * x, part, 0)  # fmt: skip
                e += w.chunk


@inlined
def _sum_packed_values(c: Args, w: Work, group: int, j: int, names: int, own: int, target: TargetValue) -> None:
    """The same where rows differ in what they see: a weight of 0 must not meet NaN or Inf; those are summed apart."""
    per_kv = c.heads // c.kv_heads
    rows = get_i64(group + G_COUNT) * per_kv
    packed, special = own + w.at_packed, 0
    for t in range(TILE):
        row = own + w.at_pack + t * w.o_row
        put_i64(packed + 8 * t, row)
        special |= pack_row(target, get_i64(names + 8 * (TILE + t)), row, c.e)
    for r in range(rows):
        p, o, a = own + w.at_s + r * S_ROW, own + w.at_o + r * w.o_row, own + w.at_alpha + 4 * r
        for e in range(0, w.o_row // 4, w.chunk):
            accumulate(target, 1, "packed", p, packed, 4 * e, o + 4 * e, w.o_row, a, 0, 0)
    if special:
        for r in range(rows):
            position = get_i64(group + G_POSITION) + r // per_kv
            lo, hi = max(seen_from(c, position), j), min(seen_to(c, position, get_i64(group + G_LENGTH)), j + TILE)
            for t in range(lo - j, hi - j):
                value, p = get_i64(names + 8 * (TILE + t)), get_f32(own + w.at_s + r * S_ROW + 4 * t)
                add_special(target, value, own + w.at_o + r * w.o_row, c.e, p)


@inlined
def _save(c: Args, w: Work, group: int, index: int, own: int) -> None:
    """Put O, maximum and sum of one span aside."""
    rows = get_i64(group + G_COUNT) * (c.heads // c.kv_heads)
    size = HEAD + w.o_row
    at = w.partials + (get_i64(group + G_PARTIAL) + index * rows) * size
    for r in range(rows):
        put_f32(at + r * size, get_f32(own + w.at_m + 4 * r))
        put_f32(at + r * size + 4, get_f32(own + w.at_l + 4 * r))
        copy(at + r * size + HEAD, own + w.at_o + r * w.o_row, w.o_row)


@inlined
def _merge(c: Args, w: Work, group: int, own: int, target: TargetValue) -> None:
    """Add up the spans of a group, first to last."""
    rows, spans = get_i64(group + G_COUNT) * (c.heads // c.kv_heads), get_i64(group + G_SPANS)
    size = HEAD + w.o_row
    at = w.partials + get_i64(group + G_PARTIAL) * size
    clear(own + w.at_o, rows * w.o_row)
    for r in range(rows):
        top, total = NOTHING, 0.0
        for s in range(spans):
            top = max(top, get_f32(at + (s * rows + r) * size))
        for s in range(spans):
            part = at + (s * rows + r) * size
            m, l = get_f32(part), get_f32(part + 4)  # noqa: E741
            factor = math.exp(m - top) if m > NOTHING else l  # nothing seen: l is 0, or NaN from a NaN key
            total += factor * l
            axpy_row(target, own + w.at_o + r * w.o_row, part + HEAD, w.o_row // (4 * w.lanes), factor)
        put_f32(own + w.at_m + 4 * r, top)
        put_f32(own + w.at_l + 4 * r, total)


@inlined
def _finish(c: Args, w: Work, group: int, own: int, target: TargetValue) -> None:
    """Divide by the sum, the sink included, and write out and lse."""
    per_kv = c.heads // c.kv_heads
    kv_head = get_i64(group + G_HEAD)
    for r in range(get_i64(group + G_COUNT) * per_kv):
        token, head = get_i64(group + G_TOKEN) + r // per_kv, kv_head * per_kv + r % per_kv
        m, total = float(get_f32(own + w.at_m + 4 * r)), float(get_f32(own + w.at_l + 4 * r))
        top, factor = m, 1.0
        if c.sinks:
            sink = float(get_f32(c.sinks + 4 * head))
            top = max(m, sink)
            factor = math.exp(m - top) if m > NOTHING else total
            total = factor * total + (math.exp(sink - top) if sink > NOTHING else 0.0)
        if c.lse:
            lse = top + math.log(total) if total != 0.0 else NOTHING
            put_f32(c.lse + token * c.lse_token + head * c.lse_head, lse)
        factor = factor / total if total != 0.0 else 0.0
        factor *= c.unit
        if c.v_scale:
            factor *= get_f32(c.v_scale + 4 * kv_head)
        row, dst = own + w.at_o + r * w.o_row, c.out + token * c.out_token + head * c.out_head
        reorder_row(target, row, w.o_row // (4 * w.chunk), 0)
        if c.q_code == 0:
            narrow_row(target, "float32", row, dst, c.e, factor)
        elif c.q_code == 1:
            narrow_row(target, "float16", row, dst, c.e, factor)
        else:
            narrow_row(target, "bfloat16", row, dst, c.e, factor)
