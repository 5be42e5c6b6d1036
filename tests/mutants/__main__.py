"""`python -m tests.mutants [PART ...]`: plants faults in the library, one at a time, and runs the tests that must fail.

Each file `PART.toml` beside this one has the tests of a part, as arguments of pytest, and the faults that they have to
find: in which file, which lines, and what stands there instead. The tree is copied for it, the checkout stays as it is.
First the tests run on a copy without a fault, for a test that fails anyway finds nothing. Exits 1 if that fails, if a
fault was not found, or if the lines of one stand nowhere any more.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
LIMIT = 900  # seconds for the tests of one fault
FAILURES = ("FAILED", "ERROR")  # how lines of pytest's summary begin
GOOD = ("found", "passes")
COPIED = (
    "benchmarks",
    "docs",
    "examples",
    "pagedkern",
    "reference",
    "tests",
    "pyproject.toml",
    "README.md",
    "Makefile",
)


@dataclass(frozen=True)
class Fault:
    """One change of one file that makes the library wrong."""

    part: str
    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def plant(self, tree: Path) -> None:
        """Raises `ValueError` unless the old lines stand in the file exactly once."""
        path = tree / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has {text.count(self.old)} places that read {self.old!r}, expected one")
        path.write_text(text.replace(self.old, self.new))


@dataclass(frozen=True)
class Outcome:
    """What the tests made of a fault."""

    fault: Fault
    verdict: str  # "found", "NOT FOUND", why it could not be planted, or that the tests fail without it
    first: str  # the test that failed first
    seconds: float


def faults(parts: list[str]) -> Iterator[Fault]:
    """Those of the parts, or of all."""
    for path in sorted(HERE.glob("*.toml")):
        if not parts or path.stem in parts:
            document = tomllib.loads(path.read_text())
            for each in document["fault"]:
                tests = tuple(each.get("tests", document["tests"]))
                yield Fault(path.stem, each["what"], each["file"], each["old"], each["new"], tests)


@contextmanager
def copied(root: Path) -> Iterator[Path]:
    """A copy of the tree, with the kernels that are compiled already."""
    with tempfile.TemporaryDirectory(prefix="pagedkern-mutant-") as folder:
        tree = Path(folder)
        for name in COPIED:
            source = root / name
            if source.is_dir():
                shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy2(source, tree / name)
        if (root / "build" / "kernels").is_dir():
            shutil.copytree(root / "build" / "kernels", tree / "build" / "kernels")
        yield tree


def run(tests: tuple[str, ...], tree: Path) -> tuple[int, str]:
    """pytest's exit status for these tests of a tree, which end with the first failure, and the test that failed."""
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    with subprocess.Popen(
        command, cwd=tree, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    ) as process:
        try:
            printed, _ = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            return int(pytest.ExitCode.TESTS_FAILED), f"the tests hang for {LIMIT} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it has started
    failed = [line.partition(" ")[2].split(" - ")[0] for line in printed.splitlines() if line.startswith(FAILURES)]
    return process.returncode, failed[0] if failed else ""


def judge(fault: Fault, root: Path = ROOT) -> Outcome:
    """Plant the fault in a copy and run its tests until one fails."""
    begin = time.monotonic()
    with copied(root) as tree:
        try:
            fault.plant(tree)
        except (OSError, ValueError) as error:
            return Outcome(fault, f"not planted: {error}", "", 0.0)
        status, first = run(fault.tests, tree)
    verdicts = {
        pytest.ExitCode.OK: "NOT FOUND", pytest.ExitCode.TESTS_FAILED: "found", pytest.ExitCode.INTERRUPTED: "found",
    }  # fmt: skip
    return Outcome(fault, verdicts.get(status, f"pytest exits with {status}"), first, time.monotonic() - begin)


def without_fault(tests: tuple[str, ...], root: Path = ROOT) -> Outcome:
    """Run tests on a copy as it is."""
    begin = time.monotonic()
    with copied(root) as tree:
        status, first = run(tests, tree)
    verdict = "passes" if status == pytest.ExitCode.OK else f"FAILS ANYWAY: pytest exits with {status}"
    fault = Fault("", f"none: {' '.join(tests)}", "", "", "", tests)
    return Outcome(fault, verdict, first, time.monotonic() - begin)


def show(outcomes: list[Outcome]) -> None:
    table = Table("part", "fault", "verdict", "first test that failed", "s")
    for each in outcomes:
        style = None if each.verdict in GOOD else "bold red"
        table.add_row(each.fault.part, each.fault.what, each.verdict, each.first, f"{each.seconds:.0f}", style=style)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help="files beside the program without .toml (default: all)"
    )
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time (default: %(default)s)")
    given = parser.parse_args()
    chosen = list(faults(given.parts))
    if not chosen:
        parser.error(
            f"PART: got {' '.join(given.parts)}, expected {', '.join(p.stem for p in sorted(HERE.glob('*.toml')))}"
        )
    with ThreadPoolExecutor(given.jobs) as pool:
        outcomes = list(pool.map(without_fault, dict.fromkeys(fault.tests for fault in chosen)))
        if all(each.verdict in GOOD for each in outcomes):
            outcomes += pool.map(judge, chosen)
    show(outcomes)
    return int(any(each.verdict not in GOOD for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
