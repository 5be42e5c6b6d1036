"""`generate`: prompts of different lengths on a paged cache, batched continuously and without padding."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from collections.abc import Sequence as List
from contextlib import contextmanager
from dataclasses import replace
from operator import index
from typing import Any

import torch
from torch import Tensor

from pagedkern.errors import InvalidArgument, InvalidType, Unsupported
from pagedkern.integrations.transformers.layer import NAME
from pagedkern.integrations.transformers.result import Completion, GenerationResult
from pagedkern.integrations.transformers.run import MAX_BATCH_TOKENS, GenerationRun, Inputs, PackedCache, most_blocks
from pagedkern.integrations.transformers.sampling import Sampling
from pagedkern.integrations.transformers.store import PagedStore, bytes_per_block, count
from pagedkern.scheduler import Costs


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
    num_host_blocks: int | None = None,
    policy: str = "auto",
    costs: Costs | None = None,
    max_batch_tokens: int = MAX_BATCH_TOKENS,
    prefix_caching: bool = True,
) -> GenerationResult:
    """Complete prompts of any lengths and any number; each prompt is computed once for all of its samples.

    The model is switched to `attn_implementation="pagedkern"` for the duration of the call. A sample that has ended
    gives its blocks back at once, to prompts that wait. When blocks are lacking, the last prompt that was taken up is
    preempted and resumed later (`pagedkern.scheduler.Scheduler`). What is said stays the same, up to the rounding of
    the model's own sums, which may depend on the shape of the batch.

    Args:
        model: a causal language model of transformers, in evaluation mode, on one device.
        prompts: token ids, or strings if there is a tokenizer.
        tokenizer: of transformers; also turns the completions into text.
        n: samples of each prompt.
        max_new_tokens: most new tokens of a sample, >= 1.
        temperature, top_p, seed: as in `Sampling`; temperature 0 takes the likeliest token.
        eos_token_id: tokens that end a sample; None: those of `model.generation_config`; (): none.
        num_blocks: size of the pool; None: as many as all prompts together can need at most.
        block_size, dtype, backend, layout: as in `PagedCache`.
        num_host_blocks: blocks in host memory for what is swapped out; None: `num_blocks`, or 0 where `policy` or the
            size of the pool makes them useless.
        policy: how to preempt: "swap", "recompute" (also what "swap" does where the host has no room), or "auto": the
            cheaper of the two by `costs`.
        costs: what "auto" reckons with; its `bytes_per_block` may be left out.
        max_batch_tokens: most tokens of one forward pass, >= 1; longer prompts are computed in chunks.
        prefix_caching: whether prompts share the blocks of a beginning that was computed for an earlier one.

    Raises:
        InvalidArgument (InvalidType): an argument that is not accepted.
        Unsupported: a model that a paged cache cannot serve.
        OutOfBlocks: the pool is too small for one of the prompts alone.
    """
    ids = _token_ids(prompts, tokenizer, model.get_input_embeddings().num_embeddings)
    numbers = {"n": n, "max_new_tokens": max_new_tokens, "block_size": block_size, "max_batch_tokens": max_batch_tokens}
    for name, value in numbers.items():
        count(name, value)
    if model.training:
        raise InvalidArgument("model: got one in training mode, expected one in evaluation mode: call model.eval()")
    if eos_token_id is None:
        eos_token_id = model.generation_config.eos_token_id
    eos = {eos_token_id} if isinstance(eos_token_id, int) else set(eos_token_id or ())
    sampling = Sampling(temperature, top_p, seed)
    most = sum(most_blocks(len(prompt), n, max_new_tokens, block_size) for prompt in ids)
    num_blocks = most if num_blocks is None else count("num_blocks", num_blocks)
    if num_host_blocks is None:
        num_host_blocks = num_blocks if num_blocks < most and policy != "recompute" else 0
    cache = PackedCache(
        model.config,
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=dtype,
        backend=backend,
        layout=layout,
        num_host_blocks=num_host_blocks,
        prefix_caching=prefix_caching,
    )
    costs = Costs() if costs is None else costs
    if isinstance(costs, Costs) and costs.bytes_per_block is None:
        costs = replace(costs, bytes_per_block=bytes_per_block(model.config, block_size, dtype or model.dtype))
    run = GenerationRun(
        cache,
        ids,
        n,
        max_new_tokens,
        eos,
        sampling,
        max_batch_tokens=max_batch_tokens,
        policy=policy,
        costs=costs,
    )
    with _attention_of(model), torch.inference_mode():
        while not run.finished:
            run.accept(forward(model, cache, run.next()))
    return _result(run, tokenizer, n * (max(map(len, ids)) + max_new_tokens))


def forward(model: Any, cache: PagedStore, inputs: Inputs) -> Tensor:
    """Run a packed forward pass and return the logits [S, vocabulary] that it asks for."""
    accepted = inspect.signature(model.forward).parameters
    if "position_ids" not in accepted:
        raise Unsupported(f"model: {type(model).__name__}.forward takes no position_ids, which a packed batch needs")
    last = torch.tensor(inputs.last, dtype=torch.int64, device=model.device)  # may be empty
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


def _token_ids(prompts: List[str] | List[List[int]], tokenizer: Any, vocabulary: int) -> list[list[int]]:
    accepted = "expected a list of strings, or of lists of token ids"
    if isinstance(prompts, str) or not isinstance(prompts, List):
        raise InvalidType(f"prompts: got {type(prompts).__name__}, {accepted}")
    if not prompts:
        raise InvalidArgument(f"prompts: got none, {accepted}")
    result: list[list[int]] = []
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str) and tokenizer is None:
            raise InvalidType(f"prompts[{i}]: got a string, expected token ids, or strings with a tokenizer")
        tokens: Any = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        try:
            result.append([index(token) for token in tokens])
        except TypeError:
            raise InvalidType(f"prompts[{i}]: got {tokens!r:.80}, {accepted}") from None
        if not result[-1]:
            raise InvalidArgument(f"prompts[{i}]: got no tokens, expected one at least")
        for token in result[-1]:
            if not 0 <= token < vocabulary:
                raise InvalidArgument(f"prompts[{i}]: got token id {token}, expected 0 to {vocabulary - 1}")
    return result


def _result(run: GenerationRun, tokenizer: Any, contiguous: int) -> GenerationResult:
    """`contiguous`: tokens that a contiguous cache reserves for one prompt."""
    kv = run.cache.kv
    assert kv is not None  # the prompts have been computed
    completions = [
        [
            Completion(
                i,
                sample.tokens,
                None if tokenizer is None else tokenizer.decode(sample.tokens, skip_special_tokens=True),
                sample.finish_reason or "",
            )
            for sample in request.samples
        ]
        for i, request in enumerate(run.requests)
    ]
    stats = run.scheduler.stats
    return GenerationResult(
        completions=completions,
        prompt_tokens=sum(len(request.prompt) for request in run.requests),
        new_tokens=sum(len(c.tokens) for samples in completions for c in samples),
        prefill_seconds=run.prefill_seconds,
        decode_seconds=run.decode_seconds,
        decode_tokens=run.decode_tokens,
        block_size=kv.block_size,
        blocks_used=run.blocks_used,
        blocks_shared=run.blocks_shared,
        blocks_saved=run.blocks_saved,
        bytes_per_block=kv.bytes_per_block,
        bytes_contiguous=len(run.requests) * contiguous * (kv.bytes_per_block // kv.block_size),
        preempted_by_swap=stats["preempted_by_swap"],
        preempted_by_recomputation=stats["preempted_by_recomputation"],
        tokens_recomputed=stats["tokens_recomputed"],
    )
