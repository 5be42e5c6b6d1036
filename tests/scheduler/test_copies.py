"""A batch goes to the other ranks of a tensor-parallel engine as a pickle."""

from __future__ import annotations

import copy
import pickle
from array import array

import pytest
import torch

from pagedkern import KVCache, write_kv
from pagedkern.errors import InvalidArgument
from pagedkern.scheduler import Batch
from tests.scheduler.engine import Engine, prompt_of, values_of

BUFFERS = ("seq_lens", "cu_seqlens_q", "slot_mapping", "token_ids", "positions", "logits_rows")
NUMBERS = ("id", "block_size", "num_blocks", "num_seqs", "num_tokens", "max_seqlen_q")


def contents(batch: Batch) -> object:
    """All that a rank needs."""
    buffers = [getattr(batch, name) for name in BUFFERS]
    table = batch.block_table
    return (
        [getattr(batch, name) for name in NUMBERS],
        [(buffer.typecode, buffer.tolist()) for buffer in buffers],
        (table.format, table.itemsize, table.shape, table.tolist()),
        [(kind, list(src), list(dst)) for kind, src, dst in batch.moves],
        [(start, end) for _, start, end in batch.rows],
    )


def busy_engine(policy: str) -> Engine:
    engine = Engine(10, 4, num_host_blocks=10, policy=policy, token_budget=12)
    for i in range(6):
        engine.scheduler.add(prompt_of(5 + i, i), max_tokens=12, n=1 + i % 2)
    return engine


@pytest.mark.parametrize("policy", ["swap", "recompute"])
def test_every_batch_in_every_phase(policy: str) -> None:
    engine = busy_engine(policy)
    kinds: set[str] = set()
    while engine.scheduler.has_work:
        aborted = engine.scheduler.schedule()
        before = contents(aborted)
        data = pickle.dumps(aborted)
        engine.scheduler.abort(aborted)
        batch = engine.scheduler.schedule()
        found = contents(batch)
        copies = [pickle.loads(pickle.dumps(batch, protocol)) for protocol in (2, pickle.HIGHEST_PROTOCOL)]
        engine.complete(batch, engine.execute(batch))
        late = pickle.loads(pickle.dumps(batch))
        again = pickle.loads(pickle.dumps(copies[0]))
        for twin in (*copies, late, again, copy.deepcopy(copies[0])):
            assert contents(twin) == found
            assert isinstance(twin, Batch)
            assert [*twin.plans, *twin.steps, *twin.seqs, *twin.outputs, *twin.resumed] == []
        assert contents(pickle.loads(data)) == contents(pickle.loads(pickle.dumps(aborted))) == before
        kinds |= {kind for kind, _, _ in batch.moves}
        kinds.add(f"{len(batch.steps)} steps")
    assert kinds >= {"0 steps", "1 steps", "2 steps", "copy"} if policy == "swap" else {"1 steps", "2 steps", "copy"}
    assert kinds >= {"swap_out", "swap_in"} or policy == "recompute"


def test_an_empty_batch() -> None:
    batch = Engine(4, 4).scheduler.schedule()
    twin = pickle.loads(pickle.dumps(batch))
    assert contents(twin) == contents(batch)
    assert (twin.logits_rows, twin.logits_rows.typecode) == (array("q"), "q")
    assert "0 rows" in repr(twin)


def test_a_copy_cannot_be_completed() -> None:
    engine = busy_engine("swap")
    batch = engine.scheduler.schedule()
    twin = pickle.loads(pickle.dumps(batch))
    with pytest.raises(InvalidArgument, match="batch: got a copy of batch 1, expected the one that `schedule`"):
        engine.scheduler.complete(twin, [1] * len(batch.outputs))
    with pytest.raises(InvalidArgument, match="got a copy"):
        engine.scheduler.abort(twin)
    engine.complete(batch, engine.execute(batch))


def test_a_copy_shares_nothing_with_the_batch() -> None:
    engine = busy_engine("swap")
    batch = engine.scheduler.schedule()
    before = contents(batch)
    twin = copy.copy(batch)
    for name in BUFFERS:
        buffer = getattr(twin, name)
        buffer[:] = array(buffer.typecode, [-9] * len(buffer))
    assert contents(batch) == before


def test_another_rank_does_the_same_with_the_copies() -> None:
    """Two caches, one driven by the batches, one by what came through a pickle."""
    engine = Engine(10, 4, num_host_blocks=10, policy="swap", token_budget=20)
    requests = [engine.scheduler.add(prompt_of(5 + i, i), max_tokens=10, n=1 + i % 2) for i in range(5)]
    caches = [KVCache(1, 10, 4, 1, 8, dtype=torch.float32, device="cpu", num_host_blocks=10) for _ in range(2)]
    for cache in caches:
        for tensor in cache.layer(0):
            tensor.fill_(0)
    while engine.scheduler.has_work:
        batch = engine.scheduler.schedule()
        texts = [values_of([*s.request.prompt, *s.tokens]) for s, _, _ in batch.rows]
        new = [v % 999 for (_, start, end), text in zip(batch.rows, texts, strict=True) for v in text[start:end]]
        values = torch.tensor(new, dtype=torch.float32).view(-1, 1, 1).expand(-1, 1, 8).contiguous()
        inputs = []
        for cache, given in zip(caches, (batch, pickle.loads(pickle.dumps(batch))), strict=True):
            cache.apply(given)
            inputs.append(cache.inputs(given))
            if batch.rows:
                write_kv(values, -values, *cache.layer(0), inputs[-1].slot_mapping)
        for one, other in zip(*inputs, strict=True):
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        for one, other in zip(caches[0].layer(0), caches[1].layer(0), strict=True):
            assert torch.equal(one, other)
        engine.complete(batch, engine.execute(batch))
    engine.finished(requests)
    assert engine.scheduler.stats["preempted_by_swap"] > 0
