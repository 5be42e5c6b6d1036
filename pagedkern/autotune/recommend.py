"""`recommend`: the block size for a workload, before an engine lays out its cache. Standard library only for a CPU."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pagedkern.autotune import profile as profiles
from pagedkern.autotune import workloads
from pagedkern.autotune.advice import advise
from pagedkern.autotune.objective import USUAL_BLOCK_SIZE, Score, score
from pagedkern.autotune.profile import ModelShape, Profile
from pagedkern.autotune.scheduling import advise_scheduler
from pagedkern.autotune.store import device as machine
from pagedkern.autotune.store import files, machines
from pagedkern.autotune.store import profiles as stored
from pagedkern.autotune.workloads import Model, Traffic
from pagedkern.errors import InvalidArgument, InvalidType

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A block size and a scheduler's limits, and why. What nothing was measured for is None."""

    block_size: int  # tokens
    num_blocks: int  # that the memory holds
    tier: str  # "tuned": measured here for this shape; "tuned-nearest": for another shape or machine; "default"
    reason: str  # what was measured, where and when, and what `advice` that supports; or why nothing is known
    tokens_per_second: float | None  # predicted by the objective
    concurrency: float | None  # sequences in memory at a time
    scores: tuple[Score, ...] = field(repr=False, default=())  # of every block size that was measured
    error: float | None = None  # half the error bar of `tokens_per_second` beside other block sizes, as a share
    alike: tuple[int, ...] = ()  # block sizes of which none is proven better or worse, this one included
    within: float | None = None  # how far the tokens per second of those are from its own at the most, as a share
    token_budget: int | None = None  # tokens of a step, for `Scheduler`: the least that costs no throughput
    max_num_seqs: int | None = None  # sequences at a time, likewise
    advice: str = ""  # why this block size and no other, in words

    @property
    def basis(self) -> str:
        """The reason without the advice: what was measured, where and when."""
        return self.reason.removesuffix(f"; {self.advice}") if self.advice else self.reason

    def __str__(self) -> str:
        return f"block size {self.block_size} ({self.num_blocks:,} blocks) [{self.tier}]: {self.reason}"


def recommend(
    workload: str | Path | Traffic,
    memory: int | str,
    *,
    model: str | Model | None = None,
    device: str | None = None,
) -> Recommendation:
    """The block size to lay out a cache with for a workload, and the limits of a scheduler over it.

    Args:
        workload: a preset ("chat", "code", "long-context", "retrieval", "parallel-sampling", "beam"), or a TOML, CSV or
            JSONL file.
        memory: bytes of the cache, all layers, K and V together; or a text such as "24GB".
        model: a preset ("llama-3-8b", ...), a folder with a `config.json`, such a file, or a shape, see
            `workloads.model`. None: the workload's, else llama-3-8b.
        device: torch device, "cpu", "cuda" (the current GPU) or "cuda:1". None: a GPU if torch is loaded and finds one.

    The block size is the usual 16, unless another is proven to give more output tokens per second, see `advice`; of
    those that are alike the smallest. `token_budget` and `max_num_seqs` are the least that give all but 2 % of the
    tokens per second, see `scheduling`.

    The tier says what this rests on, as `explain` does for kernels: measurements of this machine for this shape; else
    of this machine with the nearest number of threads, for the shape most like it, or with other versions of the
    kernels; else of the machine most like this one, imported or shipped with the library; else nothing.

    Raises:
        InvalidArgument: no such workload or model, a malformed file, memory in which nothing fits, or no such device.
    """
    traffic = workloads.load(workload)
    served = workloads.model(model) if model is not None else traffic.model or workloads.default_model()
    size = cache_size(memory, served)
    return recommend_by(*find(served, *_device(device or default_device())), traffic, served, size)


def recommend_by(
    profile: Profile | None, tier: str, reason: str, traffic: Traffic, model: Model, memory: int
) -> Recommendation:
    """What a profile, see `find`, says of a workload, for a cache of `memory` bytes."""
    scores = score(traffic, model, profile.rates, memory) if profile else []
    advice = advise(scores)
    if profile is None or advice is None:
        why = f"the longest request of {traffic.name} does not fit into the memory" if profile else reason
        num_blocks = memory // (USUAL_BLOCK_SIZE * model.token_bytes)
        return Recommendation(USUAL_BLOCK_SIZE, num_blocks, "default", why, None, None)
    taken, limits = advice.score, advise_scheduler(traffic, model, profile.rates, advice.score)
    return Recommendation(
        taken.block_size, taken.num_blocks, tier, f"{reason}; {advice}", taken.tokens_per_second, taken.concurrency,
        tuple(scores), taken.error, advice.alike, advice.within, limits.token_budget, limits.max_num_seqs,
        str(advice),
    )  # fmt: skip


def _device(device: str) -> tuple[str, int | None]:
    """Type and number of a device. Raises `InvalidArgument`."""
    kind, colon, number = device.partition(":")
    if kind == "cuda" and not machine.present(kind):
        raise InvalidArgument(f"device: got {device!r}, expected 'cpu': torch finds no GPU")
    if kind not in ("cpu", "cuda") or (colon and not number.isdecimal()):
        raise InvalidArgument(f"device: got {device!r}, expected 'cpu', 'cuda' or as 'cuda:1'")
    if kind == "cpu" or not colon:
        return kind, None
    count = int(sys.modules["torch"].cuda.device_count())
    if int(number) >= count:
        raise InvalidArgument(f"device: got {device!r}, expected 'cuda:0' to 'cuda:{count - 1}'")
    return kind, int(number)


def find(model: Model, device: str, ordinal: int | None = None) -> tuple[Profile | None, str, str]:
    """The profile to reckon with on a device, see `device.identity`, its tier and a sentence on it."""
    identity, shape = machine.identity(device, ordinal), ModelShape.of(model)
    own = _own(identity)
    if (exact := _tuned(own, identity, shape)) is not None:
        where = f"measured on {machine.describe(identity)}{_busy(exact)}"
        return exact, "tuned", f"{where}, {exact.when[:10]}: {exact.measured}"
    others = [p for _, document in stored.others() if (p := _parse(document)) and machine.likeness(identity, p.device)]

    def rank(p: Profile) -> tuple[object, ...]:
        return *machines.order(identity, p.device), p.shape.distance(shape), not fresh(p.code)

    nearest = min([*own, *others], key=rank, default=None)
    if nearest is None:
        return (
            None,
            "default",
            "not tuned: nothing was measured on this machine or one like it; run python -m pagedkern.autotune",
        )
    same = machines.same_machine(identity, nearest.device)
    here = "" if nearest in own else "imported or shipped: " if same else "not tuned here: "
    where = f"{here}measured on {machines.describe(identity, nearest.device)}{_busy(nearest)}"
    other = "" if fresh(nearest.code) else " with other kernels or libraries"
    what = nearest.measured if nearest.shape == shape else f"for another shape, {nearest.measured}"
    return nearest, "tuned-nearest", f"{where}{other}, {nearest.when[:10]}, {what}"


def is_tuned(identity: Mapping[str, str | int], shape: ModelShape) -> bool:
    """Whether there are rates that were measured on this very machine for a shape, with the kernels as they are."""
    return _tuned(_own(identity), identity, shape) is not None


def _own(identity: Mapping[str, str | int]) -> list[Profile]:
    """What was measured on this machine, with whatever number of threads."""
    return [p for _, document in stored.own(identity) if (p := _parse(document))]


def _tuned(own: Sequence[Profile], identity: Mapping[str, str | int], shape: ModelShape) -> Profile | None:
    same = (p for p in own if dict(p.device) == dict(identity) and p.shape == shape)
    return next((p for p in same if fresh(p.code)), None)


def _busy(profile: Profile) -> str:
    return " (busy at that time)" if machine.is_busy(profile.load, profile.device.get("threads")) else ""


def known() -> list[tuple[str, Path, Profile]]:
    """Every profile there is, for people to read, with its state: "used" for its shape on this machine, "other threads"
    if it was measured here with another number of them, "stale" if with other kernels or libraries, "another machine",
    "imported" or "shipped"."""
    found = []
    for origin, path, document in stored.contents():
        if (profile := _parse(document)) is not None:
            kind = str(profile.device["type"])
            state = "another machine"
            if machine.present(kind) and machines.same_machine(identity := machine.identity(kind), profile.device):
                same = dict(identity) == dict(profile.device)
                state = ("used" if same else "other threads") if fresh(profile.code) else "stale"
            found.append((state if origin == "measured" else origin, path, profile))
    return found


def fresh(code: Mapping[str, object]) -> bool:
    """Whether the kernels that were measured, and what they are built on, are those installed now."""
    return bool(code) and all(_fresh(name, then) for name, then in code.items())


def _fresh(backend: str, then: object) -> bool:
    if not isinstance(then, dict) or then.get("kernel") != machine.kernel_hash(backend):
        return False
    libraries = then.get("libraries", {})
    return isinstance(libraries, dict) and libraries.items() <= machine.libraries().items()


def default_device() -> str:
    """ "cuda" if this process has loaded torch and it finds a GPU, else "cpu"."""
    torch = sys.modules.get("torch")
    return "cuda" if torch is not None and torch.cuda.is_available() else "cpu"


def cache_size(memory: int | str, model: Model) -> int:
    """Bytes of a cache, see `parse_memory`. Raises `InvalidArgument` if not even one block of a model fits."""
    size, least = parse_memory(memory), USUAL_BLOCK_SIZE * model.token_bytes
    if size < least:
        raise InvalidArgument(f"memory: got {size:,} bytes, expected at least {least:,}, one block of {model.name}")
    return size


def parse_memory(memory: int | str) -> int:
    """Bytes of a number, or of a text such as "24GB", "1.5 GiB". Raises `InvalidArgument`."""
    if isinstance(memory, bool) or not isinstance(memory, (int, str)):
        raise InvalidType(f"memory: got {type(memory).__name__}, expected a number of bytes, or a text such as '24GB'")
    if isinstance(memory, int):
        size = memory
    else:
        found = re.fullmatch(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([A-Za-z]*)\s*", memory)
        if not found or found[2].upper() not in UNITS:
            raise InvalidArgument(f"memory: got {memory!r}, expected bytes, or a text such as '24GB' or '1.5GiB'")
        size = int(float(found[1]) * UNITS[found[2].upper()])
    if not 0 < size < 2**63:
        raise InvalidArgument(f"memory: got {memory!r}, expected a number of bytes above 0")
    return size


def _parse(document: Mapping[str, object]) -> Profile | None:
    try:
        return profiles.from_json(document)
    except files.INVALID:
        return None
