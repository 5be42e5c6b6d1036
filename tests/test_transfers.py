"""Swaps on streams of their own: contents are right in any order that the fences allow, and no fence is one too many.

No GPU is needed: the queues of `late_queues` do their work later, in random orders.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from pagedkern import KVCache
from pagedkern.cache.inputs import unpack
from pagedkern.cache.moves import Move
from pagedkern.cache.queues import COMPUTE, IN, OUT, Streams
from pagedkern.cache.transfers import Transfers
from pagedkern.scheduler import Batch
from tests.late_queues import FENCES, Fence, LateQueues
from tests.scheduler.engine import Engine, prompt_of, values_of
from tests.test_cache import Plan, fill, make

SMALL = 1 << 20  # integers below are exact in float32


def late(cache: KVCache, seed: int = 0, missing: Fence | None = None) -> LateQueues:
    """Let the cache work as on a GPU that lags behind."""
    queues = LateQueues(seed, missing)
    cache._transfers = Transfers(queues)
    return queues


class LateEngine(Engine):
    """An engine that never waits: batches are completed and blocks handed out again while the device still works.

    Each batch has a kernel that writes its K and V to the slots and reads all of its rows' blocks. `wrong` counts what
    it reads that is not as it should be.
    """

    def __init__(self, seed: int, missing: Fence | None, policy: str, **options: Any) -> None:
        super().__init__(12, 4, num_host_blocks=14, policy=policy, token_budget=20, **options)
        self.cache = KVCache(2, 12, 4, 1, 8, dtype=torch.float32, device="cpu", num_host_blocks=14)
        for layer in range(2):
            for pool in self.cache.layer(layer):
                pool.fill_(torch.nan)
        for pool in self.cache._host:
            pool.fill_(torch.nan)
        self.queues = late(self.cache, seed, missing)
        self.wrong = 0

    def execute(self, batch: Batch) -> list[int]:
        tokens = super().execute(batch)  # the shadow cache's: computed at once, as if the text were known
        self.cache.apply(batch)
        self.queues.run(COMPUTE, self.kernel(batch))
        self.queues.get_on(self.queues.generator.choice([0, 1, 5, 40]))
        return tokens

    def kernel(self, batch: Batch) -> Callable[[], None]:
        slots = torch.tensor(batch.slot_mapping.tolist() if batch.rows else [], dtype=torch.int64)
        table = batch.block_table.tolist() if batch.rows else []
        rows = [(start, end, values_of([*s.request.prompt, *s.tokens])) for s, start, end in batch.rows]

        def write_and_read() -> None:
            new = torch.tensor([v % SMALL for start, end, text in rows for v in text[start:end]], dtype=torch.float32)
            written = slots >= 0
            for layer in range(2):
                for cache, sign in zip(self.cache.layer(layer), (1, -1), strict=True):
                    cache[slots[written] // 4, slots[written] % 4, 0] = sign * (new + layer)[written, None]
                    for (_, end, text), blocks in zip(rows, table, strict=True):
                        wanted = sign * (torch.tensor([x % SMALL for x in text[:end]], dtype=torch.float32) + layer)
                        found = cache[torch.tensor(blocks[: -(-end // 4)])].reshape(-1, 8)[:end]
                        self.wrong += int((found != wanted[:, None]).sum())

        return write_and_read


def run_engine(seed: int, missing: Fence | None, policy: str = "swap") -> int:
    """How many values some kernel read wrong."""
    engine = LateEngine(seed, missing, policy, audits=False)
    generator = random.Random(seed)
    add = engine.scheduler.add
    requests = [
        add(
            prompt_of(generator.randint(4, 12), generator.randrange(3)),
            max_tokens=generator.randint(6, 14),
            n=1 + i % 2,
        )
        for i in range(8)
    ]
    engine.run()
    engine.queues.finish()
    engine.finished(requests)
    stats = engine.scheduler.stats
    assert stats["preempted_by_swap" if policy == "swap" else "preempted_by_recomputation"]
    return engine.wrong


@pytest.mark.parametrize("policy", ["swap", "recompute"])
def test_contents_are_right_in_any_order(policy: str) -> None:
    assert [run_engine(seed, None, policy) for seed in range(20)] == [0] * 20


@pytest.mark.parametrize("missing", FENCES[:4], ids=str)
def test_each_fence_between_kernels_and_transfers_is_needed(missing: Fence) -> None:
    """With any of them left out contents go wrong, and the engine above sees it."""
    assert any(run_engine(seed, missing) for seed in range(20))


CHAINS = {
    "what was swapped out comes in": (Plan().add("swap_out", (0, 0)).add("swap_in", (0, 3)), Fence(IN, OUT)),
    "a block taken out is filled": (Plan().add("swap_out", (0, 1)).add("swap_in", (2, 0)), Fence(IN, OUT)),
    "what came in is swapped out": (Plan().add("swap_in", (0, 3)).add("swap_out", (3, 1)), Fence(OUT, IN)),
    "a host block is filled again": (Plan().add("swap_in", (0, 3)).add("swap_out", (4, 0)), Fence(OUT, IN)),
    "what came in is copied": (Plan().add("swap_in", (0, 3)).add("copy", (3, 4)), Fence(COMPUTE, IN)),
    "a copy is overwritten": (Plan().add("copy", (1, 3)).add("swap_in", (0, 3)), Fence(IN, COMPUTE)),
    "a block taken out is copied to": (Plan().add("swap_out", (0, 1)).add("copy", (3, 0)), Fence(COMPUTE, OUT)),
    "a copy is swapped out": (Plan().add("copy", (1, 3)).add("swap_out", (3, 1)), Fence(OUT, COMPUTE)),
}


@pytest.mark.parametrize("name", CHAINS)
def test_moves_of_one_plan_keep_their_order_where_it_matters(name: str) -> None:
    plan, needed = CHAINS[name]

    def run(cache: KVCache) -> list[torch.Tensor]:
        fill(cache)
        for i, pool in enumerate(cache._host):
            pool.copy_(torch.arange(pool.numel(), dtype=torch.float32).view(pool.shape) + i)
        cache.apply(plan)
        return [*cache.layer(0), *cache.layer(1), *cache._host]

    expected = run(make())

    def is_right(seed: int, missing: Fence | None) -> bool:
        cache = make()
        queues = late(cache, seed, missing)
        pools = run(cache)
        queues.finish()
        return all(map(torch.equal, pools, expected))

    assert all(is_right(seed, None) for seed in range(50))
    assert not all(is_right(seed, needed) for seed in range(50)), "the fence is needed, and its loss is seen"


def test_moves_of_other_blocks_wait_for_nothing() -> None:
    cache = make()
    queues = late(cache)
    cache.apply(
        Plan().add("swap_out", (0, 0)).add("swap_in", (1, 2)).add("copy", (3, 4)).add("swap_out", (5, 2)), Table([])
    )
    assert queues.fences == [Fence(OUT, COMPUTE), Fence(IN, COMPUTE), Fence(OUT, COMPUTE)]
    queues.finish()


def test_what_is_after_a_transfer_that_was_broken_off_waits_for_what_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make()
    queues = late(cache)

    def broken(queue: str, work: Callable[[], object]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(queues, "run", broken)
    with pytest.raises(KeyboardInterrupt):
        cache.apply(Plan().add("swap_out", (0, 0)))
    cache.apply()
    assert queues.fences == [Fence(OUT, COMPUTE), Fence(COMPUTE, OUT)]
    queues.finish()


class Table(Plan):
    """A step that reads these blocks."""

    def __init__(self, blocks: list[int]) -> None:
        super().__init__()
        self.block_table = memoryview(array("i", blocks))


def test_kernels_run_beside_the_swaps_of_their_own_call_and_after_all_earlier_ones() -> None:
    cache = make()
    queues = late(cache)
    swaps = Plan().add("swap_out", (0, 0), (1, 1)).add("swap_in", (2, 4))
    cache.apply(swaps, Table([2, 3, -1]))
    assert queues.fences == [Fence(OUT, COMPUTE), Fence(IN, COMPUTE)]
    cache.apply(Table([2, 3]))
    assert queues.fences[2:] == [Fence(COMPUTE, OUT), Fence(COMPUTE, IN)]
    cache.apply(Table([2, 3]))
    assert len(queues.fences) == 4, "which are passed then"
    cache.apply(swaps, Table([2, 4]))
    assert queues.fences[4:] == [Fence(OUT, COMPUTE), Fence(IN, COMPUTE), Fence(COMPUTE, IN)], "block 4 is read"
    cache.apply(swaps)
    assert queues.fences[-1] == Fence(COMPUTE, IN), "nobody says what is read"
    queues.finish()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_adjacent_blocks_move_together(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One plain copy of contiguous memory for each run, layer, K and V: anything else would wait for the device."""
    cache = make(layout)
    before = fill(cache)
    copied: list[tuple[int, ...]] = []
    plain = torch.Tensor.copy_

    def copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        assert self.is_contiguous() and source.is_contiguous() and non_blocking  # noqa: PT018
        copied.append(tuple(self.shape))
        return plain(self, source)

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    cache.apply(Plan().add("swap_out", (4, 1), (2, 0), (5, 2)))
    block = (3, 4, 8) if layout == "HND" else (4, 3, 8)
    assert copied == [(1, *block)] * 4 + [(2, *block)] * 4
    cache.apply(Plan().add("swap_in", (0, 0), (1, 1)))
    assert copied[8:] == [(2, *block)] * 4
    for old, new in zip(before, [pool for i in range(2) for pool in cache.layer(i)], strict=True):
        assert torch.equal(new, old[[2, 4, 2, 3, 4, 5]])


def test_runs() -> None:
    def runs(*pairs: tuple[int, int]) -> list[tuple[int, int, int]]:
        return Move("swap_out", torch.tensor([s for s, _ in pairs]), torch.tensor([d for _, d in pairs])).runs()

    assert runs((7, 1), (3, 5), (4, 6), (5, 7), (6, 0)) == [(3, 5, 3), (6, 0, 2)]
    assert runs((2, 3), (1, 4)) == [(1, 4, 1), (2, 3, 1)], "adjacent on both sides, but in reverse"
    assert runs((1, 0), (1, 1)) == [(1, 0, 1), (1, 1, 1)]


def test_the_streams_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which calls of torch each of the queues comes down to."""
    calls: list[tuple[Any, ...]] = []

    class Stream:
        def __init__(self, name: object) -> None:
            self.name = name if isinstance(name, str) else f"side {len(calls)}"

        def record_event(self) -> str:
            return f"event of {self.name}"

        def wait_event(self, event: str) -> None:
            calls.append((self.name, "waits for", event))

    class Pool:
        device = torch.device("cuda", 1)

        def record_stream(self, stream: Stream) -> None:
            calls.append(("memory is kept for", stream.name))

    @contextmanager
    def stream(on: Stream) -> Iterator[None]:
        calls.append(("enter", on.name))
        yield
        calls.append(("leave", on.name))

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(f"current of {device}"))
    queues = Streams([Pool()])  # type: ignore[list-item]
    queues.run(COMPUTE, lambda: calls.append(("kernel",)))
    event = queues.record(COMPUTE)
    assert calls == [("kernel",)], "without swaps there are no streams of our own"
    queues.wait(OUT, event)  # type: ignore[arg-type]
    queues.run(OUT, lambda: calls.append(("copy",)))
    queues.wait(COMPUTE, queues.record(OUT))  # type: ignore[arg-type]
    assert calls[1:] == [
        ("memory is kept for", "side 1"),
        ("side 1", "waits for", "event of current of cuda:1"),
        ("enter", "side 1"),
        ("copy",),
        ("leave", "side 1"),
        ("current of cuda:1", "waits for", "event of side 1"),
    ]
    queues.run(IN, lambda: None)
    assert calls[7] == ("memory is kept for", "side 7"), "and another one for the way back"


def test_arrays_that_travel_together() -> None:
    arrays = [torch.tensor([2**40, -1]), torch.tensor([1, 2, 3], dtype=torch.int32), torch.empty(0, dtype=torch.int32)]
    packed = torch.cat([x.view(torch.uint8) for x in arrays])
    for x, again in zip(arrays, unpack(packed, arrays), strict=True):
        assert again.dtype == x.dtype
        assert torch.equal(again, x)
        assert not x.numel() or again.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()


class DeviceEngine(Engine):
    """The same as `LateEngine` on a real device, with its own streams, and delays put into them."""

    def __init__(self, device: str, seed: int) -> None:
        super().__init__(12, 4, num_host_blocks=14, policy="swap", token_budget=20, audits=False)
        self.cache = KVCache(2, 12, 4, 1, 8, dtype=torch.float32, device=device, num_host_blocks=14)
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)
        self.generator = random.Random(seed)

    def execute(self, batch: Batch) -> list[int]:
        tokens = super().execute(batch)
        with nothing_waits(self.cache.device):
            self.cache.apply(batch)
            inputs = self.cache.inputs(batch)
        for name in ("token_ids", "positions", "logits_rows"):
            array = getattr(inputs, name)
            assert (array.device, array.dtype) == (self.cache.device, torch.int64)
            assert array.tolist() == getattr(batch, name).tolist()
        self.delay()
        texts = [values_of([*s.request.prompt, *s.tokens]) for s, _, _ in batch.rows]
        new = [v % SMALL for (_, start, end), text in zip(batch.rows, texts, strict=True) for v in text[start:end]]
        written = [(slot, v) for slot, v in zip(batch.slot_mapping, new, strict=True) if slot >= 0]
        slots = torch.tensor([slot for slot, _ in written], device=self.cache.device)
        values = torch.tensor([float(v) for _, v in written], device=self.cache.device)
        for layer in range(2):
            for cache, sign in zip(self.cache.layer(layer), (1, -1), strict=True):
                if written:
                    cache[slots // 4, slots % 4, 0] = sign * (values + layer)[:, None]
                for i, ((_, _, end), text) in enumerate(zip(batch.rows, texts, strict=True)):
                    wanted = sign * (
                        torch.tensor([float(x % SMALL) for x in text[:end]], device=self.cache.device) + layer
                    )
                    found = cache[inputs.block_table[i, : -(-end // 4)].long()].reshape(-1, 8)[:end]
                    self.wrong += (found != wanted[:, None]).sum()
        return tokens

    def delay(self) -> None:
        """Let some stream lag behind the others."""
        if self.cache.device.type == "cuda":
            queues = self.cache._transfers._queues
            assert isinstance(queues, Streams)
            with torch.cuda.stream(queues._stream(self.generator.choice([COMPUTE, OUT, IN]))):
                torch.cuda._sleep(self.generator.choice([0, 10**5, 10**7]))


@contextmanager
def nothing_waits(device: torch.device) -> Iterator[None]:
    """On a GPU, a call that makes the host wait is an error."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
    ],
)
def test_contents_on_a_real_device(device: str) -> None:
    for seed in range(5):
        engine = DeviceEngine(device, seed)
        requests = [engine.scheduler.add(prompt_of(4 + i, i % 3), max_tokens=12, n=1 + i % 2) for i in range(8)]
        engine.run()
        engine.finished(requests)
        assert engine.scheduler.stats["preempted_by_swap"]
        assert int(engine.wrong) == 0
