"""`Runner`: what a search measures with, and what may happen to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from pagedkern.autotune.space import Candidate

LAYING_OUT, COMPILING = "laying out the caches", "compiling"  # stages
Tell = Callable[[str, Candidate | None, float | None], None]  # "stage - step" now, the best so far and its seconds


class Runner(Protocol):
    """What a search measures with: `isolate.IsolatedRunner`, `measure.Bench`, or recorded times.

    Any call but `end_at` may raise `OutOfTime`, and `RunnerFailed`.
    """

    def open(self) -> None:
        """Make what all block sizes need."""

    def end_at(self, seconds: float) -> None:
        """From now on calls are cut short, by `OutOfTime`, once so many seconds have passed, if that can be done."""

    def lay_out(self, block_size: int) -> None:
        """Make what candidates of a block size run on. The first one is also given what they are timed on."""

    def compile_ahead(self, candidates: Sequence[Candidate], seconds: float) -> Mapping[Candidate, str]:
        """Compile candidates of one block size in several processes, in their order, if that makes it any faster, for
        so many seconds. Returns those that are to be run no more, and why."""

    def prepare(self, candidate: Candidate) -> None:
        """Compile what the candidate needs, by running it on a part of the problem; whether it is right comes later.
        Raises `CandidateLost`."""

    def check(self, candidate: Candidate) -> str | None:
        """Run on the edge cases and on the whole problem for the first time; None if right, else what is wrong."""

    def sample(self, candidate: Candidate, repeats: int, context: int | None = None) -> float:
        """Seconds of a call, the mean of `repeats`; with sequences of at most `context` tokens. Raises
        `CandidateLost` if the candidate is to be run no more."""

    def read_bandwidth(self) -> float:
        """Bytes per second of a plain read."""

    def product_rate(self) -> float:
        """Floating-point operations per second of a matrix product."""


class CandidateLost(Exception):
    """A candidate crashed, hung or took too much memory. The message says which."""


class OutOfTime(Exception):
    """A call was cut short, for its time was over."""


class RunnerFailed(Exception):
    """Nothing can be measured any more. The message says why."""
