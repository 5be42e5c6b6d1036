"""A layer of a cache as transformers sees it, and how it reaches the attention function: the model passes K to both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

NAME = "pagedkern"
"""The value of `attn_implementation`."""

_MARK = "_pagedkern_layer"


@dataclass(frozen=True, slots=True)
class Scores:
    """How a layer's scores are made; the fields are those of `pagedkern.paged_attention`."""

    scale: float | None
    sliding_window: int | None
    softcap: float | None
    sinks: Tensor | None


class LayerStore(Protocol):
    """What a layer asks of the cache that holds it."""

    @property
    def num_columns(self) -> int:
        """Tokens of the batch that transformers has seen, padding included."""

    def announce(self, index: int) -> None:
        """A layer has new K and V; its attention has to come next."""

    def arrive(self, index: int) -> None:
        """The attention of a layer has come."""

    def attend(
        self, index: int, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scores: Scores
    ) -> Tensor:
        """Write K and V of one layer and attend; shapes as in the attention function."""


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer as transformers sees it. All state is in the store."""

    is_compileable = False
    is_croppable = True
    is_sliding = False  # sliding layers keep what is behind their window, as `crop` may bring it back into view
    supports_early_init = False

    def __init__(self, store: LayerStore, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.store = store
        self.index = index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the store makes its memory for all layers at once."""

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """The given K and V. They are stored by the attention function, which knows what is padding."""
        self.store.announce(self.index)
        return mark(key_states, self), value_states

    def arrive(self) -> None:
        """Its attention function has been called."""
        self.store.arrive(self.index)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scores: Scores) -> Tensor:
        """Write K and V and compute the attention of the layer, shapes as in the attention function."""
        return self.store.attend(self.index, query, key, value, visible, scores)

    def get_seq_length(self) -> int:
        return self.store.num_columns

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """(columns of the mask, 0); transformers 5.0 passes the positions of the queries, later ones their number."""
        new = query_length.shape[0] if isinstance(query_length, Tensor) else query_length
        return self.store.num_columns + new, 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:  # its name in transformers 5.0
        return -1


def mark(key: Tensor, layer: PagedLayer) -> Tensor:
    """The same tensor, which now tells the attention function its layer and, through it, its cache."""
    setattr(key, _MARK, layer)
    return key


def marked_layer(key: Tensor) -> PagedLayer | None:
    """The layer whose `update` returned this tensor; None if no cache of this integration did."""
    layer: PagedLayer | None = getattr(key, _MARK, None)
    return layer
