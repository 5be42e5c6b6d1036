"""Arguments of `tune` and of the command line: each error names the argument, what came, and what is expected."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path

import pagedkern.backends as registry
from pagedkern.errors import InvalidArgument, InvalidType

UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}


def seconds(name: str, value: object) -> float:
    """A time above 0: a number of seconds, or a text such as "90", "30s", "1.5m", "1h"."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise InvalidType(f"{name}: got {type(value).__name__}, expected seconds, or a text such as '90s' or '5m'")
    found = re.fullmatch(r"(\d{1,12}(?:\.\d{1,12})?)\s*([smh]?)", value.strip()) if isinstance(value, str) else None
    number = float(value) if not isinstance(value, str) else float(found[1]) * UNITS[found[2]] if found else math.nan
    if not 0 < number < 1e6:
        raise InvalidArgument(f"{name}: got {value!r}, expected a time such as 90, 30s, 1.5m or 1h")
    return number


def count(name: str, value: object) -> int:
    """A whole number from 1, or the text of one."""
    if isinstance(value, str) and value.strip().isdecimal() and len(value) < 20:
        value = int(value)
    if type(value) is not int or not 0 < value < 2**31:
        raise InvalidArgument(f"{name}: got {value!r}, expected a whole number of at least 1")
    return value


def whole(name: str, value: object) -> int:
    """A whole number that fits in 64 bits, signed."""
    if type(value) is not int:
        raise InvalidType(f"{name}: got {value!r}, expected a whole number")
    if not -(2**63) <= value < 2**63:
        raise InvalidArgument(f"{name}: got {value}, expected a whole number of at most 64 bits")
    return value


def path(name: str, value: object) -> Path:
    if not isinstance(value, str | Path):
        raise InvalidType(f"{name}: got {type(value).__name__}, expected a path")
    return Path(value)


def block_sizes(name: str, value: object) -> list[int]:
    """Block sizes, ascending: one or several, or a text with commas between them."""
    parts: Iterable[object]
    if isinstance(value, str):
        parts = value.split(",")
    elif isinstance(value, Iterable):
        parts = value
    else:
        parts = [value]
    found = sorted({count(name, part) for part in parts})
    if not found:
        raise InvalidArgument(f"{name}: got none, expected at least one block size")
    return found


def backends(name: str, value: object) -> list[str]:
    """Names of backends: one or several, or a text with commas between them."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    if not isinstance(value, Iterable):
        raise InvalidType(f"{name}: got {type(value).__name__}, expected names of backends")
    found = list(value)
    for one in found:
        if one not in registry.names():
            raise InvalidArgument(f"{name}: got {one!r}, expected {', '.join(registry.names())}")
    return found


def flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidType(f"{name}: got {value!r}, expected True or False")
    return value
