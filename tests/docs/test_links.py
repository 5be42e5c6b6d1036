"""Links lead somewhere, in a checkout and in the site; every page can be reached; drawings are what is drawn."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, PAGES, ROOT

CODE = re.compile(r"^ *```.*?^ *```$|`[^`\n]+`", re.DOTALL | re.MULTILINE)
OTHERS = (ROOT / "tests/contract/README.md", ROOT / "autotune/README.md", ROOT / "tests/emulation/cuda_host/README.md")


def links(page: Path) -> list[str]:
    text = CODE.sub("", page.read_text())
    return re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"^\[[^\]]+\]: (\S+)$", text, re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What a heading is called in a link, by the rule that GitHub and the site share."""
    headings = re.findall(r"^#+ (.+)$", CODE.sub(lambda m: m[0] if "\n" not in m[0] else "", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link} does not exist"
        assert target.is_relative_to(ROOT), f"{link} leaves the repository"
        if anchor:
            assert anchor in anchors(target), f"{link}: no such heading, there are {sorted(anchors(target))}"


def test_every_page_is_in_the_navigation_once() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    named = re.findall(r"([\w/]+\.md)\s*$", nav, re.MULTILINE)
    assert sorted(named) == sorted(str(page.relative_to(DOCS)) for page in PAGES if page.is_relative_to(DOCS))


def test_every_guide_is_found_from_the_first_page() -> None:
    """In a checkout there is no navigation."""
    found, open_pages = set(), [DOCS / "index.md"]
    while open_pages:
        page = open_pages.pop()
        found.add(page)
        targets = [(page.parent / link.partition("#")[0]).resolve() for link in links(page) if link.count(".md")]
        open_pages += [target for target in targets if target not in found and target.is_relative_to(DOCS)]
    lost = {page for page in PAGES if page.is_relative_to(DOCS)} - found
    assert not lost


def test_drawings_are_what_the_script_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = DOCS / "pictures"
    monkeypatch.syspath_prepend(str(folder))
    try:
        import draw  # type: ignore[import-not-found]

        drawn = {canvas.name: canvas.svg() for canvas in (make() for make in draw.PICTURES)}
    finally:
        for name in ("draw", "canvas"):
            sys.modules.pop(name, None)
    assert drawn == {path.stem: path.read_text() for path in folder.glob("*.svg")}, "run docs/pictures/draw.py"
    used = {name for page in PAGES for name in re.findall(r"pictures/(\w+)\.svg\)", page.read_text())}
    assert used == set(drawn)


def test_nothing_is_fetched_from_elsewhere() -> None:
    """Pages, drawings and style sheets name no resource of another host; the build checks the HTML that it makes."""
    for path in (*PAGES, *DOCS.rglob("*.svg"), *DOCS.rglob("*.css")):
        text = path.read_text()
        assert not re.search(r"(src=\"|url\(['\"]?|@import [\"']|!\[[^\]]*\]\()https?:", text), path
