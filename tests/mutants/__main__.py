"""`python -m tests.mutants [PART ...]`: plants faults in the library, one at a time, and runs the tests that must fail.

Each file `PART.toml` beside this one has the tests of a part, as arguments of pytest, and the faults that they have to
find: in which file, which lines, and what stands there instead. The tree is copied for it, the checkout stays as it is.
Exits 1 if a fault was not found, or if the lines of one stand nowhere any more.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
LIMIT = 900  # seconds for the tests of one fault
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
    verdict: str  # "found", "NOT FOUND" or why it could not be planted
    by: str  # the first test that failed
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
def copied() -> Iterator[Path]:
    """A copy of the tree, with the kernels that are compiled already."""
    with tempfile.TemporaryDirectory(prefix="pagedkern-mutant-") as folder:
        tree = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, tree / name)
        if (ROOT / "build" / "kernels").is_dir():
            shutil.copytree(ROOT / "build" / "kernels", tree / "build" / "kernels")
        yield tree


def judge(fault: Fault) -> Outcome:
    """Plant the fault in a copy and run its tests until one fails."""
    begin = time.monotonic()
    with copied() as tree:
        try:
            fault.plant(tree)
        except (OSError, ValueError) as error:
            return Outcome(fault, f"not planted: {error}", "", 0.0)
        env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *fault.tests]
        try:
            done = subprocess.run(
                command, cwd=tree, env=env, capture_output=True, text=True, timeout=LIMIT, check=False
            )
            status, printed = done.returncode, done.stdout
        except subprocess.TimeoutExpired:
            status, printed = 1, "FAILED the tests hang - \n"
    failed = [
        line.split(" - ")[0].partition(" ")[2] for line in printed.splitlines() if line.startswith(("FAILED", "ERROR"))
    ]
    verdict = {0: "NOT FOUND", 1: "found", 2: "found"}.get(status, f"pytest exits with {status}")
    return Outcome(fault, verdict, failed[0] if failed else "", time.monotonic() - begin)


def show(outcomes: list[Outcome]) -> None:
    table = Table("part", "fault", "verdict", "first test that failed", "s")
    for each in outcomes:
        style = None if each.verdict == "found" else "bold red"
        table.add_row(each.fault.part, each.fault.what, each.verdict, each.by, f"{each.seconds:.0f}", style=style)
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
        outcomes = list(pool.map(judge, chosen))
    show(outcomes)
    return int(any(each.verdict != "found" for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
