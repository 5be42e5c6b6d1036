"""Everybody finishes with the right text, in order, whatever memory there is."""

from __future__ import annotations

from typing import Any

import pytest

from pagedkern.allocator import BlockAllocator, Verdict
from pagedkern.errors import InvalidArgument
from pagedkern.scheduler import Costs
from tests.scheduler.engine import VOCABULARY, Engine, expected, prompt_of

POLICIES = ("swap", "recompute", "auto")


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("num_host_blocks", [0, 7, 100])
@pytest.mark.parametrize("policy", POLICIES)
def test_memory_for_a_third(policy: str, num_host_blocks: int, samples: int, caching: bool) -> None:
    size = 4
    lengths = [5, 17, 8, 23, 12, 4, 9, 31, 16, 2, 11, 20]
    new = [9, 14, 3, 8, 16, 30, 1, 6, 12, 25, 10, 7]
    whole = [-(-(p + m - 1) // size) for p, m in zip(lengths, new, strict=True)]
    most = [w + (samples - 1) * (w - p // size) for w, p in zip(whole, lengths, strict=True)]
    memory = max(sum(most) // 3, max(most))
    engine = Engine(
        memory,
        size,
        num_host_blocks=num_host_blocks,
        caching=caching,
        policy=policy,
        token_budget=16,
        watermark=0.05 if samples == 1 else 0.0,  # groups are admitted with one block more for each further sample
    )
    requests = [
        engine.scheduler.add(prompt_of(p, i % 3), max_tokens=m, n=samples)
        for i, (p, m) in enumerate(zip(lengths, new, strict=True))
    ]
    engine.run(1500)
    engine.finished(requests)
    assert engine.firsts == requests, "first tokens come in the order of arrival"
    stats = engine.scheduler.stats
    assert stats["requests_finished"] == len(requests)
    preempted = sum(request.num_preemptions for request in requests)
    assert preempted == stats["preempted_by_swap"] + stats["preempted_by_recomputation"] > 0
    if num_host_blocks == 0 or policy == "recompute":
        assert stats["preempted_by_swap"] == 0
    elif num_host_blocks == 100:
        assert stats["preempted_by_swap"] > 0
    assert requests[0].num_preemptions == 0, "the first is never preempted"
    computed = sum(len(r.prompt) + samples * (r.max_tokens - 1) - r.num_cached_tokens for r in requests)
    assert stats["tokens_scheduled"] - stats["tokens_recomputed"] <= computed
    if not caching:
        assert stats["tokens_scheduled"] - stats["tokens_recomputed"] == computed


@pytest.mark.parametrize("budget", [1, 2, 7, 64])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_token_budget(policy: str, budget: int) -> None:
    engine = Engine(12, 4, num_host_blocks=12, policy=policy, token_budget=budget)
    requests = [
        engine.scheduler.add(prompt_of(3 * i + 1), max_tokens=8, eos=4, n=i % 2 + 1, salt=i % 3) for i in range(9)
    ]
    engine.run()
    engine.finished(requests)
    assert engine.firsts == requests
    reasons = {sample.finish_reason for request in requests for sample in request.samples}
    assert reasons == {"stop", "length"}


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_every_block_size(block_size: int) -> None:
    engine = Engine(48 // block_size, block_size, num_host_blocks=48 // block_size, policy="swap", token_budget=8)
    requests = [engine.scheduler.add(prompt_of(6 + i), max_tokens=10, n=2 if block_size < 16 else 1) for i in range(6)]
    engine.run()
    engine.finished(requests)
    assert engine.scheduler.stats["preempted_by_swap"] > 0


def test_a_request_that_needs_the_whole_pool() -> None:
    """Alone it fits to the last slot; the token sampled last is not written."""
    for samples in (1, 2, 5):
        for prompt in (6, 8):
            last = 13
            shared = prompt // 4
            most = 4 if samples == 1 else shared + samples * (4 - shared)
            engine = Engine(most, 4, policy="recompute", token_budget=5)
            first = engine.scheduler.add(prompt_of(5), max_tokens=6)
            request = engine.scheduler.add(prompt_of(prompt), max_tokens=17 - prompt, n=samples)
            assert prompt + request.max_tokens - 1 == 16 == last + 3
            assert engine.scheduler.can_add(prompt, max_tokens=18 - prompt, n=samples) is Verdict.NEVER
            with pytest.raises(InvalidArgument, match="can never run"):
                engine.scheduler.add(prompt_of(prompt), max_tokens=18 - prompt, n=samples)
            engine.run()
            engine.finished([first, request])


def test_a_group_that_needs_the_whole_pool_is_resumed() -> None:
    """Its first sample is ahead of the others then, and writes into a block that it shares with them."""
    preempted = 0
    for prompt in (9, 12, 13):
        shared = prompt // 4
        for before in range(1, 9):
            engine = Engine(shared + 3 * (4 - shared), 4, policy="recompute", token_budget=16)
            first = engine.scheduler.add(prompt_of(before), max_tokens=9)
            group = engine.scheduler.add(prompt_of(prompt, 1), max_tokens=17 - prompt, n=3)
            engine.run()
            engine.finished([first, group])
            preempted += group.num_preemptions
            assert engine.allocator.stats["out_of_blocks"] == 0
    assert preempted > 3


@pytest.mark.parametrize("prompt", [5, 8, 14])
@pytest.mark.parametrize("policy", ["swap", "recompute"])
def test_a_group_is_admitted_with_the_last_blocks_of_its_samples(
    policy: str, prompt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a tight pool there are fewer preemptions than if prompts alone were counted, and less is computed again."""

    def run() -> tuple[int, int]:
        engine = Engine(14, 4, num_host_blocks=30, policy=policy, token_budget=32)
        requests = [engine.scheduler.add(prompt_of(prompt, i), max_tokens=3, n=4) for i in range(12)]
        engine.run()
        engine.finished(requests)
        stats = engine.scheduler.stats
        return stats["preempted_by_swap"] + stats["preempted_by_recomputation"], stats["tokens_recomputed"]

    ours = run()
    plain = BlockAllocator.can_allocate

    def prompts_alone(self: BlockAllocator, tokens: object, *, spare_blocks: int = 0, **more: Any) -> Verdict:
        return plain(self, tokens, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(BlockAllocator, "can_allocate", prompts_alone)
    theirs = run()
    assert ours[0] < theirs[0]
    assert ours[1] <= theirs[1]


def test_a_prompt_is_taken_up_as_soon_as_others_have_computed_its_beginning() -> None:
    """Alone it had no room; sharing what the first has computed since, it has, though no block has become free."""
    engine = Engine(20, 4)
    requests = [engine.scheduler.add([*range(40), i], max_tokens=20) for i in range(2)]
    engine.step()
    assert [request.state for request in requests] == ["running", "waiting"]
    engine.step()
    assert [request.state for request in requests] == ["running", "running"]
    assert requests[1].num_cached_tokens == 40
    engine.run()


def test_a_request_of_very_many_samples_takes_no_memory_to_refuse() -> None:
    scheduler = Engine(8, 4).scheduler
    assert scheduler.most_blocks(9, max_tokens=1, n=10**12) == 2 + 10**12
    assert scheduler.can_add(9, max_tokens=1, n=10**12) is Verdict.NEVER


def test_can_add_says_what_the_next_batch_does() -> None:
    for free in range(12):
        for prompt, n in ((4, 1), (5, 2), (8, 4), (9, 5), (13, 3)):
            engine = Engine(30, 4, token_budget=200)
            engine.scheduler.add(prompt_of(5, 1), max_tokens=3)
            engine.step()
            engine.allocator.create((engine.allocator.num_free_blocks - free) * 4)
            verdict = engine.scheduler.can_add(prompt, max_tokens=2, n=n)
            request = engine.scheduler.add(prompt_of(prompt, 2), max_tokens=2, n=n)
            engine.scheduler.schedule()
            assert (request.state == "running") == (verdict is Verdict.OK), (free, prompt, n)


def test_most_blocks_is_what_a_request_needs_alone() -> None:
    for prompt, last, n in ((6, 11, 1), (6, 11, 2), (8, 9, 5), (1, 1, 3), (16, 1, 4), (15, 2, 4)):
        most = Engine(1, 4).scheduler.most_blocks(prompt, max_tokens=last, n=n)
        engine = Engine(most, 4, policy="recompute")
        request = engine.scheduler.add(prompt_of(prompt), max_tokens=last, n=n)
        engine.run()
        engine.finished([request])
        assert engine.allocator.stats["peak_blocks_used"] == most or last == 1, (prompt, last, n)
        if most > 1:
            assert Engine(most - 1, 4).scheduler.can_add(prompt, max_tokens=last, n=n) is Verdict.NEVER


def test_two_that_each_need_what_the_other_holds() -> None:
    """Reported as vllm 57104: both prompts fit, neither completion does."""
    for policy in POLICIES:
        engine = Engine(6, 4, num_host_blocks=6, policy=policy)
        requests = [engine.scheduler.add(prompt_of(10, kind), max_tokens=12) for kind in (0, 1)]
        batch = engine.step()
        assert [row.sample.request for row in batch.rows] == requests
        assert engine.allocator.num_free_blocks == 0, "each holds half of the pool, and needs more"
        engine.run()
        engine.finished(requests)
        assert [request.num_preemptions for request in requests] == [0, 1]


def test_a_prompt_that_can_never_fit_is_refused_and_the_queue_goes_on() -> None:
    """Reported as vllm 39734."""
    engine = Engine(8, 4, watermark=0.25)
    add = engine.scheduler.add
    for length, last in ((33, 1), (25, 1), (10, 24), (1, 100)):  # the pool, the watermark, the completion
        assert engine.scheduler.can_add(length, max_tokens=last) is Verdict.NEVER
        with pytest.raises(InvalidArgument, match=f"prompt: {length} tokens and max_tokens={last} .*can never run"):
            add(prompt_of(length), max_tokens=last)
    assert not engine.scheduler.has_work
    assert engine.scheduler.can_add(24, max_tokens=9) is Verdict.OK
    behind = [add(prompt_of(24), max_tokens=9), add(prompt_of(3), max_tokens=2)]
    assert engine.scheduler.can_add(1, max_tokens=1) is Verdict.LATER
    engine.run()
    engine.finished(behind)
    assert [request.id for request in behind] == [1, 2], "the refused ones leave no trace"


def test_the_last_that_arrived_is_preempted_and_resumed_before_others_are_admitted() -> None:
    engine = Engine(8, 4, num_host_blocks=8, policy="swap", max_num_seqs=3)
    requests = [engine.scheduler.add(prompt_of(7, i), max_tokens=12) for i in range(5)]
    seen = []
    while engine.scheduler.has_work:
        batch = engine.scheduler.schedule()
        running, preempted = engine.scheduler.running, engine.scheduler.preempted
        assert len(running) <= 3
        for request in batch.swapped_out:
            assert all(request.id > other.id for other in running)
            seen.append(request)
        if preempted:
            assert all(request in engine.scheduler.waiting for request in requests if request.id > preempted[-1].id)
        engine.complete(batch, engine.execute(batch))
    assert seen
    engine.finished(requests)


def test_what_moves_is_not_handed_out_before_it_has_moved() -> None:
    """The blocks of a victim are free once the batch with its plan has run, and not before."""
    engine = Engine(6, 4, num_host_blocks=6, policy="swap")
    requests = [engine.scheduler.add(prompt_of(11, kind), max_tokens=9) for kind in (0, 1)]
    while not (batch := engine.scheduler.schedule()).swapped_out:
        engine.complete(batch, engine.execute(batch))
    (victim,) = batch.swapped_out
    assert victim is requests[1]
    assert victim.state == "swapped out"
    moved = {b for kind, src, _ in batch.moves if kind == "swap_out" for b in src}
    assert len(moved) == 3
    assert engine.allocator.num_free_blocks == 0
    assert not batch.rows, "the first needs a block and waits for it"
    with pytest.raises(InvalidArgument, match="in flight"):
        engine.scheduler.schedule()
    engine.complete(batch, engine.execute(batch))
    assert engine.allocator.num_free_blocks == 3
    batch = engine.step()
    assert [row.sample.request for row in batch.rows] == requests[:1]
    assert batch.block_table[0, 3] in moved
    engine.run()
    engine.finished(requests)


def test_as_many_are_preempted_as_it_takes() -> None:
    """Four of one block each, all about to begin a second, one is free: the last two make room for the first two."""
    for host, swapped, dropped in ((4, [4, 3], []), (1, [4], [3]), (0, [], [4, 3])):
        engine = Engine(5, 4, num_host_blocks=host, policy="swap")
        requests = [engine.scheduler.add(prompt_of(4, i), max_tokens=8) for i in range(4)]
        engine.step()
        batch = engine.step()
        assert ([r.id for r in batch.swapped_out], [r.id for r in batch.dropped]) == (swapped, dropped)
        engine.run()
        engine.finished(requests)


def test_the_watermark_is_waived_when_nothing_runs() -> None:
    """A request that has grown into the watermark is preempted: it would never come back otherwise."""
    for policy in POLICIES:
        engine = Engine(10, 4, num_host_blocks=10, policy=policy, watermark=0.3)
        requests = [engine.scheduler.add(prompt_of(p, i), max_tokens=m) for i, (p, m) in enumerate(((3, 30), (24, 17)))]
        while not (batch := engine.step()).swapped_out + batch.dropped:
            pass
        assert len(requests[1].prompt) + len(requests[1].samples[0].tokens) > 7 * 4
        engine.run()
        engine.finished(requests)


def test_swaps_do_not_hold_up_those_that_have_room() -> None:
    engine = Engine(8, 4, num_host_blocks=8, policy="swap")
    lengths = [9, 12, 5]
    requests = [engine.scheduler.add(prompt_of(p, i), max_tokens=10) for i, p in enumerate(lengths)]
    while not (batch := engine.step()).swapped_out:
        pass
    assert batch.swapped_out == requests[2:]
    assert [row.sample.request for row in batch.rows] == requests[:1], "it needs no block in this step"
    engine.run()
    engine.finished(requests)


def test_chunks_fill_the_budget_in_the_order_of_arrival() -> None:
    engine = Engine(64, 4, token_budget=10)
    long, short, last = (engine.scheduler.add(prompt_of(p, i), max_tokens=4) for i, p in enumerate((23, 5, 12)))
    plan = []
    while engine.scheduler.has_work:
        batch = engine.step()
        plan.append([(row.sample.request.id, row.end - row.start) for row in batch.rows])
    assert plan == [
        [(1, 10)],
        [(1, 10)],
        [(1, 3), (2, 5), (3, 2)],
        [(1, 1), (2, 1), (3, 8)],
        [(1, 1), (2, 1), (3, 2)],
        [(1, 1), (2, 1), (3, 1)],
        [(3, 1)],
        [(3, 1)],
    ]
    engine.finished([long, short, last])


def test_samples_share_their_prompt_and_are_drawn_from_one_row() -> None:
    engine = Engine(16, 4)
    request = engine.scheduler.add(prompt_of(10), max_tokens=5, n=4)
    batch = engine.step()
    assert batch.num_tokens == 10
    assert list(batch.logits_rows) == [9, 9, 9, 9]
    assert batch.outputs == list(request.samples)
    assert engine.allocator.num_free_blocks == 13, "forked, nothing copied"
    batch = engine.step()
    assert batch.num_tokens == 4
    assert sum(len(src) for _, src, _ in batch.moves) == 3, "the last one writes in place"
    assert len({tuple(sample.tokens) for sample in request.samples}) > 1
    engine.run()
    engine.finished([request])


def test_a_prefix_that_was_computed_is_not_computed_again() -> None:
    engine = Engine(16, 4)
    first = engine.scheduler.add(prompt_of(14), max_tokens=2)
    engine.run()
    again = engine.scheduler.add(prompt_of(14), max_tokens=2)
    other = engine.scheduler.add(prompt_of(14), max_tokens=2, salt="tenant")
    batch = engine.step()
    assert [(row.start, row.end) for row in batch.rows] == [(12, 14), (0, 14)]
    assert (first.num_cached_tokens, again.num_cached_tokens, other.num_cached_tokens) == (0, 12, 0)
    engine.run()
    engine.finished([first, again, other])


def test_recomputation_finds_what_the_cache_has_kept() -> None:
    again = []
    for caching in (True, False):
        engine = Engine(10, 4, policy="recompute", caching=caching)
        requests = [engine.scheduler.add(prompt_of(8, kind), max_tokens=16) for kind in (0, 1)]
        engine.run()
        engine.finished(requests)
        assert engine.scheduler.stats["preempted_by_recomputation"] == 1
        again.append(engine.scheduler.stats["tokens_recomputed"])
    assert 0 <= again[0] <= 4 < 16 <= again[1], "all but the tail was cached"


def test_auto_takes_the_cheaper() -> None:
    """Blocks of 1,000 bytes over a link of 1,000 bytes a second, both ways: 2 s each; so many tokens a second."""
    for rate, cheaper in ((10.0, "preempted_by_recomputation"), (1.0, "preempted_by_swap")):
        costs = Costs(
            bytes_per_block=1000, link_bytes_per_second=1000.0, transfer_seconds=0.0, prefill_tokens_per_second=rate
        )
        engine = Engine(6, 4, num_host_blocks=6, policy="auto", costs=costs)
        requests = [engine.scheduler.add(prompt_of(10, kind), max_tokens=12) for kind in (0, 1)]
        engine.run()
        engine.finished(requests)
        stats = engine.scheduler.stats
        assert stats[cheaper] == 1 == stats["preempted_by_swap"] + stats["preempted_by_recomputation"]


def test_costs() -> None:
    costs = Costs(
        bytes_per_block=1000, link_bytes_per_second=500.0, transfer_seconds=0.25, prefill_tokens_per_second=40.0
    )
    assert costs.swap_seconds(2, 3, 16) == 2 * (2 * 0.25 + 3 * 1000 / 500)
    assert costs.recompute_seconds(10) == 0.25
    default = Costs(transfer_seconds=0.0)
    assert default.swap_seconds(1, 3, 16) == 2 * 3 * 16 * 131072 / 25e9


def test_auto_knows_that_a_prefix_held_by_others_is_not_recomputed() -> None:
    """12 of 14 tokens are shared: 2 tokens to recompute at 1 s beat 4 blocks at 2 s; without sharing 14 do not."""
    costs = Costs(
        bytes_per_block=1000, link_bytes_per_second=1000.0, transfer_seconds=0.0, prefill_tokens_per_second=1.0
    )
    for kinds, cheaper in (((0, 0), "preempted_by_recomputation"), ((0, 1), "preempted_by_swap")):
        engine = Engine(6 if kinds == (0, 0) else 9, 4, num_host_blocks=9, policy="auto", costs=costs)
        first = engine.scheduler.add(prompt_of(14, kinds[0]), max_tokens=10)
        engine.step()
        second = engine.scheduler.add(prompt_of(14, kinds[1]), max_tokens=10)
        engine.run()
        engine.finished([first, second])
        assert engine.scheduler.stats[cheaper] == second.num_preemptions > 0


def test_auto_knows_that_nobody_holds_what_a_victim_before_has_given_up() -> None:
    """Two that share 12 tokens make room in one batch: one is cheap to compute again, the other is not then."""
    costs = Costs(
        bytes_per_block=1000, link_bytes_per_second=1000.0, transfer_seconds=0.0, prefill_tokens_per_second=1.0
    )
    engine = Engine(10, 4, num_host_blocks=10, policy="auto", costs=costs)
    requests = [engine.scheduler.add(prompt_of(length, 2 * (length > 5)), max_tokens=12) for length in (5, 5, 14)]
    engine.step()
    requests.append(engine.scheduler.add(prompt_of(14, 2), max_tokens=12))
    while not (batch := engine.step()).dropped:
        assert not batch.swapped_out
    assert requests[3].num_cached_tokens == 12
    assert (batch.dropped, batch.swapped_out) == (requests[3:], requests[2:3])
    engine.run()
    engine.finished(requests)


@pytest.mark.parametrize("samples", [1, 3])
def test_it_asks_the_allocator_only_for_what_there_is(samples: int) -> None:
    """`out_of_blocks` counts what clients were refused: preempting is no refusal, wherever it is for lack of blocks."""
    for policy, host in (("recompute", 0), ("swap", 30), ("swap", 3)):
        engine = Engine(9 + 4 * samples, 4, num_host_blocks=host, policy=policy, token_budget=16)
        requests = [engine.scheduler.add(prompt_of(6 + i, i), max_tokens=8 + i, n=samples) for i in range(7)]
        engine.run()
        engine.finished(requests)
        assert sum(request.num_preemptions for request in requests) > 0
        assert engine.allocator.stats["out_of_blocks"] == 0


def test_texts_of_the_engine_differ() -> None:
    """The rule for next tokens is not a constant: otherwise the tests above could not fail."""
    engine = Engine(16, 4)
    requests = [engine.scheduler.add(prompt_of(6, kind), max_tokens=9, n=2) for kind in range(3)]
    texts = [tuple(text) for request in requests for text in expected(request)]
    assert len(set(texts)) == 6
    assert {token for text in texts for token in text} <= set(range(VOCABULARY))
