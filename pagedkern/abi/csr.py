"""The CSR form of a block table, which other kernel libraries take: `indptr`, `indices`, `last_page_len`.

Blocks are called pages there. Sequence i uses pages `indices[indptr[i]:indptr[i + 1]]`, all full but the last, which
holds `last_page_len[i]` tokens: 1 to B, and 0 for a sequence without tokens. Form and names are those of FlashInfer
(https://docs.flashinfer.ai/tutorials/kv_layout.html).
"""

from __future__ import annotations

import ctypes
from array import array
from typing import NamedTuple

from pagedkern.abi.batch import count
from pagedkern.abi.hostmem import index_array, numbers
from pagedkern.errors import BlockIndexError, InvalidArgument


class CSR(NamedTuple):
    """A batch's block table without unused entries. All int32, on the host."""

    indptr: array[int]  # [num_seqs + 1] prefix sums of the block counts, from 0
    indices: array[int]  # [indptr[-1]] block ids
    last_page_len: array[int]  # [num_seqs] tokens in the last block: 1..block_size, 0 for an empty sequence


class Table(NamedTuple):
    """A batch's block table with rows of equal width. All int32, on the host."""

    block_table: memoryview[int]  # [num_seqs, width], contiguous, writable
    seq_lens: array[int]  # [num_seqs]


def to_csr(block_table: object, seq_lens: object, block_size: int) -> CSR:
    """Convert a block table to CSR form.

    O(used entries).

    Args:
        block_table: int32 [num_seqs, width], any row stride, on the host, of any kind that `describe` takes. Entries
            past `ceil(seq_lens[i] / block_size)` are not read.
        seq_lens: int32 [num_seqs], tokens, on the host.
        block_size: tokens of a block.

    Raises:
        InvalidArgument: an array on a device, a wrong dtype or shape.
        BlockIndexError: a length that is negative or longer than the row, or a negative id in a used entry (CSR has no
            way to skip a block, so those behind a sliding window must still be there).
    """
    size = count(block_size, "block_size", at_least=1)
    table = index_array(block_table, "block_table", "int32", 2)
    lens_view = index_array(seq_lens, "seq_lens", "int32", 1)
    num_seqs, width = table.shape
    if lens_view.shape[0] != num_seqs:
        raise InvalidArgument(f"seq_lens: got shape {lens_view.shape}, expected ({num_seqs},): the rows of block_table")
    lens = numbers(lens_view)
    csr = CSR(array("i", [0]), array("i"), array("i"))
    for i, seq_len in enumerate(lens):
        if not 0 <= seq_len <= width * size:
            raise BlockIndexError(f"seq_lens: got {seq_len} for sequence {i}, expected 0 to {width * size}")
        used = numbers(table, i)[: -(-seq_len // size)]
        if used and min(used) < 0:
            position = next(j for j, block in enumerate(used) if block < 0)
            raise BlockIndexError(
                f"block_table: got {used[position]} for sequence {i} at position {position}, expected 0 or more"
            )
        csr.indices.frombytes(used.cast("B"))
        csr.indptr.append(len(csr.indices))
        csr.last_page_len.append(seq_len - size * (len(used) - 1) if used else 0)
    return csr


def from_csr(
    indptr: object, indices: object, last_page_len: object, block_size: int, *, width: int | None = None, fill: int = -1
) -> Table:
    """Convert CSR form to a block table; the inverse of `to_csr`.

    O(num_seqs * width).

    Args:
        indptr: int32 [num_seqs + 1], on the host, as all arrays here.
        indices: int32, at least `indptr[-1]` long; the rest is not read.
        last_page_len: int32 [num_seqs], 1 to block_size, and 0 (or block_size, as some libraries write) for a sequence
            without blocks.
        block_size: tokens of a block.
        width: entries in a row of the result; by default the longest sequence's, at least 1.
        fill: what the unused entries hold.

    Raises:
        InvalidArgument: an array on a device, a wrong dtype or shape, a width too small.
        BlockIndexError: a number out of range; names sequence, position and value.
    """
    size = count(block_size, "block_size", at_least=1)
    ptr = numbers(index_array(indptr, "indptr", "int32", 1))
    ids = numbers(index_array(indices, "indices", "int32", 1))
    last = numbers(index_array(last_page_len, "last_page_len", "int32", 1))
    num_seqs, filler = len(last), count(fill, "fill", at_least=-(2**31), at_most=2**31 - 1)
    if len(ptr) != num_seqs + 1:
        raise InvalidArgument(
            f"indptr: got {len(ptr)} elements, expected {num_seqs + 1}: one more than last_page_len has"
        )
    if ptr[0] != 0:
        raise BlockIndexError(f"indptr: got {ptr[0]} at position 0, expected 0")
    seq_lens = array("i", (_seq_len(i, ptr, ids, last, size) for i in range(num_seqs)))
    longest = max((ptr[i + 1] - ptr[i] for i in range(num_seqs)), default=0)
    if width is None:
        width = max(longest, 1)
    elif count(width, "width", at_least=1) < longest:
        raise InvalidArgument(f"width: got {width}, expected at least {longest}: the blocks of the longest sequence")
    if num_seqs == 0:  # `cast` makes no empty shapes
        return Table(memoryview((ctypes.c_int32 * width * 0)()), seq_lens)
    flat = memoryview(array("i", [filler]) * (num_seqs * width))
    for i in range(num_seqs):
        flat[i * width : i * width + ptr[i + 1] - ptr[i]] = ids[ptr[i] : ptr[i + 1]]
    return Table(flat.cast("B").cast("i", (num_seqs, width)), seq_lens)


def _seq_len(i: int, ptr: memoryview[int], ids: memoryview[int], last: memoryview[int], size: int) -> int:
    """Tokens of sequence i, its row of the CSR form checked."""
    blocks = ptr[i + 1] - ptr[i]
    if blocks < 0 or ptr[i + 1] > len(ids):
        raise BlockIndexError(
            f"indptr: got {ptr[i + 1]} at position {i + 1} (sequence {i}), expected {ptr[i]} to {len(ids)}: "
            "prefix sums never fall, nor pass the end of indices"
        )
    accepted = (0, size) if blocks == 0 else range(1, size + 1)
    if last[i] not in accepted:
        bounds = f"0 or {size}" if blocks == 0 else f"1 to {size}"
        raise BlockIndexError(f"last_page_len: got {last[i]} for sequence {i} of {blocks} blocks, expected {bounds}")
    seq_len = size * (blocks - 1) + last[i] if blocks else 0
    if seq_len >= 2**31:
        raise BlockIndexError(
            f"indptr: got {blocks} blocks of {size} tokens for sequence {i}, expected at most 2^31 - 1 tokens"
        )
    return seq_len
