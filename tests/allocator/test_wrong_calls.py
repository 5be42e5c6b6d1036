"""Wrong calls, each with the error it must give and a message that names the argument; and odd ones that are legal."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from pagedkern.allocator import BlockAllocator, Sequence, Step, Verdict
from pagedkern.allocator.arguments import token_ids
from pagedkern.errors import AuditError, InvalidArgument, InvalidType, OutOfBlocks, StaleSequence, WrongThread
from tests.allocator.world import fingerprint


class Token(enum.IntEnum):
    """Ids with names."""

    PAD = 0
    START = 1
    LAST = 200


class Scene:
    """An allocator with one of everything."""

    def __init__(self) -> None:
        self.a = BlockAllocator(16, 4)
        self.fresh = self.a.create([1, 2, 3, 4, 5])
        self.seq = self.a.create([1, 2, 3, 4, 5])
        self.done = self.a.prefill([self.seq])
        self.a.commit(self.done)
        self.twin = self.a.fork(self.seq)[0]
        self.first = self.a.append([self.twin], [6])
        self.second = self.a.append([self.twin], [7])
        self.gone = self.a.create(1)
        self.a.free(self.gone)
        self.other = BlockAllocator(4, 4)
        self.foreign = self.other.create(2)
        self.foreign_step = self.other.prefill([self.foreign])


WRONG: dict[str, tuple[Callable[[Scene], object], type[Exception], str]] = {
    "no blocks": (lambda s: BlockAllocator(0, 4), InvalidArgument, "num_blocks: got 0, expected 1 to 2147483647"),
    "negative blocks": (lambda s: BlockAllocator(-1, 4), InvalidArgument, "num_blocks: got -1"),
    "too many blocks": (lambda s: BlockAllocator(2**31, 4), InvalidArgument, "num_blocks"),
    "block size 0": (lambda s: BlockAllocator(4, 0), InvalidArgument, "block_size: got 0"),
    "float block size": (lambda s: BlockAllocator(4, 4.0), InvalidType, "block_size: got 4.0 of type float"),
    "bool blocks": (lambda s: BlockAllocator(True, 4), InvalidType, "num_blocks: got True"),
    "string blocks": (lambda s: BlockAllocator("4", 4), InvalidType, "num_blocks: got '4'"),
    "negative host blocks": (lambda s: BlockAllocator(4, 4, num_host_blocks=-1), InvalidArgument, "num_host_blocks"),
    "watermark 1": (lambda s: BlockAllocator(4, 4, watermark=1), InvalidArgument, "watermark: got 1"),
    "watermark nan": (lambda s: BlockAllocator(4, 4, watermark=float("nan")), InvalidArgument, "watermark: got nan"),
    "watermark string": (lambda s: BlockAllocator(4, 4, watermark="x"), InvalidType, "watermark"),
    "caching 1": (lambda s: BlockAllocator(4, 4, prefix_caching=1), InvalidType, "prefix_caching: got 1"),
    "create -1": (lambda s: s.a.create(-1), InvalidArgument, "tokens: got -1"),
    "create bool": (lambda s: s.a.create(True), InvalidType, "tokens: got True"),
    "create float": (lambda s: s.a.create(3.0), InvalidType, "tokens: got 3.0"),
    "create None": (lambda s: s.a.create(None), InvalidType, "tokens: got None"),
    "create str": (lambda s: s.a.create("abc"), InvalidType, "tokens: got str"),
    "create bytes": (lambda s: s.a.create(b"12345678"), InvalidType, "tokens: got bytes"),
    "create floats": (lambda s: s.a.create([1, 2.0]), InvalidType, "tokens: token ids must be integers"),
    "create bools": (lambda s: s.a.create([True]), InvalidType, "tokens: token ids must be integers .got a bool"),
    "create a late bool": (lambda s: s.a.create([*range(4999), False]), InvalidType, "tokens: .*got a bool"),
    "create bools in a tuple": (lambda s: s.a.create((70000, True)), InvalidType, "tokens: .*got a bool"),
    "create one by one": (lambda s: s.a.create(b for b in [True]), InvalidType, "tokens: .*got a bool"),
    "create a bool beside a negative id": (lambda s: s.a.create([-1, True]), InvalidType, "tokens: .*got a bool"),
    "create bool array": (lambda s: s.a.create(np.array([True])), InvalidType, "tokens: .*got a bool"),
    "create bool tensor": (lambda s: s.a.create(torch.tensor([1, 0]) > 0), InvalidType, "tokens: .*got a bool"),
    "create numpy bools": (lambda s: s.a.create([np.True_]), InvalidType, "tokens: token ids must be integers"),
    "can_allocate bools": (lambda s: s.a.can_allocate([5, True]), InvalidType, "tokens: .*got a bool"),
    "append bool": (lambda s: s.a.append([s.seq], [True]), InvalidType, r"tokens\[0\]: .*got a bool"),
    "append bools": (lambda s: s.a.append([s.seq], [[7, False]]), InvalidType, r"tokens\[0\]: .*got a bool"),
    "digests of bools": (lambda s: s.a.digests([True]), InvalidType, "tokens: .*got a bool"),
    "create nested": (lambda s: s.a.create([[1, 2]]), InvalidType, "tokens: token ids must be integers"),
    "create huge id": (lambda s: s.a.create([2**63]), InvalidArgument, "tokens: a token id does not fit"),
    "create too large": (lambda s: s.a.create(10**6), OutOfBlocks, "250000 blocks needed"),
    "salt list": (lambda s: s.a.create(1, salt=[]), InvalidType, "salt: got list"),
    "salt bool": (lambda s: s.a.create(1, salt=True), InvalidType, "salt: got bool"),
    "salt huge": (lambda s: s.a.create(1, salt=1 << 4096), InvalidArgument, "salt: got an int of 4097 bits"),
    "salt float": (lambda s: s.a.create(1, salt=1.0), InvalidType, "salt: got float"),
    "priority 4": (lambda s: s.a.create(1, priority=4), InvalidArgument, "priority: got 4, expected 0 to 3"),
    "priority -1": (lambda s: s.a.create(1, priority=-1), InvalidArgument, "priority: got -1"),
    "can_allocate -1": (lambda s: s.a.can_allocate(-1), InvalidArgument, "tokens: got -1"),
    "can_allocate salt": (lambda s: s.a.can_allocate([1], salt={}), InvalidType, "salt: got dict"),
    "spare_blocks -1": (lambda s: s.a.can_allocate(1, spare_blocks=-1), InvalidArgument, "spare_blocks: got -1"),
    "spare_blocks None": (lambda s: s.a.can_allocate(1, spare_blocks=None), InvalidType, "spare_blocks: got None"),
    "prefill a sequence": (lambda s: s.a.prefill(s.fresh), InvalidType, "seqs: got Sequence, expected a list"),
    "prefill None": (lambda s: s.a.prefill(None), InvalidType, "seqs: got NoneType"),
    "prefill ints": (lambda s: s.a.prefill([1]), InvalidType, r"seqs\[0\]: got int, expected a Sequence"),
    "prefill twice": (lambda s: s.a.prefill([s.fresh, s.fresh]), InvalidArgument, "seqs: sequence 1 is named twice"),
    "prefill done": (lambda s: s.a.prefill([s.fresh, s.seq]), InvalidArgument, r"seqs\[1\]: .* no token left"),
    "prefill 0 tokens": (lambda s: s.a.prefill([s.fresh], 0), InvalidArgument, "max_tokens: got 0"),
    "prefill -1 tokens": (lambda s: s.a.prefill([s.fresh], max_tokens=-1), InvalidArgument, "max_tokens: got -1"),
    "prefill float": (lambda s: s.a.prefill([s.fresh], max_tokens=2.0), InvalidType, "max_tokens: got 2.0"),
    "prefill freed": (lambda s: s.a.prefill([s.gone]), StaleSequence, r"seqs\[0\]: sequence \d+ is freed"),
    "append before prefill": (lambda s: s.a.append([s.fresh], [1]), InvalidArgument, "prefill them first"),
    "append twice the same": (lambda s: s.a.append([s.seq, s.seq], [1, 2]), InvalidArgument, "named twice"),
    "append too few": (lambda s: s.a.append([s.seq], []), InvalidArgument, "tokens: got 0 entries for 1"),
    "append too many": (lambda s: s.a.append([s.seq], [1, 2]), InvalidArgument, "tokens: got 2 entries for 1"),
    "append no id": (lambda s: s.a.append([s.seq], [[]]), InvalidArgument, r"tokens\[0\]: got no id"),
    "append float": (lambda s: s.a.append([s.seq], [1.5]), InvalidType, r"tokens\[0\]: token ids must be integers"),
    "append None in list": (lambda s: s.a.append([s.seq], [None]), InvalidType, r"tokens\[0\]"),
    "append huge": (lambda s: s.a.append([s.seq], [2**63]), InvalidArgument, r"tokens\[0\]: a token id does not fit"),
    "append a number": (lambda s: s.a.append([s.seq], 5), InvalidType, "tokens: got int"),
    "append a string": (lambda s: s.a.append([s.seq], "a"), InvalidType, "tokens: got str"),
    "append 0 tokens": (lambda s: s.a.append([s.seq], num_tokens=0), InvalidArgument, "num_tokens: got 0"),
    "append -1 tokens": (lambda s: s.a.append([s.seq], num_tokens=-1), InvalidArgument, "num_tokens: got -1"),
    "append bool tokens": (lambda s: s.a.append([s.seq], num_tokens=True), InvalidType, "num_tokens: got True"),
    "append both": (
        lambda s: s.a.append([s.seq], [1], num_tokens=2),
        InvalidArgument,
        "num_tokens: got 2 although tokens already sets",
    ),
    "lookahead -1": (lambda s: s.a.append([s.seq], [1], lookahead=-1), InvalidArgument, "lookahead: got -1"),
    "lookahead float": (lambda s: s.a.append([s.seq], [1], lookahead=1.0), InvalidType, "lookahead: got 1.0"),
    "append a sequence": (lambda s: s.a.append(s.seq, [1]), InvalidType, "seqs: got Sequence"),
    "append foreign": (lambda s: s.a.append([s.seq, s.foreign]), StaleSequence, r"seqs\[1\]: .* another allocator"),
    "append freed": (lambda s: s.a.append([s.gone], [1]), StaleSequence, "is freed"),
    "mixed twice the same": (lambda s: s.a.mixed([s.seq], [1], [s.seq]), InvalidArgument, "named twice"),
    "mixed budget": (lambda s: s.a.mixed([s.seq], [[1, 2]], [s.fresh], 1), InvalidArgument, "max_tokens: got 1"),
    "mixed done": (lambda s: s.a.mixed([], [], [s.seq]), InvalidArgument, r"prefilling\[0\]: .* no token left"),
    "mixed fresh": (lambda s: s.a.mixed([s.fresh], [1], []), InvalidArgument, r"appending\[0\]: 5 tokens of"),
    "mixed None": (lambda s: s.a.mixed([s.seq], [1], None), InvalidType, "prefilling: got NoneType"),
    "window too far": (lambda s: s.a.release_window(s.seq, 6), InvalidArgument, "first_needed: got 6"),
    "window float": (lambda s: s.a.release_window(s.seq, 1.0), InvalidType, "first_needed: got 1.0"),
    "swap in live": (lambda s: s.a.swap_in([s.seq]), StaleSequence, "is live, expected one that is swapped out"),
    "swap out without a host": (lambda s: s.a.swap_out([s.seq]), OutOfBlocks, "2 host blocks needed, 0 free"),
    "swap out a sequence": (lambda s: s.a.swap_out(s.seq), InvalidType, "seqs: got Sequence"),
    "pin freed": (lambda s: s.a.pin(s.gone), StaleSequence, "is freed"),
    "digests of a number": (lambda s: s.a.digests(5), InvalidType, "tokens: got int"),
    "no event": (lambda s: s.a.record_events(limit=0), InvalidArgument, "limit: got 0"),
    "half an event": (lambda s: s.a.record_events(limit=0.5), InvalidType, "limit: got 0.5"),
    "clear a list": (lambda s: s.a.clear_cache(salt=[1]), InvalidType, "salt: got list"),
    "snapshot in flight": (lambda s: s.a.snapshot(), InvalidArgument, "2 plans are in flight"),
    "restore a list": (lambda s: s.a.restore([]), InvalidArgument, "state: not a snapshot"),
    "fork -1": (lambda s: s.a.fork(s.seq, -1), InvalidArgument, "n: got -1"),
    "fork float": (lambda s: s.a.fork(s.seq, 1.0), InvalidType, "n: got 1.0"),
    "fork a list": (lambda s: s.a.fork([s.seq]), InvalidType, "seq: got list"),
    "truncate longer": (
        lambda s: s.a.truncate(s.seq, 6),
        InvalidArgument,
        "num_tokens: got 6, expected 0 to 5",
    ),
    "truncate -1": (lambda s: s.a.truncate(s.seq, -1), InvalidArgument, "num_tokens: got -1"),
    "truncate bool": (lambda s: s.a.truncate(s.seq, False), InvalidType, "num_tokens: got False"),
    "free None": (lambda s: s.a.free(None), InvalidType, "seq: got NoneType"),
    "free twice": (lambda s: s.a.free(s.gone), StaleSequence, "is freed"),
    "free foreign": (lambda s: s.a.free(s.foreign), StaleSequence, "another allocator"),
    "commit None": (lambda s: s.a.commit(None), InvalidType, "plan: got NoneType"),
    "commit twice": (lambda s: s.a.commit(s.done), InvalidArgument, "is committed already"),
    "commit foreign": (lambda s: s.a.commit(s.foreign_step), InvalidArgument, "another allocator"),
    "commit out of order": (lambda s: s.a.commit(s.second), InvalidArgument, "commit that first"),
    "abort committed": (lambda s: s.a.abort(s.done), InvalidArgument, "is committed already"),
    "abort out of order": (lambda s: s.a.abort(s.first), InvalidArgument, "abort that first"),
    "abort a sequence": (lambda s: s.a.abort(s.seq), InvalidType, "plan: got Sequence"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_call(name: str) -> None:
    call, error, message = WRONG[name]
    scene = Scene()
    before = fingerprint(scene.a)
    with pytest.raises(error, match=message):
        call(scene)
    assert fingerprint(scene.a) == before
    scene.a.check()


def test_errors_are_also_those_that_python_would_raise() -> None:
    allocator = BlockAllocator(4, 4)
    with pytest.raises(ValueError):
        allocator.create(-1)
    with pytest.raises(TypeError):
        allocator.create(1.0)  # type: ignore[arg-type]


def test_empty_batch_gives_an_empty_step() -> None:
    allocator = BlockAllocator(4, 4)
    for step in (allocator.append([]), allocator.append([], []), allocator.prefill([]), allocator.prefill([], 5)):
        assert (step.num_seqs, step.num_tokens, step.max_seqlen_q, step.row_stride) == (0, 0, 0, 0)
        assert list(step.cu_seqlens_q) == [0]
        assert not step.seq_lens
        assert not step.slot_mapping
        assert not step.block_table.tolist()
        allocator.commit(step)
    allocator.check()


@pytest.mark.parametrize("tokens", [0, []])
def test_prompt_of_no_tokens(tokens: int | list[int]) -> None:
    allocator = BlockAllocator(4, 4)
    seq = allocator.create(tokens)
    assert (seq.num_tokens, seq.block_ids, seq.num_cached_tokens) == (0, [], 0)
    assert allocator.can_allocate(tokens) is Verdict.OK
    with pytest.raises(InvalidArgument, match="no token left"):
        allocator.prefill([seq])
    step = allocator.append([seq], [5])
    assert list(step.slot_mapping) == [seq.block_ids[0] * 4]
    allocator.commit(step)
    allocator.truncate(seq, 0)
    assert seq.block_ids == []
    allocator.free(seq)
    assert allocator.num_free_blocks == 4
    allocator.check()


def test_fork_0() -> None:
    allocator = BlockAllocator(4, 4)
    assert allocator.fork(allocator.create(3), 0) == []
    allocator.check()


def test_truncate_to_the_same_length_changes_nothing() -> None:
    allocator = BlockAllocator(4, 4)
    seq = allocator.create([1, 2, 3, 4, 5])
    blocks = seq.block_ids
    allocator.truncate(seq, 5)
    assert (seq.num_tokens, seq.block_ids) == (5, blocks)


@pytest.mark.parametrize("length", range(10))
def test_truncate_below_what_was_computed(length: int) -> None:
    allocator = BlockAllocator(4, 4)
    seq = allocator.create(list(range(9)))
    allocator.commit(allocator.prefill([seq]))
    allocator.truncate(seq, length)
    assert (seq.num_tokens, seq.num_computed_tokens, len(seq.block_ids)) == (length, length, -(-length // 4))
    allocator.check()


def two_steps() -> tuple[BlockAllocator, Sequence, Step, Step]:
    allocator = BlockAllocator(8, 4)
    seq = allocator.create(list(range(6)))
    return allocator, seq, allocator.prefill([seq]), allocator.append([seq], [7])


def test_append_before_the_prefill_is_committed() -> None:
    allocator, seq, first, second = two_steps()
    assert (seq.num_tokens, seq.num_computed_tokens) == (7, 0)
    allocator.commit(first)
    assert seq.num_computed_tokens == 6
    allocator.commit(second)
    assert seq.num_computed_tokens == 7


def test_abort_newest_first() -> None:
    allocator, seq, first, second = two_steps()
    allocator.abort(second)
    assert (seq.num_tokens, seq.num_computed_tokens) == (6, 0)
    allocator.abort(first)
    assert (seq.num_tokens, seq.num_computed_tokens) == (6, 0), "the prompt remains"
    again = allocator.prefill([seq])
    assert again.num_tokens == 6
    allocator.commit(again)
    assert seq.num_computed_tokens == 6
    allocator.check()


def test_fork_during_a_step_takes_part_in_it() -> None:
    allocator, seq, first, second = two_steps()
    (fork,) = allocator.fork(seq)
    allocator.commit(first)
    assert fork.num_computed_tokens == 6
    (late,) = allocator.fork(seq)
    allocator.abort(second)
    assert [s.num_tokens for s in (seq, fork, late)] == [6, 6, 6]
    step = allocator.append([seq, fork, late], [1, 2, 3])
    assert len(step.copies) == 2
    allocator.check()


def test_abort_of_a_copy_shares_the_block_again() -> None:
    allocator = BlockAllocator(8, 4)
    seq = allocator.create(list(range(6)))
    allocator.commit(allocator.prefill([seq]))
    (fork,) = allocator.fork(seq)
    shared = seq.block_ids
    step = allocator.append([fork], [1])
    in_place = allocator.append([seq], [2])
    assert (len(step.copies), len(in_place.copies)) == (1, 0)
    allocator.abort(step)
    assert fork.block_ids == seq.block_ids == shared
    assert (fork.num_tokens, seq.num_tokens) == (6, 7)
    allocator.commit(in_place)
    again = allocator.append([fork, seq], [1, 2])
    assert list(again.copies) == [(shared[1], fork.block_ids[1])]
    allocator.check()


def test_truncate_during_a_step() -> None:
    allocator = BlockAllocator(8, 4)
    seq = allocator.create(4)
    allocator.commit(allocator.prefill([seq]))
    step = allocator.append([seq], [[1, 2, 3, 4, 5]])
    allocator.truncate(seq, 6)
    assert len(seq.block_ids) == 2
    assert allocator.num_free_blocks == 8 - 3, "the third block is being written"
    allocator.commit(step)
    assert (seq.num_computed_tokens, allocator.num_free_blocks) == (6, 6)
    allocator.check()


def test_lookahead_reserves_blocks_that_later_tokens_use() -> None:
    allocator = BlockAllocator(8, 4)
    seq = allocator.create(4)
    allocator.commit(allocator.prefill([seq]))
    step = allocator.append([seq], [1], lookahead=5)
    assert (seq.num_tokens, len(seq.block_ids)) == (5, 3)
    assert step.block_table.tolist()[0][:3] == seq.block_ids
    blocks = seq.block_ids
    allocator.append([seq], num_tokens=7)
    assert seq.block_ids == blocks
    allocator.check()


def test_a_second_thread_is_refused() -> None:
    allocator = BlockAllocator(4, 4)
    allocator.create(1)
    calls: list[Callable[[], object]] = [
        lambda: allocator.create(1),
        lambda: allocator.can_allocate(1),
        lambda: allocator.append([], []),
        lambda: allocator.transaction().__enter__(),
        allocator.clear_cache,
        allocator.snapshot,
        allocator.record_events,
        allocator.check_thread,
    ]
    refused: list[WrongThread] = []

    def use() -> None:
        for call in calls:
            try:
                call()
            except WrongThread as error:
                refused.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert len(refused) == len(calls)
    assert all("adopt()" in str(error) for error in refused)
    assert len(allocator.sequences) == 1

    thread = threading.Thread(target=lambda: (allocator.adopt(), allocator.create(1)))
    thread.start()
    thread.join()
    assert len(allocator.sequences) == 2


def test_check_finds_damage() -> None:
    damages: list[Callable[[BlockAllocator], object]] = [
        lambda a: a._ledger.pool.refs.__setitem__(0, 2),
        lambda a: a._ledger.pool.refs.__setitem__(15, 1),
        lambda a: a._ledger.pool._blank.append(0),
        lambda a: a._ledger.pool._blank.pop(),
        lambda a: a._ledger.pool.holds.__setitem__(3, 1),
        lambda a: a._ledger.prefix._kids.clear(),
        lambda a: a._ledger.prefix.keys.__setitem__(15, (1, b"")),
        lambda a: a.sequences[0]._blocks.append(0),
        lambda a: setattr(a.sequences[0], "_computed", 99),
        lambda a: setattr(a.sequences[0], "_scheduled", 0),
        lambda a: setattr(a.sequences[0], "_private", 0),
        lambda a: a.sequences[0]._tokens.__setitem__(0, 99),
        lambda a: a._ledger.undo.append((print, ())),
        lambda a: a.sequences[1]._lockstep._table.entries.__setitem__(0, 9),  # type: ignore[union-attr]
        lambda a: a.sequences[1]._lockstep._slots.__setitem__(0, 9),  # type: ignore[union-attr]
        lambda a: a._ledger.in_flight.clear(),
    ]
    for number, damage in enumerate(damages):
        allocator = BlockAllocator(16, 4)
        seqs = [allocator.create(list(range(i, i + 9))) for i in range(2)]
        allocator.commit(allocator.prefill(seqs))
        allocator.append(seqs[1:], [1])
        allocator.check()
        damage(allocator)
        found = False
        try:
            allocator.check()
        except AuditError as error:
            found = bool(str(error))
        assert found, f"damage {number} was not found"


@pytest.mark.parametrize("make", [np.int32, np.uint8, np.int64, torch.tensor, Token])
def test_whatever_is_an_index_is_a_token_id(make: Callable[[int], object]) -> None:
    """Ids of other libraries, also where they stand for 0 and 1, as they would as bools."""
    allocator = BlockAllocator(8, 4)
    ids = [0, 1, 1, 0, 200]
    seq = allocator.create([make(i) for i in ids])  # type: ignore[misc]
    allocator.commit(allocator.prefill([seq]))
    allocator.commit(allocator.append([seq], [make(1)]))  # type: ignore[list-item]
    allocator.commit(allocator.append([seq], [[make(0), make(0)]]))  # type: ignore[list-item]
    allocator.free(seq)
    assert allocator.create([*ids, 1, 0, 0, 9]).num_cached_tokens == 8


@pytest.mark.parametrize("at", [0, 1, 63, 64, 499])
@pytest.mark.parametrize("others", [0, 1, 7, 256, 257, 40_000, 65_536, 65_537, 2**62, -1])
def test_a_bool_is_found_among_any_ids(others: int, at: int) -> None:
    ids: list[int] = [others] * 500
    assert token_ids("ids", ids).tolist() == ids
    for value in (True, False):
        ids[at] = value
        with pytest.raises(InvalidType, match=r"ids: .*got a bool"):
            token_ids("ids", ids)
