"""A few combinations in which every pair of values of any two factors occurs (all-pairs testing, Cohen 1997)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

TRIES = 10  # candidate rows for each row taken: more of them, fewer rows


def pairwise(factors: Mapping[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Rows of one value for each factor, the same ones for the same seed.

    Greedy: each row starts from a pair that no row has yet and takes, factor by factor, the value that covers most
    such pairs; of `TRIES` such rows with the factors in random order the best is kept.
    """
    rng = random.Random(seed)
    names = list(factors)
    missing = {
        ((a, x), (b, y))
        for a, b in combinations(range(len(names)), 2)
        for x, y in product(range(len(factors[names[a]])), range(len(factors[names[b]])))
    }
    rows = []
    while missing:
        first = min(missing)
        row = max(
            (_grow(first, factors, names, missing, rng) for _ in range(TRIES)), key=lambda r: len(_pairs(r) & missing)
        )
        missing -= _pairs(row)
        rows.append({names[i]: factors[names[i]][value] for i, value in row.items()})
    return rows


Choice = tuple[int, int]  # index of the factor, index of its value
Pair = tuple[Choice, Choice]


def _pairs(row: Mapping[int, int]) -> set[Pair]:
    return set(combinations(sorted(row.items()), 2))


def _grow(
    start: Pair, factors: Mapping[str, Sequence[Any]], names: Sequence[str], missing: set[Pair], rng: random.Random
) -> dict[int, int]:
    row = dict(start)
    for i in rng.sample(range(len(names)), len(names)):
        if i not in row:
            values = rng.sample(range(len(factors[names[i]])), len(factors[names[i]]))
            row[i] = max(values, key=lambda x: sum(_pair(other, (i, x)) in missing for other in row.items()))
    return row


def _pair(a: Choice, b: Choice) -> Pair:
    return (a, b) if a < b else (b, a)
