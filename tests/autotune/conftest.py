"""A store of its own for every test, and backends that are not what they should be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import pagedkern.backends as registry
from pagedkern.autotune import store
from pagedkern.autotune.store import device, profiles


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache directory, and no profile that ships: as on a machine unlike all of them."""
    path = tmp_path / "cache"
    monkeypatch.setenv("PAGEDKERN_CACHE_DIR", str(path))
    monkeypatch.setattr(profiles, "SHIPPED", tmp_path / "nothing")
    _forget()
    yield path
    monkeypatch.undo()
    _forget()


@pytest.fixture
def add_backend(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Registers a class of `tests.autotune.standins` as a backend of the given name, behind the real ones."""

    def add(name: str, cls: str) -> None:
        monkeypatch.setitem(registry._LOCATIONS, name, f"tests.autotune.standins:{cls}")
        _forget()

    return add


def _forget() -> None:
    store.reload()
    store._warned.clear()
    for cached in (device.code, device.kernel_hash, device._cpu, registry.load, registry.probe):
        cached.cache_clear()
