"""Attention of sequences with many query tokens: each program walks all keys that its tile of rows sees."""

import triton
import triton.language as tl

from pagedkern.backends.triton.rows import NUMBERS, load_queries, store_result
from pagedkern.backends.triton.walk import attend


@triton.jit
def find_tile(pid, p_cu, num_seqs, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """The sequence that tile `pid` belongs to, and its number there, by bisection.

    Sequence i begins at tile cu[i] * GROUP // ROWS + i, which leaves room for a last tile that is not full.
    """
    left = 0
    right = num_seqs
    while right - left > 1:
        middle = (left + right) // 2
        if tl.load(p_cu + middle) * GROUP // ROWS + middle <= pid:
            left = middle
        else:
            right = middle
    return left, pid - (tl.load(p_cu + left) * GROUP // ROWS + left)


@triton.jit(do_not_specialize=NUMBERS)
def prefill_kernel(
    p_q,  # [T, H, D]
    p_k,  # [N, B, G, D]
    p_v,  # [N, B, G, E]
    p_table,  # int32 [S, W]
    p_lens,  # int32 [S]
    p_cu,  # int32 [S+1]
    p_out,  # [T, H, E]
    p_lse,  # float32 [T, H], or None
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
    min_queries,  # sequences of fewer query tokens are not served here
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
    ALIGN_Q: tl.constexpr,
    ALIGN_K: tl.constexpr,
    ALIGN_V: tl.constexpr,
    ALIGN_OUT: tl.constexpr,
    CAUSAL: tl.constexpr,
    KIND: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A program for each tile of rows, the last first since those see most, and each KV head."""
    i_head = tl.program_id(1)
    i_seq, i_tile = find_tile(tl.num_programs(0) - 1 - tl.program_id(0), p_cu, num_seqs, GROUP, ROWS)
    first_row = tl.load(p_cu + i_seq)
    num_queries = tl.load(p_cu + i_seq + 1) - first_row
    if num_queries < min_queries or i_tile * ROWS >= num_queries * GROUP:
        return
    seq_len = tl.load(p_lens + i_seq)

    i_row = i_tile * ROWS + tl.arange(0, ROWS)  # [M]
    i_query = i_row // GROUP
    o_head = i_head * GROUP + i_row % GROUP
    o_token = first_row + i_query
    m_row = i_query < num_queries
    first_position = seq_len - num_queries + i_tile * ROWS // GROUP
    last_position = seq_len - num_queries + tl.minimum((i_tile * ROWS + ROWS - 1) // GROUP, num_queries - 1)
    first_tile = 0
    if window is not None:
        first_tile = tl.maximum(first_position - window + 1, 0) // TILE
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
        b_q, b_q1, seq_len - num_queries + i_query, first_position, last_position, seq_len, first_tile, 0,
        p_k + tl.multiple_of(i_head * k_head, ALIGN_K), p_v + tl.multiple_of(i_head * v_head, ALIGN_V),
        p_table + i_seq * table_row, k_block, k_token, v_block, v_token, scale, softcap, b_slope, window, D, E, EP,
        TILE, 1, 1, BLOCK_SIZE, ALIGN_K, ALIGN_V, CAUSAL, True, KIND, NATIVE_FP8, PRECISION, STAGES,
    )  # fmt: skip
    if p_v_scale is not None:
        b_acc *= tl.load(p_v_scale + i_head)
    store_result(
        b_acc, b_top, b_sum, p_out, p_lse, p_sinks, o_token, o_head, m_row, out_row, out_head, KV_HEADS * GROUP, E,
        ALIGN_OUT,
    )  # fmt: skip
