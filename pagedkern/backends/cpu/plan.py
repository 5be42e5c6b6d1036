"""What a call is and how it is cut into work: records, the numbers that live on the device, spans.

A *group* is a tile of query tokens of one sequence with the query heads of one KV head, or of several that are walked
together, because their keys lie side by side in a block. It has one item of work for each span of keys. Spans are
counted from position 0 of the sequence, and whether a group is split at all depends on that sequence's own lengths: so
its result does not depend on what else is in the batch, nor on who computes it, nor on how many KV heads are together.
"""

from __future__ import annotations

from typing import NamedTuple

from pagedkern.backends.cpu.jit import TargetValue, inlined, kernel
from pagedkern.backends.cpu.memory import get_i32, put_i64

ROWS = 64  # rows of one group: query tokens * query heads, unless one token and KV head alone have more
FEW_GROUPS = 64  # a sequence with fewer groups than this, were KV heads apart, is split over its keys as well

# A group's record: int64 fields, byte offsets
G_SEQ = 0  # sequence (-1: rows of no sequence)
G_HEAD, G_HEADS = 8, 72  # first KV head, number of them
G_TOKEN, G_COUNT = 16, 24  # first query token (row of q), number of them
G_POSITION, G_LENGTH = 32, 40  # position of the first query token in its sequence, tokens of the sequence
G_PARTIAL, G_SPANS, G_DONE = 48, 56, 64  # first row of partial results, spans, spans done
GROUP_SIZE = 80
# An item's record
I_GROUP, I_SPAN, I_INDEX = (
    0,
    8,
    16,
)  # group number, span (from position 0; -1: all), span (from the group's first)
ITEM_SIZE = 24
# Counters
C_NEXT, C_WORKERS, C_BAD = 0, 8, 16
COUNTERS_SIZE = 24

OK, BAD_LENGTH, BAD_START, BAD_BLOCK = 0, 1, 2, 3  # the status of `plan` and `find_bad_block`


class Args(NamedTuple):
    """One attention call. Addresses are those of element 0, strides are bytes, 0 stands for an array not given."""

    q: int  # [T, H, D]
    q_token: int
    q_head: int
    q_code: int  # dtype of q and out: `convert.CODES`
    k: int  # [N, B, G, D]
    k_block: int
    k_slot: int
    k_head: int
    v: int  # [N, B, G, E]
    v_block: int
    v_slot: int
    v_head: int
    table: int  # int32 [S, W]
    table_row: int
    width: int
    seq_lens: int  # int32 [S]
    cu: int  # int32 [S+1]
    out: int  # [T, H, E]
    out_token: int
    out_head: int
    lse: int  # float32 [T, H]
    lse_token: int
    lse_head: int
    alibi: int  # float32 [H]
    sinks: int  # float32 [H]
    k_scale: int  # float32 [G]
    v_scale: int  # float32 [G]
    seqs: int
    tokens: int
    heads: int
    kv_heads: int
    d: int
    e: int
    blocks: int
    block_size: int
    causal: int
    window: int  # 0: none
    span: int  # tokens, a multiple of TILE
    scale: float
    cap: float  # 0: none


@inlined
def query_range(c: Args, i: int) -> tuple[int, int]:
    """Rows of q of sequence i; i == seqs stands for the rows behind the last one."""
    if c.cu == 0:
        return (i, i + 1) if i < c.seqs else (c.seqs, c.tokens)
    return get_i32(c.cu + 4 * i), get_i32(c.cu + 4 * (i + 1)) if i < c.seqs else c.tokens


@inlined
def seen_from(c: Args, position: int) -> int:
    return max(0, position - c.window + 1) if c.window else 0


@inlined
def seen_to(c: Args, position: int, length: int) -> int:
    return max(0, min(position + 1, length)) if c.causal else length


@kernel
def plan(
    c: Args, together: int, groups: int, items: int, _target: TargetValue
) -> tuple[int, int, int, int, int, int, int]:
    """Cut a call into work, into the records at `groups` and `items`, or only count them if those are 0.

    together: KV heads of one group, if it has rows for so many. Returns the numbers of groups, items and rows of
    partial results, the tokens of K and V read over all items, and status, sequence and value of the first length that
    is out of range.
    """
    n_groups, n_items, n_partial, read = 0, 0, 0, 0
    per_kv = c.heads // c.kv_heads
    tile = max(1, ROWS // per_kv)
    previous = 0
    for i in range(c.seqs + 1):
        start, stop = query_range(c, i)
        length = get_i32(c.seq_lens + 4 * i) if i < c.seqs else 0
        if length < 0 or length > c.width * c.block_size:
            return 0, 0, 0, 0, BAD_LENGTH, i, length
        if start != previous:
            return 0, 0, 0, 0, BAD_START, i, start
        if stop < start or stop > c.tokens:
            return 0, 0, 0, 0, BAD_START, i + 1, stop
        previous = stop
        tiles = (stop - start + tile - 1) // tile
        split = tiles * c.kv_heads < FEW_GROUPS
        for x in range(tiles - 1, -1, -1):  # the last tile sees most: begin with it
            first = start + x * tile
            count = min(tile, stop - first)
            position = length - (stop - start) + x * tile
            lo, hi = seen_from(c, position), seen_to(c, position + count - 1, length)
            from_span, spans = 0, 1
            if split and hi > lo:
                from_span = lo // c.span
                spans = (hi - 1) // c.span + 1 - from_span
            step = max(1, min(together, tile // count))
            for h in range(0, c.kv_heads, step):
                heads = min(step, c.kv_heads - h)
                if groups:
                    at = groups + n_groups * GROUP_SIZE
                    put_i64(at + G_SEQ, i if i < c.seqs else -1)
                    put_i64(at + G_HEAD, h)
                    put_i64(at + G_HEADS, heads)
                    put_i64(at + G_TOKEN, first)
                    put_i64(at + G_COUNT, count)
                    put_i64(at + G_POSITION, position)
                    put_i64(at + G_LENGTH, length)
                    put_i64(at + G_PARTIAL, n_partial)
                    put_i64(at + G_SPANS, spans)
                    put_i64(at + G_DONE, 0)
                    for s in range(spans):
                        item = items + (n_items + s) * ITEM_SIZE
                        put_i64(item + I_GROUP, n_groups)
                        put_i64(item + I_SPAN, from_span + s if split else -1)
                        put_i64(item + I_INDEX, s)
                n_groups += 1
                n_items += spans
                n_partial += spans * heads * count * per_kv if spans > 1 else 0
                read += heads * max(0, hi - lo)
    return n_groups, n_items, n_partial, read, OK, 0, 0


@kernel
def find_bad_block(c: Args, _target: TargetValue) -> tuple[int, int, int]:
    """Sequence, position in the table and value of the first used entry that is no block of the cache; -1 if none."""
    for i in range(c.seqs):
        start, stop = query_range(c, i)
        length = get_i32(c.seq_lens + 4 * i)
        position = length - (stop - start)
        lo = seen_from(c, position) if stop > start else length
        hi = seen_to(c, length - 1, length)
        for j in range(lo // c.block_size, (hi + c.block_size - 1) // c.block_size):
            block = get_i32(c.table + i * c.table_row + 4 * j)
            if block < 0 or block >= c.blocks:
                return i, j, block
    return -1, -1, -1
