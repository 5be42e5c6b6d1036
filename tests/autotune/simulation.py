"""What the objective foretells, played out: the real scheduler and allocator, on the clock of measured rates.

Nothing here knows the formula. Requests are all there from the beginning, `Scheduler` makes the batches, and each batch
takes the time that its tokens, its reads and its moves cost. What decoding takes for each output is counted from the
time on when memory has been full for a while until nobody waits any more; what prompts take, over the whole run. The
two are joined with the mean output of all requests, so that it does not matter which of them a window happens to hold:
`count` requests then say as much as many times as many.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass
from functools import lru_cache

from pagedkern.allocator import BlockAllocator, Sequence
from pagedkern.autotune.rates import Rates
from pagedkern.autotune.workloads import Model, Request, Traffic
from pagedkern.errors import OutOfBlocks
from pagedkern.scheduler import Scheduler

TOKEN_BUDGET = 8192
WATERMARK = 0.01
WARM_UP = 0.3  # share of the requests that fill the memory first


@dataclass
class Played:
    """What was counted, with the outputs of all requests."""

    outputs: float  # of a request, all its samples, mean over all requests
    requests: int
    warm: bool = False  # whether steps count
    seconds: float = 0.0  # of decoding
    tokens: int = 0  # outputs in that time
    steps: int = 0
    decoding: int = 0  # sequences, summed over steps
    prompt_seconds: float = 0.0  # of all prompts
    computed: int = 0  # prompt tokens
    copies: int = 0  # blocks
    swapped: int = 0  # blocks, out and in counted each

    def step(self, seconds: float, decoding: int, outputs: int, copies: int = 0, swapped: int = 0) -> None:
        """A step has run, prompts apart."""
        if self.warm:
            self.seconds += seconds
            self.steps += 1
            self.decoding += decoding
            self.tokens += outputs
            self.copies += copies
            self.swapped += swapped

    @property
    def tokens_per_second(self) -> float:
        request = self.outputs * self.seconds / self.tokens + self.prompt_seconds / self.requests
        return self.outputs / request


@lru_cache(maxsize=1)
def prompts(traffic: Traffic, count: int, seed: int) -> list[array[int]]:
    """Token ids: no two alike, but for the beginning that is that of the request's family."""
    rng, fresh = random.Random(seed), 1 << 40
    requests = traffic.draw(count, seed)
    longest = max(r.shared for r in requests)
    families = [array("q", range(f * longest, (f + 1) * longest)) for f in range(traffic.families)]
    made = []
    for request in requests:
        ids = rng.choice(families)[: request.shared]
        rest = request.prompt - request.shared
        ids.extend(range(fresh, fresh + rest))
        fresh += rest
        made.append(ids)
    return made


def play(
    traffic: Traffic,
    model: Model,
    rates: Rates,
    memory: int,
    block_size: int,
    count: int = 400,
    seed: int = 0,
    token_budget: int = TOKEN_BUDGET,
    max_num_seqs: int | None = None,
) -> Played:
    """Serve `count` requests of a workload with a cache of `memory` bytes. None: as many sequences as it has."""
    num_blocks = memory // (block_size * model.token_bytes)
    requests = traffic.draw(count, seed)
    if traffic.beam:
        return _play_beams(traffic, model, rates, num_blocks, block_size, requests, seed)
    allocator = BlockAllocator(num_blocks, block_size, num_host_blocks=4 * num_blocks, watermark=WATERMARK)
    most = max_num_seqs or traffic.concurrency
    scheduler = Scheduler(allocator, token_budget=token_budget, max_num_seqs=most, policy="swap")
    for request, ids in zip(requests, prompts(traffic, count, seed), strict=True):
        scheduler.add(ids, max_tokens=request.output, n=traffic.samples)
    played = Played(traffic.samples * sum(r.output for r in requests) / count, count)
    while scheduler.waiting:
        played.warm = len(scheduler.waiting) <= (1 - WARM_UP) * count
        batch = scheduler.schedule()
        read, decoding = 0.0, 0
        for row in batch.rows:
            if row.sample.tokens:
                read += model.read_tokens(row.end)
                decoding += 1
            else:
                pairs = model.pairs(row.start, row.end)
                played.prompt_seconds += (row.end - row.start) * rates.token_seconds(model)
                played.prompt_seconds += rates.prefill_seconds(model, block_size, pairs)
                played.computed += row.end - row.start
        moved = dict.fromkeys(("copy", "swap_out", "swap_in"), 0)
        for kind, src, _ in batch.moves:
            moved[kind] += len(src)
        swapped = moved["swap_out"] + moved["swap_in"]
        seconds = rates.weights_seconds(model) + decoding * rates.token_seconds(model)
        seconds += rates.attention_seconds(model, block_size, read)
        seconds += moved["copy"] * rates.copy_seconds(model, block_size)
        seconds += swapped * rates.swap_seconds(model, block_size) / 2
        played.step(seconds, decoding, len(batch.outputs), moved["copy"], swapped)
        scheduler.complete(batch, [1] * len(batch.outputs))
    return played


def _play_beams(
    traffic: Traffic, model: Model, rates: Rates, num_blocks: int, block_size: int, requests: list[Request], seed: int
) -> Played:
    """Beam search, which the scheduler does not do: in each step some beams end, and others are forked instead."""
    rng, width = random.Random(seed), traffic.samples
    dying = round(width * (1 - traffic.survival))
    allocator = BlockAllocator(num_blocks, block_size, watermark=WATERMARK, prefix_caching=False)
    waiting = list(reversed(requests))
    running: list[tuple[Request, list[Sequence], int]] = []  # with the tokens that each beam has made
    played = Played(width * sum(r.output for r in requests) / len(requests), len(requests))
    while waiting:
        played.warm = len(waiting) <= (1 - WARM_UP) * len(requests)
        admitted, budget = [], TOKEN_BUDGET
        while waiting and budget > 0:
            request, groups = waiting[-1], len(running) + len(admitted) + 1
            needed = -(-request.prompt // block_size) + width * groups  # a block a beam is kept in reserve
            if needed > allocator.num_free_blocks or groups * width > traffic.concurrency:
                break
            waiting.pop()
            first = allocator.create(request.prompt)
            allocator.commit(allocator.prefill([first]))
            played.computed += request.prompt
            played.prompt_seconds += request.prompt * rates.token_seconds(model)
            played.prompt_seconds += rates.prefill_seconds(model, block_size, model.pairs(0, request.prompt))
            budget -= request.prompt
            admitted.append((request, [first, *allocator.fork(first, width - 1)], 1))
        while True:  # whoever came last makes room
            try:
                step = allocator.append([beam for _, beams, _ in running for beam in beams])
                break
            except OutOfBlocks:
                request, beams, _ = running.pop()
                for beam in beams:
                    allocator.free(beam)
                waiting.append(request)
        copies = sum(len(src) for kind, src, _ in step.moves if kind == "copy")
        allocator.commit(step)
        kept, read, decoding = [], 0.0, width * len(running)
        for request, beams, count in running:
            read += sum(model.read_tokens(beam.num_tokens) for beam in beams)
            if count + 1 >= request.output:
                for beam in beams:
                    allocator.free(beam)
                continue
            dead = rng.sample(range(width), dying)
            alive = [beam for i, beam in enumerate(beams) if i not in dead]
            for i in dead:
                forked = allocator.fork(rng.choice(alive))
                allocator.free(beams[i])
                beams[i] = forked[0]
            kept.append((request, beams, count + 1))
        running = kept + admitted
        seconds = rates.weights_seconds(model) + decoding * rates.token_seconds(model)
        seconds += rates.attention_seconds(model, block_size, read) + copies * rates.copy_seconds(model, block_size)
        played.step(seconds, decoding, decoding + width * len(admitted), copies)
    return played
