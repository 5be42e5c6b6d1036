"""Folders and files that nobody else can change: the only ones that code is loaded from.

A compiled kernel on disk is a program, and most are pickles, which run what their writer likes. So a folder of them is
treated as ssh treats `~/.ssh`: it and all its parents belong to this user or to root, and nobody else can write them.
A folder that all may write but where nobody may rename what is another's (the sticky bit, as of /tmp) does as a
parent.

Every folder on the way is opened below the one before it and looked at once it is open, as is the file in the end:
nobody can put another in its place in between. A symbolic link is followed if it belongs to this user or to root.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MODE = 0o755  # of folders that are made; others must not write, or nothing would be loaded from there
MOST_LINKS = 40  # symbolic links in a path, as the system counts them
FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | getattr(os, "O_PATH", 0)  # O_PATH: to enter it is enough
FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe that somebody put there does not keep us waiting
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
PIECE = 1 << 20  # bytes read or written at a time


class Untrusted(PermissionError):
    """Somebody else could have written this."""


@contextmanager
def opened(folder: Path, make: bool = False) -> Iterator[int]:
    """A descriptor of a folder, to open files below it. `make` makes it, and parents, if they are not there.

    Raises:
        Untrusted: somebody else can write it or one of its parents.
        OSError: it cannot be entered or made.
    """
    descriptor = _walk(os.path.abspath(folder), make)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def keep_out_others(folder: int, mode: int) -> None:
    """Let nobody else enter an opened folder, for the sake of what other programs will make in it.

    Raises:
        Untrusted: others could enter it until now, and it is not empty: they may have written below it.
        OSError: its mode cannot be set.
    """
    if stat.S_IMODE(os.fstat(folder).st_mode) == mode:
        return
    listed = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        if os.listdir(listed):
            raise Untrusted("others could enter it: remove it, or let nobody else enter it")
        os.fchmod(listed, mode)
    finally:
        os.close(listed)


def open_file(folder: int, name: str, flags: int) -> int:
    """Open a file of an opened folder, or make it (`os.O_CREAT`); never through a symbolic link. Raises `OSError`."""
    try:
        return _above_standard(os.open(name, flags | FILE, 0o644, dir_fd=folder))
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Untrusted(f"{name} is a symbolic link") from None
        raise


def read(folder: int, name: str, most: int) -> bytes:
    """The content of a file of an opened folder.

    Raises:
        Untrusted: it is no regular file, or somebody else can write it.
        OSError: it cannot be read, or is longer than `most` bytes.
    """
    file = open_file(folder, name, os.O_RDONLY)
    try:
        info = os.fstat(file)
        if not stat.S_ISREG(info.st_mode):
            raise Untrusted(f"{name} is no regular file")
        _check_owner(info, name)
        if info.st_mode & OTHERS_WRITE:
            raise Untrusted(f"others can write {name}")
        if info.st_size > most:
            raise OSError(f"{name} has {info.st_size} bytes, expected at most {most}")
        return b"".join(iter(lambda: os.read(file, PIECE), b""))
    finally:
        os.close(file)


def write(folder: int, name: str, content: bytes) -> None:
    """Put a file into an opened folder in one step: who reads it meanwhile gets the old one or the new one, whole.

    Raises `OSError`; what was there before then stays.
    """
    aside = f".{name}.{os.getpid()}.{os.urandom(4).hex()}"
    file = open_file(folder, aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        try:
            left = memoryview(content)
            while left:
                left = left[os.write(file, left[:PIECE]) :]
        finally:
            os.close(file)
        os.replace(aside, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(aside, dir_fd=folder)
        raise


def _walk(path: str, make: bool) -> int:
    """Open the folders of an absolute path one below the other; returns a descriptor of the last."""
    left, links, done = _parts(path), 0, "/"
    here = os.open(done, FOLDER)
    try:
        _check_folder(os.fstat(here), done, last=not left)
        while left:
            name = left.popleft()
            below = _below(here, name, make)
            if below is None:
                target, links = _target(here, name, os.path.join(done, name)), links + 1
                if links > MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
                left.extendleft(reversed(_parts(target)))
                if not os.path.isabs(target):
                    continue
                below, name = os.open("/", FOLDER), "/"
            done = os.path.join(done, name)
            os.close(here)
            here = below
            _check_folder(os.fstat(here), done, last=not left)
    except BaseException:
        os.close(here)
        raise
    return here


def _parts(path: str) -> deque[str]:
    return deque(name for name in path.split("/") if name not in ("", "."))


def _below(here: int, name: str, make: bool) -> int | None:
    """A descriptor of a folder; None if there is no folder of that name, but perhaps a symbolic link."""
    try:
        return os.open(name, FOLDER, dir_fd=here)
    except FileNotFoundError:
        if not make:
            raise
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            return None
        raise
    with suppress(FileExistsError):  # another process makes it at the same time
        os.mkdir(name, MODE, dir_fd=here)
    return os.open(name, FOLDER, dir_fd=here)


def _target(here: int, name: str, path: str) -> str:
    """Where a symbolic link leads. Nobody else can put another in its place: the folder that it is in was checked."""
    info = os.stat(name, dir_fd=here, follow_symlinks=False)
    if not stat.S_ISLNK(info.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    _check_owner(info, path)
    return os.readlink(name, dir_fd=here)


def _check_folder(info: os.stat_result, path: str, last: bool) -> None:
    _check_owner(info, path)
    if info.st_mode & OTHERS_WRITE and (last or not info.st_mode & stat.S_ISVTX):
        raise Untrusted(f"others can write {path}")


def _check_owner(info: os.stat_result, path: str) -> None:
    if info.st_uid not in (0, os.geteuid()):
        raise Untrusted(f"{path} belongs to user {info.st_uid}")


def _above_standard(file: int) -> int:
    """The same open file under a number above 2: where standard error is closed, what others write to it goes there."""
    if file > 2:
        return file
    try:
        return fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(file)
