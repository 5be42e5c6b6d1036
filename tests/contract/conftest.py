"""The `target` fixture: a backend on a device. See targets.py for what it runs on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.targets import Target, targets, torch_threads


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """For all but the backends under test, which `Target.threads` gives more."""
    with torch_threads(1):
        yield


@pytest.fixture(scope="session", params=targets())
def target(request: pytest.FixtureRequest) -> Target:
    chosen: Target = request.param
    return chosen
