"""The walk of a tile of query rows over its keys: which tiles it visits, and in which order.

Tiles of N keys stand side by side from some first one on. SPAN_TILES of them make a span, and split i of SPLITS takes the
spans i, i + SPLITS, i + 2 SPLITS ... Tiles that every row sees whole come first, without masks; then those at the edges of
the window, of the causal line and of the sequence. Tiles that no row sees are never visited.
"""

import triton
import triton.language as tl

from pagedkern.backends.triton.tiles import INF, add_visible, load_rows, rescaled, scores, widen


@triton.jit
def tiles_before(i_tile, i_split, SPLITS: tl.constexpr, SPAN_TILES: tl.constexpr):
    """How many of the tiles 0 .. i_tile - 1 belong to a split."""
    i_turn = i_tile // (SPLITS * SPAN_TILES)
    i_rest = i_tile - i_turn * (SPLITS * SPAN_TILES) - i_split * SPAN_TILES
    return i_turn * SPAN_TILES + tl.minimum(tl.maximum(i_rest, 0), SPAN_TILES)


@triton.jit
def tile_at(i, i_split, SPLITS: tl.constexpr, SPAN_TILES: tl.constexpr):
    """The i-th tile of a split."""
    return (i // SPAN_TILES * SPLITS + i_split) * SPAN_TILES + i % SPAN_TILES


@triton.jit
def attend(
    b_q,  # [M, DP], in the dtype of the products
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

    b_acc = tl.zeros([b_q.shape[0], EP], tl.float32)
    b_top = tl.full([b_q.shape[0]], -INF, tl.float32)
    b_sum = tl.zeros([b_q.shape[0]], tl.float32)
    for i in tl.range(begin_all, end_all, num_stages=STAGES):
        start = (first_tile + tile_at(i, i_split, SPLITS, SPAN_TILES)) * TILE
        b_acc, b_top, b_sum = attend_tile(
            b_acc, b_top, b_sum, b_q, b_position, start, low, high, p_k, p_v, p_table, k_block, k_token, v_block,
            v_token, scale, softcap, b_slope, window, D, E, TILE, BLOCK_SIZE, ALIGN_K, ALIGN_V, CAUSAL, False, RAGGED,
            KIND, NATIVE_FP8, PRECISION,
        )  # fmt: skip
    for edge in tl.range(0, begin_all - begin + end - end_all, num_stages=1):
        i = tl.where(begin + edge < begin_all, begin + edge, edge - (begin_all - begin) + end_all)
        start = (first_tile + tile_at(i, i_split, SPLITS, SPAN_TILES)) * TILE
        b_acc, b_top, b_sum = attend_tile(
            b_acc, b_top, b_sum, b_q, b_position, start, low, high, p_k, p_v, p_table, k_block, k_token, v_block,
            v_token, scale, softcap, b_slope, window, D, E, TILE, BLOCK_SIZE, ALIGN_K, ALIGN_V, CAUSAL, True, RAGGED,
            KIND, NATIVE_FP8, PRECISION,
        )  # fmt: skip
    return b_acc, b_top, b_sum


@triton.jit
def attend_tile(
    b_acc,  # float32 [M, EP], weighted sum of V
    b_top,  # float32 [M], largest score
    b_sum,  # float32 [M], sum of the weights
    b_q,  # [M, DP]
    b_position,  # int32 [M]
    start,  # position of the tile's first key
    low,  # keys before this one, and from `high` on, are seen by no row
    high,
    p_k,
    p_v,
    p_table,
    k_block,
    k_token,
    v_block,
    v_token,
    scale,
    softcap,
    b_slope,
    window,
    D: tl.constexpr,
    E: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ALIGN_K: tl.constexpr,  # every offset of a token is a multiple of so many elements
    ALIGN_V: tl.constexpr,
    CAUSAL: tl.constexpr,
    EDGE: tl.constexpr,  # some row sees less than the whole tile
    RAGGED: tl.constexpr,  # rows may see different tokens
    KIND: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The state of the running softmax after the keys start .. start + TILE - 1."""
    o_d = tl.arange(0, b_q.shape[1])
    o_e = tl.arange(0, b_acc.shape[1])
    i_key = start + tl.arange(0, TILE)  # [N]
    m_key = (i_key >= low) & (i_key < high)
    i_block = tl.load(p_table + i_key // BLOCK_SIZE, mask=m_key if EDGE else None, other=0 if EDGE else None)
    i_block = i_block.to(tl.int64)
    i_inside = i_key % BLOCK_SIZE
    o_k = tl.multiple_of(i_block * k_block + i_inside * k_token, ALIGN_K)
    o_v = tl.multiple_of(i_block * v_block + i_inside * v_token, ALIGN_V)
    b_k = load_rows(p_k + (o_k[:, None] + o_d[None, :]), m_key, o_d, D, EDGE)  # [N, DP]
    b_v = load_rows(p_v + (o_v[:, None] + o_e[None, :]), m_key, o_e, E, EDGE)  # [N, EP]
    b_k = widen(b_k, KIND, NATIVE_FP8, b_q.dtype)
    b_v = widen(b_v, KIND, NATIVE_FP8, b_q.dtype)

    b_distance = i_key[None, :] - b_position[:, None]  # [M, N]
    b_s = scores(b_q, b_k, b_distance, scale, softcap, b_slope, PRECISION)
    if EDGE:
        m_seen = tl.broadcast_to(m_key[None, :], b_s.shape)
        if RAGGED and CAUSAL:
            m_seen = m_seen & (b_distance <= 0)
        if RAGGED and window is not None:
            m_seen = m_seen & (b_distance > -window)
        b_s = tl.where(m_seen, b_s, -INF)
    b_p, b_top, b_sum, b_acc = rescaled(b_s, b_top, b_sum, b_acc)
    if EDGE and RAGGED and KIND != "int8":
        b_acc = add_visible(b_acc, b_p.to(b_q.dtype), b_v, m_seen, PRECISION)
    else:
        b_acc = tl.dot(b_p.to(b_q.dtype), b_v, b_acc, input_precision=PRECISION)
    return b_acc, b_top, b_sum
