"""What all tests share: hypothesis profiles, threads, workers, and no choice of the user's own autotuner.

Profiles, chosen by HYPOTHESIS_PROFILE: "default" draws the same bounded examples in every run, "fuzz" new ones, as many
as FUZZ_EXAMPLES says (2,000 if unset).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import emulation

if "PYTEST_XDIST_WORKER" in os.environ:  # as many workers as cores: one thread each, set before torch is imported
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MKL_NUM_THREADS", "1")

emulation.set_up()  # before torch, triton or numba are imported
# Kernels are compiled once, not anew in every run and for every folder of a test.
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(__file__).parents[1] / "build" / "kernels"))

_slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
_fuzz = int(os.environ.get("FUZZ_EXAMPLES", "2000"))
settings.register_profile("default", derandomize=True, max_examples=50, deadline=None, suppress_health_check=_slow)
settings.register_profile("fuzz", max_examples=_fuzz, print_blob=True, deadline=None, suppress_health_check=_slow)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.hookimpl(optionalhook=True)  # pytest-xdist asks
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With --dist loadgroup, which `make test` uses."""
    if config.getoption("dist") != "loadgroup":
        return None
    from tests.together import Together

    return Together(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The compilers that made code for real GPUs, from the property "compiled by" of tests that have passed."""
    passed = terminalreporter.stats.get("passed", [])
    tests = Counter(value for report in passed for name, value in report.user_properties if name == "compiled by")
    if tests:
        named = ", ".join(f"{compiler} ({tests[compiler]} tests)" for compiler in sorted(tests))
        terminalreporter.write_line(f"kernels for real GPUs were compiled by {named}")


@pytest.fixture(scope="session", autouse=True)
def own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What was tuned on this machine neither steers the tests nor is changed by them; subprocesses inherit it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGEDKERN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield
