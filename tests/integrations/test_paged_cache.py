"""What transformers does to a cache: padding, chunks, turns, crops, beams; each against its own DynamicCache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from pagedkern.integrations.transformers import PagedCache
from tests.integrations.models import EOS, PAD, VOCABULARY, left_padded, passing, prompts, tiny

CLOSE = 1e-4  # of logits about 10, in float32, of models whose attention is nearly one-hot

Make = Callable[..., Any]


def paged(model: Any, num_blocks: int = 64, block_size: int = 4, **options: Any) -> PagedCache:
    """A cache for this model, with NaN in every slot that was not written: nothing unseen may show."""
    model.set_attn_implementation("pagedkern")
    cache = PagedCache(model.config, num_blocks=num_blocks, block_size=block_size, backend="reference", **options)
    config = model.config
    like = torch.empty(1, config.num_key_value_heads, 1, config.head_dim)
    for pair in map(cache._memory(like, like).layer, range(config.num_hidden_layers)):
        for tensor in pair:
            tensor.fill_(torch.nan)
    return cache


def eager(model: Any, *_unused: Any, **_options: Any) -> DynamicCache:
    """transformers' own way with the same model, to compare with."""
    model.set_attn_implementation("eager")
    return DynamicCache(config=model.config)


def greedy(model: Any, cache: Any, count: int, **options: Any) -> Tensor:
    """New tokens [rows, count], without regard to an end of text."""
    ids = options["input_ids"]
    settings = {"do_sample": False, "eos_token_id": None, "max_new_tokens": count, "min_new_tokens": count}
    out: Tensor = model.generate(**{**settings, **options}, **passing(cache))
    return out[:, ids.shape[1] :]


def logits(model: Any, cache: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Of all given tokens, which follow those in the cache: [rows, tokens, vocabulary]."""
    with torch.no_grad():
        positions = None if mask is None else (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        result: Tensor = model(input_ids=ids, attention_mask=mask, position_ids=positions, **passing(cache)).logits
    return result


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny(request.param)


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny("llama")


def test_padding_takes_no_slot(model: Any) -> None:
    """Rows hold their real tokens only, and the logits of those are right, wherever the padding stands."""
    ids = torch.tensor(prompts((9, 9, 9)))
    mask = torch.tensor([[1] * 9, [0] * 5 + [1] * 4, [1] * 6 + [0] * 3])
    cache = paged(model)
    found = logits(model, cache, ids, mask)
    assert [seq.num_tokens for seq in cache.sequences] == [9, 4, 6]
    assert cache.get_seq_length() == 9
    assert torch.isfinite(found).all()
    expected = logits(model, eager(model), ids, mask)
    assert (found - expected)[mask.bool()].abs().max() < CLOSE


def test_a_row_alone_says_the_same(model: Any) -> None:
    """To the bit in the cache: padding and neighbours leave no trace in what is stored for a row."""
    rows = prompts((11, 4))
    both, alone = paged(model), paged(model)
    logits(model, both, **_inputs(left_padded(rows)))
    logits(model, alone, torch.tensor([rows[1]]))
    for layer in range(len(both.layers)):
        for ours, theirs in zip(both.kv.layer(layer), alone.kv.layer(layer), strict=True):
            stored = [
                cache.flatten(0, 1)[_slots(seq, 4)]
                for cache, seq in ((ours, both.sequences[1]), (theirs, alone.sequences[0]))
            ]
            assert torch.isfinite(stored[0]).all()
            assert (stored[0] - stored[1]).abs().max() < 1e-5


def _inputs(padded: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"ids": padded["input_ids"], "mask": padded["attention_mask"]}


def _slots(seq: Any, block_size: int) -> list[int]:
    return [seq.block_ids[i // block_size] * block_size + i % block_size for i in range(seq.num_tokens)]


@pytest.mark.parametrize("chunk", [1, 4, 7])
def test_prefill_in_chunks(model: Any, chunk: int) -> None:
    """Also when a row's first chunks are padding throughout."""
    inputs = left_padded(prompts((21, 2, 9)))
    expected = greedy(model, eager(model), 12, **inputs)
    cache = paged(model)
    assert torch.equal(greedy(model, cache, 12, prefill_chunk_size=chunk, **inputs), expected)
    assert [seq.num_tokens for seq in cache.sequences] == [21 + 11, 2 + 11, 9 + 11]
    cache.allocator.check()


def test_turns_of_a_conversation(llama: Any) -> None:
    """`generate` twice on one cache, with turns of different lengths: padding then stands in the middle of a row."""
    first, second = prompts((8, 3)), prompts((2, 6), seed=1)
    answers = []
    for make in (eager, paged):
        cache = make(llama)
        inputs = left_padded(first)
        said = greedy(llama, cache, 7, **inputs)
        more = left_padded(second)
        whole = {
            "input_ids": torch.cat([inputs["input_ids"], said, more["input_ids"]], 1),
            "attention_mask": torch.cat([inputs["attention_mask"], torch.ones_like(said), more["attention_mask"]], 1),
        }
        answers.append((said, greedy(llama, cache, 9, **whole)))
    assert torch.equal(answers[0][0], answers[1][0])
    assert torch.equal(answers[0][1], answers[1][1])
    assert [seq.num_tokens for seq in cache.sequences] == [8 + 7 + 2 + 8, 3 + 7 + 6 + 8]
    cache.allocator.check()


def test_a_reset_cache_takes_another_batch(llama: Any) -> None:
    cache = paged(llama, num_blocks=12)
    for rows in (prompts((8, 3, 5)), prompts((30,))):
        expected = greedy(llama, eager(llama), 5, **left_padded(rows))
        llama.set_attn_implementation("pagedkern")
        assert torch.equal(greedy(llama, cache, 5, **left_padded(rows)), expected)
        cache.reset()
        assert cache.get_seq_length() == 0
        assert cache.allocator.num_free_blocks == 12
    cache.allocator.check()


@pytest.mark.parametrize("count", [1, 3, 4, 9])
def test_crop_forgets(model: Any, count: int) -> None:
    """What is written after a crop sees nothing of what was cut off; blocks that held nothing else are free again."""
    inputs = left_padded(prompts((15, 6)))
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    cache = paged(model)
    logits(model, cache, ids, mask)
    cache.crop(-count)
    assert [seq.num_tokens for seq in cache.sequences] == [15 - count, max(0, 6 - count)]
    kept = sum(-(-seq.num_tokens // 4) for seq in cache.sequences)
    assert cache.allocator.num_blocks - cache.allocator.num_free_blocks == kept
    other = (ids[:, -count:] + 1) % VOCABULARY
    again = logits(model, cache, other, mask)
    cache.allocator.check()
    expected = logits(model, eager(model), torch.cat([ids[:, :-count], other], 1), mask)
    assert (again - expected[:, -count:])[mask[:, -count:].bool()].abs().max() < CLOSE


def test_crop_to_a_length(llama: Any) -> None:
    """A positive number keeps so many tokens (transformers 5.0); zero, and a length not reached, cut nothing."""
    cache = paged(llama)
    logits(llama, cache, torch.tensor(prompts((10,))))
    for argument, left in ((0, 10), (12, 10), (7, 7), (-7, 0)):
        cache.crop(argument)
        assert (cache.get_seq_length(), cache.sequences[0].num_tokens) == (left, left)
    with pytest.raises(ValueError, match=r"tokens_to_remove: got -1, the cache has 0 tokens a row"):
        cache.crop(-1)


@pytest.mark.parametrize("how", ["assistant", "lookup"])
def test_assisted_decoding(model: Any, how: str) -> None:
    """Drafts of an assistant, or of the prompt itself, are verified and cut off again: the greedy text comes out."""
    rows = prompts((6,))
    rows[0] *= 3  # something to look up
    inputs = left_padded(rows)
    expected = greedy(model, eager(model), 20, **inputs)
    if how == "lookup":
        inputs["eos_token_id"] = VOCABULARY  # never said; transformers 5.0 needs one for this
    draft = {"prompt_lookup_num_tokens": 3} if how == "lookup" else {"assistant_model": tiny("llama", seed=5)}
    cache, cropped = paged(model), []
    crop = cache.crop
    cache.crop = lambda n: (cropped.append(n), crop(n))[1]  # type: ignore[method-assign]
    assert torch.equal(greedy(model, cache, 20, **draft, **inputs), expected)
    assert any(cropped)
    assert cache.sequences[0].num_tokens == cache.get_seq_length()
    cache.allocator.check()


@pytest.mark.parametrize("beams", [2, 5])
def test_beam_search(model: Any, beams: int) -> None:
    """The beams of transformers' own cache; beams with a common past share its blocks."""
    inputs = left_padded(prompts((9, 4)))
    options = {"num_beams": beams, "num_return_sequences": beams, "length_penalty": 0.5}
    expected = greedy(model, eager(model), 14, **options, **inputs)
    cache = paged(model, num_blocks=100)
    assert torch.equal(greedy(model, cache, 14, **options, **inputs), expected)
    blocks = [block for seq in cache.sequences for block in seq.block_ids]
    assert len(set(blocks)) < len(blocks)
    cache.allocator.check()
    cache.reset()
    assert cache.allocator.num_free_blocks == 100


def test_rows_can_be_repeated_and_selected(llama: Any) -> None:
    """Repeated rows share all blocks until they are written to, and then only the last one is copied."""
    ids = torch.tensor(prompts((10, 10)))
    cache = paged(llama)
    logits(llama, cache, ids)
    cache.batch_repeat_interleave(3)
    assert cache.allocator.num_blocks - cache.allocator.num_free_blocks == 2 * 3
    assert [seq.block_ids for seq in cache.sequences[:3]] == [cache.sequences[0].block_ids] * 3
    cache.batch_select_indices(torch.tensor([5, 0, 1]))
    assert len({id(seq) for seq in cache.sequences}) == 3
    new = torch.tensor([[7], [8], [9]])
    found = logits(llama, cache, new)
    assert cache.allocator.num_blocks - cache.allocator.num_free_blocks == 3 + 4  # one copy, of rows 1 and 2
    cache.batch_select_indices(torch.tensor([False, True, True]))
    assert [seq.num_tokens for seq in cache.sequences] == [11, 11]
    cache.allocator.check()
    expected = logits(llama, eager(llama), torch.cat([ids[[1, 0, 0]], new], 1))[:, -1:]
    assert (found - expected).abs().max() < CLOSE


def test_selected_rows_keep_their_padding(llama: Any) -> None:
    """The mask that fits after rows have changed places is the old one with its rows in the new places."""
    inputs = left_padded(prompts((9, 3, 6)))
    order = torch.tensor([2, 0, 0, 1])
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    cache = paged(llama)
    logits(llama, cache, ids, mask)
    cache.reorder_cache(order)
    new = torch.tensor([[7, 5], [8, 5], [9, 5], [10, 5]])
    whole = torch.cat([mask[order], torch.tensor([[0, 1], [1, 1], [0, 1], [1, 1]])], 1)
    found = logits(llama, cache, new, whole)
    assert [seq.num_tokens for seq in cache.sequences] == [7, 11, 10, 5]
    expected = logits(llama, eager(llama), torch.cat([ids[order], new], 1), whole)[:, -2:]
    assert (found - expected)[whole[:, -2:].bool()].abs().max() < CLOSE


def test_an_end_of_text_in_the_middle_of_a_batch(llama: Any) -> None:
    """`generate` feeds padding to a row that has ended; the others go on undisturbed."""
    inputs = left_padded(prompts((7, 5, 12)))
    free = greedy(llama, eager(llama), 16, **inputs)
    stop = int(free[1, 6])  # the second row ends here, or earlier
    options = {"eos_token_id": stop, "min_new_tokens": None, "pad_token_id": PAD}
    expected = greedy(llama, eager(llama), 16, **options, **inputs)
    assert (expected[1, 7:] == PAD).all()
    assert (expected[0] != PAD).any()
    assert torch.equal(greedy(llama, paged(llama), 16, **options, **inputs), expected)


def test_the_memory_of_inference_mode_serves_outside(llama: Any) -> None:
    cache = paged(llama)
    cache.kv = None
    ids = torch.tensor(prompts((6,)))
    with torch.inference_mode():
        llama(input_ids=ids, **passing(cache))
    whole = torch.tensor([prompts((6,))[0] + [5, 6]])
    found = logits(llama, cache, whole[:, 6:])
    assert (found - logits(llama, eager(llama), whole)[:, 6:]).abs().max() < CLOSE


@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 2**-8), ("float8_e4m3fn", 2**-4)])
def test_the_cache_may_be_narrower_than_the_model(llama: Any, dtype: str, bound: float) -> None:
    """K and V are stored rounded: to half a unit in the last place of that type, which the logits show."""
    kind = getattr(torch, dtype)
    scales = {} if dtype == "bfloat16" else {"k_scale": 0.5, "v_scale": 0.25}
    ids = torch.tensor(prompts((12,)))
    llama.set_attn_implementation("pagedkern")
    cache = PagedCache(llama.config, num_blocks=8, block_size=4, backend="reference", dtype=kind, **scales)
    exact = paged(llama)
    difference = (logits(llama, cache, ids) - logits(llama, exact, ids)).abs().max()
    assert cache.kv.dtype == kind
    assert 0 < difference < 5.0
    for narrow, wide, name in zip(cache.kv.layer(0), exact.kv.layer(0), ("k_scale", "v_scale"), strict=True):
        found = narrow.float().flatten(0, 1)[_slots(cache.sequences[0], 4)] * scales.get(name, 1.0)
        given = wide.flatten(0, 1)[_slots(exact.sequences[0], 4)]
        assert ((found - given).abs() <= bound * given.abs() + 1e-3).all()


def test_end_of_text_is_not_padding(llama: Any) -> None:
    """Special tokens inside a prompt are tokens like others, if the mask shows them."""
    rows = prompts((6, 4))
    rows[0][2] = PAD
    rows[1][0] = EOS
    inputs = left_padded(rows)
    assert torch.equal(greedy(llama, paged(llama), 6, **inputs), greedy(llama, eager(llama), 6, **inputs))


@pytest.mark.parametrize("inside", ["cache", "all"])
def test_a_default_device_changes_nothing(llama: Any, inside: str) -> None:
    """What the cache keeps on the host is there, wherever the program makes tensors: "meta" stands for a GPU."""
    inputs = left_padded(prompts((9, 4)))
    expected = greedy(llama, eager(llama), 6, **inputs)
    before = torch.get_default_device()
    torch.set_default_device("meta")
    try:
        cache = PagedCache.from_model(llama, num_blocks=60, block_size=4)
        if inside == "cache":
            torch.set_default_device(None)
        found = greedy(llama, cache, 6, **inputs)
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([3, 0], device="cpu"))
        cache.crop(-3)
        lengths = [seq.num_tokens for seq in cache.sequences]
        cache.reset()
    finally:
        torch.set_default_device(None if before.type == "cpu" else before)
    assert torch.equal(found, expected)
    assert lengths == [4 + 5 - 3, 9 + 5 - 3]
    cache.allocator.check()
