"""What tuning found, and how the kernels look it up at run time.

One JSON file for each device and problem key, `<cache>/tuned/<device>/<key>.json`, where the cache is
`$PAGEDKERN_CACHE_DIR` or the user's cache directory. Files are replaced whole, under a lock, so readers need none.

**What must match.** The device; everything in `Key`: decode (`max_seqlen_q` 1) or prefill, dtypes, heads, head dims,
block size, window, causality, softcap, ALiBi, sinks; and the code: version of pagedkern, sources of the backend,
versions of the libraries. Anything else is a miss, and never an error: a file that is damaged, stale or unreadable is
reported once by `logging` and passed over.

**What may differ.** Number of sequences and of tokens, query lengths within prefill, and the context. A key has one
choice whatever these are, because a configuration decides how sums are split and so the last bits of a result: a
sequence must not change them when another joins its batch. The tier says whether the numbers were those measured
("tuned") or others ("tuned-nearest"). For the same reason a process reads a key once: what is stored later counts from
its next start, or after `reload()`. Only one thing about the batch is looked at, whether `max_seqlen_q` is 1: an engine
that mixes decode and prefill rows in a call, and needs the bits of a pure decode call, passes `backend` and `config`
itself.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

from pagedkern.autotune.store import device as machine
from pagedkern.autotune.store import files, machines, profiles
from pagedkern.backends.base import Problem

FORMAT = 2
MIN_GAIN = 1.02  # the untuned default is left for a gain whose lower bound reaches this
KEPT_DAYS, KEPT_FILES = 90, 1000  # a stale file goes when it is older, or when there are more

logger = logging.getLogger("pagedkern.autotune")


@dataclass(frozen=True, slots=True)
class StoredChoice:
    """A tuned choice for a problem."""

    backend: str
    config: Mapping[str, object]  # fields for the backend's make_config
    tier: str  # "tuned": measured for this problem on this device; "tuned-nearest": for another workload or device
    reason: str  # a sentence for `explain`: what was measured, where and when


@dataclass(frozen=True, slots=True)
class Key:
    """The part of a problem that must match exactly. It holds nothing that changes between two batches of an engine."""

    kind: str  # "decode": one query token a sequence; "prefill": more
    device: str
    q_dtype: str
    kv_dtype: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    block_size: int
    causal: bool  # True for decode, where it makes no difference
    sliding_window: int | None
    softcap: bool
    alibi: bool
    sinks: bool

    @classmethod
    def of(cls, problem: Problem) -> Key:
        decode = problem.max_seqlen_q <= 1
        same = {name: getattr(problem, name) for name in cls.__slots__ if name not in ("kind", "causal")}
        return cls(kind="decode" if decode else "prefill", causal=decode or problem.causal, **same)

    def filename(self) -> str:
        parts = [self.kind, self.q_dtype]
        parts += [f"kv-{self.kv_dtype}"] if self.kv_dtype != self.q_dtype else []
        parts += [f"h{self.num_heads}", f"g{self.num_kv_heads}", f"d{self.head_dim}"]
        parts += [f"e{self.head_dim_v}"] if self.head_dim_v != self.head_dim else []
        parts += [f"b{self.block_size}"]
        parts += [] if self.causal else ["full"]
        parts += [] if self.sliding_window is None else [f"w{self.sliding_window}"]
        parts += [name for name in ("softcap", "alibi", "sinks") if getattr(self, name)]
        return "-".join(parts) + ".json"


@dataclass(frozen=True, slots=True)
class Measurement:
    """The best configuration of one backend for one key, and the measurement behind it."""

    config: Mapping[str, object]
    seconds: float  # median of a call
    untuned: bool  # whether this is the choice that would be made untuned
    gain: float  # median of the ratios of times, untuned choice / this one, run in turn
    gain_low: float  # lower confidence bound of that median; both are 1 for the untuned choice
    rounds: int  # pairs behind the two
    default: str  # the untuned choice, "backend(fields)"
    num_seqs: int
    num_tokens: int
    max_seqlen_q: int
    max_seqlen_k: int
    context: int  # tokens of the longest sequence
    when: str = ""  # UTC, ISO 8601; this and the driver (see `device.driver`) are filled in by `save`
    driver: str = ""

    @property
    def eligible(self) -> bool:
        """Whether backend="auto" may use it: it is what runs untuned, or better by a margin that was measured."""
        return self.untuned or self.gain_low >= MIN_GAIN


def lookup(problem: Problem, backend: str | None = None, ordinal: int | None = None) -> StoredChoice | None:
    """The stored choice for a problem, among all backends or for one; None if there is none.

    The backend and config returned depend on `Key.of(problem)` and the device alone, for the life of the process; the
    tier and the reason also on the lengths. `ordinal` is the number of the GPU, None the current one.
    """
    key, home = Key.of(problem), files.directory()
    choices = _current(home, key, ordinal) if home is not None else {}
    name = backend or _best(choices)
    if name is None or name not in choices:
        return _nearest(home, key, backend, ordinal)
    tuned = choices[name]
    sizes = ("num_seqs", "num_tokens", "max_seqlen_q", "max_seqlen_k")
    same = all(getattr(problem, size) == getattr(tuned, size) for size in sizes)
    return StoredChoice(
        name, tuned.config, "tuned" if same else "tuned-nearest", _reason(problem, tuned, same, ordinal)
    )


def save(problem: Problem, choices: Mapping[str, Measurement]) -> Path:
    """Store the best configuration of each backend named, beside those already stored for other backends.

    What was stored against another default, or with other code, is dropped. Takes effect in this process at once.

    Raises:
        OSError: the directory cannot be made or written; what was stored before is still there, whole.
    """
    key = Key.of(problem)
    path = location(files.writable(), key)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    with files.locked(path.parent) as alone:
        defaults = {tuned.default for tuned in choices.values()}
        kept = {n: c for n, c in _read(path, key).items() if _fresh(n, c[1]) and c[0].default in defaults}
        entries = {name: entry(tuned, code) for name, (tuned, code) in kept.items()}
        for name, tuned in choices.items():
            provenance = {"when": tuned.when or now, "driver": tuned.driver or machine.driver(key.device)}
            entries[name] = {**entry(tuned, machine.code(name)), **provenance}
        document = {
            "format": FORMAT,
            "device": dict(machine.identity(key.device)),
            "problem": asdict(key),
            "choices": entries,
        }
        files.replace(path, document, alone)
        _evict(path.parent)
    reload()
    return path


def _evict(folder: Path) -> None:
    """Drop files in which nothing can be used by this installation any more and that are old, or too many. The caller
    holds the lock. An installation with other versions may still use what is stale here, hence not at once."""
    ages = sorted((time.time() - path.stat().st_mtime, path) for path in files.found(folder, "*.json"))
    for rank, (age, path) in enumerate(ages):
        if age > KEPT_DAYS * 86400 or rank >= KEPT_FILES:
            try:
                stale = not any(_fresh(n, e["code"]) for n, e in files.load(path, FORMAT)["choices"].items())
            except files.INVALID:
                stale = True
            if stale:
                path.unlink(missing_ok=True)


def reload() -> None:
    """Read the store anew from now on: what other processes have stored since this one first looked counts."""
    _current.cache_clear()
    _nearest.cache_clear()
    profiles.all_of.cache_clear()
    if (choice := sys.modules.get("pagedkern._selection")) is not None:
        choice.choose.cache_clear()


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """One choice in the store, whether or not it would be used: "auto" is what backend="auto" uses; "stale" was made
    with other kernels or libraries, "other threads" on this machine with another number of them: both are used for want
    of others, as far as the kernels are the same."""

    path: Path
    device: Mapping[str, str | int]
    key: Key
    backend: str
    tuned: Measurement
    state: str  # "auto", "used": by calls that name the backend; "stale", "other threads", "another machine"


def contents() -> Iterator[StoreEntry]:
    """Every choice in the store, for people to read. Files that cannot be read are passed over with a warning."""
    home = files.directory()
    if home is None:
        return
    for path in files.found(home, "tuned/*/*.json"):
        try:
            document = files.load(path, FORMAT)
            key, device = Key(**document["problem"]), document["device"]
            if not isinstance(device, dict):
                raise ValueError("of no device")
            if path.name != key.filename():
                raise ValueError("of another problem than its name says")
            present = machine.present(key.device)
            here = present and path == location(home, key)
            own = present and machines.same_machine(machine.identity(key.device), device)
        except files.INVALID as error:
            _warn(path, f"cannot be used: {error or type(error).__name__}")
            continue
        choices = _read(path, key, device)
        best = _best({name: tuned for name, (tuned, code) in choices.items() if here and _fresh(name, code)})
        for name, (tuned, code) in choices.items():
            state = "auto" if name == best else "used" if here else "other threads" if own else "another machine"
            yield StoreEntry(path, device, key, name, tuned, state if not own or _fresh(name, code) else "stale")


def location(home: Path, key: Key, ordinal: int | None = None) -> Path:
    """The file of a key on this machine."""
    return home / "tuned" / machine.slug_of(machine.identity(key.device, ordinal)) / key.filename()


@lru_cache(maxsize=4096)
def _current(home: Path, key: Key, ordinal: int | None) -> Mapping[str, Measurement]:
    """What the file of a key holds for the code that is installed now; empty if nothing."""
    path = location(home, key, ordinal)
    entries = _read(path, key, machine.identity(key.device, ordinal))
    fresh = {name: tuned for name, (tuned, code) in entries.items() if _fresh(name, code)}
    if entries and not fresh:
        _warn(path, "was tuned with other kernels or libraries: run python -m pagedkern.autotune again")
    return MappingProxyType(fresh)


@lru_cache(maxsize=4096)
def _nearest(home: Path | None, key: Key, backend: str | None, ordinal: int | None) -> StoredChoice | None:
    """The choice for a key of the machine that says most about this one: this machine with the nearest number of
    threads, or with other versions of libraries; else of those that were imported and those that ship the one most
    like it.

    Kernels must be the same; versions of libraries may differ. A GPU must be of the same compute capability up to its
    minor number, a CPU of the same architecture: the rest of a machine decides how good the choice is, not whether it
    works.
    """
    if key.device not in ("cpu", "cuda"):
        return None
    here = machine.identity(key.device, ordinal)
    ranked = sorted(_elsewhere(home, key, here), key=lambda found: machines.order(here, found[0]))
    for device, choices in ranked:
        same = {n: tuned for n, (tuned, code) in choices.items() if _same_kernel(n, code)}
        name = backend if backend in same else None if backend else _best(same)
        if name is not None:
            tuned, code = choices[name]
            where = machines.describe(here, device)
            where += "" if not machines.same_machine(here, device) or _fresh(name, code) else ", other libraries"
            said = f"{_gain(tuned)}; measured on {where}, {tuned.driver}, {tuned.when[:10]}"
            return StoredChoice(name, tuned.config, "tuned-nearest", said)
    return None


def _elsewhere(
    home: Path | None, key: Key, here: Mapping[str, str | int]
) -> Iterator[tuple[Mapping[str, str | int], Mapping[str, tuple[Measurement, Mapping[str, object]]]]]:
    """The choices for a key that are not those of this machine as it is, each with its machine: first of this machine,
    with other threads or by other code, then those that were imported, then those that ship."""
    for path in files.found(home, f"tuned/*/{key.filename()}") if home is not None else []:
        try:
            device = files.load(path, FORMAT)["device"]
            own = machine.is_identity(device) and path.parent.name == machine.slug_of(device)
        except files.INVALID:
            continue  # said where it is looked for
        if own and machines.same_machine(here, device):
            yield device, _read(path, key, device)
    for path, document in profiles.others():
        if not machine.likeness(here, document["device"]):
            continue
        try:
            entries = [c for c in document.get("choices", ()) if Key(**c["problem"]) == key]
            yield document["device"], {c["backend"]: _parse(c) for c in entries}
        except files.INVALID as error:
            _warn(path, f"cannot be used: {error or type(error).__name__}")


def _same_kernel(backend: str, code: Mapping[str, object]) -> bool:
    return backend.isidentifier() and code.get("kernel") == machine.kernel_hash(backend) != "unknown"


def _best(choices: Mapping[str, Measurement]) -> str | None:
    """The backend that "auto" takes."""
    ranked = sorted((name for name in choices if choices[name].eligible), key=lambda n: (-choices[n].gain_low, n))
    return ranked[0] if ranked else None


def _read(
    path: Path, key: Key, device: Mapping[str, str | int] | None = None
) -> dict[str, tuple[Measurement, Mapping[str, object]]]:
    """The choices in a file with the code that each was measured with; empty, and a warning, if it is damaged."""
    try:
        document = files.load(path, FORMAT)
        if document["device"] != (device or machine.identity(key.device)) or document["problem"] != asdict(key):
            raise ValueError("of another device or problem than its name says")
        return {name: _parse(entry) for name, entry in document["choices"].items()}
    except FileNotFoundError:
        return {}
    except files.INVALID as error:
        _warn(path, f"cannot be used: {error or type(error).__name__}")
        return {}


_FIELDS = {  # of a choice in the file: its type and least value
    "seconds": (float, 0), "untuned": (bool, None), "gain": (float, 0), "gain_low": (float, 0), "rounds": (int, 1),
    "default": (str, None), "num_seqs": (int, 0), "num_tokens": (int, 0), "max_seqlen_q": (int, 0),
    "max_seqlen_k": (int, 0), "context": (int, 0), "when": (str, None), "driver": (str, None),
}  # fmt: skip


def _parse(given: Mapping[str, object]) -> tuple[Measurement, Mapping[str, object]]:
    config, code = given["config"], given["code"]
    if not isinstance(config, dict) or not all(map(files.is_plain, config.values())):
        raise ValueError("a config that is no mapping of plain values")
    if not isinstance(code, dict):
        raise ValueError("no code")
    fields: dict[str, object] = {}
    for name, (kind, least) in _FIELDS.items():
        value = given[name]
        if kind is float and type(value) is int and files.is_plain(value):
            value = float(value)
        if type(value) is not kind or not files.is_plain(value) or (least is not None and value < least):  # type: ignore[operator]
            raise ValueError(f"{name} is {value!r:.60}")
        fields[name] = value
    return Measurement(config=MappingProxyType(config), **fields), code  # type: ignore[arg-type]


def entry(tuned: Measurement, code: Mapping[str, object]) -> dict[str, object]:
    """A choice as it stands in a file."""
    fields = {name: getattr(tuned, name) for name in _FIELDS}
    return {"config": dict(tuned.config), **fields, "code": dict(code)}


def _fresh(backend: str, code: Mapping[str, object]) -> bool:
    """Whether a choice was measured with the code that would run now. A library installed since then is no change."""
    if not backend.isidentifier():  # its sources are looked for by this name, which a file may have as "/usr"
        return False
    now, then = machine.code(backend), code.get("libraries")
    same = code.get("pagedkern") == now["pagedkern"] and code.get("kernel") == now["kernel"]
    return same and isinstance(then, dict) and then.items() <= machine.libraries().items()


def _reason(problem: Problem, tuned: Measurement, same: bool, ordinal: int | None) -> str:
    batch = f"{tuned.num_seqs} sequences, {tuned.num_tokens} query tokens, context {tuned.context}"
    where = machine.describe(machine.identity(problem.device, ordinal))
    on = "on this problem" if same else f"on {batch}"
    return f"{_gain(tuned)}; measured {on}, {where}, {tuned.driver}, {tuned.when[:10]}"


def _gain(tuned: Measurement) -> str:
    if tuned.untuned:
        return f"the untuned choice: {tuned.rounds} rounds showed nothing faster"
    return f"{tuned.gain:.2f}x the speed of {tuned.default}"


_warned: set[tuple[Path, str]] = set()


def _warn(path: Path, what: str) -> None:
    """Say once what is wrong with a file."""
    if (path, what) not in _warned:
        _warned.add((path, what))
        logger.warning("%s %s", path, what)
