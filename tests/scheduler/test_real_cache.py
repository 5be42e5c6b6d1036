"""A batch is carried out by `KVCache.apply` and `write_kv` like a step of the allocator."""

from __future__ import annotations

import pytest
import torch

from pagedkern import KVCache, write_kv
from pagedkern.scheduler import Batch
from tests.scheduler.engine import Engine, prompt_of, values_of

SMALL = 1 << 20  # integers below are exact in float32


class TensorEngine(Engine):
    """Keeps the same values in the tensors of a real cache, too, and reads them back at every step."""

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int, policy: str) -> None:
        super().__init__(num_blocks, block_size, num_host_blocks=num_host_blocks, policy=policy, token_budget=20)
        self.cache = KVCache(
            2, num_blocks, block_size, 1, 8, dtype=torch.float32, device="cpu", num_host_blocks=num_host_blocks
        )
        for layer in range(2):
            for tensor in self.cache.layer(layer):
                tensor.fill_(torch.nan)

    def execute(self, batch: Batch) -> list[int]:
        tokens = super().execute(batch)
        self.cache.apply(batch)
        slots = torch.frombuffer(batch.slot_mapping, dtype=torch.int64) if batch.rows else torch.empty(0).long()
        texts = [values_of([*sample.request.prompt, *sample.tokens]) for sample, _, _ in batch.rows]
        new = [v % SMALL for (_, start, end), text in zip(batch.rows, texts, strict=True) for v in text[start:end]]
        values = torch.tensor(new, dtype=torch.float32).view(-1, 1, 1).expand(-1, 1, 8).contiguous()
        for layer in range(2):
            k_cache, v_cache = self.cache.layer(layer)
            write_kv(values + layer, -values, k_cache, v_cache, slots)
            for i, (_, _, end) in enumerate(batch.rows):
                blocks = torch.tensor(batch.block_table.tolist()[i])
                blocks = blocks[: -(-end // self.cache.block_size)]
                wanted = torch.tensor([v % SMALL for v in texts[i][:end]], dtype=torch.float32)
                assert torch.equal(k_cache[blocks].reshape(-1, 8)[:end, 3], wanted + layer)
                assert torch.equal(v_cache[blocks].reshape(-1, 8)[:end, 7], -wanted)
        return tokens


@pytest.mark.parametrize("policy", ["swap", "recompute"])
def test_contents_in_tensors(policy: str) -> None:
    engine = TensorEngine(10, 4, 10, policy)
    requests = [engine.scheduler.add(prompt_of(5 + i, i), max_tokens=12, n=1 + i % 2) for i in range(6)]
    engine.run()
    engine.finished(requests)
    stats = engine.scheduler.stats
    assert stats["preempted_by_swap" if policy == "swap" else "preempted_by_recomputation"] > 0
