"""Which folders and files code is loaded from: those that nobody but this user and root can change."""

from __future__ import annotations

import os
import random
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pagedkern.environment import trusted
from pagedkern.environment.trusted import Untrusted

SOMEBODY = 54321  # a user that is not there
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to somebody else")


def content(folder: Path, name: str = "file", most: int = 100) -> bytes:
    with trusted.opened(folder) as opened:
        return trusted.read(opened, name, most)


@pytest.fixture
def place(open_folder: Path) -> Path:
    """A folder two levels deep that may be trusted, with a file in it."""
    folder = open_folder / "middle" / "inner"
    folder.mkdir(parents=True)
    folder.parent.chmod(0o755)
    folder.chmod(0o755)
    (folder / "file").write_bytes(b"code")
    (folder / "file").chmod(0o644)
    return folder


def test_what_is_ours_alone(place: Path) -> None:
    assert content(place) == b"code"
    place.chmod(0o500)
    (place / "file").chmod(0o400)
    assert content(place) == b"code"


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777, 0o1777, 0o2775, 0o720])
def test_a_folder_that_others_can_write(mode: int, place: Path) -> None:
    place.chmod(mode)
    with pytest.raises(Untrusted, match=f"others can write {place}"):
        content(place)


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777])
def test_a_parent_that_others_can_write(mode: int, place: Path) -> None:
    """They could put another folder in the place of this one."""
    place.parent.chmod(mode)
    with pytest.raises(Untrusted, match=f"others can write {place.parent}$"):
        content(place)
    place.parent.parent.chmod(mode)
    with pytest.raises(Untrusted, match=f"others can write {place.parent.parent}$"):
        content(place)


def test_a_parent_where_nobody_renames_what_is_anothers(place: Path) -> None:
    place.parent.chmod(0o1777)
    assert content(place) == b"code"


@needs_root
@pytest.mark.parametrize("which", ["folder", "parent", "file"])
def test_what_belongs_to_somebody_else(which: str, place: Path) -> None:
    path = {"folder": place, "parent": place.parent, "file": place / "file"}[which]
    os.chown(path, SOMEBODY, -1)
    with pytest.raises(Untrusted, match=f"{path if which != 'file' else 'file'} belongs to user {SOMEBODY}"):
        content(place)


@needs_root
def test_what_belongs_to_root_is_trusted_by_all(place: Path) -> None:
    """As a cache that was filled when an image was made, which its users cannot write."""
    code = (
        "import os, sys; from pathlib import Path; from pagedkern.environment import trusted\n"
        f"os.setuid({SOMEBODY})\n"
        "with trusted.opened(Path(sys.argv[1])) as opened:\n"
        "    print(trusted.read(opened, 'file', 9))\n"
        "    try: trusted.write(opened, 'more', b'')\n"
        "    except PermissionError as error: print(error.strerror)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(place)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["b'code'", "Permission denied"]


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666, 0o620])
def test_a_file_that_others_can_write(mode: int, place: Path) -> None:
    (place / "file").chmod(mode)
    with pytest.raises(Untrusted, match="others can write file"):
        content(place)


def _link(path: Path) -> None:
    path.symlink_to(path.with_name("file"))


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


@pytest.mark.parametrize("make", [_link, os.mkfifo, Path.mkdir, _socket], ids=["link", "pipe", "folder", "socket"])
def test_what_is_no_file(make: Callable[[Path], object], place: Path) -> None:
    """Nor is anybody waited for."""
    make(place / "other")
    with pytest.raises(OSError):
        content(place, "other")


def test_a_file_that_is_too_long(place: Path) -> None:
    with pytest.raises(OSError, match="has 4 bytes, expected at most 3"):
        content(place, most=3)


def test_links_of_ours_are_followed(place: Path) -> None:
    link = place.parent.parent / "link"
    link.symlink_to("middle/../middle/./inner")
    assert content(link) == b"code"
    link.unlink()
    link.symlink_to(place.parent)
    assert content(link / "inner") == b"code"
    place.parent.chmod(0o777)
    with pytest.raises(Untrusted, match=f"others can write {place.parent}"):
        content(link / "inner")


@needs_root
def test_links_of_others_are_not_followed(place: Path) -> None:
    link = place.parent.parent / "link"
    link.symlink_to(place)
    os.chown(link, SOMEBODY, -1, follow_symlinks=False)
    with pytest.raises(Untrusted, match=f"{link} belongs to user {SOMEBODY}"):
        content(link)


def test_links_that_lead_nowhere(place: Path) -> None:
    (place / "circle").symlink_to("circle")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        content(place / "circle")
    (place / "lost").symlink_to("nowhere")
    with pytest.raises(FileNotFoundError):
        content(place / "lost")
    with pytest.raises(NotADirectoryError):
        content(place / "file")


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_folders_are_made_where_it_is_safe(umask: int, place: Path) -> None:
    before = os.umask(umask)
    try:
        with trusted.opened(place / "a" / "b", make=True) as opened:
            trusted.write(opened, "file", b"new")
    finally:
        os.umask(before)
    assert content(place / "a" / "b") == b"new"
    place.chmod(0o777)
    with pytest.raises(Untrusted), trusted.opened(place / "c", make=True):
        pass
    assert {path.name for path in place.iterdir()} == {"a", "file"}
    place.chmod(0o1777)
    with trusted.opened(place / "c", make=True) as opened:
        trusted.write(opened, "file", b"private")
    assert content(place / "c") == b"private"


def test_a_file_is_replaced_whole_or_not_at_all(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with trusted.opened(place) as opened:
        for call in ("write", "replace"):
            with monkeypatch.context() as patch:
                patch.setattr(os, call, fail)
                with pytest.raises(OSError, match="No space"):
                    trusted.write(opened, "file", b"new code")
            assert os.listdir(place) == ["file"]
            assert content(place) == b"code"
        trusted.write(opened, "file", b"new code")
    assert content(place) == b"new code"
    assert os.listdir(place) == ["file"]


@needs_root
@pytest.mark.parametrize("seed", range(4))
def test_random_trees(seed: int, open_folder: Path) -> None:
    """Against the rule told in words: every folder on the way is ours or root's, and others write only where a sticky
    bit keeps them from renaming, never in the last."""
    rng = random.Random(seed)
    for n in range(60):
        folder, ok = open_folder / str(n), True
        depth = rng.randrange(1, 5)
        for level in range(depth):
            folder /= "x"
            folder.mkdir(parents=True)
            mode = rng.choice([0o755, 0o755, 0o700, 0o711, 0o775, 0o1777, 0o1775, 0o757, 0o1755])
            owner = rng.choice([0, 0, 0, 0, SOMEBODY])
            os.chmod(folder, mode)
            os.chown(folder, owner, -1)
            writable = bool(mode & (stat.S_IWGRP | stat.S_IWOTH))
            ok &= owner == 0 and (not writable or (bool(mode & stat.S_ISVTX) and level < depth - 1))
        (folder / "file").write_bytes(b"x")
        (folder / "file").chmod(mode := rng.choice([0o644, 0o600, 0o664]))
        ok &= not mode & stat.S_IWGRP
        try:
            assert content(folder) == b"x"
            loaded = True
        except Untrusted:
            loaded = False
        assert loaded == ok, f"seed {seed}, tree {n}"


@needs_root
def test_nobody_can_swap_a_folder_in_between(open_folder: Path) -> None:
    """Somebody exchanges our folder and theirs all the time, where all may write: their code is never read."""
    (ours := open_folder / "shared" / "cache").mkdir(parents=True)
    theirs = open_folder / "shared" / "theirs"
    theirs.mkdir()
    for folder, code in ((ours, b"ours"), (theirs, b"theirs")):
        (folder / "file").write_bytes(code)
        folder.chmod(0o755)
    os.chown(theirs, SOMEBODY, -1)
    swap = (
        "import os, sys\nos.chdir(sys.argv[1])\nprint('on', flush=True)\n"
        "while True:\n"
        "    os.rename('cache', 'ours'); os.rename('theirs', 'cache')\n"
        "    os.rename('cache', 'theirs'); os.rename('ours', 'cache')\n"
    )
    swapper = subprocess.Popen([sys.executable, "-c", swap, str(ours.parent)], stdout=subprocess.PIPE)
    try:
        assert swapper.stdout is not None
        swapper.stdout.readline()
        seen: dict[str, int] = {}
        for _ in range(3000):
            try:
                found = content(ours).decode()
            except (Untrusted, FileNotFoundError) as error:
                found = type(error).__name__
            seen[found] = seen.get(found, 0) + 1
    finally:
        swapper.kill()
        swapper.wait()
    assert "theirs" not in seen
    assert {"ours", "Untrusted"} <= set(seen), seen


def test_where_standard_streams_are_closed(place: Path) -> None:
    """A file must not be opened as number 2: what others write to standard error would go there."""
    code = (
        "import os, sys; from pathlib import Path; from pagedkern.environment import trusted\n"
        "os.closerange(0, 3)\n"
        "with trusted.opened(Path(sys.argv[1])) as opened:\n"
        "    real = os.write\n"
        "    def write(file, data):\n"
        "        try: real(2, b'a word to standard error')\n"
        "        except OSError: pass\n"
        "        return real(file, data)\n"
        "    os.write = write\n"
        "    trusted.write(opened, 'file', b'new code')\n"
    )
    subprocess.run([sys.executable, "-c", code, str(place)], check=True)
    assert content(place) == b"new code"
