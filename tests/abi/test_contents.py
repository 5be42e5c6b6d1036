"""`validate_contents`: numbers out of range are named with sequence, position and value, and unused ones never read."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkern.abi import Batch, validate, validate_contents
from pagedkern.errors import BlockIndexError, InvalidArgument, InvalidType
from tests.abi.makers import int_table, view

HUGE, LOW = 2**31 - 1, -(2**31)


def make(
    rows: Sequence[Sequence[int]],
    lens: Sequence[int],
    cu: Sequence[int] | None = None,
    slots: Sequence[int] | None = None,
    **more: Any,
) -> Batch:
    """A batch on the host; 10 blocks of 4 tokens by default."""
    return validate(
        block_table=int_table(rows, len(rows[0])),
        seq_lens=array("i", lens),
        cu_seqlens_q=None if cu is None else array("i", cu),
        slot_mapping=None if slots is None else array("q", slots),
        **{"block_size": 4, "num_blocks": 10, **more},
    )


def test_what_is_right() -> None:
    validate_contents(make([[9, 0, HUGE], [LOW, -1, HUGE], [3, HUGE, LOW]], [8, 0, 1]))
    validate_contents(make([[9, 0, 4]], [12], [0, 12], [39, 0, -1, *[5] * 9], max_seqlen_q=12))
    validate_contents(make([[9]], [4], [0, 0]))
    validate_contents(make([[9]], [4], [0, 2], [-1] * 5))  # rows at or past cu[-1] are padding
    validate_contents(make([[HUGE]], [1], num_blocks=None))  # no limit is known
    validate_contents(validate(slot_mapping=array("q"), block_size=4))
    validate_contents(
        validate(block_table=view("int32", (0, 4), device=(1, 0), ptr=0), seq_lens=array("i"), block_size=4)
    )


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            ([[9, 10, 0]], [5]),
            "block_table: got 10 for sequence 0 at position 1, expected 0 to 9; seq_lens[0] = 5 uses",
        ),
        (
            ([[0], [-1]], [4, 1]),
            "block_table: got -1 for sequence 1 at position 0, expected 0 to 9; seq_lens[1] = 1",
        ),
        (([[0, 1], [2, HUGE]], [5, 5]), f"block_table: got {HUGE} for sequence 1 at position 1, expected 0 to 9"),
        (
            ([[0, 1]], [9]),
            "seq_lens: got 9 for sequence 0, expected 0 to 8: block_table has 2 entries a row, of 4 tok",
        ),
        (([[0], [0]], [1, -1]), "seq_lens: got -1 for sequence 1, expected 0 to 4"),
        (([[0]], [4], [1, 2]), "cu_seqlens_q: got 1 at position 0, expected 0"),
        (
            ([[0], [0]], [4, 4], [0, 3, 2]),
            "cu_seqlens_q: got 2 at position 2 after 3 (sequence 1), expected prefix",
        ),
        (
            ([[0]], [4], [0, 3], [0, 1]),
            "cu_seqlens_q: got 3 at position 1, expected at most the 2 tokens of slot_mapp",
        ),
        (
            ([[0]], [4], None, [-2]),
            "slot_mapping: got -2 at position 0 (sequence 0), expected -1 to 39 (-1 = write n",
        ),
        (
            ([[0], [0]], [4, 4], [0, 1, 3], [0, 1, 40]),
            "slot_mapping: got 40 at position 2 (sequence 1), expected -1 to",
        ),
        (([[0]], [4], [0, 1], [0, 2**40]), f"slot_mapping: got {2**40} at position 1 (padding), expected -1 to 39"),
    ],
)
def test_what_is_wrong(batch: tuple[Any, ...], message: str) -> None:
    with pytest.raises(BlockIndexError) as caught:
        validate_contents(make(*batch))
    assert str(caught.value).startswith(message)


def test_max_seqlen_q_is_a_bound() -> None:
    validate_contents(make([[0]], [4], [0, 3], max_seqlen_q=3))
    with pytest.raises(BlockIndexError, match=r"cu_seqlens_q: got 3 query tokens for sequence 0 .* max_seqlen_q = 2"):
        validate_contents(make([[0]], [4], [0, 3], max_seqlen_q=2))


def test_slots_without_a_table_or_a_pool() -> None:
    with pytest.raises(BlockIndexError, match=r"slot_mapping: got -5 at position 1, expected -1 or more"):
        validate_contents(validate(slot_mapping=array("q", [2**50, -5]), block_size=4))


@pytest.mark.parametrize("name", ["block_table", "seq_lens", "cu_seqlens_q", "slot_mapping"])
def test_device_arrays_are_refused(name: str) -> None:
    shapes = {"block_table": (2, 3), "seq_lens": (2,), "cu_seqlens_q": (3,), "slot_mapping": (4,)}
    dtypes = {"slot_mapping": "int64"}
    views = {n: view(dtypes.get(n, "int32"), shape) for n, shape in shapes.items()}
    host = {
        "block_table": int_table([[0, 1, 2]] * 2, 3),
        "seq_lens": array("i", [1, 1]),
        "cu_seqlens_q": array("i", [0, 1, 2]),
        "slot_mapping": array("q", [0, 1, 2, 3]),
    }
    batch = validate(**views, block_size=4, num_blocks=3)
    on_host = validate(**host, block_size=4, num_blocks=3)
    fields = {n: getattr(on_host, n) for n in host} | {name: views[name]}
    mixed = Batch(**{f: fields.get(f, getattr(batch, f)) for f in Batch.__slots__})
    with pytest.raises(InvalidArgument, match=rf"^{name}: got an array on cuda:0, expected one in host memory: copy"):
        validate_contents(mixed)


def test_entries_behind_the_window_are_not_followed() -> None:
    # 11 tokens in blocks of 4; the last 2 are queries, at positions 9 and 10: the first sees 10 - W to 9.
    batch = make([[-1, 8, 9]], [11], [0, 2])
    validate_contents(batch, sliding_window=6)  # sees 4 .. 9
    with pytest.raises(BlockIndexError, match=r"got -1 for sequence 0 at position 0, .* uses positions 0 to 2$"):
        validate_contents(batch, sliding_window=7)  # sees 3
    with pytest.raises(BlockIndexError, match="position 0"):
        validate_contents(batch)
    with pytest.raises(BlockIndexError, match=r"got 10 for sequence 0 at position 1, .* uses positions 1 to 2$"):
        validate_contents(make([[-1, 10, 9]], [11], [0, 2]), sliding_window=6)
    with pytest.raises(InvalidArgument, match="sliding_window: got 0, expected 1 to"):
        validate_contents(batch, sliding_window=0)
    with pytest.raises(InvalidType, match="sliding_window: got float"):
        validate_contents(batch, sliding_window=2.0)  # type: ignore[arg-type]


def test_rows_without_a_query_are_not_followed() -> None:
    validate_contents(make([[HUGE, -1], [1, 2], [LOW, LOW]], [5, 8, 3], [0, 0, 8, 8]))
    with pytest.raises(BlockIndexError, match=r"^block_table: got -1 for sequence 1 at position 1"):
        validate_contents(make([[HUGE, -1], [1, -1], [LOW, LOW]], [5, 8, 3], [0, 0, 8, 8]))
    with pytest.raises(BlockIndexError, match=r"^block_table: got -1 for sequence 0 at position 1"):
        validate_contents(make([[1, -1]], [8]))  # without cu_seqlens_q each sequence has one
    with pytest.raises(BlockIndexError, match=r"^seq_lens: got 9 for sequence 0"):
        validate_contents(make([[1, 2]], [9], [0, 0]))  # lengths are read whatever the queries


@given(data=st.data(), size=st.integers(1, 5), width=st.integers(1, 4), window=st.none() | st.integers(1, 12))
def test_exactly_the_followed_entries_are_checked(data: Any, size: int, width: int, window: int | None) -> None:
    """Garbage wherever no query looks is fine; garbage wherever one looks is found."""
    seq_len = data.draw(st.integers(1, size * width))
    q_len = data.draw(st.integers(1, seq_len))
    first = seq_len - q_len  # position of the first query, which sees furthest back
    seen = {j // size for j in range(seq_len) if window is None or j > first - window}
    row = [7 if j in seen else data.draw(st.sampled_from([-1, LOW, HUGE])) for j in range(width)]
    validate_contents(make([row], [seq_len], [0, q_len], block_size=size), sliding_window=window)
    bad = data.draw(st.sampled_from(sorted(seen)))
    row[bad] = data.draw(st.sampled_from([-1, LOW, 10, HUGE]))
    with pytest.raises(BlockIndexError, match=rf"^block_table: got {row[bad]} for sequence 0 at position {bad},"):
        validate_contents(make([row], [seq_len], [0, q_len], block_size=size), sliding_window=window)
