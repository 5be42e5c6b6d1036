"""What only the README promises: its picture is what its script draws, it names the two commands and every extra."""

from __future__ import annotations

import sys
import tomllib

import pytest

from pagedkern.backends import names
from tests.docs.pages import DOCS, ROOT

TEXT = (ROOT / "README.md").read_text()


def test_the_picture_is_what_the_script_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS / "images"))
    monkeypatch.setattr(sys, "path", list(sys.path))  # the script adds a folder to it
    try:
        import draw_idea  # type: ignore[import-not-found]

        drawn = draw_idea.idea().svg()
    finally:
        for name in ("draw_idea", "canvas"):
            sys.modules.pop(name, None)
    assert drawn == (DOCS / "images" / "idea.svg").read_text(), "run docs/images/draw_idea.py"
    assert "](docs/images/idea.svg)" in TEXT


def test_it_names_the_two_commands() -> None:
    assert "\nmake tune " in TEXT
    assert "\nmake test " in TEXT


def test_it_names_every_extra_of_users() -> None:
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    for extra in extras - {"autotune", "dev", "docs", "examples", "test"}:  # those of this checkout, and part of others
        assert f"pagedkern[{extra}" in TEXT or f",{extra}]" in TEXT or f"`{extra}`" in TEXT, extra


def test_it_lists_every_backend() -> None:
    for name in names():
        assert f"`{name}`" in TEXT, name
