"""The pages of the documentation and the blocks of code on them.

What a block is follows from its language and from what stands in it; `kind` knows no other:

- "session": Python with prompts. All of a page are one session, whose output is compared with what is shown.
- "program": Python without. Each runs by itself in a fresh interpreter, as a reader who pastes it would run it.
- "file": a block whose title is the name of a file of the repository: it is put there and tried, by test_tasks.py.
- "excerpt": Python after an `<!-- excerpt: FILE ... -->` comment: it stands in that file, and is run there.
- "shell": commands; they are looked up, not run. "c": compiled, and run if it has a `main`. "toml": a workload.
- "figure": text that is not code (language `text`).

A program whose first line is `# Not run by the tests: REASON` is only compiled: the reader sees that line, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))
NOT_RUN = "# Not run by the tests: "
_FENCE = re.compile(
    r"(?P<before>[^\n]*\n|\A)(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<code>.*?)^ *```$", re.DOTALL | re.MULTILINE
)
_EXCERPT = re.compile(r"<!-- excerpt: (\S+) ")
_KINDS = {"": "shell", "sh": "shell", "c": "c", "toml": "toml", "text": "figure"}


@dataclass(frozen=True)
class Block:
    """One fenced block. `str()` names it in a test's id: page and line."""

    page: Path
    line: int
    language: str
    title: str
    code: str
    before: str  # the line before it

    @cached_property
    def kind(self) -> str:
        if self.title:
            return "file"
        if self.language == "python":
            if _EXCERPT.match(self.before):
                return "excerpt"
            return "session" if ">>> " in self.code else "program"
        assert self.language in _KINDS, f"{self}: nothing checks a block in {self.language!r}"
        return _KINDS[self.language]

    @property
    def excerpt_of(self) -> str:
        """The file name that the comment before an excerpt gives."""
        found = _EXCERPT.match(self.before)
        assert found
        return found[1]

    @property
    def is_run(self) -> bool:
        return not self.code.startswith(NOT_RUN)

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    found = []
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start("info")) + 1
        language, _, rest = match["info"].strip().partition(" ")
        title = re.fullmatch(r'title="([^"]+)"', rest)
        assert title or not rest, f"{page}:{line}: {rest!r} means nothing here"
        found.append(Block(page, line, language, title[1] if title else "", match["code"], match["before"].strip()))
    assert 2 * len(found) == len(re.findall(r"^ *```", text, re.MULTILINE)), f"{page}: a block does not end"
    return found


BLOCKS = tuple(block for page in PAGES for block in blocks_of(page))


def of_kind(kind: str) -> list[Block]:
    return [block for block in BLOCKS if block.kind == kind]
