"""The code in docs/numba_cuda_walkthrough.md is that of the kernels. UPDATE_DOCS=1 puts it there."""

from __future__ import annotations

import ast
import os
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "numba_cuda_walkthrough.md"
KERNELS = ROOT / "pagedkern" / "backends" / "numba_cuda"
EXCERPT = re.compile(
    r"<!-- excerpt: (?P<file>\S+) (?P<name>\w+)(?: \"(?P<first>[^\"]+)\" \"(?P<last>[^\"]+)\")? -->\n"
    r"```python\n(?P<code>.*?)```\n",
    re.DOTALL,
)


def excerpt(file: str, name: str, first: str | None, last: str | None) -> str:
    """A function of a file; from its first line that contains `first` to the next that contains `last`, if given."""
    source = (KERNELS / file).read_text()
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef) and node.name == name]
    assert len(found) == 1, f"{file} has {len(found)} functions {name}"
    lines = source.splitlines()[found[0].lineno - 1 : found[0].end_lineno]
    if first is not None and last is not None:
        start = next(n for n, line in enumerate(lines) if first in line)
        end = next(n for n, line in enumerate(lines) if n >= start and last in line)
        lines = lines[start : end + 1]
    return textwrap.dedent("\n".join(lines)) + "\n"


def test_excerpts_are_the_code() -> None:
    page = PAGE.read_text()
    found = list(EXCERPT.finditer(page))
    assert len(found) == page.count("<!-- excerpt") >= 10
    if os.environ.get("UPDATE_DOCS") == "1":
        PAGE.write_text(EXCERPT.sub(_filled, page))
        page = PAGE.read_text()
    for match in EXCERPT.finditer(page):
        file, name, first, last, code = match.groups()
        assert code == excerpt(file, name, first, last), f"{name} of {file} has changed: run with UPDATE_DOCS=1"


def _filled(match: re.Match[str]) -> str:
    file, name, first, last, code = match.groups()
    head = match.group()[: match.group().rindex(f"```python\n{code}```")]
    return f"{head}```python\n{excerpt(file, name, first, last)}```\n"


def test_the_page_names_what_exists() -> None:
    page = PAGE.read_text()
    for target in re.findall(r"\]\(([^)]+)\)", page):
        assert (PAGE.parent / target).exists(), target
