"""CSR conversion: exact both ways, blind to unused entries, refusing what it cannot read or express."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkern.abi import CSR, describe, from_csr, to_csr
from pagedkern.errors import BlockIndexError, InvalidArgument, InvalidType
from tests.abi.makers import CudaArray, int_table, view

HUGE, LOW = 2**31 - 1, -(2**31)


def test_example() -> None:
    table = int_table([[7, 2, HUGE], [-1, -1, LOW], [5, LOW, -1], [0, 1, 3]], 3)
    csr = to_csr(table, array("i", [20, 0, 16, 48]), 16)
    assert csr == CSR(array("i", [0, 2, 2, 3, 6]), array("i", [7, 2, 5, 0, 1, 3]), array("i", [4, 0, 16, 16]))
    assert all(part.itemsize == 4 for part in csr)
    back = from_csr(*csr, 16)
    assert back.block_table.tolist() == [[7, 2, -1], [-1, -1, -1], [5, -1, -1], [0, 1, 3]]
    assert back.seq_lens == array("i", [20, 0, 16, 48])
    got = describe(back.block_table, "x")
    assert (got.dtype, got.shape, got.strides, got.read_only) == ("int32", (4, 3), (3, 1), False)


def test_width_and_fill() -> None:
    wide = from_csr(array("i", [0, 1]), array("i", [3]), array("i", [2]), 4, width=3, fill=HUGE)
    assert wide.block_table.tolist() == [[3, HUGE, HUGE]]
    with pytest.raises(InvalidArgument, match="width: got 1, expected at least 2: the blocks of the longest"):
        from_csr(array("i", [0, 2]), array("i", [3, 4]), array("i", [2]), 4, width=1)
    with pytest.raises(InvalidArgument, match="fill: got 2147483648, expected -2147483648 to 2147483647"):
        from_csr(array("i", [0, 1]), array("i", [3]), array("i", [2]), 4, fill=2**31)


def test_no_sequences_and_no_blocks() -> None:
    csr = to_csr(view("int32", (0, 5), device=(1, 0), ptr=0), array("i"), 4)
    assert csr == CSR(array("i", [0]), array("i"), array("i"))
    back = from_csr(*csr, 4, width=5)
    assert describe(back.block_table, "x").shape == (0, 5)
    assert back.seq_lens == array("i")
    csr = to_csr(view("int32", (2, 0), device=(1, 0), ptr=0), array("i", [0, 0]), 4)
    assert csr == CSR(array("i", [0, 0, 0]), array("i"), array("i", [0, 0]))
    assert from_csr(*csr, 4).block_table.tolist() == [[-1], [-1]]


def test_an_empty_sequence_may_also_come_with_a_full_page() -> None:
    assert from_csr(array("i", [0, 0]), array("i"), array("i", [4]), 4).seq_lens == array("i", [0])


@given(data=st.data(), size=st.integers(1, 9), width=st.integers(1, 6), num_seqs=st.integers(0, 6))
def test_round_trip(data: Any, size: int, width: int, num_seqs: int) -> None:
    """Any lengths, tails of garbage, rows further apart than they are wide, trailing rubbish in `indices`."""
    ids = st.integers(0, HUGE)
    garbage = st.sampled_from([-1, LOW, HUGE])
    lens = data.draw(st.lists(st.integers(0, size * width), min_size=num_seqs, max_size=num_seqs))
    used = [data.draw(st.lists(ids, min_size=-(-n // size), max_size=-(-n // size))) for n in lens]
    rows = [row + [data.draw(garbage) for _ in range(width - len(row))] for row in used]
    table = int_table(rows, width, width + data.draw(st.integers(0, 3)))
    csr = to_csr(table, array("i", lens), size)
    assert csr.indices.tolist() == [block for row in used for block in row]
    assert csr.indptr.tolist() == [sum(map(len, used[:i])) for i in range(num_seqs + 1)]
    for n, blocks, last in zip(lens, used, csr.last_page_len, strict=True):
        assert n == (size * (len(blocks) - 1) + last if blocks else 0)
        assert 1 <= last <= size if blocks else last == 0
    back = from_csr(csr.indptr, csr.indices + array("i", [LOW, -1]), csr.last_page_len, size, width=width, fill=-7)
    assert back.seq_lens.tolist() == lens
    if num_seqs:
        assert back.block_table.tolist() == [row + [-7] * (width - len(row)) for row in used]
        assert to_csr(back.block_table, back.seq_lens, size) == csr


def test_other_libraries_arrays() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    np = pytest.importorskip("numpy", reason="NumPy is not installed")
    table, lens = [[7, 2], [5, -1]], [5, 3]
    want = to_csr(int_table(table, 2), array("i", lens), 4)
    wide = torch.full((2, 9), HUGE, dtype=torch.int32)
    wide[:, 3:5] = torch.tensor(table)
    assert to_csr(wide[:, 3:5], torch.tensor(lens, dtype=torch.int32), 4) == want
    assert to_csr(np.array(table, "i4")[::-1], np.array(lens[::-1], "i4"), 4).indices == array("i", [5, 7, 2])
    back = from_csr(*(np.array(part) for part in want), 4)
    assert torch.frombuffer(back.block_table, dtype=torch.int32).tolist() == [7, 2, 5, -1]


TABLE, LENS = int_table([[1, 2], [3, 4]], 2), array("i", [5, 8])
PTR, IDS, LAST = array("i", [0, 2, 3]), array("i", [1, 2, 3]), array("i", [1, 4])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            (view("int32", (2, 2)), LENS, 4),
            InvalidArgument,
            "block_table: got an array on cuda:0, expected one in host",
        ),
        (
            (CudaArray(shape=(2, 2)), LENS, 4),
            InvalidArgument,
            "block_table: got an array on cuda, expected one in host",
        ),
        (
            (TABLE, view("int32", (2,), device=(10, 1)), 4),
            InvalidArgument,
            "seq_lens: got an array on rocm:1, expected",
        ),
        ((TABLE, view("int32", (2,), device=(13, 0)), 4), InvalidArgument, "seq_lens: got an array on cuda_managed:0"),
        (([[1, 2]], LENS, 4), InvalidType, "block_table: got list, expected a torch tensor"),
        ((TABLE, [5, 8], 4), InvalidType, "seq_lens: got list, expected a torch tensor"),
        ((TABLE, array("q", [5, 8]), 4), InvalidArgument, "seq_lens: got dtype int64, expected int32"),
        ((LENS, LENS, 4), InvalidArgument, "block_table: got shape (2,), expected 2 dimensions"),
        ((TABLE, TABLE, 4), InvalidArgument, "seq_lens: got shape (2, 2), expected 1 dimension"),
        (
            (TABLE, array("i", [5]), 4),
            InvalidArgument,
            "seq_lens: got shape (1,), expected (2,): the rows of block_t",
        ),
        ((TABLE, LENS, 0), InvalidArgument, "block_size: got 0, expected 1 to"),
        ((TABLE, LENS, 4.0), InvalidType, "block_size: got float 4.0, expected an int"),
        ((TABLE, array("i", [5, 9]), 4), BlockIndexError, "seq_lens: got 9 for sequence 1, expected 0 to 8"),
        ((TABLE, array("i", [-1, 8]), 4), BlockIndexError, "seq_lens: got -1 for sequence 0, expected 0 to 8"),
        (
            (int_table([[1, -1]], 2), array("i", [5]), 4),
            BlockIndexError,
            "block_table: got -1 for sequence 0 at position 1",
        ),
    ],
)
def test_to_csr_refuses(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        to_csr(*arguments)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            (view("int32", (3,)), IDS, LAST, 4),
            InvalidArgument,
            "indptr: got an array on cuda:0, expected one in host",
        ),
        (
            (PTR, view("int32", (3,)), LAST, 4),
            InvalidArgument,
            "indices: got an array on cuda:0, expected one in host",
        ),
        (
            (PTR, IDS, view("int32", (2,)), 4),
            InvalidArgument,
            "last_page_len: got an array on cuda:0, expected one in",
        ),
        ((list(PTR), IDS, LAST, 4), InvalidType, "indptr: got list"),
        ((array("q", PTR), IDS, LAST, 4), InvalidArgument, "indptr: got dtype int64, expected int32"),
        ((array("i"), IDS, array("i"), 4), InvalidArgument, "indptr: got 0 elements, expected 1"),
        (
            (PTR[:2], IDS, LAST, 4),
            InvalidArgument,
            "indptr: got 2 elements, expected 3: one more than last_page_len",
        ),
        ((array("i", [1]), IDS, array("i"), 4), BlockIndexError, "indptr: got 1 at position 0, expected 0"),
        ((array("i", [1, 2, 3]), IDS, LAST, 4), BlockIndexError, "indptr: got 1 at position 0, expected 0"),
        (
            (array("i", [0, 2, 1]), IDS, LAST, 4),
            BlockIndexError,
            "indptr: got 1 at position 2 (sequence 1), expected 2",
        ),
        (
            (array("i", [0, 2, 4]), IDS, LAST, 4),
            BlockIndexError,
            "indptr: got 4 at position 2 (sequence 1), expected 2",
        ),
        (
            (PTR, IDS, array("i", [0, 4]), 4),
            BlockIndexError,
            "last_page_len: got 0 for sequence 0 of 2 blocks, expected",
        ),
        (
            (PTR, IDS, array("i", [1, 5]), 4),
            BlockIndexError,
            "last_page_len: got 5 for sequence 1 of 1 blocks, expected",
        ),
        (
            (array("i", [0, 3, 3]), IDS, array("i", [1, 2]), 4),
            BlockIndexError,
            "last_page_len: got 2 for sequence 1 of 0",
        ),
        (
            (PTR, IDS, LAST, 2**31),
            BlockIndexError,
            "indptr: got 2 blocks of 2147483648 tokens for sequence 0, expected",
        ),
        ((PTR, IDS, LAST, True), InvalidType, "block_size: got bool True, expected an int"),
    ],
)
def test_from_csr_refuses(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        from_csr(*arguments)
    assert str(caught.value).startswith(message)
