"""Writing new K and V into their slots, quantized on the way, and copying blocks."""

import triton
import triton.language as tl

WORDS = tl.constexpr(4096)  # of a program of copy_kernel


@triton.jit
def narrow(b_x, b_scale, KIND: tl.constexpr, TO: tl.constexpr):
    """b_x [M, P] as a cache stores it; KIND as in `tiles.widen`: round(x / scale) to nearest even, saturated.

    Rounding in the normal range is that of the bits (half of the last place, less one if that is even, then cut).
    Numbers below it, and all for int8, are added to a power of two whose last place is the spacing of the codes.
    """
    if KIND == "":
        b_y = b_x.to(TO)
    else:
        b_y = tl.div_rn(b_x.to(tl.float32), b_scale[:, None])
        if KIND == "int8":
            b_y = tl.minimum(tl.maximum(tl.where(b_y == b_y, b_y, 0.0), -128.0), 127.0)
            b_y = (b_y + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)  # 1.5 * 2^23
        elif KIND == "float8_e4m3fn":
            b_y = float8(b_y, 448.0, 20, 120, 0.015625, 16384.0)
        elif KIND == "float8_e5m2":
            b_y = float8(b_y, 57344.0, 21, 112, 0.00006103515625, 128.0)
    return b_y


@triton.jit
def float8(b_y, LARGEST: tl.constexpr, CUT: tl.constexpr, BIAS: tl.constexpr, NORMAL: tl.constexpr, UNIT: tl.constexpr):
    """float32 to the bits of a float8: CUT bits of mantissa less, exponents BIAS less, NORMAL the smallest normal
    number, UNIT a power of two whose last place in float32 is that of the subnormal codes. NaN is 0x7F."""
    b_bits = b_y.to(tl.int32, bitcast=True)
    b_abs = tl.minimum(tl.abs(b_y), LARGEST)
    b_up = b_abs.to(tl.int32, bitcast=True)
    b_up = ((b_up + ((1 << (CUT - 1)) - 1) + ((b_up >> CUT) & 1)) >> CUT) - (BIAS << (23 - CUT))
    b_small = (b_abs + UNIT).to(tl.int32, bitcast=True) & 0xF
    b_code = tl.where(b_abs < NORMAL, b_small, b_up)
    b_code = tl.where(b_y == b_y, b_code, 0x7F)
    return (b_code | ((b_bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def write_rows(
    p_new, p_cache, p_scale, o_token, i_head, i_slot, m_row, new_row, new_head, block, token, head, SIZE: tl.constexpr,
    PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, ALIGN_NEW: tl.constexpr, ALIGN: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Rows (token, KV head) [M] of new K or V, of SIZE elements each, to their slots."""
    o_column = tl.arange(0, PADDED)
    m_new = m_row[:, None] & (o_column < SIZE)[None, :]
    o_new = tl.multiple_of(o_token * new_row + i_head * new_head, ALIGN_NEW)
    b_new = tl.load(p_new + (o_new[:, None] + o_column[None, :]), mask=m_new, other=0)
    b_scale = None
    if p_scale is not None:
        b_scale = tl.load(p_scale + i_head, mask=m_row, other=1.0)
    o_cache = (i_slot // BLOCK_SIZE) * block + (i_slot % BLOCK_SIZE) * token + i_head * head
    o_cache = tl.multiple_of(o_cache, ALIGN)
    b_stored = narrow(b_new, b_scale, KIND, p_cache.dtype.element_ty)
    tl.store(p_cache + (o_cache[:, None] + o_column[None, :]), b_stored, mask=m_new)


@triton.jit(
    do_not_specialize=[
        "k_row", "k_head", "v_row", "v_head", "kc_block", "kc_token", "kc_head", "vc_block", "vc_token", "vc_head",
        "num_tokens",
    ]
)  # fmt: skip
def write_kernel(
    p_k,  # [T, G, D]
    p_v,  # [T, G, E]
    p_k_cache,  # [N, B, G, D]
    p_v_cache,  # [N, B, G, E]
    p_slots,  # int64 [T]
    p_k_scale,  # float32 [G], or None
    p_v_scale,
    k_row: tl.int64,  # strides in elements
    k_head: tl.int64,
    v_row: tl.int64,
    v_head: tl.int64,
    kc_block: tl.int64,
    kc_token: tl.int64,
    kc_head: tl.int64,
    vc_block: tl.int64,
    vc_token: tl.int64,
    vc_head: tl.int64,
    num_tokens,  # T
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    DP: tl.constexpr,
    EP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGN_NEW_K: tl.constexpr,
    ALIGN_NEW_V: tl.constexpr,
    ALIGN_K: tl.constexpr,
    ALIGN_V: tl.constexpr,
    KIND: tl.constexpr,
):
    """A program for each ROWS rows (token, KV head)."""
    i_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_token = i_row // KV_HEADS
    i_head = i_row % KV_HEADS
    i_slot = tl.load(p_slots + o_token, mask=o_token < num_tokens, other=-1)
    m_row = i_slot >= 0
    write_rows(
        p_k, p_k_cache, p_k_scale, o_token, i_head, i_slot, m_row, k_row, k_head, kc_block, kc_token, kc_head, D, DP,
        BLOCK_SIZE, ALIGN_NEW_K, ALIGN_K, KIND,
    )  # fmt: skip
    write_rows(
        p_v, p_v_cache, p_v_scale, o_token, i_head, i_slot, m_row, v_row, v_head, vc_block, vc_token, vc_head, E, EP,
        BLOCK_SIZE, ALIGN_NEW_V, ALIGN_V, KIND,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "a0", "a1", "a2", "a3", "a4", "a5", "a6", "a7", "saved", "num_pairs", "num_words", "size_1", "size_2", "block",
        "stride_0", "stride_1", "stride_2",
    ]
)  # fmt: skip
def copy_kernel(
    p_src,  # int64 [n]
    p_dst,  # int64 [n]
    a0: tl.int64,  # addresses of up to eight caches of one geometry
    a1: tl.int64,
    a2: tl.int64,
    a3: tl.int64,
    a4: tl.int64,
    a5: tl.int64,
    a6: tl.int64,
    a7: tl.int64,
    saved: tl.int64,  # address of [caches, n, num_words]
    num_pairs: tl.int64,
    num_words: tl.int64,  # of a block: size_0 * size_1 * size_2
    size_1: tl.int64,
    size_2: tl.int64,
    block: tl.int64,  # strides in words
    stride_0: tl.int64,
    stride_1: tl.int64,
    stride_2: tl.int64,
    WORD: tl.constexpr,
    PAIRS: tl.constexpr,
    MODE: tl.constexpr,
):
    """Some words of PAIRS blocks. MODE "move" takes all pairs in one program, which reads all before it writes any;
    "save" copies sources to `saved`, "restore" from there to the destinations."""
    i_cache = tl.program_id(1)
    address = a0
    address = tl.where(i_cache == 1, a1, address)
    address = tl.where(i_cache == 2, a2, address)
    address = tl.where(i_cache == 3, a3, address)
    address = tl.where(i_cache == 4, a4, address)
    address = tl.where(i_cache == 5, a5, address)
    address = tl.where(i_cache == 6, a6, address)
    address = tl.where(i_cache == 7, a7, address)
    p_cache = address.to(tl.pointer_type(WORD))
    i_pair = tl.program_id(2).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)  # [PAIRS]
    m_pair = i_pair < num_pairs
    i_word = tl.program_id(0).to(tl.int64) * (WORDS // PAIRS) + tl.arange(0, WORDS // PAIRS)  # [WORDS / PAIRS]
    o_word = i_word // (size_1 * size_2) * stride_0 + i_word // size_2 % size_1 * stride_1 + i_word % size_2 * stride_2
    m_word = m_pair[:, None] & (i_word < num_words)[None, :]

    p_saved = saved.to(tl.pointer_type(WORD)) + (i_cache * num_pairs + i_pair)[:, None] * num_words + i_word[None, :]
    if MODE == "restore":
        b_word = tl.load(p_saved, mask=m_word)
    else:
        o_src = tl.load(p_src + i_pair, mask=m_pair, other=0) * block
        b_word = tl.load(p_cache + (o_src[:, None] + o_word[None, :]), mask=m_word)
    if MODE == "save":
        tl.store(p_saved, b_word, mask=m_word)
    else:
        if MODE == "move":
            tl.debug_barrier()  # a block may be the source of one pair and the destination of another
        o_dst = tl.load(p_dst + i_pair, mask=m_pair, other=0) * block
        tl.store(p_cache + (o_dst[:, None] + o_word[None, :]), b_word, mask=m_word)
