"""What the site needs beside Markdown: links out of docs/ lead to the repository, drawings follow the site's colours."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)")
PICTURE = re.compile(r'<img alt="[^"]*" src="[^"]*pictures/(\w+)\.svg"\s*/?>')
DARK = re.compile(r"@media \(prefers-color-scheme: dark\) \{ (svg\.pk \{[^}]*\}) \}")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Point links that leave docs/, which work in a checkout, to the same files of the repository."""
    docs, here = Path(config.docs_dir), Path(page.file.abs_src_path).parent

    def rewrite(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(here / match[1]))
        if target.is_relative_to(docs):
            return match[0]
        if not target.exists():
            raise FileNotFoundError(f"{page.file.src_path}: {match[1]} does not exist")
        kind = "tree" if target.is_dir() else "blob"
        return f"]({config.repo_url.rstrip('/')}/{kind}/main/{target.relative_to(docs.parent)}{match[2] or ''})"

    return LINK.sub(rewrite, markdown)


def on_page_content(html: str, *, config: Any, **_: Any) -> str:
    """Put drawings into the page itself, where the site's switch between light and dark reaches them."""

    def inline(match: re.Match[str]) -> str:
        svg = (Path(config.docs_dir) / "pictures" / f"{match[1]}.svg").read_text()
        return f'<span class="picture">{DARK.sub(r"[data-md-color-scheme=slate] \1", svg).strip()}</span>'

    return PICTURE.sub(inline, html)
