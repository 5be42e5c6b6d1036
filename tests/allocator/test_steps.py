"""Steps as an engine sees them: buffers that others take without a copy, and what stays valid for how long."""

from __future__ import annotations

import ctypes
import random
import subprocess
import sys
from array import array

import pytest

from pagedkern.allocator import BlockAllocator, Sequence, Step


def batch(allocator: BlockAllocator, lengths: list[int]) -> list[Sequence]:
    seqs = [allocator.create([100 * i + j for j in range(n)]) for i, n in enumerate(lengths)]
    allocator.commit(allocator.prefill(seqs))
    return seqs


def test_buffers_go_to_torch_without_a_copy() -> None:
    torch = pytest.importorskip("torch", reason="torch takes the buffers")
    allocator = BlockAllocator(32, 4)
    seqs = batch(allocator, [5, 9])
    step = allocator.append(seqs, [1, 2])
    table = torch.frombuffer(step.block_table, dtype=torch.int32).view(step.num_seqs, step.row_stride)
    assert [row[: len(s.block_ids)] for row, s in zip(table.tolist(), seqs, strict=True)] == [s.block_ids for s in seqs]
    buffers = {torch.int64: [step.slot_mapping], torch.int32: [step.seq_lens, step.cu_seqlens_q]}
    for buffer, dtype in [(buffer, dtype) for dtype, items in buffers.items() for buffer in items]:
        tensor = torch.frombuffer(buffer, dtype=dtype)
        assert tensor.tolist() == list(buffer)
        tensor[0] += 1
        assert tensor.tolist() == list(buffer), "the same memory"


def test_buffers_go_to_c_without_a_copy() -> None:
    allocator = BlockAllocator(32, 4)
    seqs = batch(allocator, [5, 9])
    allocator.fork(seqs[0])
    step = allocator.append(seqs, [1, 2])
    width = step.row_stride
    table = (ctypes.c_int32 * (2 * width)).from_buffer(step.block_table)
    assert list(table[:3]) == [*seqs[0].block_ids, -1]
    for items, kind in (
        (step.slot_mapping, ctypes.c_int64),
        (step.seq_lens, ctypes.c_int32),
        (step.cu_seqlens_q, ctypes.c_int32),
        (step.copies.src, ctypes.c_int64),
        (step.copies.dst, ctypes.c_int64),
    ):
        assert list((kind * len(items)).from_buffer(items)) == list(items)
    assert len(step.copies) == 1
    assert (step.copies.src, step.copies.dst) == step.moves[0][1:]
    assert (step.block_table.format, step.block_table.shape, step.block_table.strides) == (
        "i",
        (2, width),
        (4 * width, 4),
    )


def test_token_ids_may_come_as_tensors() -> None:
    torch = pytest.importorskip("torch", reason="torch gives the ids")
    outcomes = []
    for make in (list, torch.tensor, tuple, lambda ids: array("i", ids), lambda ids: memoryview(array("q", ids))):
        allocator = BlockAllocator(64, 4)
        seqs = [allocator.create(make(list(range(5)))), allocator.create(make([9, 8, 7]))]
        allocator.commit(allocator.prefill(seqs))
        for token in range(9):
            allocator.commit(allocator.append(seqs, make([token, token + 1])))
        for step in (allocator.append(seqs, [make([1, 2]), make([3])]), allocator.append(seqs, [make([4])[0], 5])):
            allocator.commit(step)
        allocator.check()
        tokens = [s._tokens.tolist() for s in seqs]
        outcomes.append((tokens, allocator.create(make([*range(5), *range(9), 1, 2])).num_cached_tokens))
    assert outcomes == [([[*range(5), *range(9), 1, 2, 4], [9, 8, 7, *range(1, 10), 3, 5]], 15)] * 5
    with pytest.raises(TypeError, match="tokens: token ids must be integers"):
        allocator.create(torch.tensor([1.0]))


def test_itemsizes() -> None:
    assert (array("i").itemsize, array("q").itemsize) == (4, 8)


def test_a_prompt_in_chunks() -> None:
    allocator = BlockAllocator(32, 4)
    seqs = [allocator.create(list(range(6))), allocator.create(list(range(50, 57))), allocator.create(3)]
    step = allocator.prefill(seqs, 8)
    assert list(step.seqs) == seqs[:2], "the third gets nothing"
    assert list(step.seq_lens) == [6, 2]
    assert list(step.cu_seqlens_q) == [0, 6, 8]
    assert step.max_seqlen_q == 6
    a, b = seqs[0].block_ids, seqs[1].block_ids
    slots = [*range(4 * a[0], 4 * a[0] + 4), *range(4 * a[1], 4 * a[1] + 2), 4 * b[0], 4 * b[0] + 1]
    assert list(step.slot_mapping) == slots
    rest = allocator.prefill(seqs[1:], 100)
    assert list(rest.seq_lens) == [7, 3]
    assert list(rest.cu_seqlens_q) == [0, 5, 8]
    assert list(rest.slot_mapping)[:2] == [4 * b[0] + 2, 4 * b[0] + 3]
    allocator.commit(step)
    allocator.commit(rest)
    assert [s.num_computed_tokens for s in seqs] == [6, 7, 3]


def test_several_tokens_at_once() -> None:
    allocator = BlockAllocator(32, 4)
    seqs = batch(allocator, [3, 4])
    step = allocator.append(seqs, [[1, 2, 3], [4]])
    assert list(step.cu_seqlens_q) == [0, 3, 4]
    assert list(step.seq_lens) == [6, 5]
    first, second = seqs[0].block_ids, seqs[1].block_ids
    assert list(step.slot_mapping) == [4 * first[0] + 3, 4 * first[1], 4 * first[1] + 1, 4 * second[1]]


def test_decoding_and_prompts_in_one_step() -> None:
    allocator = BlockAllocator(32, 4)
    (decoding,) = batch(allocator, [5])
    prompts = [allocator.create(6), allocator.create(7), allocator.create(3)]
    step = allocator.mixed([decoding], [9], prompts, 9, lookahead=4)
    assert list(step.seqs) == [decoding, prompts[0], prompts[1]], "for the third the budget is used up"
    assert list(step.seq_lens) == [6, 6, 2]
    assert list(step.cu_seqlens_q) == [0, 1, 7, 9]
    assert (step.num_tokens, step.max_seqlen_q) == (9, 6)
    assert [len(s.block_ids) for s in (decoding, *prompts)] == [3, 2, 2, 1], "the one that grows has blocks ahead"
    a, b, c = (s.block_ids for s in step.seqs)
    slots = [4 * a[1] + 1, *range(4 * b[0], 4 * b[0] + 4), 4 * b[1], 4 * b[1] + 1, 4 * c[0], 4 * c[0] + 1]
    assert list(step.slot_mapping) == slots
    allocator.commit(step)
    assert [s.num_computed_tokens for s in (decoding, *prompts)] == [6, 6, 2, 0]
    step = allocator.mixed([decoding], None, prompts[1:], 1)
    assert list(step.seqs) == [decoding], "nothing is left for prompts"
    allocator.abort(step)
    assert (decoding.num_tokens, prompts[1].num_tokens) == (6, 7)
    allocator.check()


def copied(step: Step) -> tuple[list[object], ...]:
    return step.block_table.tolist(), list(step.seq_lens), list(step.slot_mapping), list(step.cu_seqlens_q)


@pytest.mark.parametrize("size", [1, 2, 4, 16])
def test_what_a_step_reads_never_changes(size: int) -> None:
    allocator = BlockAllocator(400, size)
    seqs = batch(allocator, [3, 4, 5, 6, 17])
    steps = []
    for token in range(40):
        step = allocator.append(seqs, [token] * 5)
        steps.append((step, copied(step)))
        if token % 2:
            allocator.commit(steps[-2][0])
            allocator.commit(step)
    allocator.fork(seqs[2])
    allocator.truncate(seqs[1], 5)
    allocator.free(seqs[0])
    allocator.append(seqs[1:], [1] * 4)
    for step, (table, seq_lens, slots, cu) in steps:
        assert (list(step.seq_lens), list(step.slot_mapping), list(step.cu_seqlens_q)) == (seq_lens, slots, cu)
        for row, length in enumerate(seq_lens):
            used = -(-length // size)
            assert step.block_table.tolist()[row][:used] == table[row][:used]


def test_a_table_that_is_looked_at_late_is_that_of_its_step() -> None:
    allocator = BlockAllocator(64, 4)
    shared = list(range(8))
    first = allocator.create([*shared, 8, 9])
    one = allocator.prefill([first])
    was = first.block_ids
    allocator.commit(one)
    second, third = allocator.create([*shared, 7]), allocator.create([1])
    two = allocator.prefill([second, third])
    table = [second.block_ids, [*third.block_ids, -1, -1]]
    fork = allocator.fork(first)[0]
    allocator.append([first, second], [[1] * 9, [2] * 9])  # copies a block on write, grows
    allocator.abort(allocator.append([third], [3]))
    allocator.append([fork], [4])
    allocator.truncate(first, 3)
    allocator.free(second)
    assert (one.block_table.tolist(), two.block_table.tolist()) == ([was], table)
    assert one.block_table is one.block_table


def test_callers_may_overwrite_what_belongs_to_their_step_alone() -> None:
    allocator = BlockAllocator(64, 4)
    seqs = batch(allocator, [3, 6])
    for token in range(12):
        step = allocator.append(seqs, [token, token])
        assert list(step.seq_lens) == [4 + token, 7 + token]
        assert [slot % 4 for slot in step.slot_mapping] == [(3 + token) % 4, (6 + token) % 4]
        assert list(step.cu_seqlens_q) == [0, 1, 2]
        step.seq_lens[0] = step.slot_mapping[0] = step.cu_seqlens_q[1] = -7
    allocator.check()


def test_changed_rows_are_few() -> None:
    allocator = BlockAllocator(400, 16)
    seqs = batch(allocator, [16 + i for i in range(16)])
    allocator.append(seqs, [0] * 16)
    changes = []
    for token in range(64):
        step = allocator.append(seqs, [token] * 16)
        assert step.base == step.id - 1
        changes.append(len(step.changed_rows))
    assert changes == [1] * 64, "each sequence begins a block every 16 tokens"
    (fork,) = allocator.fork(seqs[3])
    seqs[5] = fork
    step = allocator.append(seqs, [1] * 16)
    assert step.base == step.id - 1
    assert set(step.changed_rows) <= {3, 5, *[i for i, s in enumerate(seqs) if s.num_tokens % 16 == 1]}


def test_the_slow_and_the_fast_path_give_the_same() -> None:
    outcomes = []
    for fast in (True, False):
        allocator = BlockAllocator(200, 4)
        seqs = batch(allocator, [3, 4, 5, 9])
        seen = []
        for token in range(30):
            step = allocator.append(seqs if fast else tuple(seqs), [token + i for i in range(4)])
            seen.append((copied(step)[1:], [s.block_ids for s in seqs], [s.num_tokens for s in seqs], repr(seqs[0])))
            allocator.commit(step)
            allocator.check()
        for seq in seqs:
            allocator.free(seq)
        hits = allocator.create([*range(3), *range(30)]).num_cached_tokens
        outcomes.append((seen, hits, allocator.num_cached_blocks))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1] == 32


def test_mixed_batches_of_known_and_unknown_tokens() -> None:
    allocator = BlockAllocator(64, 4)
    known, unknown = batch(allocator, [6])[0], allocator.create(6)
    allocator.commit(allocator.prefill([unknown]))
    for token in range(10):
        allocator.commit(allocator.append([known, unknown], [token, token]))
    for _ in range(10):
        allocator.commit(allocator.append([known]))
    allocator.check()
    allocator.free(known)
    assert allocator.create([*range(6), *range(10), 0]).num_cached_tokens == 16


def test_two_batches_in_turn_stay_fast() -> None:
    allocator = BlockAllocator(64, 4)
    left, right = batch(allocator, [3, 5]), batch(allocator, [4])
    for token in range(9):
        for seqs in (left, right):
            allocator.commit(allocator.append(seqs, [token] * len(seqs)))
        allocator.check()
    assert len(allocator._ledger.lockstep_batches) == 2


def test_reading_a_sequence_does_not_end_the_fast_path() -> None:
    allocator = BlockAllocator(64, 4)
    seqs = batch(allocator, [3, 5])
    for token in range(9):
        step = allocator.append(seqs, [token] * 2)
        assert [s.num_tokens for s in seqs] == [4 + token, 6 + token]
        assert [s.num_computed_tokens for s in seqs] == [3 + token, 5 + token]
        allocator.commit(step)
        assert [s.num_computed_tokens for s in seqs] == [4 + token, 6 + token]
    assert len(allocator._ledger.lockstep_batches) == 1


def test_the_allocator_needs_the_standard_library_only() -> None:
    code = (
        "import sys\n"
        "before = set(sys.modules)\n"  # some packages have the interpreter load a part of them at every start
        "for name in ('torch', 'numpy', 'numba', 'triton', 'cupy'): sys.modules[name] = None\n"
        "from pagedkern import BlockAllocator\n"
        "a = BlockAllocator(8, 4); s = a.create([1, 2, 3]); a.commit(a.prefill([s])); a.commit(a.append([s], [4]))\n"
        "new = {m.split('.')[0] for m in sys.modules if m not in before and sys.modules[m]}\n"
        "print(sorted(new - set(sys.stdlib_module_names) - {'pagedkern'}))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"


def test_a_device_table_stays_right_when_the_table_was_widened_in_between() -> None:
    allocator = BlockAllocator(400, 1)
    seqs = batch(allocator, [3, 4])
    device: dict[int, list[list[int]]] = {}
    for token in range(60):
        if token == 40:
            seqs = [seqs[0], allocator.fork(seqs[1])[0]]
        step = allocator.append(seqs, [token, token])
        table = step.block_table.tolist()
        rows = [list(row) for row in device[step.base]] if step.base is not None else [[], []]
        for row in step.changed_rows:
            rows[row] = table[row]
        assert rows == table
        device = {step.id: rows}
        allocator.commit(step)


@pytest.mark.parametrize("size", [1, 3, 16, 1024, 1025, 2**31 - 1])
def test_slots_of_prompts_in_chunks_of_any_length(size: int) -> None:
    """Each slot is its block's place times the block size, and its place in the block."""
    generator = random.Random(size)
    allocator = BlockAllocator(50, size, prefix_caching=False)
    holes = [allocator.create(1) for _ in range(20)]
    for seq in generator.sample(holes, 10):  # blocks in no order
        allocator.free(seq)
    seq = allocator.create(min(20 * size - generator.randrange(size), 25_000))
    position = 0
    while position < seq.num_tokens:
        step = allocator.prefill([seq], generator.choice([1, 2, 15, 16, 17, 1500, 6000]))
        end = position + step.num_tokens
        blocks = seq.block_ids
        assert step.slot_mapping.tolist() == [blocks[p // size] * size + p % size for p in range(position, end)]
        position = end
        allocator.commit(step)
