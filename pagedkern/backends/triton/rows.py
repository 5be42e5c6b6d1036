"""Tiles of query rows: loading q, and writing what a row has found.

The query tokens of a sequence times the GROUP query heads of one KV head make its rows: row r is token r // GROUP and
head r % GROUP of the group, so K and V are read once for all heads of a group.
"""

import triton
import triton.language as tl

from pagedkern.backends.triton.tiles import INF, LOG2E

NUMBERS = (
    "window", "q_row", "q_head", "k_block", "k_token", "k_head", "v_block", "v_token", "v_head", "out_row", "out_head",
    "table_row", "num_seqs", "num_tokens", "max_queries", "min_queries", "splits", "row_tiles",
)  # fmt: skip
"""Arguments of the kernels that Triton must not compile anew for: what their alignment allows is said by ALIGN_*."""


@triton.jit
def load_queries(
    p_q,
    o_token,  # [M]
    o_head,  # [M]
    m_row,  # [M]
    q_row,
    q_head,
    D: tl.constexpr,
    FIRST: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGN: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Columns FIRST .. FIRST + COLUMNS - 1 of q of some rows, [M, COLUMNS]; 0 where there is no row or column."""
    o_d = FIRST + tl.arange(0, COLUMNS)
    o_q = tl.multiple_of(o_token.to(tl.int64) * q_row + o_head * q_head, ALIGN)
    b_q = tl.load(p_q + (o_q[:, None] + o_d[None, :]), mask=m_row[:, None] & (o_d < D)[None, :], other=0)
    return b_q.to(OPERAND)


@triton.jit
def with_sink(b_top, b_sum, b_sink):
    """The largest score and the sum of weights once the sink [M] has joined, and by how much older weights shrink."""
    b_new = tl.maximum(b_top, b_sink)
    b_base = tl.where(b_new == -INF, 0.0, b_new)
    b_decay = tl.exp2((b_top - b_base) * LOG2E)
    b_weight = tl.where(b_sink == INF, 1.0, tl.exp2((b_sink - b_base) * LOG2E))  # NaN of a NaN
    return b_new, b_sum * b_decay + b_weight, b_decay


@triton.jit
def store_result(
    b_acc,  # float32 [M, EP]
    b_top,  # float32 [M]
    b_sum,  # float32 [M]
    p_out,
    p_lse,  # or None
    p_sinks,  # float32 [H], or None
    o_token,  # [M]
    o_head,  # [M]
    m_row,  # [M]
    out_row,
    out_head,
    num_heads,
    E: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """out = acc / sum, lse = top + log(sum), the sink joined. A row that has seen nothing gets 0 and -inf."""
    if p_sinks is not None:
        b_sink = tl.load(p_sinks + o_head, mask=m_row, other=0.0)
        b_top, b_sum, b_decay = with_sink(b_top, b_sum, b_sink)
        b_acc = b_acc * b_decay[:, None]
    b_out = b_acc / tl.where(b_sum == 0.0, 1.0, b_sum)[:, None]
    o_e = tl.arange(0, b_acc.shape[1])
    o_out = tl.multiple_of(o_token.to(tl.int64) * out_row + o_head * out_head, ALIGN)
    m_out = m_row[:, None] & (o_e < E)[None, :]
    tl.store(p_out + (o_out[:, None] + o_e[None, :]), b_out.to(p_out.dtype.element_ty), mask=m_out)
    if p_lse is not None:
        tl.store(p_lse + (o_token.to(tl.int64) * num_heads + o_head), b_top + tl.log(b_sum), mask=m_row)
