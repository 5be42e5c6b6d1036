"""The guides do what they say: their code gives the output shown, their links lead somewhere."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
GUIDES = ("allocator", "scheduler")


@pytest.mark.parametrize("name", GUIDES)
def test_code_gives_the_output_shown(name: str) -> None:
    """The blocks of one page are one session."""
    text = (DOCS / f"{name}.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) > 1
    session = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, name, f"docs/{name}.md", 0)
    assert len(session.examples) > 10
    report: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(session, out=report.append)
    assert not result.failed, "".join(report)


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.md")), ids=lambda path: path.stem)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target


def test_guides_are_found_from_the_readme() -> None:
    readme = (DOCS.parent / "README.md").read_text()
    for name in GUIDES:
        assert f"](docs/{name}.md)" in readme
