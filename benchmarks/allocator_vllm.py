"""vLLM's block manager under the same load as benchmarks/allocator.py, for the ratios. Run by it, in vLLM's
environment.

Prints one JSON object with the same names. What vLLM's scheduler does around the manager for each of these is included
where pagedkern does it too: appending the token, hashing a block that fills, listing the block ids; hashes of prompts
are computed outside the clock for "hit look-up", as vLLM keeps them with the request.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
from time import perf_counter
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
for _unused in ("torchvision", "torchaudio", "torchcodec"):
    sys.modules[_unused] = None  # type: ignore[assignment]

import torch  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import get_hash_fn_by_name  # noqa: E402
from vllm.v1.core.kv_cache_manager import KVCacheManager  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402

SIZE, BLOCKS, BATCH = 16, 64, 256
TOKENS = SIZE * BLOCKS
torch.set_num_threads(1)
hash_function = get_hash_fn_by_name("sha256")
init_none_hash(hash_function)
hasher = get_request_block_hasher(SIZE, hash_function)
sampling = SamplingParams(max_tokens=4096, temperature=0.0)


def prompt(number: int, length: int = TOKENS) -> list[int]:
    return [(number * 7919 + j * 31 + 11) % 50_000 for j in range(length)]


def manager(num_blocks: int, caching: bool) -> Any:
    spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    groups = [KVCacheGroupSpec(["layer"], spec)]
    config = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    return KVCacheManager(
        config, max_model_len=8192, scheduler_block_size=SIZE, hash_block_size=SIZE, enable_caching=caching
    )


def request(number: int, tokens: list[int], caching: bool = True) -> Any:
    return Request(
        request_id=f"r{number}",
        prompt_token_ids=tokens,
        sampling_params=sampling,
        pooling_params=None,
        block_hasher=hasher if caching else None,
    )


def admit_one(blocks: Any, item: Any) -> None:
    known, hits, _ = blocks.get_computed_blocks(item)
    assert blocks.allocate_slots(item, item.num_tokens - hits, hits, known) is not None
    item.num_computed_tokens = item.num_tokens
    item.status = RequestStatus.RUNNING


def decode(caching: bool, steps: int = 320) -> float:
    blocks = manager(BATCH * 100 + 1, caching)
    items = [request(i, prompt(i, TOKENS + i % SIZE), caching) for i in range(BATCH)]
    for item in items:
        admit_one(blocks, item)
    gc.collect()
    gc.freeze()
    gc.disable()
    times = []
    for _ in range(steps):
        start = perf_counter()
        for item in items:
            item.append_output_token_ids(7)
        blocks.new_step_starts()
        given = [blocks.allocate_slots(item, 1) for item in items]
        ids = [new.get_block_ids(allow_none=True) for new in given]
        for item in items:
            item.num_computed_tokens += 1
        times.append((perf_counter() - start) * 1e6 / BATCH)
        assert len(ids) == BATCH
    gc.enable()
    gc.unfreeze()
    return statistics.median(times)


def admit(repeats: int = 400) -> float:
    blocks = manager(20_001, True)
    times = []
    for i in range(313 + repeats):
        tokens = prompt(i)
        start = perf_counter()
        item = request(i, tokens)
        admit_one(blocks, item)
        blocks.free(item)
        if i >= 313:
            times.append((perf_counter() - start) * 1e6 / BLOCKS)
    return statistics.median(times)


def hit(repeats: int = 1000) -> float:
    blocks = manager(20_001, True)
    admit_one(blocks, request(0, prompt(0, TOKENS + 1)))
    again = request(1, prompt(0, TOKENS + 1))
    times = []
    for _ in range(repeats):
        start = perf_counter()
        _, count, _ = blocks.get_computed_blocks(again)
        times.append((perf_counter() - start) * 1e6)
        assert count == TOKENS
    return statistics.median(times)


if __name__ == "__main__":
    figures = {"decode": decode(True), "decode, no prefix cache": decode(False), "admit": admit(), "hit look-up": hit()}
    print(json.dumps(figures))
