"""Many paged caches behind one forward pass of a model: the weights are read once for all of them.

What a cache is given and asked for is what it would be given and asked for alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from pagedkern.integrations.transformers.layer import PagedLayer, Scores, mark
from pagedkern.integrations.transformers.store import PagedStore


class FanLayer(PagedLayer):
    """A layer of every member at once. Members take turns along the batch (dim 0) or the packed tokens (dim 2)."""

    store: Fan

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        for member in self.store.members:
            member.announce(self.index)
        return mark(key_states, self), value_states

    def arrive(self) -> None:
        for member in self.store.members:
            member.arrive(self.index)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scores: Scores) -> Tensor:
        dim, sizes = self.store.dim, self.store.sizes
        masks = [None] * len(sizes) if visible is None else visible.split(sizes)
        tensors = zip(query.split(sizes, dim), key.split(sizes, dim), value.split(sizes, dim), masks, strict=True)
        members = zip(self.store.members, tensors, strict=True)
        outs = [member.layers[self.index].attend(*parts, scores) for member, parts in members]
        return torch.cat(outs, 0 if dim == 0 else 1)  # [batch, Q, heads, head_dim]


class Fan(Cache):
    """A cache that deals out the rows (dim 0) or tokens (dim 2) of a forward pass to its members, `sizes` to each."""

    def __init__(self, members: list[PagedStore], dim: int, sizes: list[int]) -> None:
        super().__init__(layers=[FanLayer(self, i) for i in range(len(members[0].layers))])
        self.members, self.dim, self.sizes = members, dim, sizes

    @property
    def num_columns(self) -> int:
        columns = {member.num_columns for member in self.members}
        assert len(columns) == 1
        return columns.pop()
