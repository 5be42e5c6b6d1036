"""Events, digests, counts, pins, clearing, snapshots, and the log of operations with its replay."""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from pagedkern.allocator import BlockAllocator, Sequence
from pagedkern.allocator.replay import main, replay
from pagedkern.errors import InvalidArgument, OutOfBlocks, StaleSequence
from pagedkern.scheduler import Scheduler
from tests.allocator.world import ACTIONS, World


def computed(allocator: BlockAllocator, tokens: list[int], salt: str | None = None) -> Sequence:
    seq = allocator.create(tokens, salt=salt)
    allocator.commit(allocator.prefill([seq]))
    return seq


def test_events_tell_what_can_be_found() -> None:
    allocator = BlockAllocator(3, 4, num_host_blocks=2)
    allocator.record_events()
    prompt = list(range(9))
    seq = computed(allocator, prompt, salt="a")
    first, second = allocator.digests(prompt, salt="a")
    stored = allocator.events
    assert [(e.kind, e.memory, e.block, e.digest) for e in stored] == [
        ("stored", "device", seq.block_ids[0], first),
        ("stored", "device", seq.block_ids[1], second),
    ]
    assert stored[1].parent == first
    assert allocator.events == [], "each is told once"
    allocator.free(seq)
    allocator.create(8)
    assert [(e.kind, e.digest) for e in allocator.events] == [("removed", second)]
    with pytest.raises(OutOfBlocks):
        allocator.create(8)
    assert allocator.events == []


def test_events_of_both_memories() -> None:
    allocator = BlockAllocator(4, 4, num_host_blocks=4)
    allocator.record_events()
    seq = computed(allocator, list(range(4)))
    allocator.commit(allocator.swap_out([seq]))
    (digest,) = allocator.digests(list(range(4)))
    assert [(e.kind, e.memory, e.digest) for e in allocator.events] == [
        ("stored", "device", digest),
        ("stored", "host", digest),
    ]
    allocator.clear_cache()
    assert sorted((e.kind, e.memory) for e in allocator.events) == [("removed", "device"), ("removed", "host")]


def test_what_a_transaction_takes_back_is_no_event() -> None:
    allocator = BlockAllocator(4, 4)
    allocator.record_events()
    seq = allocator.create(list(range(4)))
    step = allocator.prefill([seq])
    with pytest.raises(InvalidArgument), allocator.transaction():  # noqa: PT012
        allocator.commit(step)
        allocator.commit(step)
    assert allocator.events == []


def test_events_follow_the_cache_through_any_operations() -> None:
    generator = random.Random(7)
    num_cached = 0
    for _ in range(20):
        world = World(12, 2, num_host_blocks=6)
        world.real.record_events()
        found: set[tuple[str, bytes]] = set()
        for _ in range(120):
            name = generator.choice([n for n in ACTIONS if n not in ("snapshot", "create_count", "append_unknown")])
            getattr(world, name)(*(generator.randrange(4096) for _ in range(3)))
            for event in world.real.events:
                place = (event.memory, event.digest)
                assert (place in found) == (event.kind == "removed")
                found ^= {place}
        for a in range(3):
            tokens = world.prompt(a, 39)
            blocks = world.real._ledger.prefix.match(world.real._ledger.roots.peek(None), packed(tokens))
            num_cached += len(blocks)
            for b, digest in zip(blocks, world.real.digests(tokens), strict=False):
                assert ("device" if b >= 0 else "host", digest) in found
    assert num_cached


def packed(tokens: list[int]) -> bytes:
    return b"".join(token.to_bytes(8, sys.byteorder, signed=True) for token in tokens)


def test_digests_are_the_same_everywhere() -> None:
    allocator = BlockAllocator(4, 2)
    digests = allocator.digests([1, 2, 3, 4, 5])
    assert len(digests) == 2
    assert len(set(digests + allocator.digests([1, 2, 3, 4], salt="a") + allocator.digests([3, 4]))) == 5
    code = (
        "from pagedkern.allocator import BlockAllocator as A; print([d.hex() for d in A(1, 2).digests([1, 2, 3, 4])])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == str([d.hex() for d in digests])


def test_counts() -> None:
    allocator = BlockAllocator(8, 4, num_host_blocks=4)
    seq = computed(allocator, list(range(6)))
    twins = allocator.fork(seq, 2)
    allocator.commit(allocator.append([seq, *twins], [1, 2, 3]))
    assert allocator.create(list(range(6))).num_cached_tokens == 4
    allocator.commit(allocator.swap_out([seq]))
    with pytest.raises(OutOfBlocks):
        allocator.create(1000)
    stats = allocator.stats
    expected = {
        "blocks": 8,
        "sequences": 4,
        "sequences_created": 2,
        "forks": 2,
        "blocks_copied": 2,
        "prefix_tokens_asked": 12,
        "prefix_tokens_found": 4,
        "blocks_swapped_out": 2,
        "out_of_blocks": 1,
        "peak_blocks_used": 5,
        "peak_host_blocks_used": 2,
        "blocks_fenced": 0,
        "plans_in_flight": 0,
        "plans": 3,
    }
    assert {name: stats[name] for name in expected} == expected


def test_counts_of_evictions_and_of_the_fast_path() -> None:
    allocator = BlockAllocator(8, 1)
    allocator.free(computed(allocator, [1, 2, 3, 4]))
    seq = allocator.create([])
    for token in range(8):
        allocator.commit(allocator.append([seq], [token + 10]))
    assert allocator.stats["blocks_evicted"] == 4
    assert allocator.stats["peak_blocks_used"] == 8


def test_pinned_blocks_are_not_evicted() -> None:
    allocator = BlockAllocator(6, 4)
    seq = computed(allocator, list(range(10)))
    pinned = allocator.pin(seq)
    assert (pinned.num_tokens, pinned.block_ids) == (8, seq.block_ids[:2])
    allocator.free(seq)
    filler = allocator.create(16)
    with pytest.raises(OutOfBlocks):
        allocator.create(4)
    allocator.free(filler)
    assert allocator.create(list(range(9))).num_cached_tokens == 8
    allocator.free(pinned)
    allocator.check()


def test_cleared_cache_serves_nothing_old() -> None:
    allocator = BlockAllocator(8, 4)
    seq = computed(allocator, list(range(8)))
    half = allocator.create(list(range(50, 58)))
    step = allocator.prefill([half])
    allocator.clear_cache()
    allocator.commit(step)
    allocator.commit(allocator.append([seq], [[8, 9, 10, 11]]))
    assert allocator.num_cached_blocks == 0
    assert allocator.create(list(range(8))).num_cached_tokens == 0
    allocator.check()


def test_snapshot_is_json_and_goes_on_as_before() -> None:
    allocator = BlockAllocator(12, 4, num_host_blocks=4, watermark=0.25)
    seq = computed(allocator, list(range(10)), salt="x")
    away = computed(allocator, list(range(30, 36)))
    allocator.commit(allocator.swap_out([away]))
    step = allocator.append([seq], [1])
    with pytest.raises(InvalidArgument, match="1 plans are in flight"):
        allocator.snapshot()
    allocator.commit(step)
    other = BlockAllocator.restore(json.loads(json.dumps(allocator.snapshot())))
    assert [repr(s) for s in other.sequences] == [repr(s) for s in allocator.sequences]
    for a in (allocator, other):
        first, second = a.sequences
        a.commit(a.swap_in([second]))
        a.commit(a.append([first, second], [5, 6]))
        a.create(list(range(9)), salt="x")
        a.check()
    assert other.stats == allocator.stats
    assert [s.block_ids for s in other.sequences] == [s.block_ids for s in allocator.sequences]


@pytest.mark.parametrize("state", [{}, {"pagedkern_allocator": 99}, [], None])
def test_what_is_not_a_snapshot(state: object) -> None:
    with pytest.raises(InvalidArgument, match="not a snapshot"):
        BlockAllocator.restore(state)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(5))
def test_a_log_is_replayed_to_the_same(seed: int) -> None:
    generator = random.Random(seed)
    world = World(16, 3)
    file = io.StringIO()
    world.real.log_to(file)
    for _ in range(150):
        name = generator.choice([n for n in ACTIONS if n not in ("snapshot", "stale")])
        getattr(world, name)(*(generator.randrange(4096) for _ in range(3)))
    world.real.log_to(None)
    lines = file.getvalue().splitlines()
    assert len(lines) > 100
    assert replay(lines) is None
    place = max(i for i, line in enumerate(lines) if '"slots": [' in line)
    entry = json.loads(lines[place])
    entry["gives"]["slots"] = [*entry["gives"]["slots"], 5]
    difference = replay([*lines[:place], json.dumps(entry), *lines[place + 1 :]])
    assert difference is not None
    assert difference.startswith(f"line {place + 1}, {entry['op']}: gives ")


def test_a_log_holds_tensors_and_generators() -> None:
    torch = pytest.importorskip("torch", reason="torch gives the ids")
    file = io.StringIO()
    allocator = BlockAllocator(8, 4)
    allocator.log_to(file)
    seq = allocator.create(torch.tensor([1, 2, 3]))
    allocator.commit(allocator.prefill(s for s in [seq]))
    allocator.commit(allocator.append([seq], torch.tensor([4])))
    allocator.commit(allocator.append([seq], [torch.tensor([5, 6])]))
    assert seq.num_tokens == 6
    assert replay(file.getvalue().splitlines()) is None


def test_the_replay_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.jsonl"
    with path.open("w") as file:
        allocator = BlockAllocator(8, 4)
        computed(allocator, [1, 2, 3])
        allocator.log_to(file)
        seq = allocator.create([4, 5, 6, 7, 8], salt=b"s")
        allocator.commit(allocator.prefill([seq], max_tokens=3))
        with pytest.raises(OutOfBlocks):
            allocator.create(1000)
        allocator.free(seq)
    assert main([str(path)]) == 0
    assert "every operation gave what the log has" in capsys.readouterr().out
    path.write_text(path.read_text().replace('"OutOfBlocks"', '"StaleSequence"'))
    assert main([str(path)]) == 1
    assert "line 5, create: gives {'raises': 'OutOfBlocks'}" in capsys.readouterr().out
    with pytest.raises(InvalidArgument, match="not the start of a log"):
        replay(["{}"])


def test_a_log_of_wrong_calls_is_replayed() -> None:
    """Handles freed before the log began, handles of another allocator, plans that have landed, no arguments."""
    allocator, file = BlockAllocator(8, 4), io.StringIO()
    freed, landed = allocator.create(3), allocator.create(3)
    step = allocator.prefill([landed])
    allocator.commit(step)
    allocator.free(freed)
    other = BlockAllocator(8, 4)
    foreign = [other.create(3) for _ in range(2)]
    plan = other.prefill(foreign)
    allocator.log_to(file)
    for call in (
        lambda: allocator.free(freed),
        lambda: allocator.append([landed, freed]),
        lambda: allocator.free(foreign[1]),
        lambda: allocator.swap_out(foreign),
        lambda: allocator.commit(step),
        lambda: allocator.abort(plan),
        lambda: allocator.create(),  # type: ignore[call-arg]
    ):
        with pytest.raises((InvalidArgument, StaleSequence, TypeError)):
            call()
    lines = file.getvalue().splitlines()
    assert [json.loads(line)["raises"] for line in lines[1:]] == [
        *["StaleSequence"] * 4,
        *["InvalidArgument"] * 2,
        "TypeError",
    ]
    assert replay(lines) is None


def test_a_log_that_cannot_be_written_ends_and_disturbs_nothing() -> None:
    allocator, file = BlockAllocator(8, 4), io.StringIO()
    allocator.log_to(file)
    file.close()
    with pytest.warns(RuntimeWarning, match="the log ends here"):
        seq = allocator.create(3)
    allocator.free(seq)
    allocator.log_to(other := io.StringIO())
    with allocator.transaction():
        allocator.create(3)
        allocator.log_to(None)
        other.close()
    allocator.check()
    assert len(allocator.sequences) == 1


def test_a_file_that_is_no_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.jsonl"
    with path.open("w") as file:
        allocator = BlockAllocator(8, 4)
        allocator.log_to(file)
        allocator.create(3)
    whole = path.read_text()
    for text, words in (
        (whole[:-5], "line 2 is no operation, or was cut off"),
        ("", "not the start of a log"),
        ('{"op": "start"}', "not a snapshot"),
        (None, "No such file"),
    ):
        path.write_text(text) if text is not None else path.unlink()
        with pytest.raises(SystemExit) as caught:
            main([str(path)])
        assert caught.value.code == 2
        assert words in capsys.readouterr().err


def test_salts_that_nothing_is_cached_under_are_forgotten() -> None:
    allocator = BlockAllocator(4, 4, num_host_blocks=1)
    allocator.record_events()
    seq = computed(allocator, [1, 2, 3, 4], "host")
    allocator.commit(allocator.swap_out([seq]))
    allocator.free(seq)
    allocator.free(allocator.create(16))  # the device forgets it
    assert [(e.kind, e.memory) for e in allocator.events] == [
        ("stored", "device"),
        ("stored", "host"),
        ("removed", "device"),
    ]
    for salt in range(3000):
        allocator.free(allocator.create([1], salt=salt))
    assert len(allocator._ledger.roots) < 1500
    assert allocator.create([1, 2, 3, 4, 5], salt="host").num_cached_tokens == 4, "the host still has it"


@pytest.mark.parametrize("policy", ["swap", "recompute"])
def test_memory_of_the_queues_is_bounded_in_any_use(policy: str) -> None:
    """A scheduler creates sequences within transactions only; an engine may also swap, and create none."""
    allocator = BlockAllocator(48, 4, num_host_blocks=48)
    scheduler = Scheduler(allocator, policy=policy)
    generator = random.Random(0)
    for _ in range(1500):
        if len(scheduler.waiting) < 3:
            scheduler.add([generator.randrange(999) for _ in range(20)], max_tokens=generator.randint(5, 60))
        batch = scheduler.schedule()
        scheduler.complete(batch, [generator.randrange(999) for _ in batch.outputs])
    core = allocator._ledger
    assert core.pool.num_evicted > 3000
    assert max(len(queue._entries) for pool in (core.pool, core.host) for queue in pool.idle._queues) < 2200
    allocator = BlockAllocator(8, 4, num_host_blocks=8)
    seq = computed(allocator, list(range(32)))
    for _ in range(500):
        allocator.commit(allocator.swap_out([seq]))
        allocator.commit(allocator.swap_in([seq]))
    core = allocator._ledger
    assert max(len(queue._entries) for pool in (core.pool, core.host) for queue in pool.idle._queues) < 2200


def test_events_wait_for_the_end_of_the_outermost_transaction() -> None:
    allocator = BlockAllocator(8, 4)
    allocator.record_events()
    with pytest.raises(InvalidArgument), allocator.transaction():  # noqa: PT012
        computed(allocator, list(range(4)))
        assert allocator.events == []
        raise InvalidArgument
    assert allocator.events == []
    with allocator.transaction():
        with allocator.transaction():
            computed(allocator, list(range(4)))
            assert allocator.events == []
        assert allocator.events == []
    assert [e.kind for e in allocator.events] == ["stored"]


def test_a_log_of_transactions_left_out_of_order_is_replayed() -> None:
    allocator, file = BlockAllocator(8, 4), io.StringIO()
    allocator.log_to(file)
    first, second = allocator.transaction(), allocator.transaction()
    first.__enter__()
    second.__enter__()
    allocator.create(4)
    with pytest.raises(InvalidArgument):
        first.__exit__(None, None, None)
    del second
    allocator.create(20)
    assert replay(file.getvalue().splitlines()) is None
