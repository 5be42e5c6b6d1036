"""Which block size to take: the usual one, unless another is proven to give more tokens per second.

Scores are compared by their error bars, see `rating`. A block size is better than another if its lowest tokens per
second are at least `MARGIN` times the highest of the other: about gains below that, formula and simulation do not
always agree. Of those that are better than the usual one the smallest is taken that nothing beats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagedkern.autotune.objective import Score, best, unusual

MARGIN = 1.002


@dataclass(frozen=True, slots=True)
class Advice:
    """A block size, and those that are as good as it within the error bars."""

    score: Score  # of the block size to take
    usual: Score  # of the block size that is taken unless another is proven better
    alike: tuple[int, ...]  # block sizes of which none is proven better or worse than the one to take, itself included
    within: float  # how far their tokens per second are apart from its own at the most, as a share
    all_alike: bool  # whether these are all that were measured

    def __str__(self) -> str:
        """Why this block size, in a sentence without its end."""
        b, usual = self.score.block_size, self.usual.block_size
        others = [size for size in self.alike if size != b]
        near = f"{100 * self.within:.1f} %"
        if b != usual:
            gain = 100 * (self.score.low / self.usual.high - 1)
            text = f"at least {gain:.1f} % more tokens per second than with block size {usual}"
            return f"{text}; {listed(others)} within {near} of it" if others else text
        if not others:
            return f"{b} is the only one that was measured" if self.all_alike else f"all others are slower than {b}"
        all_ = "all " if self.all_alike else ""
        return f"block sizes {listed(self.alike)} are {all_}within {near}, and none is proven better than {usual}"


def advise(scores: Sequence[Score]) -> Advice | None:
    """The block size to take by the scores of those that were measured; None if there are none."""
    if not scores:
        return None
    usual = min(scores, key=lambda s: unusual(s.block_size))
    better = [s for s in scores if proven(s, usual)]
    top = best(better)
    taken = usual if top is None else min((s for s in better if not proven(top, s)), key=lambda s: s.block_size)
    alike = [s for s in scores if not proven(s, taken) and not proven(taken, s)]
    within = max(abs(s.tokens_per_second / taken.tokens_per_second - 1) for s in alike)
    sizes = tuple(sorted(s.block_size for s in alike))
    return Advice(taken, usual, sizes, within, len(alike) == len(scores))


def proven(score: Score, other: Score) -> bool:
    """Whether one block size is better than another beyond their error bars and the margin."""
    return score.low >= MARGIN * other.high


def listed(sizes: Sequence[int]) -> str:
    """Block sizes in a sentence."""
    names = [str(size) for size in sizes]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
