"""What tuning found, and how the kernels look it up at run time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pagedkern.backends.base import Problem


@dataclass(frozen=True, slots=True)
class Found:
    """A tuned choice for a problem."""

    backend: str
    config: Mapping[str, object]  # fields for the backend's make_config
    tier: str  # "tuned": measured for this problem on this device; "tuned-nearest": for another workload or device
    reason: str  # a sentence for `explain`: what was measured, where and when


def lookup(problem: Problem, backend: str | None = None) -> Found | None:
    """The best stored choice for a problem, among all backends or for one; None if there is none."""
    return None
