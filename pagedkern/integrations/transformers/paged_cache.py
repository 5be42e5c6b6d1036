"""PagedCache: what `model.generate(..., past_key_values=)` takes in place of transformers' own caches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as List
from typing import Any

import torch
from torch import Tensor

from pagedkern import Sequence
from pagedkern.errors import InvalidArgument
from pagedkern.integrations.transformers.store import Forward, PagedStore, count


class PagedCache(PagedStore):
    """A paged KV cache for `model(...)` and `model.generate(...)` with `attn_implementation="pagedkern"`.

    Each row of the batch is a sequence of one allocator and holds its real tokens only: padding, which the 2-D
    `attention_mask` shows, takes no slot (so a sliding window is counted in real tokens). The cache serves several
    calls in a row as other caches do: the turns of a conversation, or assisted decoding, whose rejected tokens are cut
    off again. Rows that beam search duplicates share their blocks until they are written to.

    Args:
        config: `model.config`.
        num_blocks: blocks of the pool. Give this or `max_tokens`.
        max_tokens: tokens that the pool is to hold, of all rows together; rounded up to blocks.
        block_size: tokens of one block.
        dtype: of the cache; None is that of the model's K and V. Quantized: float8_e4m3fn, float8_e5m2, int8.
        backend: a name from `pagedkern.backends()`, or "auto".
        layout: "HND" or "NHD", as in `pagedkern.KVCache`.
        k_scale, v_scale: of a quantized cache: a positive number or float32 [KV heads]; None is 1.

    Raises:
        InvalidArgument: neither or both of num_blocks and max_tokens, or a value that the allocator does not accept.
        Unsupported: the model has layers that a paged cache cannot serve.
    """

    def __init__(
        self,
        config: Any,
        *,
        num_blocks: int | None = None,
        max_tokens: int | None = None,
        block_size: int = 16,
        **options: Any,
    ) -> None:
        if (num_blocks is None) == (max_tokens is None):
            raise InvalidArgument(f"num_blocks: got {num_blocks} with max_tokens={max_tokens}, expected one of the two")
        if num_blocks is None:
            num_blocks = -(-count("max_tokens", max_tokens) // count("block_size", block_size))
        super().__init__(config, num_blocks=num_blocks, block_size=block_size, **options)
        self._rows: list[Sequence] = []
        self._visible = torch.ones(0, 0, dtype=torch.bool, device="cpu")  # [batch, num_columns]; False is padding
        self._pending = self._visible  # what `_visible` becomes when the forward pass has run

    @classmethod
    def from_model(cls, model: Any, **options: Any) -> PagedCache:
        """A cache for this model, which is set to use it. The other arguments are those of the class."""
        cache = cls(model.config, **options)
        model.set_attn_implementation("pagedkern")
        return cache

    @property
    def num_columns(self) -> int:
        return self._visible.shape[1]

    @property
    def sequences(self) -> List[Sequence]:
        """The allocator's sequence of each row of the batch."""
        return tuple(self._rows)

    # One forward pass.

    def _begin(self, batch: int, length: int, visible: Tensor | None) -> Forward:
        if self.num_columns == 0 and len(self._rows) != batch:
            self.reset()
            self._rows = [self.allocator.create(0) for _ in range(batch)]
            self._visible = torch.ones(batch, 0, dtype=torch.bool, device="cpu")
        if len(self._rows) != batch:
            raise InvalidArgument(
                f"input_ids: got {batch} rows, expected {len(self._rows)}, those of the cache, until it is reset"
            )
        new = self._new_columns(length, visible)
        tokens = None
        if bool(new.all()):
            step = self.allocator.append(self._rows, num_tokens=length)
        else:
            counts: list[int] = new.sum(1).tolist()
            grown = [i for i, count in enumerate(counts) if count]
            if not grown:
                raise InvalidArgument("attention_mask: got padding only for the new tokens, expected one real token")
            # Only the number of ids matters: without a prefix cache nothing is looked up by them.
            step = self.allocator.append([self._rows[i] for i in grown], [[0] * counts[i] for i in grown])
            tokens = new.flatten().nonzero().squeeze(1)
        self._pending = torch.cat([self._visible, new], 1)
        return Forward((batch, length), step, tokens)

    def _new_columns(self, length: int, visible: Tensor | None) -> Tensor:
        """Which of the new tokens are real, bool [batch, length] on the host. Synchronises if there is a mask."""
        batch, past = self._visible.shape
        if visible is None:
            if not bool(self._visible.all()):
                raise InvalidArgument("attention_mask: got None, expected one that covers the padding in the cache")
            return torch.ones(batch, length, dtype=torch.bool, device="cpu")
        host = visible.to("cpu", torch.bool)
        if host.shape != (batch, past + length):
            raise InvalidArgument(
                f"attention_mask: got shape {list(host.shape)}, expected [{batch}, {past + length}]: the {past} "
                f"tokens seen before and the {length} new ones"
            )
        if not torch.equal(host[:, :past], self._visible):
            raise InvalidArgument(
                "attention_mask: got other values than before for tokens that the cache has seen, expected the same"
            )
        return host[:, past:]

    def _end(self, forward: Forward) -> None:
        self.allocator.commit(forward.step)
        self._visible = self._pending

    def _undo(self, forward: Forward) -> None:
        self.allocator.abort(forward.step)

    # What `generate` does to a cache between forward passes.

    def crop(self, tokens_to_remove: int) -> None:
        """Cut every row, padding counted: -n removes the last n tokens; n > 0 keeps the first n (transformers 5.0)."""
        self.roll_back()
        keep = min(tokens_to_remove, self.num_columns) if tokens_to_remove > 0 else self.num_columns + tokens_to_remove
        if keep < 0:
            raise InvalidArgument(
                f"tokens_to_remove: got {tokens_to_remove}, the cache has {self.num_columns} tokens a row"
            )
        self._visible = self._visible[:, :keep]
        for seq, length in zip(self._rows, self._visible.sum(1).tolist(), strict=True):
            if length < seq.num_tokens:
                self.allocator.truncate(seq, length)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` was, int [new batch]. Rows taken more than once share their blocks."""
        self.roll_back()
        if not self._rows:
            return
        rows = torch.arange(len(self._rows), device="cpu")
        index = rows[beam_idx.cpu()]  # also from negative or boolean indices, as for tensors
        sources: list[int] = index.tolist()
        taken = Counter(sources)
        copies = {i: [self._rows[i], *self.allocator.fork(self._rows[i], taken[i] - 1)] for i in taken}
        for i, seq in enumerate(self._rows):
            if i not in taken:
                self.allocator.free(seq)
        self._rows = [copies[i].pop() for i in sources]
        self._visible = self._visible[index]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of the batch, in this order."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, one after the other. They share their blocks."""
        self.reorder_cache(torch.arange(len(self._rows), device="cpu").repeat_interleave(repeats))

    def reset(self) -> None:
        """Free every row: the cache is as new, its memory stays."""
        self.roll_back()
        for seq in self._rows:
            self.allocator.free(seq)
        self._rows, self._visible = [], torch.ones(0, 0, dtype=torch.bool, device="cpu")
