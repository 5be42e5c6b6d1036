"""What both caches of this integration share: one allocator, one KVCache for all layers, one step a forward pass."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from pagedkern import BlockAllocator, KVCache, paged_attention, write_kv
from pagedkern.cache import StepInputs
from pagedkern.cache.inputs import PlannedStep
from pagedkern.errors import InvalidArgument, Unsupported
from pagedkern.integrations.transformers.layer import NAME, PagedLayer, Scores

_LAYER_TYPES = {"full_attention", "sliding_attention"}


class Forward:
    """A forward pass through the model, from its first layer's attention to its last one's: one step of the allocator,
    or one batch of the scheduler. S sequences, T tokens.
    """

    inputs: StepInputs[Any]

    def __init__(self, shape: tuple[int, int], step: Any, tokens: Tensor | None) -> None:
        self.shape = shape  # batch, Q
        self.step = step  # a Step of the allocator or a Batch of the scheduler
        self.tokens = tokens  # int64 [T], where the step's tokens are in the flattened batch; None: it has no padding
        self.done: set[int] = set()  # layers that have run

    def upload(self, kv: KVCache) -> None:
        """Put what the kernels read on the device of the cache; on a CPU the tensors are the step's own buffers."""
        step: PlannedStep = self.step
        self.inputs = kv.inputs(step)
        self.tokens = None if self.tokens is None else self.tokens.to(kv.device)

    def pack(self, x: Tensor) -> Tensor:
        """[batch, heads, Q, D] -> [T, heads, D]. Without padding a view, if the heads were split off a projection."""
        rows = x.transpose(1, 2).flatten(0, 1)
        return rows if self.tokens is None else rows.index_select(0, self.tokens)

    def unpack(self, x: Tensor) -> Tensor:
        """[T, heads, D] -> [batch, Q, heads, D], zeros for padding."""
        batch, length = self.shape
        if self.tokens is not None:
            x = x.new_zeros(batch * length, *x.shape[1:]).index_copy_(0, self.tokens, x)
        return x.view(batch, length, *x.shape[1:])


class PagedStore(Cache):
    """Base of the caches: subclasses say which step a forward pass is.

    The memory is made at the first forward pass, with the heads, head_dim, dtype and device that the model then shows.
    """

    def __init__(
        self,
        config: Any,
        *,
        num_blocks: int,
        block_size: int = 16,
        dtype: torch.dtype | None = None,
        backend: str = "auto",
        layout: str = "HND",
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        num_host_blocks: int = 0,
        prefix_caching: bool = False,
    ) -> None:
        super().__init__(layers=[PagedLayer(self, i) for i in range(num_layers(config))])
        self.allocator = BlockAllocator(
            num_blocks, block_size, num_host_blocks=num_host_blocks, prefix_caching=prefix_caching
        )
        self.kv: KVCache | None = None
        self.backend = backend
        self._dtype = dtype
        self._layout = layout
        self._k_scale, self._v_scale = k_scale, v_scale
        self._forward: Forward | None = None
        self._ran_through = False  # a forward pass has come through all layers
        self._announced: int | None = None  # the layer whose attention has to come next

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by each layer of the model: see `PagedLayer.update`."""
        if layer_idx >= len(self.layers):
            raise InvalidArgument(
                f"past_key_values: got K and V of layer {layer_idx}, expected 0 to {len(self.layers) - 1}, the "
                "layers of the config that the cache was made for"
            )
        updated: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return updated

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise Unsupported(
            f"{type(self).__name__}: a copy would need a pool of its own, expected batch_repeat_interleave, which "
            "shares the blocks"
        )

    def __reduce__(self) -> NoReturn:
        raise Unsupported(f"{type(self).__name__}: its blocks are memory of this process, it cannot be pickled")

    @property
    def num_columns(self) -> int:
        """Tokens of the batch that transformers has seen, padding included."""
        return 0

    @abstractmethod
    def _begin(self, batch: int, length: int, visible: Tensor | None) -> Forward:
        """The step of a forward pass of `batch` rows and `length` tokens each."""

    @abstractmethod
    def _end(self, forward: Forward) -> None:
        """The forward pass has run through all layers."""

    @abstractmethod
    def _undo(self, forward: Forward) -> None:
        """The forward pass did not get through its last layer's attention."""

    def announce(self, index: int) -> None:
        """A layer has new K and V; its attention has to come next."""
        before, self._announced = self._announced, index
        if before is not None:
            self._announced = None
            raise InvalidArgument(
                f"attn_implementation: the attention of layer {before} did not run through pagedkern, expected "
                f"{NAME!r}: model.set_attn_implementation({NAME!r})"
            )

    def arrive(self, index: int) -> None:
        """The attention of a layer has come."""
        announced, self._announced = self._announced, None
        if announced != index:
            raise Unsupported(f"layer {index}: its K and V are used by another layer, expected layers with their own")

    def attend(
        self, index: int, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scores: Scores
    ) -> Tensor:
        """Write K and V of one layer and attend; shapes as in the attention function. Begins and ends the step."""
        shape = (query.shape[0], query.shape[2])
        try:
            kv = self._memory(key, value)
            if self._forward is not None and index in self._forward.done and self._ran_through:
                self.roll_back()  # the pass before raised on its way: every layer is known to run
            elif self._forward is not None and index in self._forward.done:
                raise InvalidArgument(
                    f"past_key_values: the forward pass before this one ended after layer {max(self._forward.done)} of "
                    f"0 to {len(self.layers) - 1}, so it was undone; expected a model that runs every layer of its "
                    "config (if it raised on the way: call it again)"
                )
            if self._forward is None:
                self._forward = self._begin(*shape, visible)
                self._forward.upload(kv)
                kv.apply(self._forward.step)
            forward = self._forward
            if forward.shape != shape:
                raise InvalidArgument(
                    f"query: layer {index} got [batch, tokens] = {shape}, layers before {forward.shape}"
                )
            out = self._run(kv.layer(index), forward, query, key, value, scores)
        except BaseException:
            self.roll_back()
            raise
        forward.done.add(index)
        if len(forward.done) == len(self.layers):
            self._forward, self._ran_through = None, True
            self._end(forward)
        return forward.unpack(out)

    def _run(
        self, caches: tuple[Tensor, Tensor], forward: Forward, query: Tensor, key: Tensor, value: Tensor, scores: Scores
    ) -> Tensor:
        """One layer: [T, heads, head_dim_v]."""
        k_cache, v_cache = caches
        inputs = forward.inputs
        write_kv(
            forward.pack(key),
            forward.pack(value),
            k_cache,
            v_cache,
            inputs.slot_mapping,
            backend=self.backend,
            k_scale=self._k_scale,
            v_scale=self._v_scale,
        )
        return paged_attention(
            forward.pack(query),
            k_cache,
            v_cache,
            inputs.block_table,
            inputs.seq_lens,
            cu_seqlens_q=inputs.cu_seqlens_q,
            max_seqlen_q=inputs.max_seqlen_q,
            backend=self.backend,
            scale=scores.scale,
            sliding_window=scores.sliding_window,
            softcap=scores.softcap,
            sinks=scores.sinks,
            k_scale=self._k_scale,
            v_scale=self._v_scale,
        )

    def _memory(self, key: Tensor, value: Tensor) -> KVCache:
        if self.kv is None:
            self.kv = KVCache(
                len(self.layers),
                self.allocator.num_blocks,
                self.allocator.block_size,
                key.shape[1],
                key.shape[3],
                dtype=key.dtype if self._dtype is None else self._dtype,
                device=key.device,
                layout=self._layout,
                head_dim_v=value.shape[3],
                num_host_blocks=self.allocator.num_host_blocks,
            )
        return self.kv

    def roll_back(self) -> None:
        """Undo a forward pass that did not get through its last layer's attention, if there is one."""
        forward, self._forward = self._forward, None
        if forward is not None:
            self._undo(forward)


def num_layers(config: Any) -> int:
    """The decoder layers of a model, all of which must do attention that a paged cache can serve."""
    text = config.get_text_config(decoder=True)
    others = set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES
    if others:
        raise Unsupported(f"config: got layers of type {sorted(others)}, expected {sorted(_LAYER_TYPES)}")
    if getattr(text, "num_kv_shared_layers", 0) or getattr(text, "is_encoder_decoder", False):
        raise Unsupported(
            f"config: got {type(text).__name__} with layers that share or cross-attend K and V, expected a decoder "
            "whose layers have their own"
        )
    return int(text.num_hidden_layers)


def bytes_per_block(config: Any, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of K and V of a block in all layers, by the usual names of a configuration: no layer has been seen yet."""
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * num_layers(config) * block_size * heads * head_dim * dtype.itemsize)


def count(name: str, value: object) -> int:
    """The value, if it is an integer >= 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidArgument(f"{name}: got {value!r}, expected an integer >= 1")
    return value
