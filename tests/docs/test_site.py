"""The hooks of the site, where mkdocs is installed; `make docs` is what builds it, strictly."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tests.docs.pages import DOCS, ROOT

pytest.importorskip("mkdocs")


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(DOCS / "site"))
    yield import_module("hooks")
    sys.modules.pop("hooks")


def config(site: Path) -> SimpleNamespace:
    return SimpleNamespace(docs_dir=str(DOCS), site_dir=str(site), extra={"source": "https://example.org/here"})


def test_links_out_of_the_docs_lead_to_the_repository(hooks: ModuleType, tmp_path: Path) -> None:
    page = SimpleNamespace(file=SimpleNamespace(abs_src_path=str(DOCS / "api" / "abi.md"), src_path="api/abi.md"))

    def made(text: str) -> str:
        return str(hooks.on_page_markdown(text, page=page, config=config(tmp_path)))

    assert made("[a](../abi.md#from-c) [b](kernels.md)") == "[a](../abi.md#from-c) [b](kernels.md)"
    assert made("[a](../../README.md)") == "[a](https://example.org/here/blob/main/README.md)"
    assert made("[a](../../examples/)") == "[a](https://example.org/here/tree/main/examples)"
    with pytest.raises(Exception, match=r"nothing\.md does not exist"):
        made("[a](../../nothing.md)")


def test_drawings_stand_in_the_page_and_follow_its_switch(hooks: ModuleType, tmp_path: Path) -> None:
    made = hooks.on_page_content('<p><img alt="x" src="../pictures/loop.svg" /></p>', config=config(tmp_path))
    assert made.startswith('<p><span class="picture" data-search-exclude><svg ')
    assert "[data-md-color-scheme=slate] svg.pk {" in made
    assert "prefers-color-scheme" not in made


@pytest.mark.parametrize(
    "text",
    [
        '<script async src="https://cdn.example.org/x.js"></script>',
        '<img alt="" src="//example.org/x.png">',
        '<link rel="stylesheet" href="https://fonts.example.org/css">',
        '<link href="https://fonts.example.org" rel=preconnect crossorigin>',
        "<style>a { background: url(https://example.org/x.png) }</style>",
        '<a href="https://example.org" data-md-component="source">',
    ],
)
def test_what_would_be_fetched_from_elsewhere_fails_the_build(hooks: ModuleType, tmp_path: Path, text: str) -> None:
    page = tmp_path / "index.html"
    page.write_text('<link rel="canonical" href="https://example.org/"><a href="https://example.org">a link</a>')
    hooks.on_post_build(config=config(tmp_path))
    page.write_text(text)
    with pytest.raises(Exception, match="would fetch"):
        hooks.on_post_build(config=config(tmp_path))


def test_the_configuration_asks_for_no_font_and_for_a_strict_build() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in text
    assert "strict: true" in text
    assert "\nrepo_url" not in text  # the theme would ask that host for figures
    assert "--quiet" not in (ROOT / "Makefile").read_text().partition("mkdocs build")[2].partition("\n")[0], (
        "warnings that are not logged do not fail a strict build"
    )
