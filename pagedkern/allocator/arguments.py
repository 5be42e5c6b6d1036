"""Checks of what callers pass in. Messages name the argument, what was given and what is accepted."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from operator import index
from typing import TypeAlias

from pagedkern.errors import InvalidArgument, InvalidType

Tokens: TypeAlias = Iterable[int]
"""Token ids: a list, an `array`, anything that iterates over integers of at most 64 bits, signed."""


def integer(name: str, value: object, low: int, high: int | None = None) -> int:
    """The value as an int within `low .. high`. Bools and floats are not counts."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InvalidType(f"{name}: got {value!r} of type {type(value).__name__}, an int is accepted")
    number = index(value)
    if number < low or (high is not None and number > high):
        accepted = f"at least {low}" if high is None else f"from {low} to {high}"
        raise InvalidArgument(f"{name}: got {number}, accepted is {accepted}")
    return number


def token_ids(name: str, tokens: Tokens) -> array[int]:
    """The ids as a new array of int64. O(n), a copy of memory if they come as `array('q')`."""
    if type(tokens) is array and tokens.typecode == "q":
        return tokens[:]
    if isinstance(tokens, (str, bytes, bytearray)) or not isinstance(tokens, Iterable):
        raise InvalidType(f"{name}: got {type(tokens).__name__}, a list or array of token ids is accepted")
    try:
        return array("q", tokens)
    except TypeError as error:
        raise InvalidType(f"{name}: token ids must be integers ({error})") from None
    except OverflowError:
        raise InvalidArgument(f"{name}: a token id does not fit into 64 bits with a sign") from None
