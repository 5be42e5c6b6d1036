"""Checks of what callers pass in. Messages name the argument, what was given and what was expected."""

from __future__ import annotations

import enum
import sys
from array import array
from collections.abc import Iterable, Mapping
from operator import index
from typing import Any, TypeAlias

from pagedkern.errors import InvalidArgument, InvalidType

Salt: TypeAlias = str | bytes | int | None
Tokens: TypeAlias = Iterable[int]
"""Token ids: a list, an `array`, anything that iterates over integers of at most 64 bits, signed."""


class Everybody(enum.Enum):
    """Stands for all salts, of which None is one."""

    EVERYBODY = "all salts"


EVERYBODY = Everybody.EVERYBODY
MAX_TOKENS = 2**31 - 1
"""Most tokens of a sequence and of a step: lengths are int32."""
PRIORITIES = 4
"""Levels of eviction: cached blocks of level 0 are evicted before those of level 1, and so on."""


def integer(name: str, value: object, low: int, high: int | None = None) -> int:
    """The value as an int within `low .. high`. Bools and floats are not counts."""
    if type(value) is int and low <= value and (high is None or value <= high):
        return value
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InvalidType(f"{name}: got {value!r} of type {type(value).__name__}, expected an int")
    number = index(value)
    if number < low or (high is not None and number > high):
        accepted = f"at least {low}" if high is None else f"{low} to {high}"
        raise InvalidArgument(f"{name}: got {number}, expected {accepted}")
    return number


def unpacked(tokens: Any) -> Any:
    """A tensor or array of some library as a list or an int, which is faster than item by item; else what is given."""
    return tokens.tolist() if hasattr(tokens, "tolist") and not isinstance(tokens, array) else tokens


def settled(value: Any) -> Any:
    """What iterates by code of the caller's as a list; else what is given, tensors and mappings too."""
    if not hasattr(value, "__iter__") or hasattr(value, "tolist"):
        return value
    return value if isinstance(value, (list, tuple, str, bytes, bytearray, Mapping)) else list(value)


def materialised(value: Any) -> Any:
    """The same all the way down, tensors included: can be iterated over more than once."""
    lists = unpacked(settled(value))
    return [materialised(item) for item in lists] if isinstance(lists, (list, tuple)) else value


_LOW_BYTE, _NEXT_BYTE, _HIGH_BYTE = (0, 1, 7) if sys.byteorder == "little" else (7, 6, 0)

_ZERO_FOR_BOOLS = bytes(value > 1 for value in range(256))


def packed(tokens: Any) -> array[int]:
    """`array("q", tokens)`, in half the time for a list or tuple. Refuses bools, which that would take for 0 and 1."""
    if isinstance(tokens, array):
        return array("q", tokens)
    if not isinstance(tokens, (list, tuple)):
        tokens = list(tokens)
    try:
        data = array("Q", tokens).tobytes()
        exact = data[_HIGH_BYTE::8].isascii()  # all below 2**63, where both types have the same bytes
    except (TypeError, OverflowError):
        exact = False
    ids = array("q", data if exact else tokens)
    if _has_bool(tokens, data if exact else ids.tobytes()):
        raise TypeError("got a bool")
    return ids


def _has_bool(tokens: list[Any] | tuple[Any, ...], data: bytes) -> bool:
    """Whether one of the ids, packed in `data`, came as a bool. O(n) in C, and some Python for one id in 64 or so."""
    suspects = data[_NEXT_BYTE::8]  # 0 in ids below 256
    if suspects.count(0) > len(tokens) // 64:
        suspects = data[_LOW_BYTE::8].translate(_ZERO_FOR_BOOLS)  # 0 in ids that end as 0 and 1 do
    at = suspects.find(0)
    while at >= 0:
        if type(tokens[at]) is bool:
            return True
        at = suspects.find(0, at + 1)
    return False


def token_ids(name: str, tokens: Tokens) -> array[int]:
    """The ids as a new array of int64. O(n), a copy of memory if they come as `array('q')`."""
    if type(tokens) is array and tokens.typecode == "q":
        return tokens[:]
    if type(tokens) is not list:
        tokens = unpacked(tokens)
        if isinstance(tokens, (str, bytes, bytearray, Mapping)) or not isinstance(tokens, Iterable):
            raise InvalidType(f"{name}: got {type(tokens).__name__}, expected a list or array of token ids")
    try:
        return packed(tokens)
    except TypeError as error:
        raise InvalidType(f"{name}: token ids must be integers ({error})") from None
    except OverflowError:
        raise InvalidArgument(f"{name}: a token id does not fit into 64 bits with a sign") from None


def tenant(salt: object) -> Salt:
    """The salt as a plain value, if it can be one."""
    return salt if salt is None or type(salt) is str else label("salt", salt, "a str, bytes, an int or None")


def label(name: str, value: object, expected: str) -> str | bytes | int:
    """A salt or digest as a plain value. No bools, no floats: Python takes some for equal to ints."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bytes):
        return bytes(memoryview(value))
    if isinstance(value, int) and not isinstance(value, bool):
        number = int.__index__(value)
        if number.bit_length() > 4096:  # Python does not turn much longer ones into text, for logs and digests
            raise InvalidArgument(f"{name}: got an int of {number.bit_length()} bits, expected at most 4096")
        return number
    raise InvalidType(f"{name}: got {type(value).__name__}, expected {expected}")


def single_ids(tokens: object, count: int) -> array[int] | None:
    """The ids if they are plainly one for each sequence; None to have a closer look."""
    tokens = unpacked(tokens)
    if not isinstance(tokens, (list, tuple, array)) or len(tokens) != count:
        return None
    try:
        return packed(tokens)
    except (TypeError, OverflowError):
        return None


def new_tokens(
    num_seqs: int, tokens: Iterable[int | Tokens] | None, num_tokens: int
) -> tuple[list[int], list[Iterable[int] | None]]:
    """How many tokens each sequence grows by, and their ids if they are known."""
    count = integer("num_tokens", num_tokens, 1, MAX_TOKENS)
    if tokens is None:
        return [count] * num_seqs, [None] * num_seqs
    if count != 1:
        raise InvalidArgument(f"num_tokens: got {count} although tokens already sets the count, expected 1")
    single = single_ids(tokens, num_seqs)
    if single is not None:
        return [1] * num_seqs, [(token,) for token in single]
    if not isinstance(tokens, Iterable) or isinstance(tokens, (str, bytes, bytearray, Mapping)):
        raise InvalidType(f"tokens: got {type(tokens).__name__}, expected one id or a list of ids for each sequence")
    rows: list[Iterable[int] | None] = []
    counts = []
    for i, new in enumerate(map(unpacked, unpacked(tokens))):
        ids = token_ids(f"tokens[{i}]", new if isinstance(new, Iterable) else [new])
        if not ids:
            raise InvalidArgument(f"tokens[{i}]: got no id, expected at least one")
        rows.append(ids)
        counts.append(len(ids))
    if len(rows) != num_seqs:
        raise InvalidArgument(f"tokens: got {len(rows)} entries for {num_seqs} sequences, expected one for each")
    return counts, rows
