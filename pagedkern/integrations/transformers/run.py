"""One `generate` call without its model: a scheduler says what each forward pass computes, logits come back."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection
from collections.abc import Sequence as List
from typing import NamedTuple

from torch import Tensor

from pagedkern import Verdict
from pagedkern.errors import InvalidArgument, OutOfBlocks
from pagedkern.integrations.transformers.sampling import Sampling
from pagedkern.integrations.transformers.store import Forward, PagedStore
from pagedkern.scheduler import Batch, Costs, Scheduler

MAX_BATCH_TOKENS = 8192


class PackedCache(PagedStore):
    """The cache of a batch without padding: one row, in which the new tokens of all sequences stand one after another.

    To which sequences they belong, the batch says that is given to `plan` before each forward pass. Who made the batch
    completes it.
    """

    _planned: Batch | None = None

    def plan(self, batch: Batch) -> None:
        """The next forward pass is this batch of a scheduler on `self.allocator`."""
        self._planned = batch

    def carry_out(self, batch: Batch) -> None:
        """The moves of a batch that computes nothing."""
        assert self.kv is not None  # else there would be nothing to move
        self.kv.apply(batch)

    def _begin(self, batch: int, length: int, visible: Tensor | None) -> Forward:
        planned, self._planned = self._planned, None
        if planned is None or visible is not None or (batch, length) != (1, planned.num_tokens):
            raise InvalidArgument(
                f"input_ids: got [{batch}, {length}], expected what was planned, without a mask: "
                f"{planned and [1, planned.num_tokens]}"
            )
        return Forward((batch, length), planned, None)

    def _end(self, forward: Forward) -> None:
        """Nothing: the batch is completed once its tokens are chosen."""

    def _undo(self, forward: Forward) -> None:
        """Nothing: a run whose forward pass fails is not taken up again."""


class Inputs(NamedTuple):
    """A packed forward pass of T tokens after which S logits are wanted."""

    ids: list[int]  # [T]
    positions: list[int]  # [T]
    last: list[int]  # [S], places of the tokens whose logits are wanted


class GenerationRun:
    """The requests of one `generate` call, and the figures of what ran. It holds no model.

    `while not run.finished: run.accept(forward(run.next()))`

    Raises:
        OutOfBlocks: the pool is too small for one of the prompts alone.
        InvalidArgument: a policy that does not exist.
    """

    def __init__(
        self,
        cache: PackedCache,
        prompts: List[List[int]],
        n: int,
        max_new_tokens: int,
        eos: Collection[int],
        sampling: Sampling,
        *,
        max_batch_tokens: int = MAX_BATCH_TOKENS,
        policy: str = "auto",
        costs: Costs | None = None,
    ) -> None:
        self.cache, self.allocator, self.sampling = cache, cache.allocator, sampling
        self.scheduler = Scheduler(
            cache.allocator,
            token_budget=max_batch_tokens,
            max_num_seqs=len(prompts) * n,
            policy=policy,
            costs=costs,
        )
        blocks, size = self.allocator.num_blocks, self.allocator.block_size
        for i, prompt in enumerate(prompts):
            if self.scheduler.can_add(len(prompt), max_tokens=max_new_tokens, n=n) is Verdict.NEVER:
                raise OutOfBlocks(
                    f"num_blocks: got {blocks}, prompts[{i}] of {len(prompt)} tokens with n={n} and max_new_tokens="
                    f"{max_new_tokens} needs up to {most_blocks(len(prompt), n, max_new_tokens, size)} for itself"
                )
        self.requests = [self.scheduler.add(prompt, max_tokens=max_new_tokens, n=n, eos=eos) for prompt in prompts]
        self._generators = {
            sample: sampling.generator(i, j)
            for i, request in enumerate(self.requests)
            for j, sample in enumerate(request.samples)
        }
        self._batch: Batch | None = None  # in flight
        self._rows: list[int] = []  # for each of its outputs, the row of the logits
        self._begun = False  # a sample has just got its first token
        self._clock = time.perf_counter()
        self.blocks_used = self.blocks_shared = self.blocks_saved = self.decode_tokens = 0
        self.prefill_seconds = self.decode_seconds = 0.0

    @property
    def finished(self) -> bool:
        return not self.scheduler.has_work

    @property
    def tokens(self) -> list[list[list[int]]]:
        """The new token ids so far: [prompt][sample][token]."""
        return [[sample.tokens for sample in request.samples] for request in self.requests]

    def next(self) -> Inputs:
        """The next forward pass. Batches that only move blocks are carried out on the way."""
        batch = self.scheduler.schedule()
        while not batch.rows:
            self.cache.carry_out(batch)
            self.scheduler.complete(batch, ())
            batch = self.scheduler.schedule()
        self._batch = batch
        self.cache.plan(batch)
        self.blocks_used = max(self.blocks_used, self.allocator.num_blocks - self.allocator.num_free_blocks)
        if self._begun:  # samples share most when they have just begun
            self._count_shared()
        places = batch.logits_rows.tolist()
        last = sorted(set(places))  # the samples of a prompt begin with the same logits
        row = {place: i for i, place in enumerate(last)}
        self._rows = [row[place] for place in places]
        return Inputs(batch.token_ids.tolist(), batch.positions.tolist(), last)

    def accept(self, logits: Tensor) -> None:
        """Take the logits [S, vocabulary] of the forward pass that `next` planned, which has run."""
        batch, self._batch = self._batch, None
        assert batch is not None
        outputs = batch.outputs
        if self._rows != list(range(len(logits))):
            logits = logits[self._rows]
        tokens = self.sampling.choose(logits, [self._generators[s] for s in outputs]) if outputs else []
        decoding = all(start >= len(s.request.prompt) and end == start + 1 for s, start, end in batch.rows)
        self.scheduler.complete(batch, tokens)
        self._begun = any(len(sample.tokens) == 1 for sample in outputs)
        before, self._clock = self._clock, time.perf_counter()  # the tokens were read back: the work is finished
        if decoding:
            self.decode_seconds += self._clock - before
            self.decode_tokens += len(tokens)
        else:
            self.prefill_seconds += self._clock - before

    def _count_shared(self) -> None:
        samples = [sample for request in self.scheduler.running for sample in request.samples]
        owners = Counter(block for sample in samples if sample.seq is not None for block in sample.seq.block_ids)
        self.blocks_shared = max(self.blocks_shared, sum(count > 1 for count in owners.values()))
        self.blocks_saved = max(self.blocks_saved, owners.total() - len(owners))


def most_blocks(length: int, n: int, max_new_tokens: int, block_size: int) -> int:
    """Blocks that n samples of a prompt take at most: its full blocks once, the rest for each.

    The last token of a sample is never stored."""
    shared = length // block_size
    return shared + n * (-(-(length + max_new_tokens - 1) // block_size) - shared)
