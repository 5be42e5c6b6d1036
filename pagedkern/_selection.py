"""Which backend and configuration computes a problem: the caller's, the tuned one, or a stated default."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import pagedkern.backends as registry
from pagedkern.backends.base import Backend, Config, Problem
from pagedkern.errors import InvalidArgument, InvalidType, Unsupported


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend and a configuration for one problem, and why these."""

    backend: str
    config: Config
    tier: str  # "explicit", "tuned", "tuned-nearest" (another workload or device) or "default"
    reason: str  # of a default: a line for each backend that was passed over as well
    problem: Problem
    implementation: Backend = field(repr=False, compare=False)

    def __str__(self) -> str:
        fields = ", ".join(f"{k}={v}" for k, v in self.config.to_dict().items())
        return f"{self.backend}({fields}) [{self.tier}]: {self.reason}"


def encode_config(config: Config | Mapping[str, object] | None, backend: str) -> str:
    """A caller's configuration as a string, the form in which it passes through an operator's schema."""
    if config is None:
        return ""
    if backend == "auto":
        raise InvalidArgument("config: got a configuration with backend='auto', expected one for a named backend")
    if isinstance(config, Config):
        config = config.to_dict()
    if not isinstance(config, Mapping):
        raise InvalidType(
            f"config: got {type(config).__name__}, expected a config object, a mapping of its fields, or None"
        )
    for name, value in config.items():
        if not isinstance(name, str) or type(value) not in (bool, int, float, str):
            raise InvalidType(f"config: got {name}={value!r}, expected a plain number, name or flag for each field")
        if type(value) is float and not -math.inf < value < math.inf:
            raise InvalidArgument(f"config: got {name}={value}, expected a finite number")
    return repr([(name, config[name]) for name in sorted(config)])


def _decode_config(text: str) -> dict[str, object]:
    return dict(ast.literal_eval(text))


@lru_cache(maxsize=4096)
def choose(problem: Problem, backend: str, config: str, ordinal: int | None = None) -> Choice:
    """The backend to use for a problem; `backend` is "auto" or a name, `config` "" or the string of `encode_config`,
    `ordinal` the number of the GPU: another may have been tuned otherwise.

    Cached: call `choose.cache_clear()` after the store of tuned choices has changed.

    Raises:
        InvalidArgument: no such backend, or a field that its configuration does not have.
        BackendUnavailable, Unsupported: the named backend cannot run here, or cannot compute the problem.
    """
    if backend == "auto":
        return _tuned(problem, None, ordinal) or _default(problem)
    implementation = registry.available(backend)
    if (reason := implementation.supports(problem)) is not None:
        raise Unsupported(f"backend={backend!r} cannot compute this: {reason}")
    if config:
        chosen = implementation.make_config(_decode_config(config))
        return Choice(backend, chosen, "explicit", "backend and config given by the caller", problem, implementation)
    tuned = _tuned(problem, backend, ordinal)
    if tuned is not None:
        return tuned
    chosen = implementation.default_config(problem)
    return Choice(
        backend, chosen, "explicit", "backend given by the caller, its default config", problem, implementation
    )


def _tuned(problem: Problem, backend: str | None, ordinal: int | None) -> Choice | None:
    """What the autotuner found for this problem, if that can run here."""
    if problem.op != "attention":
        return None
    from pagedkern.autotune import store  # read on first use: an untuned engine never opens it

    found = store.lookup(problem, backend, ordinal)
    if found is None or found.backend not in registry.names():
        return None
    implementation = registry.load(found.backend)
    probe = registry.probe(found.backend)
    if not probe.available or (probe.emulated and backend is None) or implementation.supports(problem) is not None:
        return None
    try:
        config = implementation.make_config(found.config)
    except InvalidArgument:  # tuned by a version whose configs had other fields: as good as not tuned
        return None
    return Choice(found.backend, config, found.tier, found.reason, problem, implementation)


def _default(problem: Problem) -> Choice:
    """The first backend of the registry that can run here and supports the problem."""
    passed_over: list[str] = []
    for name in registry.names():
        implementation = registry.load(name)
        probe = registry.probe(name)
        if probe.emulated:
            reason: str | None = "emulated on this machine, runs only when named"
        else:
            reason = implementation.supports(problem) if probe.available else probe.reason
        if reason is None:
            why = "\n  not ".join(["not tuned: first backend that supports the problem", *passed_over])
            return Choice(name, implementation.default_config(problem), "default", why, problem, implementation)
        passed_over.append(f"{name}: {reason}")
    raise Unsupported("\n  not ".join(["backend='auto': no backend can compute this", *passed_over]))
