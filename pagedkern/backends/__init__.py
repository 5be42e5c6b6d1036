"""The registry of backends. A new backend is one package beside this file and one line in `_LOCATIONS`.

The module itself is callable: `pagedkern.backends()` lists every backend with its availability.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import cast

from pagedkern.backends.base import Backend, Probe
from pagedkern.errors import BackendUnavailable, InvalidArgument

_LOCATIONS = {  # name: "module:class", in the order in which backend="auto" prefers them when nothing was tuned
    "triton": "pagedkern.backends.triton:TritonBackend",
    "cupy": "pagedkern.backends.cupy:CupyBackend",
    "numba_cuda": "pagedkern.backends.numba_cuda:NumbaCudaBackend",
    "cpu": "pagedkern.backends.cpu:CpuBackend",
    "reference": "pagedkern.backends.reference:ReferenceBackend",
}


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """One line of `pagedkern.backends()`."""

    name: str
    available: bool
    emulated: bool  # runs GPU kernels on the CPU by an interpreter or simulator
    reason: str  # why it is not available, or what it runs on


def names() -> tuple[str, ...]:
    """The registered backends, in the order of preference of `backend="auto"`."""
    return tuple(_LOCATIONS)


@cache
def load(name: str) -> Backend:
    """The backend of that name, its module imported on first use, whether or not it can run here."""
    if name not in _LOCATIONS:
        raise InvalidArgument(f"backend: got {name!r}, expected 'auto', {', '.join(map(repr, _LOCATIONS))}")
    module, _, attribute = _LOCATIONS[name].partition(":")
    return cast(Backend, getattr(import_module(module), attribute)())


@cache
def probe(name: str) -> Probe:
    """Whether the backend of that name can run here, found out once a process."""
    return _probe(name)


def _probe(name: str) -> Probe:
    try:
        return load(name).probe()
    except ImportError as error:  # of the module itself, before it could look for what it needs
        return Probe(False, f"{error}: pip install 'pagedkern[cpu]', or the extra of your GPU")


def available(name: str) -> Backend:
    """The backend of that name; raises `BackendUnavailable` with the missing piece if it cannot run here."""
    found = probe(name)
    if not found.available:
        raise BackendUnavailable(f"backend={name!r} cannot run here: {found.reason}")
    return load(name)


def backends() -> list[BackendInfo]:
    """Every backend with its availability on this machine, and the reason."""
    probes = ((name, _probe(name)) for name in _LOCATIONS)  # anew, for whoever has just installed something
    return [BackendInfo(name, p.available, p.emulated, p.reason) for name, p in probes]


class _CallableModule(ModuleType):
    """Lets `pagedkern.backends` be the package and the public function at once, in whatever order they are imported."""

    def __call__(self) -> list[BackendInfo]:
        return backends()


sys.modules[__name__].__class__ = _CallableModule
