"""Attention over the block table: what one thread does with the items of work that it draws.

Layout of a thread's scratch memory: `scratch`. All sums are float32, in an order fixed by the sequence alone.
"""

from __future__ import annotations

from pagedkern.backends.cpu.convert import reorder_row, widen_row
from pagedkern.backends.cpu.finish import finish_group, merge_spans, save_span
from pagedkern.backends.cpu.jit import TargetValue, inlined, kernel
from pagedkern.backends.cpu.memory import clear, copy, fetch_add, get_f32, get_i32, get_i64, put_f32, put_i64
from pagedkern.backends.cpu.micro import (
    TILE,
    accumulate,
    add_special,
    pack_row,
    prefetch_rows,
    scores,
    shift_addresses,
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
    G_HEADS,
    G_LENGTH,
    G_POSITION,
    G_SEQ,
    G_SPANS,
    GROUP_SIZE,
    I_GROUP,
    I_INDEX,
    I_SPAN,
    ITEM_SIZE,
    Args,
    seen_from,
    seen_to,
)
from pagedkern.backends.cpu.scratch import ADDRESSES, NOTHING, P_ROW, S_ROW, Work, count_rows, find_row

SLICE = 16  # tokens of a tile whose values are summed at a time
FEW_ROWS = 8  # up to so many


@kernel
def attend(c: Args, w: Work, target: TargetValue) -> None:
    """Draw items until none is left. Run by every thread of the call at once."""
    own = w.scratch + w.scratch_size * fetch_add(w.counters + C_WORKERS, 1)
    clear(own + w.at_zero, w.at_pack - w.at_zero)
    addresses, ahead = own + w.at_addresses, own + w.at_addresses + ADDRESSES
    item = _draw(w)
    good = _address_first_tile(c, w, item, addresses, own)
    for t in range(0, TILE, 4):
        prefetch_rows(4, addresses + 8 * t, w.lines)
    while item and good and not get_i64(w.counters + C_BAD):
        group, following = w.groups + get_i64(item + I_GROUP) * GROUP_SIZE, _draw(w)
        steps = _span(c, w, item, following, addresses, ahead, own, target)
        good = steps >= 0
        if steps % 2:
            addresses, ahead = ahead, addresses
        spans = get_i64(group + G_SPANS)
        if spans > 1:
            save_span(c, w, group, get_i64(item + I_INDEX), own)
        if good and (spans == 1 or fetch_add(group + G_DONE, 1) == spans - 1):
            if spans > 1:
                merge_spans(c, w, group, own, target)
            finish_group(c, w, group, own, target)
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
def _address_first_tile(c: Args, w: Work, item: int, addresses: int, own: int) -> bool:
    """`_address_tokens` for the first tile of an item, zeros if there is none."""
    if item == 0:
        _address_zeros(w, addresses, addresses + 8 * TILE, 0, TILE, own)
        return True
    group = w.groups + get_i64(item + I_GROUP) * GROUP_SIZE
    lo, hi = _range(c, group, get_i64(item + I_SPAN))
    return _address_tokens(c, w, group, 0, lo // TILE * TILE, lo, max(lo, hi), addresses, own)


@inlined
def _span(
    c: Args, w: Work, item: int, following: int, addresses: int, ahead: int, own: int, target: TargetValue
) -> int:
    """Fill O, maximum and sum of a group's rows from one span of keys; returns the steps taken, -1 at a wrong block id.

    A step is one KV head of one tile. `addresses` holds the tokens of the item's first step. They change places with
    `ahead` after each step; in the end the first step of the following item is named, and on its way.
    """
    group = w.groups + get_i64(item + I_GROUP) * GROUP_SIZE
    heads, rows = get_i64(group + G_HEADS), count_rows(c, group)
    clear(own + w.at_o, heads * rows * w.o_row)
    for r in range(heads * rows):
        put_f32(own + w.at_m + 4 * r, NOTHING)
        put_f32(own + w.at_l + 4 * r, 0.0)
        put_f32(own + w.at_exact + 4 * r, 0.0)
    lo, hi = _range(c, group, get_i64(item + I_SPAN))
    if hi <= lo:
        return 0 if _address_first_tile(c, w, following, addresses, own) else -1
    _load_queries(c, w, group, own, target)
    steps = 0
    for j in range(lo // TILE * TILE, hi, TILE):
        for head in range(heads):
            if head + 1 < heads:
                if lo <= j and j + TILE <= hi:
                    good = True
                    shift_addresses(addresses, ahead, c.k_head, c.v_head)
                else:
                    good = _address_tokens(c, w, group, head + 1, j, max(lo, j), hi, ahead, own)
            elif j + TILE < hi:
                good = _address_tokens(c, w, group, 0, j + TILE, j + TILE, hi, ahead, own)
            else:
                good = _address_first_tile(c, w, following, ahead, own)
            if not good:
                return -1
            _scores(c, w, rows, head, addresses, ahead, own, target)
            _weights(c, w, group, head, j, own, target)
            if _rows_agree(c, group, j):
                _sum_values(c, w, rows, head, addresses + 8 * TILE, ahead, own, target)
            else:
                _sum_packed_values(c, w, group, head, j, addresses + 8 * TILE, own, target)
            addresses, ahead = ahead, addresses
            steps += 1
    return steps


@inlined
def _rows_agree(c: Args, group: int, j: int) -> bool:
    """Whether all query tokens of a group see the same tokens of the tile that begins at j."""
    first, length = get_i64(group + G_POSITION), get_i64(group + G_LENGTH)
    last = first + get_i64(group + G_COUNT) - 1
    same_from = max(seen_from(c, first), j) == max(seen_from(c, last), j)
    return same_from and min(seen_to(c, first, length), j + TILE) == min(seen_to(c, last, length), j + TILE)


@inlined
def _load_queries(c: Args, w: Work, group: int, own: int, target: TargetValue) -> None:
    """Q of a group as `scores` wants it."""
    rows = get_i64(group + G_HEADS) * count_rows(c, group)
    clear(own, rows * w.q_row)
    for r in range(rows):
        token, head = find_row(c, group, r)
        src, dst = c.q + token * c.q_token + head * c.q_head, own + r * w.q_row
        if w.tables:
            _weave_query(c, src, dst)
            continue
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
def _weave_query(c: Args, src: int, dst: int) -> None:
    """A row of q as `convert.weave_bytes` orders it: of each 64 elements, the lower 8 of each 16, then the others."""
    for i in range(0, c.d, 8):
        at = i // 64 * 64 + i % 16 * 4 + i % 64 // 16 * 8
        copy(dst + 2 * at, src + 2 * i, 2 * min(8, c.d - i))


@inlined
def _address_tokens(
    c: Args, w: Work, group: int, head: int, j: int, lo: int, hi: int, addresses: int, own: int
) -> bool:
    """Addresses of K, then of V, of the tokens j..j+TILE-1, outside [lo, hi) of zeros; False at a wrong block id."""
    table = c.table + get_i64(group + G_SEQ) * c.table_row
    head += get_i64(group + G_HEAD)
    keys, values = addresses - 8 * j, addresses + 8 * (TILE - j)
    _address_zeros(w, keys, values, j, min(lo, j + TILE), own)
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
    _address_zeros(w, keys, values, max(hi, j), j + TILE, own)
    return True


@inlined
def _address_zeros(w: Work, keys: int, values: int, first: int, last: int, own: int) -> None:
    for t in range(first, last):
        put_i64(keys + 8 * t, own + w.at_zero)
        put_i64(values + 8 * t, own + w.at_zero)


@inlined
def _scores(c: Args, w: Work, rows: int, head: int, keys: int, ahead: int, own: int, target: TargetValue) -> None:
    """S = Q K', and meanwhile the first half of the next step is prefetched."""
    queries = own + head * rows * w.q_row
    for t in range(0, TILE, 4):
        prefetch_rows(2, ahead + 4 * t, w.lines)
        at, s = keys + 8 * t, own + w.at_s + 4 * t
        r = 0
        while r + 4 <= rows:
            scores(target, 4, 4, queries + r * w.q_row, w.q_row, at, c.d, s + r * S_ROW, S_ROW)
            r += 4
        q, s = queries + r * w.q_row, s + r * S_ROW
        if rows - r == 3:
            scores(target, 3, 4, q, w.q_row, at, c.d, s, S_ROW)
        elif rows - r == 2:
            scores(target, 2, 4, q, w.q_row, at, c.d, s, S_ROW)
        elif rows - r == 1:
            scores(target, 1, 4, q, w.q_row, at, c.d, s, S_ROW)


@inlined
def _weights(c: Args, w: Work, group: int, head: int, j: int, own: int, target: TargetValue) -> None:
    """Scores to softmax weights, row by row, with everything that depends on the row: mask, softcap, ALiBi."""
    per_kv, rows = c.heads // c.kv_heads, count_rows(c, group)
    kv_head, length = get_i64(group + G_HEAD) + head, get_i64(group + G_LENGTH)
    scale = c.scale
    if c.k_scale:
        scale *= get_f32(c.k_scale + 4 * kv_head)
    for r in range(rows):
        s, position = own + w.at_s + r * S_ROW, get_i64(group + G_POSITION) + r // per_kv
        first = min(max(seen_from(c, position) - j, 0), TILE)
        last = min(max(seen_to(c, position, length) - j, 0), TILE)
        slope = get_f32(c.alibi + 4 * (kv_head * per_kv + r % per_kv)) if c.alibi else 0.0
        factor = scale
        if c.cap > 0.0:
            softcap_row(target, s, scale, c.cap)
            factor = 1.0
        at = own + 4 * (head * rows + r)
        m, l, exact = at + w.at_m, at + w.at_l, at + w.at_exact  # noqa: E741
        put_f32(
            own + w.at_alpha + 4 * r,
            softmax_row(target, s, own + w.at_p + r * P_ROW, first, last, slope, j - position, factor, m, l, exact),
        )


@inlined
def _sum_values(c: Args, w: Work, rows: int, head: int, values: int, ahead: int, own: int, target: TargetValue) -> None:
    """O = O * alpha + P V, straight from the cache: every row sees the same tokens of this tile.

    Few rows take a few tokens at a time, so that memory is walked as it lies. Meanwhile the second half of the
    next step is prefetched.
    """
    step = SLICE if rows <= FEW_ROWS else TILE
    for t in range(0, TILE, step):
        v, coming = values + 8 * t, ahead + 4 * (TILE + t)
        for r in range(0, rows, 4):
            o, a, n = own + w.at_o + (head * rows + r) * w.o_row, own + w.at_alpha + 4 * r, min(4, rows - r)
            s = own + w.at_s + r * S_ROW + 4 * t
            p = own + w.at_p + r * P_ROW + 2 * t if w.pairs else s
            e = 0
            while e < c.e:
                left = c.e - e
                if left >= 4 * w.lanes:
                    x = e * w.item
                    if n == 4:
                        accumulate(target, 4, "wide", step, p, v, x, o + 4 * e, w.o_row, a, 0, coming)
                    elif n == 3:
                        accumulate(target, 3, "wide", step, p, v, x, o + 4 * e, w.o_row, a, 0, coming)
                    elif n == 2:
                        accumulate(target, 2, "wide", step, p, v, x, o + 4 * e, w.o_row, a, 0, coming)
                    else:
                        accumulate(target, 1, "wide", step, p, v, x, o + 4 * e, w.o_row, a, 0, coming)
                    e += 4 * w.lanes
                else:
                    part = min(left, w.chunk)
                    tail, p_row = (p, P_ROW) if w.tables else (s, S_ROW)
                    for x in range(n):
                        accumulate(target, 1, "chunk", step, tail + x * p_row, v, e * w.item,
                                   o + x * w.o_row + 4 * e, w.o_row, a + 4 * x, part, 0)  # fmt: skip
                    e += w.chunk
            for x in range(n):
                put_f32(a + 4 * x, 1.0)


@inlined
def _sum_packed_values(
    c: Args, w: Work, group: int, head: int, j: int, values: int, own: int, target: TargetValue
) -> None:
    """The same where rows differ in what they see: a weight of 0 must not meet NaN or Inf; those are summed apart."""
    per_kv, rows = c.heads // c.kv_heads, count_rows(c, group)
    sums = own + w.at_o + head * rows * w.o_row
    packed, special = own + w.at_packed, 0
    for t in range(TILE):
        row = own + w.at_pack + t * w.o_row
        put_i64(packed + 8 * t, row)
        special |= pack_row(target, get_i64(values + 8 * t), row, c.e)
    for r in range(rows):
        p, o, a = own + w.at_s + r * S_ROW, sums + r * w.o_row, own + w.at_alpha + 4 * r
        for e in range(0, w.o_row // 4, w.chunk):
            accumulate(target, 1, "packed", TILE, p, packed, 4 * e, o + 4 * e, w.o_row, a, 0, 0)
    if special:
        for r in range(rows):
            position = get_i64(group + G_POSITION) + r // per_kv
            lo, hi = max(seen_from(c, position), j), min(seen_to(c, position, get_i64(group + G_LENGTH)), j + TILE)
            for t in range(lo - j, hi - j):
                value, p = get_i64(values + 8 * t), get_f32(own + w.at_s + r * S_ROW + 4 * t)
                add_special(target, value, sums + r * w.o_row, c.e, p)
