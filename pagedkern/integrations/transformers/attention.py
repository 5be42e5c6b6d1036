"""The attention function and the mask function that transformers calls, and their registration.

How a forward pass runs: for each layer, the model calls `cache.update(k, v)`, which stores nothing yet but marks `k`
with the layer it belongs to; the model hands `k` and `v` on to the attention function, which finds the mark, and only
there, where the padding is known, are K and V written and the queries computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from pagedkern.errors import InvalidArgument, Unsupported
from pagedkern.integrations.transformers.layer import NAME, Scores, marked_layer

_REFUSED = ("head_mask", "layer_head_mask", "position_bias", "attention_bias", "alibi", "block_mask")
"""Arguments that models of other kinds pass to their attention function and that change its result."""


@dataclass(frozen=True, slots=True)
class Mask:
    """What the mask function hands, through the model, to the attention function."""

    visible: (
        Tensor | None
    )  # bool [batch, tokens of the cache and of this forward pass]; False is padding. None: all True
    window: int | None  # tokens seen, the query's own included


def make_mask(
    *,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    allow_is_causal_skip: bool = True,
    **_sizes: Any,
) -> Mask:
    """The mask of a layer type: padding and window, never a matrix. Called by transformers' `create_*_mask`.

    Raises:
        Unsupported: the model asks for anything but causal attention with or without a sliding window.
    """
    if use_vmap or not allow_is_causal_skip or (local_size is None and mask_function is not causal_mask_function):
        raise Unsupported(
            "attention mask: the model adds its own pattern to the causal mask (bidirectional blocks, packed sequences "
            f"or a custom mask function), attn_implementation={NAME!r} computes causal and sliding-window attention"
        )
    return Mask(attention_mask, local_size)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Write this step's K and V into the paged cache and attend over it. Called by the model for each layer.

    Args:
        query: [batch, H, Q, D].
        key, value: [batch, G, Q, D] and [batch, G, Q, E], as `PagedCache.update` returned them.
        attention_mask: from `make_mask`.
        scaling, sliding_window, softcap: as in `pagedkern.paged_attention`.
        s_aux: [H], attention sinks.

    Returns:
        [batch, Q, H, E], zeros for padding tokens; and None in place of attention weights.

    Raises:
        InvalidArgument: no `PagedCache` was passed to the model, or its mask does not fit the cache.
        Unsupported: the model asks for something that paged attention does not compute.
        OutOfBlocks: the cache is too small; it is as it was before this forward pass.
    """
    layer = marked_layer(key)
    if layer is None:
        raise InvalidArgument(
            f"past_key_values: got none or another cache, attn_implementation={NAME!r} accepts a PagedCache: "
            "model(..., past_key_values=PagedCache(model.config, num_blocks=...))"
        )
    layer.arrive()
    if attention_mask is not None and not isinstance(attention_mask, Mask):
        shape = list(getattr(attention_mask, "shape", ()))
        raise Unsupported(
            f"attention_mask: got a custom {type(attention_mask).__name__} of shape {shape}, expected a padding mask"
            " [batch, tokens]"
        )
    if attention_mask is not None and attention_mask.window != sliding_window:
        raise Unsupported(
            f"attention mask: the model masks a span of {attention_mask.window} tokens and asks for sliding_window="
            f"{sliding_window}, expected the same for both (no chunked attention)"
        )
    _refuse(query, dropout, is_causal, others)
    sinks = None if s_aux is None else s_aux.detach().float().contiguous()
    visible = None if attention_mask is None else attention_mask.visible
    return layer.attend(query, key, value, visible, Scores(scaling, sliding_window, softcap, sinks)), None


def _refuse(query: Tensor, dropout: float, is_causal: bool | None, others: dict[str, Any]) -> None:
    """Raise for what would otherwise be ignored."""
    if torch.is_grad_enabled() and query.requires_grad:
        raise Unsupported(
            f"gradients: attn_implementation={NAME!r} is for inference, call the model under torch.no_grad() or "
            "torch.inference_mode()"
        )
    if dropout:
        raise Unsupported(f"dropout: got {dropout}, expected 0: call model.eval()")
    if is_causal is False:
        raise Unsupported("is_causal: got False, expected causal attention")
    if others.get("output_attentions"):
        raise Unsupported("output_attentions: paged attention keeps no weights, expected False")
    for name in _REFUSED:
        if others.get(name) is not None:
            raise Unsupported(f"{name}: got {type(others[name]).__name__}, expected None")


def register() -> None:
    """Make `attn_implementation="pagedkern"` known to transformers. Importing the integration does it."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, make_mask)
