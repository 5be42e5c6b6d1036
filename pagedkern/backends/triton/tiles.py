"""What the attention kernels share: one tile of keys, taken in by a tile of query rows.

Names in the kernels: `p_` pointer, `i_` index, `o_` offsets in elements, `b_` tile in registers, `m_` mask. Letters in
the shapes: M rows of a tile (query tokens times the query heads of one KV head), N keys of a tile, D and E the head_dim
of K and V, DP and EP the powers of two that hold them. A float32 row statistic has shape [M].

Scores are kept in units of the natural logarithm and multiplied by log2(e) only as distances from their maximum: folded
into the scale, the rounding of that product would be an error of exp that grows with the score.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
INF = tl.constexpr(float("inf"))


@triton.jit
def widen(b_x, KIND: tl.constexpr, NATIVE_FP8: tl.constexpr, TO: tl.constexpr):
    """A tile as the cache stores it, in the dtype TO; codes of a quantized cache as the numbers they stand for.

    KIND is "int8", "float8_e4m3fn" (loaded as uint8), "float8_e5m2" (loaded as uint8) or "" for a float cache. Only
    compute capability 8.9 and later convert float8_e4m3fn by themselves (NATIVE_FP8); everywhere else its bits are put
    where a float16 has them, 2^8 too small for the difference of the exponents' biases.
    """
    if KIND == "float8_e4m3fn":
        if NATIVE_FP8:
            b_x = b_x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        else:
            b_bits = (b_x.to(tl.int8, bitcast=True).to(tl.int16) << 7) & -0x4001  # sign to bit 15, 0 in bit 14
            b_half = b_bits.to(tl.float16, bitcast=True) * 256.0
            b_x = tl.where((b_x & 0x7F) == 0x7F, float("nan"), b_half).to(tl.float16)
    elif KIND == "float8_e5m2":  # the upper half of a float16
        b_x = (b_x.to(tl.int16) << 8).to(tl.float16, bitcast=True)
    elif KIND == "int8":  # as the last bits of 1024 + 128 + x or 2^23 + 128 + x: faster than converting integers
        b_code = b_x.to(tl.uint8, bitcast=True) ^ 0x80
        if tl.float16 == TO:
            b_x = (b_code.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - 1152.0
        else:
            b_x = (b_code.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
    if KIND != "" and tl.bfloat16 == TO:
        b_x = b_x.to(tl.float32)
    return b_x.to(TO)


@triton.jit
def tanh(b_x):
    """tanh to about two units in the last place: a polynomial in x^2 up to 1, the exponential function beyond.

    The coefficients are a least-squares fit of (tanh(x) / x - 1) / x^2 at Chebyshev nodes, off by 2.1e-8 at most.
    """
    b_abs = tl.abs(b_x)
    b_z = b_x * b_x
    b_p = b_z * -0.00042374594 + 0.0025196751
    b_p = b_z * b_p - 0.0082293795
    b_p = b_z * b_p + 0.0216655974
    b_p = b_z * b_p - 0.0539360903
    b_p = b_z * b_p + 0.1333314031
    b_p = b_z * b_p - 0.3333333135
    b_far = 1.0 - 2.0 / (tl.exp2(b_abs * (2 * LOG2E)) + 1.0)
    return tl.where(b_abs < 1.0, b_x + b_x * (b_z * b_p), tl.where(b_x < 0, -b_far, b_far))


@triton.jit
def scores(b_s, b_distance, scale, softcap, b_slope):
    """Scores from products of q and k, float32 [M, N]; `b_distance`: key minus query position."""
    b_s *= scale
    if softcap is not None:
        b_s = softcap * tanh(b_s / softcap)
    if b_slope is not None:
        b_s += b_slope[:, None] * b_distance.to(tl.float32)
    return b_s


@triton.jit
def rescaled(b_s, b_top, b_sum, b_acc):
    """The running softmax moved to the maximum that includes the scores b_s: weights [M, N], and the state.

    Milakov and Gimelshein (arXiv:1805.02867). A row that has seen nothing has top = -inf, and measures from 0.
    """
    b_new = tl.maximum(b_top, tl.max(b_s, 1))
    b_base = tl.where(b_new == -INF, 0.0, b_new)
    b_p = tl.exp2((b_s - b_base[:, None]) * LOG2E)
    b_decay = tl.exp2((b_top - b_base) * LOG2E)
    return b_p, b_new, b_sum * b_decay + tl.sum(b_p, 1), b_acc * b_decay[:, None]


@triton.jit
def wild(b_v):
    """Where V is NaN or infinite, in codes whose sum over less than 2048 keys tells what they add up to: `wild_sum`.

    1 for Inf, 2^-11 for -Inf, 2^11 for NaN: exact in 16 bits. A row sees less than 1024 keys at its edges: there are
    two, each shorter than a tile of rows and a tile of keys together, of 256 at most.
    """
    b_wide = b_v.to(tl.float32)
    b_code = tl.where(b_wide == INF, 1.0, tl.where(b_wide == -INF, 0.00048828125, 2048.0))
    return tl.where(tl.abs(b_wide) < INF, 0.0, b_code)


@triton.jit
def wild_sum(b_codes):
    """An infinity if all terms were the same, NaN if not, 0 if there was none."""
    b_count = tl.floor(b_codes)  # of Inf, and 2048 for each NaN
    b_sum = tl.where(b_codes > b_count, -INF, 0.0) + tl.where(b_count > 0, INF, 0.0)
    return tl.where(b_count >= 2048, float("nan"), b_sum)


@triton.jit
def block_ids(p_table, i_key, m_key, BLOCK_SIZE: tl.constexpr):
    """The blocks of the keys [N], int64; 0 where m_key is false: those entries are not read."""
    return tl.load(p_table + i_key // BLOCK_SIZE, mask=m_key, other=0).to(tl.int64)


@triton.jit
def load_tokens(
    p_x,  # K or V of one KV head in block 0
    i_block,  # int64 [N]
    i_key,  # [N]
    m_key,  # [N], or None: all are read
    block,  # strides in elements
    token,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ALIGN: tl.constexpr,  # offsets of tokens are multiples of so many elements
    KIND: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    TO: tl.constexpr,
):
    """K or V of some tokens, [N, PADDED] in the dtype TO: 0 past column SIZE and where m_key is false."""
    o_column = tl.arange(0, PADDED)
    o_x = tl.multiple_of(i_block * block + i_key % BLOCK_SIZE * token, ALIGN)
    p_rows = p_x + (o_x[:, None] + o_column[None, :])
    if m_key is not None:
        b_x = tl.load(p_rows, mask=m_key[:, None] & (o_column < SIZE)[None, :], other=0)
    elif SIZE == PADDED:
        b_x = tl.load(p_rows)
    else:
        b_x = tl.load(p_rows, mask=(o_column < SIZE)[None, :], other=0)
    return widen(b_x, KIND, NATIVE_FP8, TO)
