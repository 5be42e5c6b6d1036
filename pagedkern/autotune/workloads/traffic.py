"""`Traffic`: the requests of a workload as distributions, and how to draw some."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import pi, sin, sqrt
from statistics import NormalDist
from typing import NamedTuple

from pagedkern.autotune.workloads.models import Model


class Request(NamedTuple):
    """Lengths of one request, in tokens."""

    prompt: int  # at least 1
    output: int  # of each sample, at least 1
    shared: int  # leading tokens of the prompt that other requests of its family begin with, too


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A distribution: value `values[i]` is not exceeded by the share `shares[i]`; linear between."""

    shares: tuple[float, ...]  # ascending, from 0 to 1
    values: tuple[float, ...]  # not descending
    rank_correlation: float = 0.0  # Spearman's, with the length of the prompt

    def at(self, share: float) -> float:
        """The value at a share from 0 to 1."""
        i = min(max(1, bisect_left(self.shares, share)), len(self.shares) - 1)
        (a, b), (low, high) = self.shares[i - 1 : i + 1], self.values[i - 1 : i + 1]
        return low + (high - low) * (min(max(share, a), b) - a) / (b - a)

    @property
    def mean(self) -> float:
        """The mean of the distribution."""
        steps = zip(self.shares, self.shares[1:], self.values, self.values[1:], strict=False)
        return sum((b - a) * (low + high) / 2 for a, b, low, high in steps)


@dataclass(frozen=True, slots=True)
class Traffic:
    """A workload: distributions of lengths (`prompt`, `output`, `shared`), or the requests of a trace (`rows`)."""

    name: str
    about: str
    source: str
    url: str
    licence: str
    limit: int  # tokens of prompt and output of one request at the most: longer ones are cut
    prompt: Quantiles | None = None
    output: Quantiles | None = None
    shared: Quantiles | None = None  # the part of a prompt that others of its family begin with, 0 to 1
    rows: tuple[Request, ...] = ()
    trace: str = ""  # name of the table in autotune/workloads/ that the distributions are of
    families: int = 1  # prompts that share are of so many families, equally frequent
    prefix: int = 0  # tokens that all prompts begin with, before everything else: a system prompt
    samples: int = 1  # completions of each prompt
    beam: bool = False  # whether these are the beams of a beam search, and not independent
    survival: float = 0.75  # share of the beams that go on in each step; the others are replaced by forks of those
    concurrency: int = 256  # sequences that run at a time at the most, each sample counted
    model: Model | None = None  # the model that the file names

    def draw(self, count: int, seed: int = 0) -> list[Request]:
        """`count` requests in an order of arrival, others for another `seed`. Those of a trace are repeated in its
        order; of a longer one they are taken at equal distances.

        Lengths are joined by a Gaussian copula with the rank correlations of the distributions; the prompt's own
        quantiles are taken one by one from `count` equal shares, so that few requests make a good picture.
        """
        if self.rows:
            rows = self.rows
            if len(rows) > count:
                rows = tuple(rows[i * len(rows) // count] for i in range(count))
            return [self._cut(*rows[i % len(rows)]) for i in range(count)]
        assert self.prompt is not None
        assert self.output is not None
        rng, normal = random.Random(seed), NormalDist()
        shares = [(i + 0.5) / count for i in range(count)]
        rng.shuffle(shares)
        drawn = []
        for share in shares:
            z = normal.inv_cdf(share)

            def joined(quantiles: Quantiles, z: float = z) -> float:
                rho = 2 * sin(pi * quantiles.rank_correlation / 6)  # of normals with that rank correlation
                return quantiles.at(normal.cdf(rho * z + sqrt(max(0.0, 1 - rho * rho)) * rng.gauss()))

            prompt, output = self.prompt.at(share), joined(self.output)
            part = joined(self.shared) if self.shared else 0.0
            drawn.append(self._cut(round(prompt), round(output), int(part * prompt)))
        return drawn

    def _cut(self, prompt: int, output: int, shared: int) -> Request:
        """Within `limit`, at least one token each; the prefix of all comes before."""
        prompt = max(1, min(self.prefix + prompt, self.limit - 1))
        output = max(1, min(output, self.limit - prompt))
        return Request(prompt, output, min(self.prefix + shared if self.prefix or shared else 0, prompt))

    def __str__(self) -> str:
        requests = self.draw(1000)
        prompt, output = _mean([r.prompt for r in requests]), _mean([r.output for r in requests])
        shared = _mean([r.shared / r.prompt for r in requests])
        text = f"prompts of {prompt:,.0f} tokens, outputs of {output:,.0f} (means)"
        text += f", {shared:.0%} of a prompt shared" if shared else ""
        kind = "beams" if self.beam else "samples"
        return text + (f", {self.samples} {kind} a prompt" if self.samples > 1 else "")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
