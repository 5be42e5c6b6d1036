"""What cannot be done is refused with a message that says what was given and what was expected, and changes nothing."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    LlamaConfig,
    T5Config,
)
from transformers.masking_utils import (
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)

from pagedkern.errors import BackendUnavailable, InvalidArgument, OutOfBlocks, Unsupported
from pagedkern.integrations.transformers import NAME, PagedCache, generate
from pagedkern.integrations.transformers.attention import attention, make_mask
from tests.integrations.models import passing, prompts, tiny


@pytest.fixture
def model() -> Any:
    """A model of its own for each test: some change it."""
    result = tiny("llama")
    result.set_attn_implementation(NAME)
    return result


def cache_of(model: Any, **options: Any) -> PagedCache:
    return PagedCache(model.config, **{"num_blocks": 32, "block_size": 4, "backend": "reference", **options})


IDS = torch.tensor(prompts((6, 6)))
MASK = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])


def test_importing_registers() -> None:
    assert AttentionInterface()[NAME] is attention
    assert AttentionMaskInterface()[NAME] is make_mask


def test_from_model_switches_the_model() -> None:
    model = tiny("llama")
    cache = PagedCache.from_model(model, max_tokens=33, block_size=8)
    assert model.config._attn_implementation == NAME
    assert (cache.allocator.num_blocks, cache.allocator.block_size) == (5, 8)


@torch.no_grad()
def test_a_model_without_a_paged_cache(model: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"past_key_values: got none or another cache.* accepts a PagedCache"):
        model(IDS, use_cache=False)
    with pytest.raises(InvalidArgument, match=r"past_key_values: got none or another cache"):
        model(IDS, **passing(DynamicCache(config=model.config)))
    with pytest.raises(InvalidArgument, match=r"past_key_values: got none or another cache"):
        model.generate(IDS, max_new_tokens=2)


@torch.no_grad()
@pytest.mark.parametrize("other", ["eager", "sdpa"])
def test_a_paged_cache_without_its_attention(model: Any, other: str) -> None:
    """Another attention would see the new tokens only; it never gets to an answer."""
    model.set_attn_implementation(other)
    cache = cache_of(model)
    message = r"attn_implementation: the attention of layer 0 did not run .*set_attn_implementation\('pagedkern'\)"
    with pytest.raises(InvalidArgument, match=message):
        model(IDS, **passing(cache))
    model.set_attn_implementation(NAME)
    model(IDS, **passing(cache))
    assert cache.get_seq_length() == 6


REFUSED: dict[str, tuple[Callable[[Any, PagedCache], Any], str]] = {
    "a custom mask": (
        lambda model, cache: model(IDS, attention_mask=torch.zeros(2, 1, 6, 6), **passing(cache)),
        r"attention_mask: got a custom Tensor of shape \[2, 1, 6, 6\], expected a padding mask",
    ),
    "attention weights": (
        lambda model, cache: model(IDS, output_attentions=True, **passing(cache)),
        r"output_attentions: .* expected False",
    ),
    "dropout": (
        lambda model, cache: _with_dropout(model)(IDS, **passing(cache)),
        r"dropout: got 0\.25, expected 0: call model\.eval\(\)",
    ),
    "a head mask": (
        lambda model, cache: model(IDS, head_mask=torch.ones(6), **passing(cache)),
        r"head_mask: got Tensor, expected None",
    ),
    "a position bias": (
        lambda model, cache: model(IDS, position_bias=torch.ones(6), **passing(cache)),
        r"position_bias: got Tensor, expected None",
    ),
    "no causality": (
        lambda model, cache: model(IDS, is_causal=False, **passing(cache)),
        r"causal",  # by the mask or, in earlier versions of transformers, by the attention
    ),
}


def _with_dropout(model: Any) -> Any:
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.25
    return model.train()


@torch.no_grad()
@pytest.mark.parametrize("what", REFUSED)
def test_unsupported(model: Any, what: str) -> None:
    call, message = REFUSED[what]
    cache = cache_of(model)
    with pytest.raises(Unsupported, match=message):
        call(model, cache)
    assert cache.get_seq_length() == 0
    assert cache.allocator.num_free_blocks == 32
    model.eval()
    model(IDS, **passing(cache))  # and the cache is as good as new
    cache.allocator.check()


def test_gradients(model: Any) -> None:
    with pytest.raises(Unsupported, match=r"gradients: .* is for inference, call the model under torch\.no_grad\(\)"):
        model(IDS, **passing(cache_of(model)))


@torch.no_grad()
def test_masks_that_do_not_fit(model: Any) -> None:
    cache = cache_of(model)
    model(IDS, attention_mask=MASK, **passing(cache))
    new = IDS[:, :1]
    wrong = {
        r"attention_mask: got None, expected one that covers the padding": None,
        r"attention_mask: got shape \[2, 1\], expected \[2, 7\]: the 6 tokens seen before and the 1 new": MASK[:, :1],
        r"attention_mask: got other values than before for tokens that the cache has seen": torch.ones(2, 7).long(),
        r"attention_mask: got padding only": torch.cat([MASK, torch.zeros(2, 1).long()], 1),
    }
    for message, mask in wrong.items():
        with pytest.raises(InvalidArgument, match=message):
            model(new, attention_mask=mask, **passing(cache))
        assert [seq.num_tokens for seq in cache.sequences] == [6, 4]
    with pytest.raises(InvalidArgument, match=r"input_ids: got 1 rows, expected 2, those of the cache"):
        model(new[:1], **passing(cache))
    model(new, attention_mask=torch.cat([MASK, torch.ones(2, 1).long()], 1), **passing(cache))
    assert [seq.num_tokens for seq in cache.sequences] == [7, 5]


@torch.no_grad()
def test_out_of_blocks_leaves_the_cache_as_it_was(model: Any) -> None:
    cache = cache_of(model, num_blocks=4)
    model(IDS, **passing(cache))
    model(IDS[:, :2], **passing(cache))  # both rows are full now
    with pytest.raises(OutOfBlocks):
        model(IDS[:, :1], **passing(cache))
    assert [seq.num_tokens for seq in cache.sequences] == [8, 8]
    cache.allocator.check()
    cache.crop(-1)
    found = model(IDS[:, 1:2], **passing(cache)).logits
    whole = torch.cat([IDS, IDS[:, :2]], 1)
    model.set_attn_implementation("eager")
    assert (found[:, 0] - model(whole).logits[:, -1]).abs().max() < 1e-4


@torch.no_grad()
def test_a_failure_between_the_layers_is_undone(model: Any) -> None:
    """The step that was begun is aborted; the same tokens can be run again, or others of another shape."""
    cache = cache_of(model)
    model(IDS, **passing(cache))

    def fail(*_args: Any) -> None:
        raise RuntimeError("out of memory, say")

    hook = model.model.layers[0].mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="say"):
        model(IDS[:, :3], **passing(cache))
    hook.remove()
    assert cache.get_seq_length() == 6
    found = model(IDS[:, :2], **passing(cache)).logits
    assert [seq.num_tokens for seq in cache.sequences] == [8, 8]
    cache.allocator.check()
    model.set_attn_implementation("eager")
    assert (found - model(torch.cat([IDS, IDS[:, :2]], 1)).logits[:, -2:]).abs().max() < 1e-4


@pytest.mark.parametrize("change", ["crop", "reset", "reorder"])
@torch.no_grad()
def test_a_failed_pass_is_undone_before_the_cache_is_changed(model: Any, change: str) -> None:
    cache = cache_of(model)
    model(IDS, **passing(cache))
    hook = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(IDS[:, :3], **passing(cache))
    hook.remove()
    if change == "crop":
        cache.crop(-2)
    elif change == "reset":
        cache.reset()
    else:
        cache.reorder_cache(torch.tensor([1, 1]))
    left = {"crop": [4, 4], "reset": [], "reorder": [6, 6]}[change]
    assert [seq.num_tokens for seq in cache.sequences] == left
    cache.allocator.check()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"num_blocks": None},
            InvalidArgument,
            r"num_blocks: got None with max_tokens=None, expected one of the two",
        ),
        ({"max_tokens": 8}, InvalidArgument, r"num_blocks: got 32 with max_tokens=8"),
        ({"num_blocks": None, "max_tokens": 0}, InvalidArgument, r"max_tokens: got 0, expected an integer >= 1"),
        ({"num_blocks": None, "max_tokens": 8, "block_size": 0}, InvalidArgument, r"block_size: got 0"),
        ({"block_size": 0}, InvalidArgument, r"block_size"),
        ({"num_blocks": 0}, InvalidArgument, r"num_blocks"),
    ],
)
def test_sizes(model: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cache_of(model, **options)


@torch.no_grad()
def test_what_the_kernels_refuse_leaves_no_trace(model: Any) -> None:
    for options in ({"backend": "abacus"}, {"layout": "DHN"}, {"dtype": torch.int32}, {"k_scale": 0.5}):
        cache = cache_of(model, **options)
        with pytest.raises((InvalidArgument, BackendUnavailable), match=next(iter(options))):
            model(IDS, **passing(cache))
        assert cache.allocator.num_free_blocks == 32
        assert cache.get_seq_length() == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (T5Config(num_layers=2), r"config: got T5Config with layers that share or cross-attend"),
        (
            LlamaConfig(layer_types=["full_attention"] * 31 + ["linear_attention"]),
            r"layers of type \['linear_attention'\]",
        ),
    ],
)
def test_other_kinds_of_model(config: Any, message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        PagedCache(config, num_blocks=8)


def test_layers_that_share_keys(model: Any) -> None:
    """A model whose second layer attends over the first one's K and V is noticed when it does."""
    cache = cache_of(model)
    layer = cache.layers[0]
    key = torch.randn(1, 2, 3, 16)
    keys, values = layer.update(key, key)
    query = torch.randn(1, 6, 3, 16)
    attention(model.model.layers[0].self_attn, query, keys, values, None)
    with pytest.raises(Unsupported, match=r"layer 0: its K and V are used by another layer"):
        attention(model.model.layers[1].self_attn, query, keys, values, None)


def test_masks_of_other_kinds() -> None:
    """Through transformers' own functions: a mask of the model's own, chunks, and a window that attention ignores."""
    config = LlamaConfig(attention_chunk_size=4, sliding_window=3, num_hidden_layers=1)
    config._attn_implementation = NAME
    common = {"config": config, "attention_mask": None, "position_ids": None, **passing(None)}
    accepted = inspect.signature(create_causal_mask).parameters
    common["inputs_embeds" if "inputs_embeds" in accepted else "input_embeds"] = torch.zeros(2, 6, 8)
    if "cache_position" in accepted:  # in transformers 5.0
        common["cache_position"] = torch.arange(6)
    with pytest.raises(Unsupported, match=r"attention mask: the model adds its own pattern"):
        create_causal_mask(**common, or_mask_function=lambda b, h, q, k: k >= 0)
    with pytest.raises(Unsupported, match=r"attention mask: the model adds its own pattern"):
        create_sliding_window_causal_mask(**common, or_mask_function=lambda b, h, q, k: k >= 0)
    assert create_sliding_window_causal_mask(**common).window == 3
    plain = create_causal_mask(**common)
    assert (plain.visible, plain.window) == (None, None)
    chunked = create_chunked_causal_mask(**common)
    assert chunked.window == 4

    cache = PagedCache(config, num_blocks=4, backend="reference")
    key = torch.randn(2, 2, 6, 16)
    for mask, window in ((chunked, None), (plain, 4)):
        keys, values = cache.layers[0].update(key, key)
        with pytest.raises(
            Unsupported, match=r"the model masks a span of (4|None) tokens and asks for sliding_window="
        ):
            attention(torch.nn.Module(), key, keys, values, mask, sliding_window=window)
    assert cache.allocator.num_free_blocks == 4


@pytest.mark.parametrize(
    ("prompt_list", "options", "words"),
    [
        ([1, 2, 3], {}, r"prompts\[0\]: got 1, expected a list of strings"),
        ([[1], None], {}, r"prompts\[1\]: got None"),
        ([[1.9]], {}, r"prompts\[0\]: got \[1.9\]"),
        ([[1], [2, 64_000]], {}, r"prompts\[1\]: got token id 64000, expected 0 to "),
        ([[-1]], {}, r"prompts\[0\]: got token id -1"),
        ([[1]], {"temperature": "a"}, "temperature: got str 'a', expected a number"),
        ([[1]], {"top_p": None}, "top_p: got NoneType"),
    ],
)
def test_generate_refuses(model: Any, prompt_list: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        generate(model, prompt_list, max_new_tokens=2, **options)


def test_a_temperature_of_almost_nothing_is_greedy(model: Any) -> None:
    greedy, cold = (generate(model, [[1, 2, 3]], max_new_tokens=4, temperature=t) for t in (0, 1e-310))
    assert greedy.completions[0][0].tokens == cold.completions[0][0].tokens


@torch.no_grad()
def test_a_model_that_runs_fewer_layers_than_its_config(model: Any) -> None:
    """Its passes never end, so what they wrote would be undone for good: said at the second one, not wrong text."""
    cache = cache_of(model)
    model.model.layers = model.model.layers[:1]
    model(IDS, **passing(cache))
    with pytest.raises(InvalidArgument, match=r"ended after layer 0 of 0 to 1, .* runs every layer of its config"):
        model(IDS[:, :1], **passing(cache))
    cache.allocator.check()
    assert cache.get_seq_length() == 0


@torch.no_grad()
def test_a_model_that_runs_more_layers_than_the_cache_has(model: Any) -> None:
    cache = cache_of(model)
    cache.layers.pop()
    with pytest.raises(InvalidArgument, match=r"got K and V of layer 1, expected 0 to 0"):
        model(IDS, **passing(cache))


def test_a_cache_is_neither_copied_nor_pickled(model: Any) -> None:
    cache = cache_of(model)
    with pytest.raises(Unsupported, match="pool of its own"):
        copy.deepcopy(cache)
    with pytest.raises(Unsupported, match="memory of this process"):
        pickle.dumps(cache)
