"""The walk of a tile of query rows over its keys: which tiles it visits, and in which order.

Tiles of N keys stand side by side from some first one on. SPAN_TILES of them make a span, and split i of SPLITS takes
the spans i, i + SPLITS, i + 2 SPLITS ... Tiles that every row sees whole come first, without masks and with several
tiles in flight; then those at the edges of the window, of the causal line and of the sequence. Tiles that no row sees
are never visited.

Where rows see different tokens, a row must not be touched by what only others see, not even by 0 * NaN. At the edges V
is therefore taken with its NaN and Inf replaced by 0; if there were any, what they add up to for the rows that do see
them is found afterwards.
"""

import triton
import triton.language as tl

from pagedkern.backends.triton.tiles import INF, block_ids, load_tokens, rescaled, scores, wild, wild_sum


@triton.jit
def tiles_before(i_tile, i_split, SPLITS: tl.constexpr, SPAN_TILES: tl.constexpr):
    """How many of the tiles 0 .. i_tile - 1 belong to a split."""
    i_turn = i_tile // (SPLITS * SPAN_TILES)
    i_rest = i_tile - i_turn * (SPLITS * SPAN_TILES) - i_split * SPAN_TILES
    return i_turn * SPAN_TILES + tl.minimum(tl.maximum(i_rest, 0), SPAN_TILES)


@triton.jit
def first_key(i, first_tile, i_split, TILE: tl.constexpr, SPLITS: tl.constexpr, SPAN_TILES: tl.constexpr):
    """Position of the first key of a split's i-th tile."""
    return (first_tile + (i // SPAN_TILES * SPLITS + i_split) * SPAN_TILES + i % SPAN_TILES) * TILE


@triton.jit
def attend(
    b_q,  # [M, D0], in the dtype of the products
    b_q1,  # [M, D1], the columns of q from D0 on, or None
    b_position,  # int32 [M], in the sequence
    first_position,  # of the rows that count
    last_position,
    seq_len,
    first_tile,  # the tile that split 0 begins with
    i_split,
    p_k,  # K of this KV head in block 0
    p_v,
    p_table,  # int32 [W], this sequence's row
    k_block,  # strides in elements
    k_token,
    v_block,
    v_token,
    scale,
    softcap,  # or None
    b_slope,  # float32 [M], or None
    window,  # or None
    D: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    SPAN_TILES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ALIGN_K: tl.constexpr,
    ALIGN_V: tl.constexpr,
    CAUSAL: tl.constexpr,
    RAGGED: tl.constexpr,
    KIND: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Weighted sum of V [M, EP], largest score [M] and sum of weights [M] over the keys of one split."""
    low = 0  # keys low .. high - 1 are seen by some row, low_all .. high_all - 1 by every row
    low_all = 0
    high = seq_len
    high_all = seq_len
    if CAUSAL:
        high = tl.minimum(seq_len, last_position + 1)
        high_all = tl.minimum(seq_len, first_position + 1)
    if window is not None:
        low = tl.maximum(first_position - window + 1, 0)
        low_all = tl.maximum(last_position - window + 1, 0)
    begin = tiles_before(low // TILE - first_tile, i_split, SPLITS, SPAN_TILES)
    end = tiles_before(tl.cdiv(tl.maximum(high, low), TILE) - first_tile, i_split, SPLITS, SPAN_TILES)
    begin_all = tiles_before(tl.cdiv(low_all, TILE) - first_tile, i_split, SPLITS, SPAN_TILES)
    end_all = tiles_before(tl.maximum(high_all, low) // TILE - first_tile, i_split, SPLITS, SPAN_TILES)
    begin_all = tl.minimum(begin_all, end)
    end_all = tl.maximum(end_all, begin_all)

    o_key = tl.arange(0, TILE)
    b_acc = tl.zeros([b_q.shape[0], EP], tl.float32)
    b_top = tl.full([b_q.shape[0]], -INF, tl.float32)
    b_sum = tl.zeros([b_q.shape[0]], tl.float32)
    i_key = first_key(begin_all, first_tile, i_split, TILE, SPLITS, SPAN_TILES) + o_key
    i_block = block_ids(p_table, i_key, i_key < high_all, BLOCK_SIZE)
    for i in tl.range(begin_all, end_all, num_stages=STAGES):
        i_next = first_key(i + 1, first_tile, i_split, TILE, SPLITS, SPAN_TILES) + o_key
        i_next_block = block_ids(p_table, i_next, i_next < high_all, BLOCK_SIZE)  # a turn ahead: K and V wait for it
        b_s = products(
            b_q, b_q1, p_k, i_block, i_key, None, k_block, k_token, D, BLOCK_SIZE, ALIGN_K, KIND, NATIVE_FP8, PRECISION
        )  # [M, N]
        b_v = load_tokens(
            p_v, i_block, i_key, None, v_block, v_token, E, EP, BLOCK_SIZE, ALIGN_V, KIND, NATIVE_FP8, b_q.dtype
        )  # [N, EP]
        b_s = scores(b_s, i_key[None, :] - b_position[:, None], scale, softcap, b_slope)
        b_p, b_top, b_sum, b_acc = rescaled(b_s, b_top, b_sum, b_acc)
        b_acc = tl.dot(b_p.to(b_q.dtype), b_v, b_acc, input_precision=PRECISION)
        i_key = i_next
        i_block = i_next_block

    before = begin_all - begin
    num_edges = before + end - end_all
    num_wild = 0
    for edge in tl.range(0, num_edges, num_stages=1):
        i = tl.where(edge < before, begin + edge, end_all + edge - before)
        i_key = first_key(i, first_tile, i_split, TILE, SPLITS, SPAN_TILES) + o_key
        m_key = (i_key >= low) & (i_key < high)
        i_block = block_ids(p_table, i_key, m_key, BLOCK_SIZE)
        b_s = products(
            b_q, b_q1, p_k, i_block, i_key, m_key, k_block, k_token, D, BLOCK_SIZE, ALIGN_K, KIND, NATIVE_FP8, PRECISION
        )
        b_v = load_tokens(
            p_v, i_block, i_key, m_key, v_block, v_token, E, EP, BLOCK_SIZE, ALIGN_V, KIND, NATIVE_FP8, b_q.dtype
        )
        b_distance = i_key[None, :] - b_position[:, None]
        b_s = scores(b_s, b_distance, scale, softcap, b_slope)
        b_s = tl.where(visible(b_distance, m_key, window, CAUSAL, RAGGED), b_s, -INF)
        b_p, b_top, b_sum, b_acc = rescaled(b_s, b_top, b_sum, b_acc)
        if RAGGED and KIND != "int8":
            m_wild = wild(b_v) > 0
            num_wild += tl.sum(tl.sum(m_wild.to(tl.int32), 1), 0)
            b_v = tl.where(m_wild, 0.0, b_v).to(b_q.dtype)
        b_acc = tl.dot(b_p.to(b_q.dtype), b_v, b_acc, input_precision=PRECISION)

    if RAGGED and KIND != "int8":  # noqa: SIM102  (known when compiled, unlike the next)
        if num_wild > 0:
            b_codes = tl.zeros([b_q.shape[0], EP], tl.float32)
            for edge in tl.range(0, num_edges, num_stages=1):
                i = tl.where(edge < before, begin + edge, end_all + edge - before)
                i_key = first_key(i, first_tile, i_split, TILE, SPLITS, SPAN_TILES) + o_key
                m_key = (i_key >= low) & (i_key < high)
                i_block = block_ids(p_table, i_key, m_key, BLOCK_SIZE)
                b_v = load_tokens(
                    p_v, i_block, i_key, m_key, v_block, v_token, E, EP, BLOCK_SIZE, ALIGN_V, KIND, NATIVE_FP8,
                    b_q.dtype,
                )  # fmt: skip
                m_seen = visible(i_key[None, :] - b_position[:, None], m_key, window, CAUSAL, RAGGED)
                b_codes = tl.dot(m_seen.to(b_q.dtype), wild(b_v).to(b_q.dtype), b_codes, input_precision=PRECISION)
            b_acc += wild_sum(b_codes)
    return b_acc, b_top, b_sum


@triton.jit
def products(
    b_q, b_q1, p_k, i_block, i_key, m_key, k_block, k_token, D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ALIGN_K: tl.constexpr, KIND: tl.constexpr, NATIVE_FP8: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Products of all query rows with the keys of a tile, float32 [M, N]."""
    D0: tl.constexpr = b_q.shape[1]
    if b_q1 is None:
        b_k = load_tokens(
            p_k, i_block, i_key, m_key, k_block, k_token, D, D0, BLOCK_SIZE, ALIGN_K, KIND, NATIVE_FP8, b_q.dtype
        )  # [N, D0]
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    else:
        b_k = load_tokens(
            p_k, i_block, i_key, m_key, k_block, k_token, D0, D0, BLOCK_SIZE, ALIGN_K, KIND, NATIVE_FP8, b_q.dtype
        )
        b_k1 = load_tokens(
            p_k + D0, i_block, i_key, m_key, k_block, k_token, D - D0, b_q1.shape[1], BLOCK_SIZE, ALIGN_K, KIND,
            NATIVE_FP8, b_q.dtype,
        )  # fmt: skip
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_s = tl.dot(b_q1, tl.trans(b_k1), b_s, input_precision=PRECISION)
    return b_s


@triton.jit
def visible(b_distance, m_key, window, CAUSAL: tl.constexpr, RAGGED: tl.constexpr):
    """Which keys (columns) each row sees, [M, N]; `b_distance`: key minus query position."""
    m_seen = tl.broadcast_to(m_key[None, :], b_distance.shape)
    if RAGGED and CAUSAL:
        m_seen = m_seen & (b_distance <= 0)
    if RAGGED and window is not None:
        m_seen = m_seen & (b_distance > -window)
    return m_seen
