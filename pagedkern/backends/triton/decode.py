"""Attention of sequences with few query tokens: keys split among programs, partial results merged by a second kernel.

The keys of a sequence are cut into spans counted from position 0, and each split takes every SPLITS-th span from the
first that any query sees. Both numbers belong to the configuration, so what is summed in which order depends on the
sequence alone: not on its batch, nor on the width of the table.
"""

import triton
import triton.language as tl

from pagedkern.backends.triton.rows import NUMBERS, load_queries, store_result
from pagedkern.backends.triton.tiles import INF, LOG2E
from pagedkern.backends.triton.walk import attend

PARTIAL = tl.constexpr(4)  # a partial result is a weighted sum [E], its largest score, its sum of weights, and 2 unused


@triton.jit
def query_rows(p_cu, i_seq):
    """The first row of q of a sequence, and its number of query tokens."""
    if p_cu is None:
        first = i_seq
        count = 1
    else:
        first = tl.load(p_cu + i_seq)
        count = tl.load(p_cu + i_seq + 1) - first
    return first, count


@triton.jit
def used_spans(seq_len, num_queries, window, SPAN: tl.constexpr):
    """The first span that some query of the sequence sees, and how many spans there are from it on."""
    first = 0
    if window is not None:
        first = tl.maximum(seq_len - num_queries - window + 1, 0) // SPAN
    return first, tl.maximum(tl.cdiv(seq_len, SPAN) - first, 0)


@triton.jit(do_not_specialize=NUMBERS)
def split_kernel(
    p_q,  # [T, H, D]
    p_k,  # [N, B, G, D]
    p_v,  # [N, B, G, E]
    p_table,  # int32 [S, W]
    p_lens,  # int32 [S]
    p_cu,  # int32 [S+1], or None: one query a sequence
    p_out,  # [T, H, E]
    p_lse,  # float32 [T, H], or None
    p_work,  # float32 [S, max_queries, H, splits, E + PARTIAL], or None if there is one split
    p_slopes,  # float32 [H], or None
    p_sinks,  # float32 [H], or None
    p_k_scale,  # float32 [G], or None
    p_v_scale,  # float32 [G], or None
    scale,
    softcap,  # or None
    window,  # or None
    q_row: tl.int64,  # strides in elements
    q_head: tl.int64,
    k_block: tl.int64,
    k_token: tl.int64,
    k_head: tl.int64,
    v_block: tl.int64,
    v_token: tl.int64,
    v_head: tl.int64,
    out_row: tl.int64,
    out_head: tl.int64,
    table_row: tl.int64,
    num_seqs,  # S
    num_tokens,  # T
    max_queries,  # query tokens of a sequence that is served here
    splits,  # of the grid: SPLITS, or fewer if the longest possible context has fewer spans
    row_tiles,  # tiles of max_queries * GROUP rows
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    D0: tl.constexpr,  # columns of q and k taken together,
    D1: tl.constexpr,  # and the rest of them, or 0
    EP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    SPAN_TILES: tl.constexpr,
    ALIGN_Q: tl.constexpr,
    ALIGN_K: tl.constexpr,
    ALIGN_V: tl.constexpr,
    ALIGN_OUT: tl.constexpr,
    CAUSAL: tl.constexpr,
    RAGGED: tl.constexpr,  # max_queries > 1
    KIND: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A program for each tile of rows of a KV head, KV head, split and sequence, the first varying fastest; with p_cu
    the last "sequence" is the rows of q that belong to none."""
    pid = tl.program_id(0)
    i_tile = pid % row_tiles
    i_head = pid // row_tiles % KV_HEADS
    i_split = pid // (row_tiles * KV_HEADS) % splits
    i_seq = pid // (row_tiles * KV_HEADS * splits)

    i_row = i_tile * ROWS + tl.arange(0, ROWS)  # [M]
    o_head = i_head * GROUP + i_row % GROUP
    if p_cu is not None:  # noqa: SIM102  (known when compiled, unlike the next)
        if i_seq == num_seqs:
            i_spare = i_split * row_tiles * ROWS + i_row
            blank_rows(
                tl.load(p_cu + num_seqs), num_tokens, i_spare, splits * row_tiles * ROWS, i_head, p_out, p_lse, p_sinks,
                out_row, out_head, KV_HEADS, GROUP, E, EP, ALIGN_OUT,
            )  # fmt: skip
            return
    first_row, num_queries = query_rows(p_cu, i_seq)
    if num_queries > max_queries or i_tile * ROWS >= num_queries * GROUP:
        return
    seq_len = tl.load(p_lens + i_seq)
    first_span, num_spans = used_spans(seq_len, num_queries, window, SPAN_TILES * TILE)
    if i_split >= tl.maximum(num_spans, 1):
        return

    i_query = i_row // GROUP
    m_row = i_query < num_queries
    o_token = first_row + i_query
    first_position = seq_len - num_queries + i_tile * ROWS // GROUP
    last_position = seq_len - num_queries + tl.minimum((i_tile * ROWS + ROWS - 1) // GROUP, num_queries - 1)
    b_q = load_queries(p_q, o_token, o_head, m_row, q_row, q_head, D, 0, D0, ALIGN_Q, OPERAND)
    b_q1 = None
    if D1 > 0:
        b_q1 = load_queries(p_q, o_token, o_head, m_row, q_row, q_head, D, D0, D1, ALIGN_Q, OPERAND)
    b_slope = None
    if p_slopes is not None:
        b_slope = tl.load(p_slopes + o_head, mask=m_row, other=0.0)
    if p_k_scale is not None:
        scale = scale * tl.load(p_k_scale + i_head)
    b_acc, b_top, b_sum = attend(
        b_q, b_q1, seq_len - num_queries + i_query, first_position, last_position, seq_len, first_span * SPAN_TILES,
        i_split,
        p_k + tl.multiple_of(i_head * k_head, ALIGN_K), p_v + tl.multiple_of(i_head * v_head, ALIGN_V),
        p_table + i_seq * table_row, k_block, k_token, v_block, v_token, scale, softcap, b_slope, window, D, E, EP,
        TILE, SPLITS, SPAN_TILES, BLOCK_SIZE, ALIGN_K, ALIGN_V, CAUSAL, RAGGED, KIND, NATIVE_FP8, PRECISION, STAGES,
    )  # fmt: skip
    if p_v_scale is not None:
        b_acc *= tl.load(p_v_scale + i_head)

    if p_work is None or num_spans <= 1:
        store_result(
            b_acc, b_top, b_sum, p_out, p_lse, p_sinks, o_token, o_head, m_row, out_row, out_head, KV_HEADS * GROUP, E,
            ALIGN_OUT,
        )  # fmt: skip
    else:
        i_part = ((i_seq.to(tl.int64) * max_queries + i_query) * (KV_HEADS * GROUP) + o_head) * splits + i_split
        p_part = p_work + tl.multiple_of(i_part * (E + PARTIAL), 4)  # [M]
        o_e = tl.arange(0, EP)
        tl.store(p_part[:, None] + o_e[None, :], b_acc, mask=m_row[:, None] & (o_e < E)[None, :])
        tl.store(p_part + E, b_top, mask=m_row)
        tl.store(p_part + (E + 1), b_sum, mask=m_row)


@triton.jit
def blank_rows(
    first,  # token
    num_tokens,
    i_row,  # [M], in the first turn
    step,  # rows of all programs together
    i_head,  # KV head
    p_out,
    p_lse,
    p_sinks,
    out_row,
    out_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
    ALIGN_OUT: tl.constexpr,
):
    """The result of rows first .. num_tokens - 1 of q, which belong to no sequence: they see nothing."""
    b_acc = tl.zeros([i_row.shape[0], EP], tl.float32)
    b_sum = tl.zeros([i_row.shape[0]], tl.float32)
    for done in tl.range(0, (num_tokens - first) * GROUP, step):
        o_token = first + (done + i_row) // GROUP
        o_head = i_head * GROUP + (done + i_row) % GROUP
        store_result(
            b_acc, b_sum - INF, b_sum, p_out, p_lse, p_sinks, o_token, o_head, o_token < num_tokens, out_row, out_head,
            KV_HEADS * GROUP, E, ALIGN_OUT,
        )  # fmt: skip


@triton.jit(do_not_specialize=NUMBERS)
def merge_kernel(
    p_work,  # float32 [S, max_queries, H, splits, E + PARTIAL]
    p_lens,  # int32 [S]
    p_cu,  # int32 [S+1], or None
    p_out,  # [T, H, E]
    p_lse,  # float32 [T, H], or None
    p_sinks,  # float32 [H], or None
    window,  # or None
    out_row: tl.int64,
    out_head: tl.int64,
    max_queries,
    splits,
    HEADS: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
    SPAN: tl.constexpr,
    PARTS: tl.constexpr,  # a power of two >= SPLITS
    CHUNK: tl.constexpr,  # partial results that are summed at a time
    ALIGN_OUT: tl.constexpr,
):
    """A program for each query token of each sequence and each head: the sum of its partial results, first to last."""
    i_seq = tl.program_id(0) // max_queries
    i_query = tl.program_id(0) % max_queries
    i_head = tl.program_id(1)
    first_row, num_queries = query_rows(p_cu, i_seq)
    if num_queries > max_queries or i_query >= num_queries:
        return
    _, num_spans = used_spans(tl.load(p_lens + i_seq), num_queries, window, SPAN)
    if num_spans <= 1:
        return

    num_parts = tl.minimum(num_spans, splits)
    p_parts = p_work + (tl.program_id(0).to(tl.int64) * HEADS + i_head) * splits * (E + PARTIAL)
    o_part = tl.arange(0, PARTS)
    m_part = o_part < num_parts
    b_tops = tl.load(p_parts + o_part * (E + PARTIAL) + E, mask=m_part, other=-INF)  # [PARTS]
    b_sums = tl.load(p_parts + o_part * (E + PARTIAL) + E + 1, mask=m_part, other=0.0)
    top = tl.max(b_tops, 0)
    base = tl.where(top == -INF, 0.0, top)
    total = tl.sum(b_sums * tl.exp2((b_tops - base) * LOG2E), 0)

    o_e = tl.arange(0, EP)
    b_acc = tl.zeros([EP], tl.float32)
    for chunk in tl.range(0, num_parts, CHUNK):
        o_row = chunk + tl.arange(0, CHUNK)
        p_row = p_parts + tl.multiple_of(o_row * (E + PARTIAL), 4)
        m_row = o_row < num_parts
        b_weight = tl.exp2((tl.load(p_row + E, mask=m_row, other=-INF) - base) * LOG2E)  # [CHUNK]
        b_part = tl.load(p_row[:, None] + o_e[None, :], mask=m_row[:, None] & (o_e < E)[None, :], other=0.0)
        b_acc += tl.sum(b_weight[:, None] * b_part, 0)

    o_row = tl.arange(0, 1)
    store_result(
        b_acc[None, :], top + o_row, total + o_row, p_out, p_lse, p_sinks, first_row + i_query + o_row, i_head + o_row,
        o_row == 0, out_row, out_head, HEADS, E, ALIGN_OUT,
    )  # fmt: skip
