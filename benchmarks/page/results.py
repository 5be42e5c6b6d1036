"""What pytest-benchmark wrote, as rows; files of one machine are one result."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BUSY = 3.0  # load average: one process of ours keeps two or more cores busy


@dataclass(frozen=True)
class Row:
    """One line of a group."""

    group: str
    name: str
    seconds: float  # median of the rounds
    spread: float  # interquartile range, as a share of the median
    rounds: int
    info: dict[str, Any]  # what the benchmark recorded beside its times


@dataclass
class Result:
    """Everything that was measured on one machine."""

    device: str
    python: str
    versions: dict[str, str]
    dates: set[str] = field(default_factory=set)
    commits: set[str] = field(default_factory=set)
    sizes: set[str] = field(default_factory=set)
    load: float = 0.0  # processes that wanted a core, at the most
    rows: dict[str, Row] = field(default_factory=dict)  # by the name of the test

    def starting(self, *beginnings: str) -> Iterator[tuple[str, list[Row]]]:
        """The groups whose names begin so, in the order in which they were measured."""
        groups: dict[str, list[Row]] = {}
        for row in self.rows.values():
            if row.group.startswith(beginnings):
                groups.setdefault(row.group, []).append(row)
        yield from groups.items()

    @property
    def slug(self) -> str:
        """The machine as a part of a file name."""
        return re.sub(r"[^a-z0-9]+", "-", self.device.lower()).strip("-")

    @property
    def caption(self) -> str:
        """The machine, the versions and the date in one sentence."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        when = f"{', '.join(sorted(self.dates))}, commit {', '.join(sorted(self.commits))}"
        text = f"**{self.device}**; Python {self.python}, {versions}; {when}"
        if self.load < BUSY:
            return text
        return f"{text}. Others used the machine, too (load average {self.load:.0f}): times and ratios are rough"


def load(paths: Iterable[Path]) -> list[Result]:
    """One result for each machine and set of versions; a test that occurs twice counts as it was measured last."""
    found: dict[str, Result] = {}
    for data in sorted((json.loads(path.read_text()) for path in paths), key=lambda data: str(data["datetime"])):
        machine = data["machine_info"]
        key = json.dumps(machine, sort_keys=True)
        result = found.setdefault(key, Result(machine["device"], machine["python"], machine["versions"]))
        result.dates.add(data["datetime"][:10])
        result.commits.add(data["commit_info"]["id"][:10])
        result.sizes.add(data["size"])
        result.load = max(result.load, data.get("load") or 0.0)
        result.rows |= {entry["fullname"]: _row(entry) for entry in data["benchmarks"]}
    return list(found.values())


def _row(entry: dict[str, Any]) -> Row:
    stats, info = entry["stats"], entry["extra_info"]
    return Row(entry["group"], info["row"], stats["median"], stats["iqr"] / stats["median"], stats["rounds"], info)


def side_by_side(path: Path) -> tuple[list[str], dict[str, list[dict[str, str]]]]:
    """The lines of benchmarks/cpu_attention.py: its remarks, and the records by what they compare."""
    remarks: list[str] = []
    records: dict[str, list[dict[str, str]]] = {}
    for line in path.read_text().splitlines():
        if line.startswith("#"):
            remarks.append(line.lstrip("# "))
        elif parts := re.match(r"(\S+)\s+(\S+)\s+(.*?)\s{2,}(\S+ [\d.]+.*)", line):
            values = dict(re.findall(r"(\S+) ([\d.]+)", parts[4]))
            records.setdefault(parts[1], []).append({"dtype": parts[2], "case": parts[3], **values})
    return remarks, records
