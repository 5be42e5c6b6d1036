"""The `target` fixture: a backend on a device. See targets.py for what it runs on."""

from __future__ import annotations

import pytest

from tests.contract.targets import Target, targets


@pytest.fixture(params=targets())
def target(request: pytest.FixtureRequest) -> Target:
    chosen: Target = request.param
    return chosen
