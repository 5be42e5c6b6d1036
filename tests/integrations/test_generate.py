"""`generate`: samples that share blocks, ends of texts, memory, sampling, refusals."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StaticCache

from pagedkern.errors import InvalidArgument, InvalidType, OutOfBlocks, Unsupported
from pagedkern.integrations.transformers import generate
from pagedkern.integrations.transformers.generation import forward
from pagedkern.integrations.transformers.run import Inputs, PackedCache
from pagedkern.integrations.transformers.sampling import Sampling
from tests.integrations.models import VOCABULARY, prompts, tiny
from tests.integrations.watched import watch

PROMPTS = prompts((9, 4, 14))


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("gemma2")


def run(model: Any, given: list[list[int]] = PROMPTS, **options: Any) -> Any:
    settings = {"max_new_tokens": 12, "eos_token_id": (), "block_size": 4, "backend": "reference"}
    return generate(model, given, **{**settings, **options})


@torch.no_grad()
def eager_logits(model: Any, tokens: list[int], count: int) -> Tensor:
    """Of the last `count` tokens, [count, vocabulary]."""
    model.set_attn_implementation("eager")
    result: Tensor = model(torch.tensor([tokens])).logits[0, -count:]
    return result


@pytest.mark.parametrize("n", [1, 2, 5])
def test_samples_are_what_eager_logits_make_them(model: Any, n: int) -> None:
    """Each token of each sample follows from eager attention over that sample's own past: forks do not mix."""
    sampling = Sampling(temperature=0.8, top_p=0.9, seed=3)
    batch = watch(model, PROMPTS, n, 12, sampling)
    texts = set()
    for i, samples in enumerate(request.samples for request in batch.requests):
        assert len(samples) == n
        for j, sample in enumerate(samples):
            rows = eager_logits(model, PROMPTS[i] + sample.tokens[:-1], 12)
            generator = sampling.generator(i, j)
            assert sample.tokens == [sampling.choose(row[None], [generator])[0] for row in rows]
            texts.add(tuple(sample.tokens))
    assert len(texts) == len(PROMPTS) * n
    assert batch.allocator.num_free_blocks == 100


def test_samples_share_the_blocks_of_their_prompt(model: Any) -> None:
    """Full blocks of a prompt once for all samples; a block that is half full is copied for all but the last writer."""
    n = 5
    batch = watch(model, PROMPTS, n, 12, Sampling(1.0))
    full = [len(prompt) // 4 for prompt in PROMPTS]
    partial = [len(prompt) % 4 > 0 for prompt in PROMPTS]
    assert batch.blocks_shared == sum(full)
    assert batch.blocks_saved == sum(full) * (n - 1)
    assert batch.copies[1] == sum(partial) * (n - 1)
    assert sum(batch.copies) == batch.copies[1]
    most = sum(full) + n * sum(
        -(-(len(prompt) + 11) // 4) - blocks for prompt, blocks in zip(PROMPTS, full, strict=True)
    )
    assert batch.blocks_used == most


def test_one_sample_shares_nothing(model: Any) -> None:
    result = run(model)
    assert (result.blocks_shared, result.blocks_saved) == (0, 0)


def test_what_is_said_does_not_depend_on_the_batch(model: Any) -> None:
    """The first samples of five are those of two, a prompt alone says what it says among others, seeds tell apart."""
    options = {"temperature": 1.0, "seed": 5}
    five, two = run(model, n=5, **options), run(model, n=2, **options)
    assert [samples[:2] for samples in five.tokens] == two.tokens
    assert run(model, PROMPTS[:1], n=2, **options).tokens == two.tokens[:1]
    assert run(model, n=2, temperature=1.0, seed=6).tokens != two.tokens
    assert run(model, n=2, **options).tokens == two.tokens


def test_a_sample_that_ends_frees_its_blocks(model: Any) -> None:
    """An end of text in the middle of a batch: it is kept, the sample stops, the others go on undisturbed."""
    free = run(model).tokens
    eos = free[1][0][5]
    stops = [tokens.index(eos) + 1 if eos in tokens else 12 for (tokens,) in free]
    assert min(stops) < max(stops)
    batch = watch(model, PROMPTS, 1, 12, Sampling(), {eos})
    for (sample,), (tokens,), stop in zip((request.samples for request in batch.requests), free, stops, strict=True):
        assert sample.tokens == tokens[:stop]
        assert sample.finish_reason == ("stop" if tokens[stop - 1] == eos else "length")
    assert batch.allocator.num_free_blocks == 100

    result = run(model, eos_token_id=eos)
    assert [len(tokens) for (tokens,) in result.tokens] == stops
    assert result.new_tokens == sum(stops)
    assert result.decode_tokens == sum(stops) - 3


def test_an_end_at_the_first_token(model: Any) -> None:
    """Nothing is left to decode; all of that at once is no special case."""
    first = [tokens[0] for (tokens,) in run(model, max_new_tokens=1).tokens]
    result = run(model, n=3, eos_token_id=first, block_size=16)
    assert result.tokens == [[[token]] * 3 for token in first]
    assert {c.finish_reason for samples in result.completions for c in samples} == {"stop"}
    assert (result.decode_tokens, result.blocks_used) == (0, 3)


def test_the_model_names_the_end_by_default(model: Any) -> None:
    before = model.generation_config.eos_token_id
    ends = run(model).tokens[0][0][3:5]
    try:
        for given in (ends, ends[0]):
            model.generation_config.eos_token_id = given
            assert run(model, eos_token_id=None).tokens == run(model, eos_token_id=given).tokens
            assert len(run(model, eos_token_id=None).tokens[0][0]) <= 4
    finally:
        model.generation_config.eos_token_id = before


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("block_size", [1, 4, 5, 64])
def test_the_pool_is_as_large_as_needed_and_no_larger(model: Any, block_size: int, n: int) -> None:
    result = run(model, n=n, block_size=block_size)
    exact = run(model, n=n, block_size=block_size, num_blocks=result.blocks_used)
    assert exact.tokens == result.tokens
    assert exact.preempted_by_swap + exact.preempted_by_recomputation == 0
    assert result.bytes_used == result.blocks_used * result.bytes_per_block
    fewer = run(model, n=n, block_size=block_size, num_blocks=result.blocks_used - 1)
    assert fewer.tokens == result.tokens
    assert fewer.blocks_used < result.blocks_used


def test_the_contiguous_reservation_is_that_of_a_static_cache(model: Any) -> None:
    """transformers' own cache with a place for every token that the batch may come to, without a window."""
    llama = tiny("llama")
    result = run(llama, n=2, max_new_tokens=6)
    static = StaticCache(config=llama.config, max_cache_len=14 + 6)
    static.early_initialization(batch_size=6, num_heads=2, head_dim=16, dtype=torch.float32, device=torch.device("cpu"))
    memory = sum(x.numel() * x.element_size() for layer in static.layers for x in (layer.keys, layer.values))
    assert result.bytes_contiguous == memory
    assert 0 < result.bytes_used < memory


def test_the_figures_of_a_result(model: Any) -> None:
    result = run(model, n=2, max_new_tokens=3)
    assert result.prompt_tokens == 9 + 4 + 14
    assert result.new_tokens == sum(len(tokens) for samples in result.tokens for tokens in samples) == 18
    assert result.prefill_seconds > 0
    assert result.decode_seconds > 0
    assert result.tokens_per_second == 18 / (result.prefill_seconds + result.decode_seconds)
    assert [[c.prompt for c in samples] for samples in result.completions] == [[0, 0], [1, 1], [2, 2]]
    assert {c.text for samples in result.completions for c in samples} == {None}


class Letters:
    """A tokenizer of single characters."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) - 32 for c in text]}

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(token + 32) for token in tokens)


def test_strings_and_a_tokenizer(model: Any) -> None:
    tokenizer = Letters()
    result = run(model, ["Hello", "My dear fellow"], tokenizer=tokenizer)
    same = run(model, [tokenizer("Hello")["input_ids"], tokenizer("My dear fellow")["input_ids"]])
    assert result.tokens == same.tokens
    assert result.texts == [[tokenizer.decode(tokens, True) for tokens in samples] for samples in same.tokens]


@pytest.mark.parametrize("before", ["eager", "sdpa", "pagedkern"])
def test_the_model_gets_its_attention_back(before: str) -> None:
    llama = tiny("llama")
    llama.set_attn_implementation(before)
    run(llama, max_new_tokens=2)
    assert llama.config._attn_implementation == before
    with pytest.raises(InvalidArgument, match=r"backend: got 'abacus'"):
        run(llama, backend="abacus")
    assert llama.config._attn_implementation == before


REFUSED: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    ("Hello", {}, InvalidType, r"prompts: got str, expected a list of strings, or of lists of token ids"),
    (7, {}, InvalidType, r"prompts: got int, expected a list"),
    ([], {}, InvalidArgument, r"prompts: got none, expected a list"),
    (["Hello"], {}, InvalidType, r"prompts\[0\]: got a string, expected token ids, or strings with a tokenizer"),
    ([[1], []], {}, InvalidArgument, r"prompts\[1\]: got no tokens, expected one at least"),
    ([[1]], {"n": 0}, InvalidArgument, r"n: got 0, expected an integer >= 1"),
    ([[1]], {"n": 1.0}, InvalidArgument, r"n: got 1\.0, expected an integer >= 1"),
    ([[1]], {"max_new_tokens": True}, InvalidArgument, r"max_new_tokens: got True, expected an integer >= 1"),
    ([[1]], {"block_size": 0}, InvalidArgument, r"block_size: got 0, expected an integer >= 1"),
    ([[1]], {"temperature": -1.0}, InvalidArgument, r"temperature: got -1\.0, expected a finite number >= 0"),
    ([[1]], {"temperature": float("nan")}, InvalidArgument, r"temperature: got nan"),
    ([[1]], {"top_p": 0.0}, InvalidArgument, r"top_p: got 0\.0, expected a number in \(0, 1\]"),
    ([[1]], {"backend": "abacus"}, InvalidArgument, r"backend: got 'abacus'"),
    ([[1]], {"num_blocks": 0}, InvalidArgument, r"num_blocks: got 0, expected an integer >= 1"),
    ([[1]], {"max_batch_tokens": 0}, InvalidArgument, r"max_batch_tokens: got 0, expected an integer >= 1"),
    ([[1]], {"policy": "luck"}, InvalidArgument, r"policy: got 'luck', expected one of 'swap', 'recompute', 'auto'"),
    ([[1]], {"costs": 1.0}, InvalidType, r"costs: got float, expected a Costs"),
    ([[1]], {"num_host_blocks": -1}, InvalidArgument, r"num_host_blocks"),
    ([[1]], {"prefix_caching": 1}, InvalidType, r"prefix_caching: got 1, expected True or False"),
    (
        [[1], [1] * 9],
        {"num_blocks": 4},
        OutOfBlocks,
        r"num_blocks: got 4, prompts\[1\] of 9 tokens with n=1 and max_new_tokens=12 needs up to 5 for itself",
    ),
]


@pytest.mark.parametrize(("given", "options", "error", "message"), REFUSED)
def test_refusals(model: Any, given: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run(model, given, **options)


def test_models_that_cannot(model: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"model: got one in training mode"):
        run(tiny("llama").train())

    class Positionless:
        def forward(self, input_ids: Tensor) -> None: ...

    with pytest.raises(Unsupported, match=r"model: Positionless\.forward takes no position_ids"):
        forward(Positionless(), None, Inputs([1], [0], [0]))  # type: ignore[arg-type]


def test_a_forward_pass_that_was_not_planned(model: Any) -> None:
    cache = PackedCache(model.config, num_blocks=4, backend="reference")
    model.set_attn_implementation("pagedkern")
    with torch.inference_mode(), pytest.raises(InvalidArgument, match=r"input_ids: got \[1, 2\], expected what was"):
        forward(model, cache, Inputs([5, 6], [0, 1], [1]))


# Sampling by itself.


def test_greedy_takes_the_likeliest() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, -1.0, 1.9]])
    assert Sampling().choose(logits, [Random(0), Random(1)]) == [1, 0]


def counts(sampling: Sampling, logits: list[float], draws: int = 4000) -> Counter[int]:
    generator = Random(1)
    return Counter(sampling.choose(torch.tensor([logits] * draws), [generator] * draws))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    logits = [0.0, 1.0, -1.0, 2.0]
    found = counts(Sampling(temperature), logits)
    for token, p in enumerate(torch.softmax(torch.tensor(logits) / temperature, -1).tolist()):
        assert abs(found[token] / 4000 - p) < 4 * (p * (1 - p) / 4000) ** 0.5


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    """Probabilities 0.4, 0.3, 0.2, 0.1: a nucleus of 0.6 is the first two, in their own proportion."""
    logits = torch.tensor([0.2, 0.4, 0.1, 0.3]).log().tolist()
    found = counts(Sampling(1.0, top_p=0.6), logits)
    assert set(found) == {1, 3}
    assert abs(found[1] / 4000 - 4 / 7) < 0.03
    assert set(counts(Sampling(1.0, top_p=0.05), logits)) == {1}
    assert set(counts(Sampling(1.0, top_p=1.0), logits)) == {0, 1, 2, 3}


def test_impossible_tokens_are_never_drawn() -> None:
    class Edge(Random):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.value = value

        def random(self) -> float:
            return self.value

    logits = torch.full((1, VOCABULARY), -torch.inf)
    logits[0, 7] = logits[0, 50] = 0.0
    for draw, token in ((0.0, 7), (0.499, 7), (0.5, 50), (1 - 2**-53, 50)):
        assert Sampling(1.0).choose(logits, [Edge(draw)]) == [token]


def test_generators_differ_by_seed_prompt_and_sample() -> None:
    sampling = Sampling(1.0, seed=3)
    draws = {sampling.generator(i, j).random() for i in range(4) for j in range(4)}
    assert len(draws) == 16
    assert sampling.generator(1, 2).random() in draws
    assert Sampling(1.0, seed=4).generator(1, 2).random() not in draws
