"""Sequences that are not the scheduler's leave a request too little room: it is named, and the others go on."""

from __future__ import annotations

import pickle

import pytest

from pagedkern.allocator import Verdict
from pagedkern.errors import OutOfBlocks
from pagedkern.scheduler import Request
from tests.scheduler.engine import Engine, prompt_of, values_of

POLICIES = ("swap", "recompute", "auto")


def stuck(engine: Engine) -> Request:
    """The request that the next call of `schedule` names, which changes nothing else."""
    batches = engine.num_batches
    with pytest.raises(OutOfBlocks, match="not the scheduler's") as caught:
        engine.scheduler.schedule()
    engine.scheduler.check()
    request = caught.value.request
    assert isinstance(request, Request)
    assert f"request {request.id} " in str(caught.value)
    assert not request.ended
    assert not engine.fits_alone(request)
    assert engine.num_batches == batches
    return request


def until_stuck(engine: Engine, limit: int = 500) -> Request:
    """Run until a request is named."""
    named = None
    for _ in range(limit):
        try:
            engine.step()
        except OutOfBlocks as error:
            engine.scheduler.check()
            named = error.request
            break
    assert isinstance(named, Request), "nobody is named"
    return named


def with_pinned_prefix(num_blocks: int, pinned: int, **options: object) -> Engine:
    """A prompt has been computed and is pinned."""
    engine = Engine(num_blocks, 4, **options)  # type: ignore[arg-type]
    assert engine.compute(prompt_of(4 * pinned, 9))
    return engine


def test_a_request_of_seven_blocks_where_six_are_free() -> None:
    engine = with_pinned_prefix(8, 2)
    assert engine.allocator.num_free_blocks == 6
    big = engine.scheduler.add(prompt_of(27), max_tokens=2)
    small = [engine.scheduler.add(prompt_of(5 + i, i), max_tokens=4) for i in range(3)]
    assert stuck(engine) is big
    assert engine.scheduler.stuck == [big]
    assert big.state == "waiting"
    assert engine.scheduler.waiting == [big, *small]
    while not all(request.ended for request in small):
        engine.step()
    for _ in range(3):
        assert stuck(engine) is big, "said as often as it is asked, and nothing else happens"
    engine.let_go()
    engine.run()
    assert engine.scheduler.stuck == []
    engine.finished([big, *small])


def test_a_request_that_begins_with_the_pinned_prefix_has_room() -> None:
    engine = with_pinned_prefix(8, 2)
    request = engine.scheduler.add([*prompt_of(8, 9), *prompt_of(19)], max_tokens=2)
    engine.run()
    assert request.num_cached_tokens == 8
    engine.finished([request])


def test_cancelling_whoever_is_named_empties_the_scheduler() -> None:
    engine = Engine(8, 4)
    assert engine.hold(5)
    requests = [engine.scheduler.add(prompt_of(9 + i, i), max_tokens=9 + i % 3) for i in range(12)]
    named = []
    for _ in range(200):
        if not engine.scheduler.has_work:
            break
        try:
            engine.step()
        except OutOfBlocks as error:
            named.append(error.request)
            engine.scheduler.cancel(error.request)
    assert not engine.scheduler.has_work
    assert named
    assert len(set(named)) == len(named)
    assert {request for request in requests if request.state == "cancelled"} == set(named)


def test_a_pin_made_after_the_request_was_added() -> None:
    engine = Engine(8, 4)
    first = engine.scheduler.add(prompt_of(12), max_tokens=2)
    engine.step()
    big = engine.scheduler.add(prompt_of(24, 1), max_tokens=2)
    small = engine.scheduler.add(prompt_of(3, 2), max_tokens=2)
    engine.pin(first.samples[0])
    assert until_stuck(engine) is big
    assert first.state == "finished"
    while not small.ended:
        engine.step()
    assert stuck(engine) is big
    engine.let_go()
    engine.run()
    engine.finished([first, big, small])


def test_several_are_named_one_by_one_in_the_order_of_arrival() -> None:
    engine = Engine(10, 4)
    assert engine.hold(5)
    big = [engine.scheduler.add(prompt_of(21 + i, i), max_tokens=3) for i in range(5)]
    small = [engine.scheduler.add(prompt_of(3 + i, i), max_tokens=3) for i in range(3)]
    assert [stuck(engine) for _ in big] == big
    assert engine.scheduler.stuck == big
    while not all(request.ended for request in small):
        engine.step()
    assert stuck(engine) is big[0]
    assert engine.scheduler.cancel(big[0])
    assert stuck(engine) is big[1]
    engine.let_go()
    engine.run()
    engine.finished([*big[1:], *small])
    assert [request.id for request in engine.firsts] == [6, 7, 8, 2, 3, 4, 5], "at their places again"


@pytest.mark.parametrize("policy", POLICIES)
def test_one_that_runs_and_cannot_grow_makes_way_for_others(policy: str) -> None:
    engine = Engine(8, 4, num_host_blocks=8, policy=policy)
    first = engine.scheduler.add(prompt_of(10), max_tokens=20)
    engine.step()
    others = [engine.scheduler.add(prompt_of(6, 1 + i), max_tokens=3) for i in range(3)]
    assert engine.hold(3)
    assert until_stuck(engine) is first
    assert first.state == "preempted"
    assert first.num_preemptions == 1
    tokens = list(first.samples[0].tokens)
    assert len(tokens) > 5
    while not all(request.ended for request in others):
        engine.step()
    assert stuck(engine) is first
    assert first.samples[0].tokens == tokens
    engine.let_go()
    engine.run()
    engine.finished([first, *others])


def test_one_that_runs_alone_keeps_its_blocks() -> None:
    engine = Engine(6, 4, token_budget=8)
    request = engine.scheduler.add(prompt_of(7), max_tokens=15)
    engine.step()
    assert engine.hold(4)
    assert until_stuck(engine) is request
    for _ in range(3):
        before = engine.allocator.snapshot()
        assert stuck(engine) is request
        assert engine.allocator.snapshot() == before
        assert (request.state, request.num_preemptions) == ("running", 0)
    engine.let_go()
    engine.run()
    engine.finished([request])
    assert engine.scheduler.stats["tokens_recomputed"] == 0


@pytest.mark.parametrize("watermark", [0.0, 0.2, 0.4])
def test_beside_a_watermark(watermark: float) -> None:
    """It is waived for one that is alone: what then has no room has none because of others."""
    engine = Engine(10, 4, watermark=watermark)
    assert engine.hold(6)
    fits = engine.scheduler.add(prompt_of(15), max_tokens=2)
    engine.run()
    engine.scheduler.add(prompt_of(18, 1), max_tokens=2)
    big = stuck(engine)
    engine.let_go()
    engine.run()
    engine.finished([fits, big])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("prompt", [6, 8])
def test_a_group_of_samples(prompt: int, policy: str) -> None:
    """Its prompt has room, its samples have not: it is named when they are to grow, and not started again in vain."""
    engine = Engine(12, 4, num_host_blocks=12, policy=policy)
    assert engine.hold(8)
    group = engine.scheduler.add(prompt_of(prompt), max_tokens=6, n=5)
    other = engine.scheduler.add(prompt_of(5, 1), max_tokens=7)
    assert until_stuck(engine) is group
    assert [len(sample.tokens) for sample in group.samples] == [1] * 5
    computed = engine.scheduler.stats["tokens_scheduled"]
    while not other.ended:
        engine.step()
    for _ in range(3):
        assert stuck(engine) is group
    assert engine.scheduler.stats["tokens_scheduled"] < computed + 15, "only the other was computed"
    engine.let_go()
    engine.run()
    engine.finished([group, other])


def test_one_in_host_memory_that_has_no_room_to_come_back() -> None:
    """It would fit, but not grow: it must not go to and fro."""
    engine = Engine(8, 4, num_host_blocks=8, policy="swap")
    requests = [engine.scheduler.add(prompt_of(10, kind), max_tokens=20) for kind in (0, 1)]
    while requests[1].state != "swapped out":
        engine.step()
    assert requests[1].samples[0].seq is not None
    num_blocks = len(requests[1].samples[0].seq.block_ids)
    engine.scheduler.cancel(requests[0])
    assert engine.hold(engine.allocator.num_free_blocks - num_blocks)
    other = engine.scheduler.add(prompt_of(3, 2), max_tokens=2)
    if requests[1].samples[0].seq.num_computed_tokens % 4 == 0:
        assert stuck(engine) is requests[1]
        assert requests[1].state == "swapped out"
        while not other.ended:
            engine.step()
        for _ in range(3):
            assert stuck(engine) is requests[1]
        assert engine.scheduler.preempted == [requests[1]]
    else:
        pytest.fail("the example does not show what it should")
    engine.let_go()
    engine.run()
    engine.finished([requests[1], other])


def test_foreign_host_blocks_only_change_how_room_is_made() -> None:
    engine = with_pinned_prefix(8, 3, num_host_blocks=4, policy="swap")
    plan = engine.allocator.swap_out(engine.foreign)
    engine.move(plan)
    engine.allocator.commit(plan)
    assert engine.allocator.num_free_host_blocks == 1
    requests = [engine.scheduler.add(prompt_of(10, kind), max_tokens=16) for kind in (0, 1)]
    engine.run()
    engine.finished(requests)
    assert engine.scheduler.stats["preempted_by_recomputation"] > 0


def test_blocks_that_a_foreign_step_in_flight_keeps() -> None:
    """Its sequence is freed, its blocks are fenced: they come when it is committed, and so does the request."""
    engine = Engine(8, 4)
    seq = engine.allocator.create(20)
    step = engine.allocator.prefill([seq])
    engine.allocator.free(seq)
    big = engine.scheduler.add(prompt_of(20), max_tokens=2)
    others = [engine.scheduler.add(prompt_of(3, i), max_tokens=20) for i in range(2)]
    assert until_stuck(engine) is big
    engine.step()
    engine.allocator.commit(step)
    engine.step()
    assert engine.scheduler.stuck == []
    engine.run()
    engine.finished([big, *others])


def test_it_gets_its_turn_under_a_load_that_never_ends() -> None:
    """Others arrive as fast as they finish. It is set aside as long as it has no room; then it waits for what runs
    already, and for nobody behind it.
    """
    engine = Engine(16, 4, token_budget=16)
    assert engine.hold(8)
    big = engine.scheduler.add(prompt_of(35), max_tokens=8)
    small: list[Request] = []

    def load() -> None:
        while len(engine.scheduler.waiting) < 4:
            small.append(engine.scheduler.add(prompt_of(2 + len(small) % 5, len(small)), max_tokens=6))

    load()
    assert until_stuck(engine) is big
    for _ in range(60):
        load()
        engine.step()
    assert sum(request.ended for request in small) > 20, "nobody starves behind it"
    assert big.state == "waiting"
    engine.let_go()
    waited = 0
    while not big.ended:
        load()
        engine.step()
        waited += 1
        assert waited < 40, "it starves"
    assert engine.scheduler.running
    for request in engine.scheduler.waiting:
        engine.scheduler.cancel(request)
    engine.run()
    engine.finished([big, *(request for request in small if request.state == "finished")])


def test_foreign_memory_that_comes_and_goes_starves_nobody() -> None:
    engine = Engine(12, 4)
    assert engine.hold(6)
    big = engine.scheduler.add(prompt_of(30), max_tokens=2)
    small = [engine.scheduler.add(prompt_of(5, i), max_tokens=3 + i % 3) for i in range(20)]
    named = []
    for turn in range(200):
        if turn % 2:
            engine.hold(1)
        elif len(engine.foreign) > 1:
            engine.let_go()
        try:
            engine.step()
        except OutOfBlocks as error:
            named.append(error.request)
        if all(request.ended for request in small):
            break
    else:
        raise AssertionError("others wait for it")
    assert set(named) == {big}
    assert len(named) < 10, "it is tried again when there is more room, and not for each block that comes and goes"
    while engine.foreign:
        engine.let_go()
    engine.run()
    engine.finished([big, *small])


def test_only_those_come_back_that_have_more_room_than_when_they_were_set_aside() -> None:
    engine = Engine(10, 4)
    assert engine.hold(5)
    large, small = (engine.scheduler.add(prompt_of(length), max_tokens=2) for length in (24, 16))
    assert stuck(engine) is large
    assert engine.hold(2)
    assert stuck(engine) is small
    engine.let_go()
    engine.run_one(small)
    assert engine.scheduler.stuck == [large], "five are held, as before"
    engine.let_go()
    engine.run()
    engine.finished([large, small])


def test_it_may_have_room_as_soon_as_a_foreign_prompt_is_computed() -> None:
    """It begins alike, and shares those blocks then. One that runs, and cannot grow, must not stand in its way."""
    engine = Engine(8, 4)
    seq = engine.allocator.create(prompt_of(16))
    step = engine.allocator.prefill([seq])
    longer = engine.scheduler.add([*prompt_of(16), 1, 2, 3, 4], max_tokens=2)
    other = engine.scheduler.add(prompt_of(2, 5), max_tokens=28)
    assert until_stuck(engine) is longer
    assert until_stuck(engine) is other
    assert engine.scheduler.stuck == [longer, other]
    engine.foreign.append(seq)
    engine.write(step, values_of(prompt_of(16)))
    engine.allocator.commit(step)
    engine.run_one(longer)
    assert longer.num_cached_tokens == 16
    engine.let_go()
    engine.run()
    engine.finished([longer, other])


def test_its_prompt_comes_before_those_of_later_arrivals() -> None:
    engine = Engine(16, 4, token_budget=8)
    assert engine.hold(10)
    big = engine.scheduler.add(prompt_of(28), max_tokens=2)
    assert stuck(engine) is big
    later = engine.scheduler.add(prompt_of(20, 1), max_tokens=2)
    engine.step()
    engine.let_go()
    engine.step()
    batch = engine.step()
    assert [(row.sample.request, row.end - row.start) for row in batch.rows] == [(big, 8)]
    engine.run()
    engine.finished([big, later])


def test_can_add_knows_of_those_that_come_back() -> None:
    engine = Engine(8, 4)
    assert engine.hold(4)
    big = engine.scheduler.add(prompt_of(18), max_tokens=2)
    assert stuck(engine) is big
    assert engine.scheduler.can_add(4, max_tokens=2) is Verdict.OK
    engine.let_go()
    assert engine.scheduler.can_add(4, max_tokens=2) is Verdict.LATER, "it goes first"
    engine.run()
    engine.finished([big])


def test_cancelled_while_it_is_set_aside() -> None:
    engine = Engine(8, 4, num_host_blocks=8, policy="swap")
    assert engine.hold(4)
    big = engine.scheduler.add(prompt_of(18), max_tokens=2)
    assert stuck(engine) is big
    assert engine.scheduler.cancel(big)
    assert not engine.scheduler.has_work
    assert engine.scheduler.stuck == []
    engine.scheduler.check()
    assert engine.step().num_tokens == 0
    assert not engine.scheduler.cancel(big)


def test_the_error_can_be_sent_to_another_process() -> None:
    engine = Engine(4, 4)
    assert engine.hold(4)
    engine.scheduler.add([1], max_tokens=1)
    with pytest.raises(OutOfBlocks) as caught:
        engine.scheduler.schedule()
    copy = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(copy, OutOfBlocks)
    assert str(copy) == str(caught.value)
    assert copy.request is None
    with pytest.raises(OutOfBlocks) as caught:
        engine.allocator.create(1)
    assert caught.value.request is None
