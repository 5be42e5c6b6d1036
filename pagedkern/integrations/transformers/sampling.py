"""Choosing the next token of each sequence from its logits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from pagedkern.errors import InvalidArgument, InvalidType


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: greedily at temperature 0, else by nucleus sampling (arXiv:1904.09751).

    Each sample draws from a generator of its own, which depends on the seed, its prompt's index and its own index: what
    it says depends neither on the device nor on what else is in the batch.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            if isinstance(value := getattr(self, name), bool) or not isinstance(value, (int, float)):
                raise InvalidType(f"{name}: got {type(value).__name__} {value!r}, expected a number")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InvalidArgument(f"temperature: got {self.temperature}, expected a finite number >= 0 (0 is greedy)")
        if not 0 < self.top_p <= 1:
            raise InvalidArgument(f"top_p: got {self.top_p}, expected a number in (0, 1]")

    def generator(self, prompt: int, sample: int) -> Random:
        """The generator of one sample."""
        return Random(f"{self.seed}/{prompt}/{sample}")

    def choose(self, logits: Tensor, generators: list[Random]) -> list[int]:
        """One token for each row of logits [S, vocabulary]; generator i decides row i."""
        if self.temperature == 0:
            return _numbers(logits.argmax(-1))
        draws = torch.tensor([[g.random()] for g in generators], dtype=torch.float64, device=logits.device)
        weights, ids = torch.softmax((logits.double() - logits.double().amax(-1, True)) / self.temperature, -1).sort(
            dim=-1, descending=True, stable=True
        )
        before = weights.cumsum(-1) - weights
        cumulative = weights.where(before < self.top_p, 0).cumsum(-1)  # the first token always stays
        # The first place whose cumulative weight exceeds the draw: never a token of weight zero.
        place = torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True)
        return _numbers(ids.gather(-1, place).squeeze(-1))


def _numbers(x: Tensor) -> list[int]:
    result: list[int] = x.tolist()
    return result
