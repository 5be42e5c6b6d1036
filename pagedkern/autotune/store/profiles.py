"""Profiles of machines: what was measured here, what was imported, and what ships with the library.

`<cache>/rates/<device>/<shape>.json` is of this machine; `<cache>/profiles/*.json` was imported; the folder `profiles`
of the package holds what was distilled from `autotune/records/`. This module keeps them as JSON objects;
`pagedkern.autotune.profile` gives them a meaning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from pagedkern.autotune.store import device as machine
from pagedkern.autotune.store import files
from pagedkern.autotune.store.machines import same_machine
from pagedkern.environment import notices

FORMAT = 2
SHIPPED = Path(__file__).parents[1] / "profiles"


def save_rates(document: Mapping[str, Any], name: str) -> Path:
    """Store the profile of this machine for a shape of that name, just measured. Raises `OSError`."""
    path = folder(files.writable(), document["device"]) / f"{name}.json"
    with files.locked(path.parent) as alone:
        files.replace(path, document, alone)
    return path


def take_over(document: Mapping[str, Any], name: str, own: bool = False) -> tuple[Path, str | None]:
    """Store an imported profile, beside or (`own`) in place of what was measured here, unless there is a newer one.

    Returns the file, and when what it keeps instead was measured; None if it was stored. Raises `OSError`.
    """
    home, device = files.writable(), document["device"]
    imported = home / "profiles" / f"{machine.slug_of(device)}-{name}.json"
    path = folder(home, device) / f"{name}.json" if own else imported
    with files.locked(path.parent) as alone:
        there = _load(path)
        if there is not None and newer(there, document):
            return path, str(there["when"])
        files.replace(path, document, alone)
    all_of.cache_clear()
    return path, None


def newer(document: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether one profile was measured later than another. What does not say when is older than all."""
    moments = moment(document), moment(other)
    return moments[0] is not None and (moments[1] is None or moments[0] > moments[1])


def moment(document: Mapping[str, Any]) -> datetime | None:
    """When a profile was measured."""
    try:
        found = datetime.fromisoformat(document["when"])
    except (KeyError, TypeError, ValueError):
        return None
    return found if found.tzinfo is not None else None


def own(device: Mapping[str, str | int]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The profiles that were measured on a machine, with whatever number of threads. Damaged ones are passed over with
    a warning."""
    home = files.directory()
    for place in files.found(home, "rates/*") if home is not None else []:
        for path, document in _read(place):
            if place == folder(home, document["device"]) and same_machine(device, document["device"]):  # type: ignore[arg-type]
                yield path, document


def others() -> Iterator[tuple[Path, dict[str, Any]]]:
    """The profiles that were imported, then those that ship."""
    home = files.directory()
    yield from all_of(home / "profiles" if home else None)


def contents() -> Iterator[tuple[str, Path, dict[str, Any]]]:
    """Every profile, with where it is from: "measured", "imported" or "shipped"."""
    home = files.directory()
    places = [("measured", place) for place in files.found(home, "rates/*")] if home else []
    places += [("imported", home / "profiles")] if home else []
    for origin, place in [*places, ("shipped", SHIPPED)]:
        yield from ((origin, path, document) for path, document in _read(place))


@lru_cache(maxsize=8)
def all_of(imported: Path | None) -> tuple[tuple[Path, dict[str, Any]], ...]:
    return (*(_read(imported) if imported else ()), *_read(SHIPPED))


def folder(home: Path, device: Mapping[str, str | int]) -> Path:
    return home / "rates" / machine.slug_of(device)


def _read(place: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in files.found(place, "*.json"):
        if (document := _load(path)) is not None:
            yield path, document


def _load(path: Path) -> dict[str, Any] | None:
    """The profile in a file; None if there is no file, and with a warning if there is something else in it."""
    try:
        document = files.load(path, FORMAT)
        if not machine.is_identity(document["device"]) or not isinstance(document["shape"], dict):
            raise ValueError("of no device or no shape")
    except FileNotFoundError:
        return None
    except files.INVALID as error:
        notices.warn_once(("profile", path), f"{path} cannot be used: {notices.reason(error)}")
        return None
    return document
