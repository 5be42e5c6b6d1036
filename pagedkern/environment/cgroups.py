"""What the control groups of this process allow: containers limit processors and memory by them, in two versions.

`/proc/self/cgroup` names the groups of this process, `/proc/self/mountinfo` says where they can be read. A limit of
any group that this one lies in counts, so the smallest does. What cannot be read is no limit. `root` is for tests.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")
MOST_BYTES = 1 << 20  # of a file: of more than that none is known
UNLIMITED = 1 << 60  # bytes; version 1 writes "no limit" as a number of about 2**63


def processors(root: Path = ROOT) -> int | None:
    """How many processors may be used at a time, rounded up; None if no group limits them."""
    quotas = [_quota(group, version) for version, group in groups("cpu", root)]
    return min((max(1, math.ceil(quota)) for quota in quotas if quota is not None), default=None)


def free_memory(root: Path = ROOT) -> int | None:
    """How many bytes may still be taken; None if no group limits them. What only caches files is not taken."""
    rooms = [_room(group, version) for version, group in groups("memory", root)]
    return min((room for room in rooms if room is not None), default=None)


def groups(controller: str, root: Path = ROOT) -> Iterator[tuple[int, Path]]:
    """The groups of this process that can limit what a controller counts, with their versions, the innermost first."""
    members = dict(_memberships(root))
    for mount in _mounts(root):
        path = members.get(controller if mount.version == 1 else "")
        if path is None or (mount.version == 1 and controller not in mount.controllers):
            continue
        top = mount.top.rstrip("/")
        inside = path[len(top) :] if path == top or path.startswith(f"{top}/") else ""
        names = [name for name in inside.split("/") if name]
        if ".." in names:  # the group lies outside of this namespace: what can be seen of it is what it lies in
            names = []
        point = root / mount.point.lstrip("/")
        for depth in range(len(names), -1, -1):
            yield mount.version, point.joinpath(*names[:depth])


class _Mount(NamedTuple):
    version: int
    controllers: tuple[str, ...]  # of version 1
    top: str  # the group whose folder the mount point is
    point: str


def _mounts(root: Path) -> Iterator[_Mount]:
    """Where groups can be read."""
    for line in (_read(root / "proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        place, kind = before.split(" "), after.split(" ")
        if len(place) >= 6 and len(kind) >= 3 and kind[0] in ("cgroup", "cgroup2"):
            top, point = (re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), x) for x in place[3:5])
            yield _Mount(2 if kind[0] == "cgroup2" else 1, tuple(kind[2].split(",")), top, point)


def _memberships(root: Path) -> Iterator[tuple[str, str]]:
    """The path of this process's group for each controller; that of version 2 for ""."""
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if colon and (controllers or number == "0"):
            for name in controllers.split(","):
                yield name, path


def _quota(group: Path, version: int) -> float | None:
    """Processors that a group may use, as a fraction."""
    if version == 2:
        found = re.match(r"(\d{1,18})(?:\s+(\d{1,18}))?\s*$", _read(group / "cpu.max") or "")
        quota, period = (int(found[1]), int(found[2] or 100_000)) if found else (0, 0)
    else:
        quota, period = _number(group / "cpu.cfs_quota_us") or 0, _number(group / "cpu.cfs_period_us") or 0
    return quota / period if quota > 0 and period > 0 else None


def _room(group: Path, version: int) -> int | None:
    """Bytes that a group may still take."""
    stat = _read(group / "memory.stat") or ""
    if version == 2:
        limits = [_number(group / "memory.max"), _number(group / "memory.high")]
        used, cached = _number(group / "memory.current"), _field(stat, "inactive_file")
    else:
        limits = [_number(group / "memory.limit_in_bytes"), _field(stat, "hierarchical_memory_limit")]
        used, cached = _number(group / "memory.usage_in_bytes"), _field(stat, "total_inactive_file")
    limit = min((each for each in limits if each is not None and each < UNLIMITED), default=None)
    return None if limit is None else max(0, limit - max(0, (used or 0) - (cached or 0)))


def _field(text: str, name: str) -> int | None:
    found = re.search(rf"^{name} (\d{{1,19}})$", text, re.MULTILINE)
    return int(found[1]) if found else None


def _number(path: Path) -> int | None:
    """The number in a file; None for anything else, as "max" or -1."""
    found = re.fullmatch(r"\d{1,19}", (_read(path) or "").strip())
    return int(found[0]) if found else None


def _read(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return file.read(MOST_BYTES).decode(errors="surrogateescape")
    except OSError:
        return None
