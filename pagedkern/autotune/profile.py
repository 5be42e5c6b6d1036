"""What is kept of a machine: its rates for shapes of models, and the choices of kernels. As JSON, stored and shipped.

A profile is made from the measurements of a run (`rating.rates_of`), or distilled from records (`distil`). The files in
`profiles/` are distilled from `autotune/records/`; a test makes them anew and compares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pagedkern.autotune.decision import Decision, decide
from pagedkern.autotune.log import Log
from pagedkern.autotune.rates import Rates, Speed
from pagedkern.autotune.rating import rates_of
from pagedkern.autotune.records import Recording
from pagedkern.autotune.space import Space, Workload
from pagedkern.autotune.store import Key, Measurement, entry
from pagedkern.autotune.store import device as machine
from pagedkern.autotune.store import profiles as stored
from pagedkern.autotune.workloads import Model
from pagedkern.backends.base import ITEMSIZE

DIGITS = 4  # of numbers that are kept: more would be noise
UNKNOWN_ERROR = 0.02  # of rates that do not say theirs, as those of version 0.1.0

__all__ = ["ModelShape", "Profile", "choices_of", "distil", "from_json", "rates_of", "to_json"]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the rates of attention depend on in a model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    kv_dtype: str
    windows: tuple[int | None, ...]  # of its layers, None that of layers without one
    softcap: bool

    @classmethod
    def of(cls, model: Model) -> ModelShape:
        heads = model.num_heads, model.num_kv_heads, model.head_dim
        return cls(*heads, model.dtype, model.cache_dtype, model.windows, model.softcap is not None)

    @classmethod
    def of_problems(cls, workloads: Sequence[Workload]) -> ModelShape:
        """The shape of the model that these problems stand for."""
        w = workloads[0]
        windows = dict.fromkeys(other.sliding_window for other in workloads)
        heads = w.num_heads, w.num_kv_heads, w.head_dim
        return cls(*heads, w.dtype, w.kv_dtype, tuple(windows), w.softcap is not None)

    def name(self) -> str:
        """A name for files. It leaves out what is usual, as `store.Key.filename` does."""
        parts = [f"h{self.num_heads}", f"g{self.num_kv_heads}", f"d{self.head_dim}", self.dtype]
        parts += [f"kv-{self.kv_dtype}"] if self.kv_dtype != self.dtype else []
        parts += ["all" if w is None else f"w{w}" for w in self.windows if self.windows != (None,)]
        return "-".join([*parts, "softcap"] if self.softcap else parts)

    def distance(self, other: ModelShape) -> float:
        """How little the rates of one say about the other: dtypes first, then the group, then sizes, then the rest."""
        sizes = [
            abs(math.log2(a / b))
            for a, b in (
                (self.num_heads / self.num_kv_heads, other.num_heads / other.num_kv_heads),
                (self.head_dim, other.head_dim),
            )
        ]
        kinds = 100 * (self.dtype != other.dtype) + 50 * (self.kv_dtype != other.kv_dtype)
        rest = 0.2 * (self.softcap != other.softcap) + 0.1 * (self.windows != other.windows)
        return kinds + 2 * sizes[0] + sizes[1] + rest


@dataclass(frozen=True, slots=True)
class Profile:
    """What is known of one machine for one shape."""

    device: Mapping[str, str | int]
    shape: ModelShape
    rates: Rates
    code: Mapping[str, object]  # for each backend: see `store.device.code`
    driver: str  # see `store.device.driver`
    when: str  # UTC, ISO 8601
    measured: str  # the problems, in words
    load: float | None = None  # of the machine when it was measured


def to_json(profile: Profile) -> dict[str, Any]:
    """A JSON object, numbers rounded."""
    rates = profile.rates
    return {
        "format": stored.FORMAT,
        "device": dict(profile.device),
        "shape": {**asdict(profile.shape), "windows": list(profile.shape.windows)},
        "read": _rounded(rates.read),
        "compute": _rounded(rates.compute),
        "link": _rounded(rates.link),
        "speeds": {
            str(block_size): {k: _rounded(v) if isinstance(v, float) else v for k, v in asdict(speed).items()}
            for block_size, speed in sorted(rates.speeds.items())
        },
        "code": dict(profile.code),
        "driver": profile.driver,
        "when": profile.when,
        "measured": profile.measured,
        "load": profile.load,
    }


def from_json(document: Mapping[str, Any]) -> Profile:
    """The profile of a JSON object. Raises `ValueError`, `KeyError` or `TypeError` if it is none."""
    if document["format"] != stored.FORMAT:
        raise ValueError(f"of format {document['format']!r}, not {stored.FORMAT}")
    shape = ModelShape(**{**document["shape"], "windows": tuple(document["shape"]["windows"])})
    numbers = (shape.num_heads, shape.num_kv_heads, shape.head_dim, *(w for w in shape.windows if w is not None))
    if not all(type(n) is int and n > 0 for n in numbers) or not shape.windows or type(shape.softcap) is not bool:
        raise ValueError("an invalid shape")
    if shape.dtype not in ITEMSIZE or shape.kv_dtype not in ITEMSIZE:  # names of files are made of them
        raise ValueError("an invalid dtype")
    speeds = {}
    for block_size, fields in document["speeds"].items():
        speed = Speed(**{"kv_error": UNKNOWN_ERROR, "prefill_error": UNKNOWN_ERROR, **fields})
        for name in ("backend", "config", "prefill_backend", "prefill_config"):
            if not isinstance(getattr(speed, name), str):
                raise ValueError(f"{name} is no text")
        _positive(speed.kv_bytes_per_second)
        for value in (speed.call_seconds, speed.prefill_flops, speed.kv_error, speed.prefill_error):
            _positive(value, zero=True)
        if max(speed.kv_error, speed.prefill_error) >= 1:
            raise ValueError("an error of all that there is")
        if not 0 < int(block_size) < 1 << 20:
            raise ValueError(f"block size {block_size}")
        speeds[int(block_size)] = speed
    if not speeds:
        raise ValueError("no speeds")
    device, code = document["device"], document["code"]
    if not machine.is_identity(device) or not isinstance(code, dict):
        raise ValueError("no device or no code")
    when, measured, driver = document["when"], document["measured"], document["driver"]
    if not all(isinstance(text, str) and text.isprintable() for text in (when, measured, driver)):
        raise ValueError("when, measured or driver is no text")
    if stored.moment(document) is None:
        raise ValueError(f"when is {when!r:.40}, no time with its zone")
    read, compute, link = (_positive(document[name]) for name in ("read", "compute", "link"))
    load = None if document["load"] is None else _positive(document["load"], zero=True)
    rates = Rates(read, compute, link, speeds)
    return Profile(device, shape, rates, code, driver, when, measured, load)


def distil(recorded: Recording) -> dict[str, Any] | None:
    """The file of a machine from its records: its rates, and its choices as the store keeps them. None if nothing was
    decided."""
    verdicts = [decide(space, log) for space, log in zip(recorded.spaces, recorded.logs, strict=True)]
    picks = [{b: pick.candidate for b, pick in verdict.winners.items()} for verdict in verdicts]
    rates = rates_of(recorded.spaces, recorded.logs, picks)
    if rates is None:
        return None
    workloads = [space.workload for space in recorded.spaces]
    code = {name: value for codes in recorded.code for name, value in codes.items()}
    measured = "; ".join(f"{w.kind}: {w}" for w in workloads)
    shape, driver = ModelShape.of_problems(workloads), recorded.driver
    profile = Profile(recorded.device, shape, rates, code, driver, recorded.when, measured, recorded.load)
    choices = []
    for space, log, verdict in zip(recorded.spaces, recorded.logs, verdicts, strict=True):
        for block_size, tuned in choices_of(space, log, verdict).items():
            key = asdict(Key.of(space.workload.problem(block_size)))
            for name, choice in tuned.items():
                fields = {k: _rounded(v) if isinstance(v, float) else v for k, v in entry(choice, code[name]).items()}  # type: ignore[arg-type]
                choices.append({"problem": key, "backend": name, **fields, "when": recorded.when, "driver": driver})
    return {**to_json(profile), "choices": choices}


def choices_of(space: Space, log: Log, verdict: Decision) -> dict[int, dict[str, Measurement]]:
    """What the store is to keep: for each block size and backend the configuration, and the measurement behind it."""
    found: dict[int, dict[str, Measurement]] = {}
    for block_size, picks in verdict.picks.items():
        problem, untuned = space.workload.problem(block_size), space.untuned(block_size)
        found[block_size] = {
            name: Measurement(
                config=pick.candidate.fields,
                seconds=log.seconds(pick.candidate) or 0.0,
                untuned=pick.candidate == untuned,
                gain=pick.gain.ratio,
                gain_low=pick.gain.low,
                rounds=pick.gain.rounds,
                default=str(untuned),
                num_seqs=problem.num_seqs,
                num_tokens=problem.num_tokens,
                max_seqlen_q=problem.max_seqlen_q,
                max_seqlen_k=problem.max_seqlen_k,
                context=space.workload.context,
            )
            for name, pick in picks.items()
        }
    return found


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _positive(value: object, zero: bool = False) -> float:
    if type(value) not in (int, float) or not (0 if zero else 1e-30) <= value < math.inf:  # type: ignore[operator]
        raise ValueError(f"{value!r:.40} is no positive number")
    return float(value)  # type: ignore[arg-type]
