"""`generate`: prompts of different lengths as one packed batch on a paged cache, without padding."""

from __future__ import annotations

import inspect
import time
from collections import Counter
from collections.abc import Collection, Iterator
from collections.abc import Sequence as List
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagedkern import Sequence, Step
from pagedkern.errors import InvalidArgument, InvalidType, Unsupported
from pagedkern.integrations.transformers.attention import NAME
from pagedkern.integrations.transformers.result import Completion, GenerationResult
from pagedkern.integrations.transformers.sampling import Sampling
from pagedkern.integrations.transformers.store import Forward, PagedStore, count


class PackedCache(PagedStore):
    """The cache of a batch without padding: one row, in which the new tokens of all sequences stand one after another.

    To which sequences they belong, the step says that is given to `plan` before each forward pass.
    """

    _planned: Step | None = None

    def plan(self, step: Step) -> None:
        """The next forward pass is this step of `self.allocator`."""
        self._planned = step

    def _begin(self, batch: int, length: int, visible: Tensor | None) -> Forward:
        step, self._planned = self._planned, None
        if step is None or visible is not None or (batch, length) != (1, step.num_tokens):
            raise InvalidArgument(
                f"input_ids: got [{batch}, {length}], accepted is what was planned, without a mask: "
                f"{step and [1, step.num_tokens]}"
            )
        return Forward((batch, length), step, None)


class Inputs(NamedTuple):
    """A packed forward pass of T tokens after which S logits are wanted."""

    ids: list[int]  # [T]
    positions: list[int]  # [T]
    last: list[int]  # [S], places of the tokens whose logits are wanted


@dataclass(eq=False)
class Sample:
    """One sequence being generated."""

    prompt: int
    seq: Sequence
    random: Random
    tokens: list[int] = field(default_factory=list)  # the new ones
    finish_reason: str = ""  # empty while it goes on


class Batch:
    """The sequences of one `generate` call: what to run next, and what to do with the logits. It holds no model.

    `while not batch.finished: batch.accept(forward(batch.next()))`
    """

    def __init__(
        self,
        cache: PackedCache,
        prompts: List[List[int]],
        n: int,
        max_new_tokens: int,
        eos: Collection[int],
        sampling: Sampling,
    ) -> None:
        self.cache, self.allocator = cache, cache.allocator
        self.prompts, self.n, self.max_new_tokens, self.eos, self.sampling = prompts, n, max_new_tokens, eos, sampling
        self.samples: list[list[Sample]] = []  # [prompt][sample]
        self.blocks_used = self.blocks_shared = self.blocks_saved = 0
        with self.allocator.transaction():
            self._new = [self.allocator.create(tokens) for tokens in prompts]  # not yet computed

    @property
    def live(self) -> list[Sample]:
        """Samples that go on; none before the prompts have been computed."""
        return [sample for samples in self.samples for sample in samples if not sample.finish_reason]

    @property
    def finished(self) -> bool:
        return not self._new and not self.live

    def next(self) -> Inputs:
        """Plan the next forward pass: all prompts, then one token of each live sample."""
        if self._new:
            step = self.allocator.prefill(self._new)
            ids = [token for prompt in self.prompts for token in prompt]
        else:
            live = self.live
            ids = [sample.tokens[-1] for sample in live]
            step = self.allocator.append([sample.seq for sample in live], ids)
            if len(live[0].tokens) == 1:  # the first step after the prompts: later steps share no more than this one
                self._count_shared(live)
        self.cache.plan(step)
        self.blocks_used = max(self.blocks_used, self.allocator.num_blocks - self.allocator.num_free_blocks)
        ends, starts = step.seq_lens, step.cu_seqlens_q
        positions = [p for i, end in enumerate(ends) for p in range(end - (starts[i + 1] - starts[i]), end)]
        return Inputs(ids, positions, [start - 1 for start in starts[1:]])

    def accept(self, logits: Tensor) -> None:
        """Take the logits [S, vocabulary] of the forward pass that `next` planned, which has run."""
        if self._new:
            for i, seq in enumerate(self._new):
                seqs = [seq, *self.allocator.fork(seq, self.n - 1)] if self.n > 1 else [seq]
                self.samples.append([Sample(i, s, self.sampling.generator(i, j)) for j, s in enumerate(seqs)])
            self._new = []
            logits = logits.repeat_interleave(self.n, 0)
        live = self.live
        for sample, token in zip(live, self.sampling.choose(logits, [s.random for s in live]), strict=True):
            sample.tokens.append(token)
            if token in self.eos:
                sample.finish_reason = "stop"
            elif len(sample.tokens) == self.max_new_tokens:
                sample.finish_reason = "length"
            if sample.finish_reason:
                self.allocator.free(sample.seq)

    def _count_shared(self, live: list[Sample]) -> None:
        owners = Counter(block for sample in live for block in sample.seq.block_ids)
        self.blocks_shared = sum(count > 1 for count in owners.values())
        self.blocks_saved = owners.total() - len(owners)


def generate(
    model: Any,
    prompts: List[str] | List[List[int]],
    *,
    tokenizer: Any = None,
    n: int = 1,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    eos_token_id: int | Collection[int] | None = None,
    num_blocks: int | None = None,
    block_size: int = 16,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
    layout: str = "HND",
) -> GenerationResult:
    """Complete prompts of any lengths in one paged batch; each prompt is computed once for all of its samples.

    The model is switched to `attn_implementation="pagedkern"` for the duration of the call. A sample that has ended
    gives its blocks back at once.

    Args:
        model: a causal language model of transformers, in evaluation mode, on one device.
        prompts: token ids, or strings if there is a tokenizer.
        tokenizer: of transformers; also turns the completions into text.
        n: samples of each prompt.
        max_new_tokens: most new tokens of a sample, >= 1.
        temperature, top_p, seed: as in `Sampling`; temperature 0 takes the likeliest token.
        eos_token_id: tokens that end a sample; None: those of `model.generation_config`; (): none.
        num_blocks: size of the pool; None: as many as the batch can need at most.
        block_size, dtype, backend, layout: as in `PagedCache`.

    Raises:
        InvalidArgument (InvalidType): an argument that is not accepted.
        Unsupported: a model that a paged cache cannot serve.
        OutOfBlocks: the pool is too small for the batch.
    """
    ids = _token_ids(prompts, tokenizer)
    for name, value in (("n", n), ("max_new_tokens", max_new_tokens), ("block_size", block_size)):
        count(name, value)
    if model.training:
        raise InvalidArgument("model: got one in training mode, accepted is one in evaluation mode: call model.eval()")
    if eos_token_id is None:
        eos_token_id = model.generation_config.eos_token_id
    eos = {eos_token_id} if isinstance(eos_token_id, int) else set(eos_token_id or ())
    sampling = Sampling(temperature, top_p, seed)
    if num_blocks is None:
        num_blocks = sum(_most_blocks(len(prompt), n, max_new_tokens, block_size) for prompt in ids)
    cache = PackedCache(
        model.config, num_blocks=num_blocks, block_size=block_size, dtype=dtype, backend=backend, layout=layout
    )
    batch = Batch(cache, ids, n, max_new_tokens, eos, sampling)
    clock = [time.perf_counter()]
    with _attention_of(model), torch.inference_mode():
        while not batch.finished:
            batch.accept(forward(model, cache, batch.next()))  # reads tokens back, so the clock sees finished work
            clock.append(time.perf_counter())
    return _result(batch, tokenizer, clock)


def forward(model: Any, cache: PagedStore, inputs: Inputs) -> Tensor:
    """Run a packed forward pass and return the logits [S, vocabulary] that it asks for."""
    accepted = inspect.signature(model.forward).parameters
    if "position_ids" not in accepted:
        raise Unsupported(f"model: {type(model).__name__}.forward takes no position_ids, which a packed batch needs")
    last = torch.tensor(inputs.last, device=model.device)
    options: dict[str, Any] = {"cache" if "cache" in accepted else "past_key_values": cache}
    if "logits_to_keep" in accepted:
        options["logits_to_keep"] = last
    logits: Tensor = model(
        input_ids=torch.tensor([inputs.ids], device=model.device),
        position_ids=torch.tensor([inputs.positions], device=model.device),
        use_cache=True,
        **options,
    ).logits[0]
    return logits if "logits_to_keep" in accepted else logits[last]


@contextmanager
def _attention_of(model: Any) -> Iterator[None]:
    """The model computes its attention with pagedkern meanwhile."""
    before = model.config._attn_implementation
    if before != NAME:
        model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        if before != NAME:
            model.set_attn_implementation(before)


def _token_ids(prompts: List[str] | List[List[int]], tokenizer: Any) -> list[list[int]]:
    accepted = "accepted is a list of strings, or of lists of token ids"
    if isinstance(prompts, str) or not isinstance(prompts, List):
        raise InvalidType(f"prompts: got {type(prompts).__name__}, {accepted}")
    if not prompts:
        raise InvalidArgument(f"prompts: got none, {accepted}")
    result: list[list[int]] = []
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str) and tokenizer is None:
            raise InvalidType(f"prompts[{i}]: got a string, accepted are token ids, or strings with a tokenizer")
        tokens: Any = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        if not len(tokens):
            raise InvalidArgument(f"prompts[{i}]: got no tokens, accepted is one at least")
        result.append([int(token) for token in tokens])
    return result


def _most_blocks(length: int, n: int, max_new_tokens: int, block_size: int) -> int:
    """Blocks that n samples of a prompt take at most: its full blocks once, the rest for each.

    The last token of a sample is never stored."""
    shared = length // block_size
    return shared + n * (-(-(length + max_new_tokens - 1) // block_size) - shared)


def _result(batch: Batch, tokenizer: Any, clock: list[float]) -> GenerationResult:
    kv = batch.cache.kv
    assert kv is not None  # the prompts have been computed
    completions = [
        [
            Completion(
                sample.prompt,
                sample.tokens,
                None if tokenizer is None else tokenizer.decode(sample.tokens, skip_special_tokens=True),
                sample.finish_reason,
            )
            for sample in samples
        ]
        for samples in batch.samples
    ]
    new_tokens = sum(len(c.tokens) for samples in completions for c in samples)
    rows = len(batch.prompts) * batch.n
    columns = max(map(len, batch.prompts)) + batch.max_new_tokens
    return GenerationResult(
        completions=completions,
        prompt_tokens=sum(map(len, batch.prompts)),
        new_tokens=new_tokens,
        prefill_seconds=clock[1] - clock[0],
        decode_seconds=clock[-1] - clock[1],
        decode_tokens=new_tokens - rows,
        block_size=kv.block_size,
        blocks_used=batch.blocks_used,
        blocks_shared=batch.blocks_shared,
        blocks_saved=batch.blocks_saved,
        bytes_per_block=kv.bytes_per_block,
        bytes_contiguous=rows * columns * (kv.bytes_per_block // kv.block_size),
    )
