"""`recommend`: the block size for a workload, before an engine lays out its cache. Standard library only for a CPU."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pagedkern.autotune import profile as profiles
from pagedkern.autotune import workloads
from pagedkern.autotune.objective import Score, best, score
from pagedkern.autotune.profile import Profile, Shape
from pagedkern.autotune.store import device as machine
from pagedkern.autotune.store import files
from pagedkern.autotune.store import profiles as stored
from pagedkern.autotune.workloads import Model, Traffic
from pagedkern.errors import InvalidArgument, InvalidType

USUAL_BLOCK_SIZE = 16
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A block size, and why."""

    block_size: int  # tokens
    num_blocks: int  # that the memory holds
    tier: str  # "tuned": measured here for this shape; "tuned-nearest": for another shape or machine; "default"
    reason: str  # what was measured, where and when, or why nothing is known
    tokens_per_second: float | None  # foretold by the objective; None if nothing was measured
    concurrency: float | None  # sequences in memory at a time
    scores: tuple[Score, ...] = field(repr=False, default=())  # of every block size that was measured

    def __str__(self) -> str:
        return f"block size {self.block_size} ({self.num_blocks:,} blocks) [{self.tier}]: {self.reason}"


def recommend(
    workload: str | Path | Traffic,
    memory: int | str,
    *,
    model: str | Model | None = None,
    device: str | None = None,
) -> Recommendation:
    """The block size that gives the most output tokens per second for a workload.

    Args:
        workload: a preset ("chat", "code", "long-context", "retrieval", "parallel-sampling", "beam"), or a TOML, CSV or
            JSONL file.
        memory: bytes of the cache, all layers, K and V together; or a text such as "24GB".
        model: a preset ("llama-3-8b", ...) or a shape, see `workloads.model`. None: the workload's, else llama-3-8b.
        device: torch device, "cpu", "cuda" (the current GPU) or "cuda:1". None: a GPU if torch is loaded and finds one.

    The tier says what this rests on, as `explain` does for kernels: measurements of this machine for this shape; else
    of this machine for the shape most like it, or with other versions of the kernels; else of the machine most like
    this one, imported or shipped with the library; else nothing, and the block size is the usual 16.

    Raises:
        InvalidArgument: no such workload or model, a malformed file, memory in which nothing fits, or no such device.
    """
    traffic = workloads.load(workload)
    of = workloads.model(model) if model is not None else traffic.model or workloads.model(workloads.model_names()[0])
    size = parse_memory(memory)
    if size < USUAL_BLOCK_SIZE * of.token_bytes:
        raise InvalidArgument(
            f"memory: got {size:,} bytes, accepted is at least {USUAL_BLOCK_SIZE * of.token_bytes:,}, one block"
        )
    found, tier, reason = find(of, *_device(device or default_device()))
    scores = score(traffic, of, found.rates, size) if found else []
    chosen = best(scores)
    if chosen is None:
        why = f"the longest request of {traffic.name} does not fit into the memory" if found else reason
        return Recommendation(USUAL_BLOCK_SIZE, size // (USUAL_BLOCK_SIZE * of.token_bytes), "default", why, None, None)
    return Recommendation(
        chosen.block_size, chosen.num_blocks, tier, reason, chosen.tokens_per_second, chosen.concurrency, tuple(scores)
    )


def _device(device: str) -> tuple[str, int | None]:
    """Type and number of a device. Raises `InvalidArgument`."""
    kind, colon, number = device.partition(":")
    if kind == "cuda" and not machine.present(kind):
        raise InvalidArgument(f"device: got {device!r}, accepted is 'cpu': torch finds no GPU")
    if kind not in ("cpu", "cuda") or (colon and not number.isdecimal()):
        raise InvalidArgument(f"device: got {device!r}, accepted is 'cpu', 'cuda' or as 'cuda:1'")
    if kind == "cpu" or not colon:
        return kind, None
    count = int(sys.modules["torch"].cuda.device_count())
    if int(number) >= count:
        raise InvalidArgument(f"device: got {device!r}, accepted is 'cuda:0' to 'cuda:{count - 1}'")
    return kind, int(number)


def find(model: Model, device: str, ordinal: int | None = None) -> tuple[Profile | None, str, str]:
    """The profile to reckon with on a device, see `device.identity`, its tier and a sentence on it."""
    identity, shape = machine.identity(device, ordinal), Shape.of(model)
    here = [p for _, document in stored.own(identity) if (p := _parse(document)) and dict(p.device) == dict(identity)]
    for profile in here:
        if profile.shape == shape and fresh(profile.code):
            return (
                profile,
                "tuned",
                f"measured on {machine.describe(identity)}{_busy(profile)}, {profile.when[:10]}: {profile.measured}",
            )
    nearest = min(here, key=lambda p: (p.shape.distance(shape), not fresh(p.code)), default=None)
    if nearest is not None:
        what = "with other kernels or libraries" if nearest.shape == shape else f"for another shape, {nearest.measured}"
        return nearest, "tuned-nearest", f"measured on this machine{_busy(nearest)} {what}, {nearest.when[:10]}"
    known = [p for _, document in stored.others() if (p := _parse(document)) and machine.likeness(identity, p.device)]
    alike = min(known, key=lambda p: (-machine.likeness(identity, p.device), p.shape.distance(shape)), default=None)
    if alike is not None:
        other = "" if fresh(alike.code) else " with other kernels or libraries"
        where = f"{machine.describe(alike.device)}{_busy(alike)}{other}"
        return alike, "tuned-nearest", f"not tuned here: measured on {where}, {alike.when[:10]}, {alike.measured}"
    return (
        None,
        "default",
        "not tuned: nothing was measured on this machine or one like it; run python -m pagedkern.autotune",
    )


def _busy(profile: Profile) -> str:
    return " (busy at that time)" if machine.is_busy(profile.load, profile.device.get("threads")) else ""


def known() -> list[tuple[str, Path, Profile]]:
    """Every profile there is, for people to read, with its state: "used" for its shape on this machine, "stale" if it
    was measured here with other kernels or libraries, "another machine", "imported" or "shipped"."""
    found = []
    for origin, path, document in stored.contents():
        if (profile := _parse(document)) is not None:
            kind = str(profile.device["type"])
            here = machine.present(kind) and dict(machine.identity(kind)) == dict(profile.device)
            state = ("used" if fresh(profile.code) else "stale") if here else "another machine"
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


def parse_memory(memory: int | str) -> int:
    """Bytes of a number, or of a text such as "24GB", "1.5 GiB". Raises `InvalidArgument`."""
    if isinstance(memory, bool) or not isinstance(memory, (int, str)):
        raise InvalidType(
            f"memory: got {type(memory).__name__}, accepted is a number of bytes, or a text such as '24GB'"
        )
    if isinstance(memory, int):
        size = memory
    else:
        found = re.fullmatch(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([A-Za-z]*)\s*", memory)
        if not found or found[2].upper() not in UNITS:
            raise InvalidArgument(f"memory: got {memory!r}, accepted is bytes, or a text such as '24GB' or '1.5GiB'")
        size = int(float(found[1]) * UNITS[found[2].upper()])
    if not 0 < size < 2**63:
        raise InvalidArgument(f"memory: got {memory!r}, accepted is a number of bytes above 0")
    return size


def _parse(document: Mapping[str, object]) -> Profile | None:
    try:
        return profiles.from_json(document)
    except files.INVALID:
        return None
