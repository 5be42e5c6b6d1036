"""The `target` fixture: a backend on a device. See targets.py for what it runs on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import groupby

import pytest

from tests.contract.targets import SAMPLED, SAMPLED_CASES, Target, targets, torch_threads


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """For all but the backends under test, which `Target.threads` gives more."""
    with torch_threads(1):
        yield


@pytest.fixture(scope="session", params=targets())
def target(request: pytest.FixtureRequest) -> Target:
    chosen: Target = request.param
    return chosen


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where a backend runs a sample (`targets.SAMPLED`), keep evenly spread cases of each test.

    CONTRACT=full keeps all of them; CONTRACT_EVERY=n keeps every n-th case of each test on every backend.
    """
    if os.environ.get("CONTRACT") == "full":
        return
    dropped: set[pytest.Item] = set()
    for every, cases in _sampled(items):
        count = -(-len(cases) // every)
        kept = {round(i * (len(cases) - 1) / max(1, count - 1)) for i in range(count)}
        dropped |= {case for i, case in enumerate(cases) if i not in kept}
    if dropped:
        config.hook.pytest_deselected(items=list(dropped))
        items[:] = [item for item in items if item not in dropped]


def _sampled(items: list[pytest.Item]) -> Iterator[tuple[int, list[pytest.Item]]]:
    """The cases of each test on each backend that is to run only every n-th of them, with that n."""

    everywhere = int(os.environ.get("CONTRACT_EVERY", "0"))

    def key(item: pytest.Item) -> tuple[str, str, int]:
        callspec = getattr(item, "callspec", None)
        chosen = callspec.params.get("target") if callspec else None
        every = everywhere or 1
        if not everywhere and isinstance(chosen, Target) and chosen.emulated:
            every = (SAMPLED_CASES if item.path.stem == "test_cases" else SAMPLED).get(chosen.name, 1)
        return (item.nodeid.partition("[")[0], str(chosen), every)

    for (*_, every), cases in groupby(sorted(items, key=key), key=key):
        if every > 1:
            yield every, list(cases)
