"""Block keys: what tokens stand for that their ids do not tell, as the pictures behind equal placeholders do."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from pagedkern.allocator.arguments import integer, label
from pagedkern.errors import InvalidType

Digest: TypeAlias = str | bytes | int
Keys: TypeAlias = "list[tuple[int, int, Digest]] | tuple[tuple[int, int, Digest], ...]"
"""Spans (start, end, digest) of positions, half open, in order, none overlapping another."""

_HEAD = struct.Struct("<iiqBq")
PLAIN: Mapping[int, bytes] = {}


class Span(NamedTuple):
    """Tokens at positions `start .. end-1` stand for something with this digest."""

    start: int
    end: int
    digest: Digest


def read(keys: object, length: int) -> tuple[Span, ...]:
    """The argument `keys` of a prompt of so many tokens."""
    if not isinstance(keys, (list, tuple)):
        raise InvalidType(f"keys: got {type(keys).__name__}, expected a list of (start, end, digest)")
    spans: list[Span] = []
    for i, key in enumerate(keys):
        if not isinstance(key, (list, tuple)) or len(key) != 3:
            raise InvalidType(f"keys[{i}]: got {str(key)[:60]}, expected (start, end, digest)")
        start = integer(f"keys[{i}], start", key[0], spans[-1].end if spans else 0, length - 1)
        spans.append(
            Span(
                start,
                integer(f"keys[{i}], end", key[1], start + 1, length),
                label(f"keys[{i}], digest", key[2], "a str, bytes or an int"),
            )
        )
    return tuple(spans)


def cut(spans: tuple[Span, ...], length: int) -> tuple[Span, ...]:
    """What is left of spans in the first `length` tokens."""
    return tuple(span._replace(end=min(span.end, length)) for span in spans if span.start < length)


def special(spans: tuple[Span, ...], data: bytes, stride: int, first: int = 0) -> Mapping[int, bytes]:
    """What the full blocks are known by that hold tokens of spans: their tokens, and what these stand for.

    Longer than the tokens of a block alone, so it is never equal to those of another block.

    Args:
        data: packed tokens from block `first` on.
        stride: bytes of a block's tokens.
    """
    if not spans:
        return PLAIN
    size, count = stride // 8, len(data) // stride
    chunks: dict[int, bytes] = {}
    for start, end, digest in spans:
        for number in range(max(start // size - first, 0), min(-(-end // size) - first, count)):
            begin = (first + number) * size
            low, high = max(start, begin), min(end, begin + size)
            known = chunks.get(number) or data[number * stride : (number + 1) * stride]
            chunks[number] = known + _encoded(low - begin, high - begin, low - start, digest)
    return chunks


def _encoded(low: int, high: int, offset: int, digest: Digest) -> bytes:
    """Which tokens of a block are part of a span, from which offset in the span on, and the span's digest."""
    if isinstance(digest, str):
        kind, value = 0, digest.encode("utf-8", "surrogatepass")
    elif isinstance(digest, bytes):
        kind, value = 1, digest
    else:
        kind, value = 2, digest.to_bytes(digest.bit_length() // 8 + 1, "little", signed=True)
    return _HEAD.pack(low, high, offset, kind, len(value)) + value


def to_json(spans: tuple[Span, ...]) -> list[list[Any]]:
    """The spans as JSON, for a snapshot."""
    return [[s.start, s.end, {"bytes": s.digest.hex()} if isinstance(s.digest, bytes) else s.digest] for s in spans]


def from_json(value: Any, length: int) -> tuple[Span, ...]:
    """The spans of a snapshot."""
    rows = [(start, end, bytes.fromhex(d["bytes"]) if isinstance(d, dict) else d) for start, end, d in value]
    return read(rows, length)
