"""docs/architecture.md is true: its imports are the rule that is enforced, its folders those that there are."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.pages import DOCS, ROOT
from tests.test_imports import ALLOWED, SHARED_BY_BACKENDS, library_files, part_of

PAGE = (DOCS / "architecture.md").read_text()


def cells(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading."""
    section = PAGE.partition(f"## {heading}\n")[2]
    rows = re.search(r"^\|.*\n\|[ -|]+\n((?:\|.*\n)+)", section, re.MULTILINE)
    assert rows
    return [[cell.strip() for cell in row.strip("|\n ").split("|")] for row in rows[1].splitlines()]


def names(cell: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", cell))


def test_the_imports_are_those_of_the_rule() -> None:
    said = {name: names(imports) for part, imports, _ in cells("Layers") for name in names(part)}
    assert said == ALLOWED


def test_every_backend_is_named() -> None:
    parts = {part_of(name) for name, _ in library_files()} - set(ALLOWED)
    sentence = re.search(r"Each backend \(([^)]+)\) imports\s+((?:[^.]|\.\w)+)\.\n", PAGE)
    assert sentence
    assert names(sentence[1]) == parts
    assert names(sentence[2]) == SHARED_BY_BACKENDS


def test_the_folders_are_those_that_there_are() -> None:
    said = {name.rstrip("/") for folder, _ in cells("Folders") for name in names(folder)}
    for name in said:
        assert (ROOT / name).is_dir(), name

    assert said == {str(p.relative_to(ROOT)) for folder in (ROOT, ROOT / "pagedkern") for p in folders(folder)}


def folders(path: Path) -> list[Path]:
    """Those that are part of the repository: not what is built, nor what stands beside it in a workplace."""
    passing = {"build", "dist", "shared", "venv"}
    return [p for p in path.iterdir() if p.is_dir() and p.name[0] not in "._" and p.name not in passing]
