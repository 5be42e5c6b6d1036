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
    """A tile as the cache stores it, in the dtype TO; codes of a quantized cache as the numbers they stand for, exactly.

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
        if TO == tl.float16:
            b_x = (b_code.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - 1152.0
        else:
            b_x = (b_code.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
    if KIND != "" and TO == tl.bfloat16:
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
def scores(b_q, b_k, b_distance, scale, softcap, b_slope, PRECISION: tl.constexpr):
    """Scores of all rows against all keys of a tile, float32 [M, N]; `b_distance`: key minus query position."""
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale
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
def add_visible(b_acc, b_p, b_v, m_seen, PRECISION: tl.constexpr):
    """b_acc + b_p @ b_v where each row is touched only by the values that it sees, not even by 0 * NaN.

    The product runs over V with its NaN and Inf replaced by 0. If there were any, rows that see some get the sum that
    those make: an infinity if all are the same, else NaN.
    """
    b_wide = b_v.to(tl.float32)
    m_finite = tl.abs(b_wide) < INF  # not true of NaN
    b_acc = tl.dot(b_p, tl.where(m_finite, b_v, 0.0).to(b_v.dtype), b_acc, input_precision=PRECISION)
    if tl.min(tl.min(m_finite.to(tl.int32), 1), 0) == 0:
        b_seen = m_seen.to(b_v.dtype)  # [M, N]
        b_wild = tl.where(m_finite, 0.0, 1.0).to(b_v.dtype)  # [N, EP]
        b_sign = tl.where(b_wide == INF, 1.0, tl.where(b_wide == -INF, -1.0, 0.0)).to(b_v.dtype)
        b_count = tl.dot(b_seen, b_wild, input_precision=PRECISION)  # exact: small integers
        b_net = tl.dot(b_seen, b_sign, input_precision=PRECISION)
        b_sum = tl.where(tl.abs(b_net) == b_count, b_net * INF, float("nan"))
        b_acc = tl.where(b_count > 0, b_sum, b_acc)
    return b_acc


@triton.jit
def load_rows(p_x, m_row, o_column, SIZE: tl.constexpr, MASKED: tl.constexpr):
    """A tile [N, P] of the first SIZE columns of the rows that m_row [N] names (of all, if not MASKED); else 0."""
    if MASKED:
        b_x = tl.load(p_x, mask=m_row[:, None] & (o_column < SIZE)[None, :], other=0)
    elif o_column.shape[0] == SIZE:
        b_x = tl.load(p_x)
    else:
        b_x = tl.load(p_x, mask=(o_column < SIZE)[None, :], other=0)
    return b_x
