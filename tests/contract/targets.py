"""What the contract runs on: every backend of the registry that can run here, on every device that it serves.

A new backend gets the whole contract through its line in the registry. The one thing to add here is what it may refuse:
a target that is not in `MAY_REFUSE` may refuse nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import pagedkern
from pagedkern.backends import load
from pagedkern.backends.base import Backend, Config, Problem
from pagedkern.errors import Unsupported
from tests.contract.problems import Call


def _nothing(problem: Problem) -> bool:
    return False


MAY_REFUSE: dict[str, Callable[[Problem], bool]] = {}
"""None of today's backends needs to: each computes every problem of the tests."""

SAMPLED: dict[str, int] = {"triton": 7, "numba_cuda": 32}
"""Backends so slow under emulation that only every n-th case of each test runs, the first and the last among them; for
the cases of `test_cases.py`, `SAMPLED_CASES` says which n. CONTRACT=full runs everything everywhere."""

SAMPLED_CASES: dict[str, int] = {"numba_cuda": 3}
"""All cases of `test_cases.py` run on all others."""

EMULATED_CONFIG: dict[str, Mapping[str, object]] = {
    "triton": {
        "tile": 32, "span": 64, "num_splits": 3, "rows": 16, "split_queries": 3, "prefill_rows": 16, "prefill_tile": 32,
    },
    "cupy": {
        "tile": 32, "warps": 2, "stages": 2, "span": 64, "num_splits": 3, "decode_tokens": 2, "prefill_tile": 32,
        "prefill_warps": 2,
    },
    "numba_cuda": {"threads": 32, "keys": 32, "prefill_rows": 8, "span": 64, "splits": 3},
}  # fmt: skip
"""What emulated backends are configured with unless a test says otherwise: tiles and spans so small that small problems
cross every boundary between them."""

SLOW = {"numba_cuda"}
"""Emulated backends that run a kernel's every instruction in Python: what is random or long is cut down for them."""

THREADS = {"cpu": 2}
"""Backends that split a call over the threads of torch, and over how many the tests let them."""


class Refused(Exception):
    """The backend refused the call, with the reason of its `supports()`, and may do so. Ends the check that asked."""


class Result(NamedTuple):
    out: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Target:
    """A backend on a device, with the configuration to use (None: whatever it would choose)."""

    name: str
    device: str = "cpu"
    config: Config | Mapping[str, object] | None = field(default=None, compare=False)
    emulated: bool = False  # GPU kernels run by an interpreter or simulator: some thousand times slower

    def size(self, full: int, emulated: int) -> int:
        """How much of something to test: `full`, or less where the kernels are emulated."""
        return emulated if self.emulated else full

    @property
    def slow(self) -> bool:
        """Whether even emulated sizes are too much."""
        return self.emulated and self.name in SLOW

    def short(self, query_lens: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """Query lengths, where even emulated sizes are too much at most 9: still in several tiles of rows."""
        return tuple(min(n, 9) for n in query_lens) if query_lens and self.slow else query_lens

    def __str__(self) -> str:
        return f"{self.name}-{self.device}"

    def attend(self, call: Call, **options: Any) -> Result:
        """Run the call through the public function, memory that it allocates being filled with NaN first."""
        self.check_support(call)
        if self.config is not None:
            options.setdefault("config", self.config)
        with poisoned_memory(), self.threads():
            out, lse = pagedkern.paged_attention(**call.args, return_lse=True, backend=self.name, **options)
        return Result(out, lse)

    def threads(self) -> AbstractContextManager[None]:
        """As many threads as the backend is to use. Everything else runs on one: many small tensors, shared cores."""
        return torch_threads(THREADS.get(self.name, 1))

    def check_support(self, call: Call) -> None:
        """Raise `Refused` if the backend says that it cannot do this, having asserted that it says so properly."""
        problem = Problem(**call.problem_fields())
        reason = load(self.name).supports(problem)
        if reason is None:
            return
        assert len(reason) > 10, f"{self.name} refuses without saying why: {reason!r}"
        with pytest.raises(Unsupported) as caught:
            pagedkern.paged_attention(**call.args, backend=self.name)
        assert reason in str(caught.value)
        allowed = MAY_REFUSE.get(self.name, _nothing)
        assert allowed(problem), f"{self.name} may not refuse {call.spec}: {reason}"
        raise Refused(reason)

    def configs(self, call: Call) -> list[Config]:
        backend: Backend = load(self.name)
        return list(backend.configs(Problem(**call.problem_fields())))


def targets() -> list[Any]:
    """Parameters for the `target` fixture; what cannot run here is a skip that says what is missing."""
    found: list[Any] = []
    for info in pagedkern.backends():
        if not info.available:
            found.append(pytest.param(Target(info.name), marks=pytest.mark.skip(reason=info.reason), id=info.name))
            continue
        for device in _devices(info.name):
            config = EMULATED_CONFIG.get(info.name) if info.emulated else None
            found.append(pytest.param(Target(info.name, device, config, info.emulated), id=f"{info.name}-{device}"))
    return found


def _devices(name: str) -> list[str]:
    """Those of this machine on which the backend computes something."""
    here = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    small = Problem("cpu", "float32", "float32", 2, 1, 16, 16, 16, 1, 1, 1, 16)
    return [device for device in here if load(name).supports(replace(small, device=device)) is None]


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def torch_settings(name: str, value: Any) -> Iterator[None]:
    """Set one of torch's global settings for a while."""
    before = getattr(torch, f"get_{name}")()
    getattr(torch, f"set_{name}")(value)
    try:
        yield
    finally:
        getattr(torch, f"set_{name}")(None if name == "default_device" else before)  # a device would stay as a mode


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` returns NaN (the largest number of an integer type), so that an element never written shows."""
    before, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(1).isnan()
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
