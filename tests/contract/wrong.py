"""What a wrong call is: how it differs from a right one, and the error that it must give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pagedkern.errors import InvalidArgument

Arguments = dict[str, Any]
Change = Mapping[str, Any] | Callable[[Arguments], Arguments]


@dataclass(frozen=True)
class Wrong:
    name: str  # of the argument at fault
    what: str
    change: Change
    words: tuple[str, ...]
    error: type[InvalidArgument] = InvalidArgument
    in_memory: bool = False  # the fault is a number in a tensor, which is seen when something is computed

    def __str__(self) -> str:
        return f"{self.name}: {self.what}"

    def apply(self, right: Arguments) -> Arguments:
        return {**right, **(self.change(right) if callable(self.change) else self.change)}


NUMBER = torch.tensor(1.0)
NO_NUMBERS = [np.bool_(True), np.array([2]), np.complex64(1)]  # which convert to numbers without an error
