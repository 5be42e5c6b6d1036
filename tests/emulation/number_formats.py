"""Floating-point formats that NumPy lacks, held as the integers of their bits: conversion to and from float32.

Everything rounds to nearest, ties to even, as GPUs do unless told otherwise. What lies beyond the largest finite value
of a float8 becomes NaN (e4m3fn) or infinity (e5m2): chips and versions of torch differ (some saturate), so a kernel
must not rely on either, and one that clamps first never meets it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]


class BFloat16:
    """The upper half of a float32, in uint16."""

    storage = np.dtype(np.uint16)

    def widen(self, bits: NDArray[Any]) -> F32:
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)

    def narrow(self, values: F32) -> NDArray[Any]:
        bits = values.view(np.uint32)
        half_and_tie = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        rounded = ((bits + half_and_tie) >> np.uint32(16)).astype(np.uint16)
        return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)  # adding could carry a NaN into zero


@dataclass(frozen=True)
class Float8:
    """Sign, exponent and mantissa in uint8, by a table of all values."""

    exponent_bits: int
    mantissa_bits: int
    infinity: int | None  # its code; codes above are NaN. None: only the last code is NaN, and nothing is infinite
    storage = np.dtype(np.uint8)

    @cached_property
    def _positive(self) -> F32:
        """The values of codes 0 to 127 as if all of them were finite: ascending."""
        codes = np.arange(128)
        bias = 2 ** (self.exponent_bits - 1) - 1
        exponent, mantissa = codes >> self.mantissa_bits, codes & (2**self.mantissa_bits - 1)
        significand = np.where(exponent > 0, 1.0, 0.0) + mantissa / 2**self.mantissa_bits
        return np.ldexp(significand, np.maximum(exponent, 1) - bias).astype(np.float32)

    @property
    def _overflow(self) -> int:
        """The first code that is no finite value: infinity, or NaN."""
        return 127 if self.infinity is None else self.infinity

    @cached_property
    def _table(self) -> F32:
        positive = self._positive.copy()
        positive[self._overflow :] = np.nan
        if self.infinity is not None:
            positive[self.infinity] = np.inf
        return np.concatenate([positive, -positive])

    @cached_property
    def _middles(self) -> F32:
        """Halfway between a code and the next, up to the first that is not finite."""
        finite = self._positive[: self._overflow + 1]
        return (finite[:-1] + finite[1:]) / 2

    def widen(self, bits: NDArray[Any]) -> F32:
        return self._table[bits]

    def narrow(self, values: F32) -> NDArray[Any]:
        size = np.abs(values)
        below, above = (np.searchsorted(self._middles, size, side) for side in ("left", "right"))
        code = np.where(below % 2 == 0, below, above)  # they differ in a tie only, by one: the even one
        code = np.where(np.isnan(size), 127, code)
        return (code | (np.signbit(values) << 7)).astype(np.uint8)


BFLOAT16 = BFloat16()
E4M3FN = Float8(exponent_bits=4, mantissa_bits=3, infinity=None)
E5M2 = Float8(exponent_bits=5, mantissa_bits=2, infinity=0x7C)


def round_to_tf32(values: F32) -> F32:
    """To 10 bits of mantissa. (Chips round or truncate here, and both differ from float32, which is what matters.)"""
    bits = values.view(np.uint32)
    half_and_tie = np.uint32(0x0FFF) + ((bits >> np.uint32(13)) & np.uint32(1))
    rounded = ((bits + half_and_tie) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isfinite(values), rounded, values)
