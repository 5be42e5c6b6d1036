"""Profiles of machines: what was measured here, what was imported, and what ships with the library.

`<cache>/rates/<device>/<shape>.json` is of this machine; `<cache>/profiles/*.json` was imported; the folder `profiles`
of the package holds what was distilled from `autotune/records/`. This module keeps them as JSON objects;
`pagedkern.autotune.profile` gives them a meaning.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from pagedkern.autotune.store import device as machine
from pagedkern.autotune.store import files

FORMAT = 1
SHIPPED = Path(__file__).parents[1] / "profiles"

logger = logging.getLogger("pagedkern.autotune")


def save_rates(document: Mapping[str, Any], name: str) -> Path:
    """Store the profile of this machine for a shape of that name. Raises `OSError`."""
    path = folder(files.writable(), document["device"]) / f"{name}.json"
    with files.locked(path.parent):
        files.replace(path, document)
    return path


def save_import(document: Mapping[str, Any]) -> Path:
    """Store the profile of another machine. Raises `OSError`."""
    device, shape = document["device"], document["shape"]
    parts = [machine.slug_of(device), *map(str, shape.values())]
    path = files.writable() / "profiles" / f"{'-'.join(parts)}.json"
    with files.locked(path.parent):
        files.replace(path, document)
    all_of.cache_clear()
    return path


def own(device: Mapping[str, str | int]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The profiles that were measured on a machine. Damaged ones are passed over with a warning."""
    home = files.directory()
    if home is not None:
        yield from _read(folder(home, device))


def others() -> Iterator[tuple[Path, dict[str, Any]]]:
    """The profiles that were imported, then those that ship."""
    home = files.directory()
    yield from all_of(home / "profiles" if home else None)


@lru_cache(maxsize=8)
def all_of(imported: Path | None) -> tuple[tuple[Path, dict[str, Any]], ...]:
    return (*(_read(imported) if imported else ()), *_read(SHIPPED))


def folder(home: Path, device: Mapping[str, str | int]) -> Path:
    return home / "rates" / machine.slug_of(device)


def _read(place: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in sorted(place.glob("*.json")):
        try:
            document = files.load(path, FORMAT)
            if not machine.is_identity(document["device"]) or not isinstance(document["shape"], dict):
                raise ValueError("of no device or no shape")
            yield path, document
        except files.INVALID as error:
            logger.warning("%s cannot be used: %s", path, error or type(error).__name__)
