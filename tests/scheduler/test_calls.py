"""Cancelling, aborting, wrong calls, faults."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import partial

import pytest

from pagedkern.allocator import BlockAllocator
from pagedkern.errors import AuditError, InvalidArgument, InvalidType, OutOfBlocks, StaleSequence
from pagedkern.scheduler import Batch, Costs, Request, Sample, Scheduler
from tests.allocator.world import fingerprint
from tests.scheduler.engine import Engine, prompt_of


def state_of(scheduler: Scheduler) -> object:
    """All that a call may change."""
    state = scheduler._state
    requests = [*scheduler.running, *scheduler.preempted, *scheduler.waiting]
    return (
        fingerprint(scheduler.allocator),
        [
            (r.id, r.state, r._prefilling, r.num_preemptions, r.num_cached_tokens, *map(sample_of, r.samples))
            for r in requests
        ],
        (len(scheduler.running), len(scheduler.preempted), len(scheduler.waiting)),
        [request.id for request in scheduler.stuck],
        scheduler.stats,
        (state.num_batches, state.num_requests, state.batch),
        (state.num_seqs, state.num_prefilling, state.num_promised),
    )


def sample_of(sample: Sample) -> object:
    return sample.tokens[:], sample.finish_reason, sample.seq.id if sample.seq else None, sample._computed


def crowded(policy: str, **options: object) -> tuple[Engine, list[Request]]:
    """Some run, one is preempted, one waits."""
    engine = Engine(9, 4, num_host_blocks=9, policy=policy, token_budget=12, **options)  # type: ignore[arg-type]
    requests = [engine.scheduler.add(prompt_of(7, i), max_tokens=11, n=1 + (i == 1)) for i in range(6)]
    while not engine.scheduler.preempted:
        engine.step()
    assert engine.scheduler.running
    assert engine.scheduler.waiting
    return engine, requests


@pytest.mark.parametrize("place", ["running", "preempted", "waiting"])
@pytest.mark.parametrize("policy", ["swap", "recompute"])
def test_cancel_between_batches(policy: str, place: str) -> None:
    engine, requests = crowded(policy)
    request = getattr(engine.scheduler, place)[0]
    assert engine.scheduler.cancel(request)
    engine.scheduler.check()
    assert request.state == "cancelled"
    assert all(sample.seq is None for sample in request.samples)
    assert request not in [*engine.scheduler.running, *engine.scheduler.preempted, *engine.scheduler.waiting]
    assert not engine.scheduler.cancel(request), "it had ended"
    engine.run()
    engine.finished([r for r in requests if r is not request])
    assert not engine.scheduler.cancel(requests[-1])
    assert engine.scheduler.stats["requests_cancelled"] == 1


@pytest.mark.parametrize("policy", ["swap", "recompute"])
@pytest.mark.parametrize("victim", range(4))
def test_cancel_while_a_batch_is_in_flight(policy: str, victim: int) -> None:
    """In every batch of the run: whatever it is doing with the request."""
    when = 0
    while True:
        engine = Engine(8, 4, num_host_blocks=8, policy=policy, token_budget=12)
        requests = [engine.scheduler.add(prompt_of(7, i), max_tokens=9, n=1 + (i == 1)) for i in range(4)]
        for _ in range(when):
            if engine.scheduler.has_work:
                engine.step()
        if requests[victim].ended:
            break
        batch = engine.scheduler.schedule()
        tokens = engine.execute(batch)
        free = engine.allocator.num_free_blocks
        assert engine.scheduler.cancel(requests[victim])
        engine.scheduler.check()
        if any(row.sample.request is requests[victim] for row in batch.rows):
            assert engine.allocator.num_free_blocks <= free, "what the batch writes is not handed out before it has run"
        texts = [sample.tokens[:] for sample in requests[victim].samples]
        ended = engine.complete(batch, tokens)
        assert all(sample.request is not requests[victim] for sample in ended)
        assert [sample.tokens for sample in requests[victim].samples] == texts
        engine.run()
        engine.finished([r for r in requests if r is not requests[victim]])
        when += 1
    assert when >= 9


def test_cancel_of_a_copying_batch_waits_for_the_fence() -> None:
    """Reported as vllm 45357, 47728, 52360: the source of a copy was handed out while the copy was to come."""
    engine = Engine(7, 4)
    request = engine.scheduler.add(prompt_of(6), max_tokens=6, n=3)
    engine.step()
    batch = engine.scheduler.schedule()
    ((kind, src, dst),) = batch.moves
    assert (kind, len(src)) == ("copy", 2)
    engine.scheduler.cancel(request)
    assert engine.allocator.num_free_blocks == 3, "only what the batch does not touch"
    other = engine.allocator.create(12)
    assert not {*src, *dst} & set(other.block_ids)
    engine.allocator.free(other)
    engine.scheduler.complete(batch, [0] * len(batch.outputs))
    engine.scheduler.check()
    assert engine.allocator.num_free_blocks == 7


@pytest.mark.parametrize("policy", ["swap", "recompute", "auto"])
def test_abort_any_batch(policy: str) -> None:
    """Each batch is aborted once, after it ran or before, then made again: the texts are the same."""
    engine = Engine(8, 4, num_host_blocks=5, policy=policy, token_budget=12)
    requests = [engine.scheduler.add(prompt_of(7 + i, i), max_tokens=12, n=1 + (i == 1)) for i in range(5)]
    turn = 0
    while engine.scheduler.has_work:
        before, queues = engine.scheduler.stats, [r.id for r in engine.scheduler.running]
        batch = engine.scheduler.schedule()
        dropped = bool(batch.dropped)
        turn += 1
        if turn % 3:
            engine.execute(batch)
        engine.scheduler.abort(batch)
        engine.scheduler.check()
        if not dropped:
            assert engine.scheduler.stats == before
            assert [r.id for r in engine.scheduler.running] == queues
        with pytest.raises(InvalidArgument, match="not in flight"):
            engine.scheduler.abort(batch)
        engine.step()
        assert turn < 500
    engine.finished(requests)
    assert engine.firsts == requests


def test_abort_where_one_was_swapped_and_one_dropped() -> None:
    """The later one comes back, the earlier one cannot: so the later one has to wait for it."""
    engine = Engine(5, 4, num_host_blocks=1, policy="swap")
    requests = [engine.scheduler.add(prompt_of(4, i), max_tokens=8) for i in range(4)]
    engine.step()
    batch = engine.scheduler.schedule()
    assert (batch.swapped_out, batch.dropped) == (requests[3:], requests[2:3])
    engine.scheduler.abort(batch)
    engine.scheduler.check()
    assert [request.state for request in requests] == ["running", "running", "preempted", "preempted"]
    engine.run()
    engine.finished(requests)


def test_abort_after_a_cancellation() -> None:
    for policy in ("swap", "recompute"):
        for victim in range(4):
            for when in range(0, 24, 2):
                engine = Engine(8, 4, num_host_blocks=8, policy=policy, token_budget=12)
                requests = [engine.scheduler.add(prompt_of(7, i), max_tokens=9, n=1 + (i == 1)) for i in range(4)]
                for _ in range(when):
                    engine.step()
                batch = engine.scheduler.schedule()
                engine.scheduler.cancel(requests[victim])
                engine.scheduler.abort(batch)
                engine.scheduler.check()
                engine.run()
                engine.finished([r for i, r in enumerate(requests) if i != victim])


def test_stopped_by_the_engine() -> None:
    engine = Engine(16, 4)
    request = engine.scheduler.add(prompt_of(6), max_tokens=9, n=3)
    batch = engine.scheduler.schedule()
    ended = engine.scheduler.complete(batch, engine.execute(batch), stopped=[0, 2])
    assert ended == [request.samples[0], request.samples[2]]
    assert [sample.finish_reason for sample in request.samples] == ["stop", None, "stop"]
    engine.scheduler.check()
    engine.run()
    assert [len(sample.tokens) for sample in request.samples] == [1, 9, 1]
    assert engine.allocator.num_free_blocks == 16


def test_an_empty_batch() -> None:
    engine = Engine(4, 4)
    batch = engine.step()
    assert (batch.num_tokens, batch.num_seqs, batch.max_seqlen_q, batch.plans) == (0, 0, 0, ())
    assert list(batch.cu_seqlens_q) == [0]
    assert len(batch.block_table) == len(batch.seq_lens) == len(batch.slot_mapping) == len(batch.token_ids) == 0
    assert not engine.scheduler.has_work


def test_blocks_held_by_somebody_else() -> None:
    """Nothing can go on: said, not looped over; and it goes on when they are free."""
    engine = Engine(6, 4)
    hoard = engine.allocator.create(16)
    requests = [engine.scheduler.add(prompt_of(7), max_tokens=9)]
    engine.step()
    engine.step()
    for _ in range(2):
        before = state_of(engine.scheduler)
        with pytest.raises(OutOfBlocks, match="not the scheduler's"):
            engine.scheduler.schedule()
        assert state_of(engine.scheduler) == before
    engine.allocator.free(hoard)
    engine.run()
    engine.finished(requests)
    hoard = engine.allocator.create(24)
    requests = [engine.scheduler.add(prompt_of(3), max_tokens=2)]
    with pytest.raises(OutOfBlocks, match="0 of 6 blocks are free"):
        engine.scheduler.schedule()
    engine.allocator.free(hoard)
    engine.run()
    engine.finished(requests)


def test_a_plain_decode_step_stays_on_the_fast_path() -> None:
    engine = Engine(64, 4)
    for i in range(4):
        engine.scheduler.add(prompt_of(6, i), max_tokens=20)
    engine.step()
    engine.step()
    batch = engine.scheduler.schedule()
    (step,) = batch.steps
    assert batch.block_table is step.block_table
    assert batch.slot_mapping is step.slot_mapping
    assert step._lockstep is not None


BUILD: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "allocator": (lambda: Scheduler(8), InvalidType, "allocator: got int"),  # type: ignore[arg-type]
    "policy": (lambda: Scheduler(BlockAllocator(8, 4), policy="lru"), InvalidArgument, "policy: got 'lru'"),
    "token_budget": (lambda: Scheduler(BlockAllocator(8, 4), token_budget=0), InvalidArgument, "token_budget: got 0"),
    "max_num_seqs": (
        lambda: Scheduler(BlockAllocator(8, 4), max_num_seqs=1.5),  # type: ignore[arg-type]
        InvalidType,
        "max_num_seqs: got 1.5",
    ),
    "costs": (lambda: Scheduler(BlockAllocator(8, 4), costs=3), InvalidType, "costs: got int"),  # type: ignore[arg-type]
    "rate 0": (lambda: Costs(prefill_tokens_per_second=0), InvalidArgument, "prefill_tokens_per_second: got 0"),
    "rate nan": (lambda: Costs(link_bytes_per_second=float("nan")), InvalidArgument, "link_bytes_per_second: got nan"),
    "rate text": (
        lambda: Costs(link_bytes_per_second="fast"),  # type: ignore[arg-type]
        InvalidType,
        "link_bytes_per_second: got 'fast'",
    ),
    "bytes": (lambda: Costs(bytes_per_block=0), InvalidArgument, "bytes_per_block: got 0"),
}


@pytest.mark.parametrize("name", BUILD)
def test_refused_when_built(name: str) -> None:
    call, error, message = BUILD[name]
    with pytest.raises(error, match=message):
        call()


CALLS: dict[str, tuple[Callable[[Scheduler, Batch], object], type[Exception], str]] = {
    "no prompt": (lambda s, b: s.add([], max_tokens=1), InvalidArgument, "prompt: got no token"),
    "text": (lambda s, b: s.add("abc", max_tokens=1), InvalidType, "prompt: got str"),  # type: ignore[arg-type]
    "max_tokens": (lambda s, b: s.add([1], max_tokens=0), InvalidArgument, "max_tokens: got 0"),
    "n": (lambda s, b: s.add([1], max_tokens=1, n=0), InvalidArgument, "n: got 0"),
    "many": (lambda s, b: s.add([1], max_tokens=1, n=4), InvalidArgument, "n: got 4, expected at most"),
    "eos": (lambda s, b: s.add([1], max_tokens=1, eos=2.5), InvalidType, "eos"),  # type: ignore[arg-type]
    "salt": (lambda s, b: s.add([1], max_tokens=1, salt=2.5), InvalidType, "salt"),  # type: ignore[arg-type]
    "priority": (lambda s, b: s.add([1], max_tokens=1, priority=4), InvalidArgument, "priority: got 4"),
    "schedule": (lambda s, b: s.schedule(), InvalidArgument, "batch 1 is in flight"),
    "few": (lambda s, b: s.complete(b, []), InvalidArgument, "tokens: got 0 ids, expected 1"),
    "float": (lambda s, b: s.complete(b, [1.0]), InvalidType, "tokens"),  # type: ignore[list-item]
    "stopped": (lambda s, b: s.complete(b, [1], stopped=[1]), InvalidArgument, "stopped: got 1"),
    "stopped is None": (
        lambda s, b: s.complete(b, [1], stopped=None),
        InvalidType,
        "stopped: got NoneType, expected",
    ),
    "stopped is a number": (
        lambda s, b: s.complete(b, [1], stopped=0),
        InvalidType,
        "stopped: got int, expected",
    ),
    "not a batch": (lambda s, b: s.complete(b.plans[0], [1]), InvalidType, "batch: got Step"),  # type: ignore[arg-type]
    "foreign batch": (lambda s, b: s.abort(Batch(7)), InvalidArgument, "batch: 7 is not in flight"),
    "not a request": (lambda s, b: s.cancel(1), InvalidType, "request: got int"),  # type: ignore[arg-type]
    "foreign request": (
        lambda s, b: s.cancel(Scheduler(s.allocator).add([1], max_tokens=1)),
        InvalidArgument,
        "request: 1 was made by another scheduler",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_refused_and_nothing_changed(name: str) -> None:
    call, error, message = CALLS[name]
    scheduler = Scheduler(BlockAllocator(8, 4), max_num_seqs=3)
    scheduler.add([1, 2, 3], max_tokens=2)
    batch = scheduler.schedule()
    before = state_of(scheduler)
    with pytest.raises(error, match=message):
        call(scheduler, batch)
    assert state_of(scheduler) == before
    scheduler.check()
    assert scheduler.complete(batch, array("q", [5])) == []


class Fault(Exception):
    """Raised in the middle of a call."""


@pytest.mark.parametrize("policy", ["swap", "recompute"])
def test_a_fault_at_any_call_of_the_allocator(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of the allocator raises once, before or after it was done; the call of the scheduler is then repeated.

    A call done by itself, not in a transaction, counts as done only when it has returned: there only before.
    """
    countdown = [0]

    def faulty(name: str) -> Callable[..., object]:
        real = getattr(BlockAllocator, name)

        def call(self: BlockAllocator, *args: object, **kwargs: object) -> object:
            countdown[0] -= 1
            if countdown[0] == 0:
                raise Fault
            result = real(self, *args, **kwargs)
            if self._ledger.in_transaction:
                countdown[0] -= 1
                if countdown[0] == 0:
                    raise Fault
            return result

        return call

    for name in ("create", "fork", "truncate", "free", "append", "prefill", "swap_in", "swap_out", "commit", "abort"):
        monkeypatch.setattr(BlockAllocator, name, faulty(name))

    def insist(call: Callable[[], object]) -> object:
        number = 0
        while True:
            number += 1
            before = state_of(scheduler)
            countdown[0] = number
            try:
                result = call()
            except Fault:
                assert state_of(scheduler) == before
                scheduler.check()
                continue
            countdown[0] = 0
            faults.append(number - 1)
            return result

    faults: list[int] = []
    engine = Engine(9, 4, num_host_blocks=12, policy=policy, token_budget=12, audits=False)
    scheduler = engine.scheduler
    requests = [scheduler.add(prompt_of(6 + i, i), max_tokens=8, n=1 + i % 2) for i in range(6)]
    victim = scheduler.add(prompt_of(9), max_tokens=8, n=2)
    turn = 0
    while scheduler.has_work:
        turn += 1
        batch = insist(scheduler.schedule)
        assert isinstance(batch, Batch)
        if turn % 4 == 1:
            insist(partial(scheduler.abort, batch))
            continue
        if victim.samples[0].tokens:
            insist(partial(scheduler.cancel, victim))
        insist(partial(scheduler.complete, batch, engine.execute(batch)))
        scheduler.check()
    engine.finished(requests)
    assert victim.state == "cancelled"
    assert max(faults) > 5
    assert sum(faults) > 200


def test_check_can_fail() -> None:
    faults: list[Callable[[Scheduler], object]] = [
        lambda s: s._state.running._by_id.move_to_end(s.running[0].id),
        lambda s: s._state.line.add(s.running[0]),
        lambda s: s._state.aside.add(s.running[0]),
        lambda s: setattr(s._state, "num_seqs", s._state.num_seqs - 1),
        lambda s: setattr(s._state, "num_promised", 1),
        lambda s: s.running[0]._unfinished.append(s.running[1].samples[0]),
        lambda s: setattr(s.running[0].samples[0], "_computed", 1),
        lambda s: s.allocator.free(s.running[0].samples[0].seq),  # type: ignore[arg-type]
        lambda s: setattr(s.running[1], "_prefilling", True),
        lambda s: s.running[0].samples[0].tokens.extend([1] * 12),
        lambda s: s.running[0].samples[0].tokens.clear(),
        lambda s: setattr(s.preempted[0], "_stage", s.running[0]._stage),
        lambda s: setattr(s._state, "max_num_seqs", 1),
    ]
    for fault in faults:
        engine, _ = crowded("swap")
        engine.scheduler.check()
        fault(engine.scheduler)
        with pytest.raises(AuditError):
            engine.scheduler.check()


def test_a_sequence_touched_from_outside_is_noticed() -> None:
    engine, _ = crowded("swap")
    seq = engine.scheduler.running[0].samples[0].seq
    assert seq is not None
    engine.allocator.free(seq)
    before = state_of(engine.scheduler)
    with pytest.raises(StaleSequence):
        engine.scheduler.schedule()
    assert state_of(engine.scheduler) == before
