"""What the site needs beside Markdown: links out of docs/ lead to the repository, drawings follow the site's colours,
and a page that would fetch anything from another host fails the build (the theme's `source` asks for figures)."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

LINK = re.compile(r"\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)")
PICTURE = re.compile(r'<img alt="[^"]*" src="[^"]*pictures/(\w+)\.svg"\s*/?>')
DARK = re.compile(r"@media \(prefers-color-scheme: dark\) \{ (svg\.pk \{[^}]*\}) \}")
FETCHED = re.compile(
    r"""<(?:script|img|iframe|source|audio|video|embed)\b[^>]*?\bsrc=["']?(?:https?:)?//
      | <link\b(?=[^>]*?\brel=["']?(?:stylesheet|preload|preconnect|icon|manifest))[^>]*?\bhref=["']?(?:https?:)?//
      | url\(["']?(?:https?:)?//
      | @import\s+["'](?:https?:)?//
      | data-md-component="source" """,
    re.VERBOSE,
)


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Point links that leave docs/, which work in a checkout, to the same files of the repository."""
    docs, here = Path(config.docs_dir), Path(page.file.abs_src_path).parent

    def rewrite(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(here / match[1]))
        if target.is_relative_to(docs):
            return match[0]
        if not target.exists():
            raise PluginError(f"{page.file.src_path}: {match[1]} does not exist")
        kind = "tree" if target.is_dir() else "blob"
        return f"]({config.extra['source']}/{kind}/main/{target.relative_to(docs.parent)}{match[2] or ''})"

    return LINK.sub(rewrite, markdown)


def on_page_content(html: str, *, config: Any, **_: Any) -> str:
    """Put drawings into the page itself, where the site's switch between light and dark reaches them."""

    def inline(match: re.Match[str]) -> str:
        svg = (Path(config.docs_dir) / "pictures" / f"{match[1]}.svg").read_text()
        svg = DARK.sub(r"[data-md-color-scheme=slate] \1", svg).strip()
        return f'<span class="picture" data-search-exclude>{svg}</span>'

    return PICTURE.sub(inline, html)


def on_post_build(*, config: Any, **_: Any) -> None:
    """Whatever a page loads comes from the site itself. (Links to elsewhere are only followed by a reader.)"""
    for path in sorted(Path(config.site_dir).rglob("*")):
        if path.suffix in (".html", ".css") and (found := FETCHED.search(path.read_text())):
            raise PluginError(f"{path}: would fetch from another host: {found[0]}")
