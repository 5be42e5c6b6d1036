"""`validate_contents`: the numbers in a batch's index arrays, checked on the host."""

from __future__ import annotations

from pagedkern.abi.batch import Batch, check_batch, count
from pagedkern.abi.hostmem import numbers, on_host
from pagedkern.errors import BlockIndexError


def validate_contents(batch: Batch, *, sliding_window: int | None = None) -> None:
    """Check the block ids, lengths, prefix sums and slots of a batch whose index arrays are in host memory.

    Only what will be followed is checked: table entries at `j >= ceil(seq_lens[i] / B)` may hold anything, and so may
    those wholly behind the window, where an allocator that gives such blocks back leaves -1, and the rows of sequences
    to which `cu_seqlens_q` gives no query. O(used entries).

    Args:
        batch: of `validate`.
        sliding_window: tokens that a query sees, its own included; None: all before it.

    Raises:
        BlockIndexError: names the array, the sequence, the position and the value.
        InvalidArgument: an index array is not on the host.
        InvalidType: `batch` is no `Batch`.
    """
    check_batch(batch)
    window = None if sliding_window is None else count(sliding_window, "sliding_window", at_least=1)
    _check_cu_seqlens(batch)
    _check_seq_lens(batch)
    _check_block_table(batch, window)
    _check_slots(batch)


def _check_cu_seqlens(batch: Batch) -> None:
    if batch.cu_seqlens_q is None:
        return
    cu = numbers(on_host(batch.cu_seqlens_q, "cu_seqlens_q"))
    if cu[0] != 0:
        raise BlockIndexError(f"cu_seqlens_q: got {cu[0]} at position 0, expected 0")
    for i in range(batch.num_seqs):
        q_len = cu[i + 1] - cu[i]
        if q_len < 0:
            raise BlockIndexError(
                f"cu_seqlens_q: got {cu[i + 1]} at position {i + 1} after {cu[i]} (sequence {i}), "
                "expected prefix sums, which never fall"
            )
        if q_len > batch.max_seqlen_q > 0:
            raise BlockIndexError(
                f"cu_seqlens_q: got {q_len} query tokens for sequence {i} (positions {i} and {i + 1} hold {cu[i]} and "
                f"{cu[i + 1]}), expected at most max_seqlen_q = {batch.max_seqlen_q}"
            )
    if (batch.q or batch.slot_mapping) is not None and cu[batch.num_seqs] > batch.num_tokens:
        raise BlockIndexError(
            f"cu_seqlens_q: got {cu[batch.num_seqs]} at position {batch.num_seqs}, expected at most the "
            f"{batch.num_tokens} tokens of {'q' if batch.q is not None else 'slot_mapping'}"
        )


def _check_seq_lens(batch: Batch) -> None:
    if batch.seq_lens is None:
        return
    longest = batch.width * batch.block_size
    lens = numbers(on_host(batch.seq_lens, "seq_lens"))
    if lens and not 0 <= min(lens) <= max(lens) <= longest:
        i = next(i for i, n in enumerate(lens) if not 0 <= n <= longest)
        raise BlockIndexError(
            f"seq_lens: got {lens[i]} for sequence {i}, expected 0 to {longest}: block_table has {batch.width} "
            f"entries a row, of {batch.block_size} tokens each"
        )


def _check_block_table(batch: Batch, window: int | None) -> None:
    if batch.block_table is None or batch.seq_lens is None:
        return
    lens = numbers(batch.seq_lens)
    cu = None if batch.cu_seqlens_q is None else numbers(batch.cu_seqlens_q)
    table, size = on_host(batch.block_table, "block_table"), batch.block_size
    for i, seq_len in enumerate(lens):
        q_len = 1 if cu is None else cu[i + 1] - cu[i]
        if seq_len == 0 or q_len == 0:
            continue
        # The first query of the sequence sees furthest back: to its own position less the window.
        first = 0 if window is None else min(max(seq_len - q_len - window + 1, 0), seq_len) // size
        used = numbers(table, i)[first : -(-seq_len // size)]
        position = _outside(used, 0, batch.num_blocks)
        if position is not None:
            raise BlockIndexError(
                f"block_table: got {used[position]} for sequence {i} at position {first + position}, "
                f"expected {_bounds(0, batch.num_blocks)}; seq_lens[{i}] = {seq_len} uses positions {first} to "
                f"{first + len(used) - 1}"
            )


def _check_slots(batch: Batch) -> None:
    if batch.slot_mapping is None:
        return
    slots = numbers(on_host(batch.slot_mapping, "slot_mapping"))
    limit = None if batch.num_blocks is None else batch.num_blocks * batch.block_size
    position = _outside(slots, -1, limit)
    if position is not None:
        raise BlockIndexError(
            f"slot_mapping: got {slots[position]} at position {position}{_sequence_of(batch, position)}, "
            f"expected {_bounds(-1, limit)} (-1 = write nothing)"
        )


def _sequence_of(batch: Batch, token: int) -> str:
    """Which sequence a token belongs to, for a message; nothing if the batch does not say."""
    if batch.seq_lens is None:
        return ""
    if batch.cu_seqlens_q is None:
        return f" (sequence {token})"
    cu = numbers(batch.cu_seqlens_q)
    owner = next((i for i in range(batch.num_seqs) if cu[i] <= token < cu[i + 1]), None)
    return " (padding)" if owner is None else f" (sequence {owner})"


def _outside(values: memoryview[int], low: int, end: int | None) -> int | None:
    """Position of the first value outside low .. end-1, None if there is none. `min` and `max` run at C's speed."""
    if not values or (min(values) >= low and (end is None or max(values) < end)):
        return None
    return next(i for i, v in enumerate(values) if v < low or (end is not None and v >= end))


def _bounds(low: int, end: int | None) -> str:
    return f"{low} or more" if end is None else f"{low} to {end - 1}"
