"""Numbers of every dtype to and from float32, as device functions.

Memory holds *codes*: float32 as it is, float16 and bfloat16 as 16-bit integers, float8 as bytes, int8 as int8. Kernels
widen a code to float32 to compute with it, and narrow float32 to a code to store it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from numba import cuda, float32, int8, int64, uint8, uint16

from pagedkern.backends.numba_cuda.device import bits_of_float, float_from_bits, float_from_half, inlined, load_vector

NAN = math.nan


class Format(NamedTuple):
    """A dtype as kernels see it."""

    code: Any  # Numba type of what memory holds
    size: int  # bytes
    widen: Callable[[Any], Any]  # device function: code to float32
    narrow: Callable[[Any], Any]  # device function: float32 to code, to nearest even


@inlined
def same(x):
    """float32 is its own code."""
    return x


@inlined
def widen_bfloat16(code):
    """bfloat16 is the upper half of a float32."""
    return float_from_bits(int64(code) << 16)


@inlined
def widen_e4m3(code):
    """Exponent and mantissa moved into place are 2**120 too small: the biases are 7 and 127. 0x7F is NaN."""
    size = int64(code) & 0x7F
    magnitude = float_from_bits(size << 20) * float32(2.0**120)
    if size == 0x7F:
        magnitude = float32(NAN)
    return -magnitude if int64(code) & 0x80 else magnitude


@inlined
def widen_e5m2(code):
    """float8_e5m2 is the upper half of a float16."""
    return float_from_half(int64(code) << 8)


@inlined
def widen_int8(code):
    return float32(code)


def narrowing(exponent: int, mantissa: int, top: int, nan: int, saturates: bool) -> Callable[[Any], Any]:
    """The device function from float32 to a smaller float format, to nearest even.

    `exponent` and `mantissa` are numbers of bits; `top` is the largest code, infinity if there is one that overflow
    leads to, else the largest finite number, which infinity then also `saturates` to; `nan` is the code of NaN.
    """
    dropped = 23 - mantissa  # bits of the mantissa that do not fit
    rebias = 127 - (2 ** (exponent - 1) - 1)
    sign_shift = 31 - exponent - mantissa

    @inlined
    def narrow(x):
        bits = bits_of_float(x)
        size = bits & 0x7FFFFFFF
        place = (size >> 23) - rebias  # the exponent in the smaller format; below 1 the result is subnormal
        shift = int64(dropped)
        kept = size - (int64(rebias) << 23)
        if rebias > 0 and place < 1:
            shift = min(dropped + 1 - place, 32)
            kept = (size & 0x7FFFFF) | 0x800000
        # Half of the last place, less one, plus the last bit that is kept: ties go to the even code.
        code = (kept + (int64(1) << (shift - 1)) - 1 + ((kept >> shift) & 1)) >> shift
        if code > top or (saturates and size == 0x7F800000):
            code = int64(top)
        if size > 0x7F800000:
            code = int64(nan)
        return code | ((bits >> sign_shift) & (1 << (exponent + mantissa)))

    return narrow


@inlined
def narrow_int8(x):
    """Clamped to what int8 holds; NaN is 0."""
    if x != x:
        return int64(0)
    x = min(max(x, float32(-128.0)), float32(127.0))
    below = math.floor(x)
    rest = x - float32(below)
    if rest > float32(0.5) or (rest == float32(0.5) and int64(below) % 2 != 0):
        return int64(below) + 1
    return int64(below)


FORMATS = {
    "float32": Format(float32, 4, same, same),
    "float16": Format(uint16, 2, float_from_half, narrowing(5, 10, 0x7C00, 0x7E00, False)),
    "bfloat16": Format(uint16, 2, widen_bfloat16, narrowing(8, 7, 0x7F80, 0x7FC0, False)),
    "float8_e4m3fn": Format(uint8, 1, widen_e4m3, narrowing(4, 3, 0x7E, 0x7F, True)),
    "float8_e5m2": Format(uint8, 1, widen_e5m2, narrowing(5, 2, 0x7B, 0x7F, True)),
    "int8": Format(int8, 1, widen_int8, narrow_int8),
}


def loading(dtype: str, count: int) -> Callable[..., Any]:
    """The device function that reads `count` numbers of a dtype at once: numbers[i : i+count] = source[j : j+count]."""
    CODE, widen = FORMATS[dtype].code, FORMATS[dtype].widen

    @inlined
    def load(numbers, i, source, j):
        codes = cuda.local.array(count, CODE)
        load_vector(codes, 0, source, j, count)
        for n in range(count):
            numbers[i + n] = widen(codes[n])

    @inlined
    def load_float32(numbers, i, source, j):
        load_vector(numbers, i, source, j, count)

    return load_float32 if dtype == "float32" else load
