"""Where the cache folder is, whatever the environment says or lacks."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkern.environment import folders

VALUES = st.sampled_from([None, "", " ", ".", "relative/path", "~", "~/there", "~nobody-at-all/x", "/absolute", "/"])


def at(
    monkeypatch: pytest.MonkeyPatch, given_: str | None, xdg: str | None, home: str | None, passwd: str | None
) -> None:
    """An environment, and the home in the passwd entry; None is: not there."""
    for name, value in (("PAGEDKERN_CACHE_DIR", given_), ("XDG_CACHE_HOME", xdg), ("HOME", home)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)

    def entry(_: object) -> pwd.struct_passwd:
        if passwd is None:
            raise KeyError("uid not found")
        return pwd.struct_passwd(("me", "x", 1, 1, "", passwd, "/bin/sh"))

    monkeypatch.setattr(pwd, "getpwuid", entry)


@pytest.mark.parametrize(
    ("given_", "xdg", "home", "passwd", "folder"),
    [
        ("/mine", "/xdg", "/home/me", "/home/pw", "/mine"),
        ("here", "/xdg", "/home/me", "/home/pw", "here"),
        ("", "/xdg", "/home/me", "/home/pw", "/xdg/pagedkern"),
        (None, "", "/home/me", "/home/pw", "/home/me/.cache/pagedkern"),
        (None, "relative", "/home/me", "/home/pw", "/home/me/.cache/pagedkern"),
        (None, None, "", "/home/pw", "/home/pw/.cache/pagedkern"),
        (None, None, "relative", "/home/pw", "/home/pw/.cache/pagedkern"),
        (None, None, None, "/home/pw", "/home/pw/.cache/pagedkern"),
        (None, None, None, "", None),
        (None, None, None, None, None),
        (None, None, "", None, None),
        ("~/mine", None, "/home/me", None, "/home/me/mine"),
        ("~", None, "/home/me", None, "/home/me"),
        ("~/mine", "/xdg", None, None, None),
        ("~nobody-at-all/mine", None, "/home/me", None, None),
    ],
)
def test_the_cache_folder(
    given_: str | None, xdg: str | None, home: str | None, passwd: str | None, folder: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    at(monkeypatch, given_, xdg, home, passwd)
    found = folders.cache_folder()
    assert (None if found is None else str(found)) == folder


@given(VALUES, VALUES, VALUES, VALUES)
def test_no_environment_makes_a_folder_named_like_a_home(
    given_: str | None, xdg: str | None, home: str | None, passwd: str | None
) -> None:
    """Nothing is kept in a folder "~" or, unless it was named, below the one that the process happens to be in."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        at(monkeypatch, given_, xdg, home, passwd)
        found = folders.cache_folder()
    if found is None:
        assert given_ or not any(os.path.isabs(x or "") for x in (xdg, home, passwd))
        return
    assert "~" not in str(found)
    assert found.is_absolute() or str(found) == str(Path(given_ or "/"))


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_folders_are_made_so_that_others_cannot_write_them(umask: int, tmp_path: Path) -> None:
    """Also under a umask that lets the group write: nothing would be loaded from there."""
    before = os.umask(umask)
    try:
        folders.make(tmp_path / "a" / "b" / "c")
        folders.make(tmp_path / "a" / "b" / "c")  # is there
    finally:
        os.umask(before)
    for path in (tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "c"):
        assert path.stat().st_mode & 0o777 == 0o755 & ~umask


def test_folders_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for path in ("file", "file/below", "link", "link/below"):
        with pytest.raises(OSError):
            folders.make(tmp_path / path)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link"}


def test_compiled_code_lies_where_the_user_tells_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    at(monkeypatch, "/mine", None, None, None)
    assert folders.compiled_folder("cpu") == Path("/mine/cpu")
    assert folders.compiled_folder("cpu", "/numba") == Path("/numba/pagedkern/cpu")
    at(monkeypatch, None, None, None, None)
    assert folders.compiled_folder("cpu") is None
    assert folders.compiled_folder("cpu", "~/numba") is None
