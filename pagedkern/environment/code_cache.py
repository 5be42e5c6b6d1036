"""Compiled code on disk for the next process: one file for each thing that was compiled, whole or as good as absent.

A file holds a digest of its name and content, so that one which was cut off, damaged or renamed is found out. It is
read and written in a trusted folder only (see `trusted`). That it cannot be read or kept costs time and no more: one
warning says why.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pagedkern.environment import folders, locks, notices, trusted

MOST_BYTES = 64 << 20  # of a file
MOST_FILES, MOST_DAYS = 400, 90.0  # of a folder; older sources, compilers and processors leave files that nobody reads
IN_USE_DAYS = 1.0  # how often a file is marked as used
LOCK_SECONDS = 60.0  # somebody else may be compiling the same
LEFT_OVER_DAYS = 1 / 24  # after which a file that was being written, or a lock, is of a process that was killed
MAGIC = b"pagedkern code 1\n"
SUFFIX, LOCK = ".bin", ".lock"


class CodeCache:
    """The compiled code of one backend on disk."""

    def __init__(self, what: str, folder: Callable[[], Path | None], most_files: int = MOST_FILES) -> None:
        """`what`: how a warning calls it, as "compiled CPU kernels". `folder` is asked each time."""
        self._what = what
        self._folder = folder
        self._most_files = most_files

    def name(self, stem: str, key: str) -> str:
        """The file of something compiled; `stem` is for people, `key` says all that it depends on."""
        return f"{stem}-{hashlib.sha256(key.encode()).hexdigest()[:32]}{SUFFIX}"

    def load(self, name: str) -> bytes | None:
        """What was kept under a name; None if nothing was, or nothing that can be used."""
        folder = self._folder()
        if folder is None:
            return None
        try:
            with trusted.opened(folder) as opened:
                return self._read(opened, name)
        except FileNotFoundError:
            return None
        except OSError as error:
            self.warn(f"are neither loaded from {folder} nor kept there: {notices.reason(error)}")
            return None

    def _read(self, folder: int, name: str) -> bytes | None:
        try:
            content = trusted.read(folder, name, MOST_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            self.damaged(name, notices.reason(error))
            return None
        start = len(MAGIC) + 32
        if content[:start] != MAGIC + _digest(name, content[start:]):
            self.damaged(name, "it was cut off or damaged, or another version wrote it")
            return None
        with suppress(OSError):  # it is somebody else's, or on a disk that is only read
            _mark_used(folder, name)
        return content[start:]

    def save(self, name: str, code: bytes) -> bool:
        """Keep something; False if it cannot be kept."""
        folder = self._folder()
        if folder is None:
            self.warn(f"cannot be kept, there is no home: set {folders.VARIABLE} to a folder for them")
            return False
        try:
            with trusted.opened(folder, make=True) as opened:
                trusted.write(opened, name, MAGIC + _digest(name, code) + code)
                with suppress(OSError):  # what cannot be removed stays
                    _tidy(opened, self._most_files)
        except OSError as error:
            self.warn(f"cannot be kept in {folder}: {notices.reason(error)}")
            return False
        return True

    @contextmanager
    def turn(self, name: str) -> Iterator[None]:
        """Exclude other processes that make the same, as far as possible, unless it has been made."""
        folder = self._folder()
        file = None if folder is None else self._lock_file(folder, name)
        if folder is None or file is None:
            yield
            return
        try:
            with locks.held(file, f"{folder}/*{LOCK}", LOCK_SECONDS):
                yield
        finally:
            os.close(file)
            with suppress(OSError), trusted.opened(folder) as opened:
                os.unlink(name + LOCK, dir_fd=opened)  # whoever waits for it looks first whether it has been made

    def _lock_file(self, folder: Path, name: str) -> int | None:
        """A descriptor of the file to lock; None if it was made, or if there can be no such file: `save` tells why."""
        try:
            with trusted.opened(folder, make=True) as opened:
                if _exists(opened, name):
                    return None
                return trusted.open_file(opened, name + LOCK, os.O_RDWR | os.O_CREAT)
        except OSError:
            return None

    def damaged(self, name: str, why: str) -> None:
        """Warn that a file cannot be used."""
        self.warn(f"are compiled anew where needed: {self._folder()}/{name} cannot be used, {why}")

    def warn(self, message: str) -> None:
        """Warn, unless there was a warning before: what goes wrong first mostly explains the rest."""
        notices.warn_once(("kept", self._what), f"the {self._what} {message}")


def _digest(name: str, code: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + code).digest()


def _exists(folder: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _mark_used(folder: int, name: str) -> None:
    """Set a file's time of change, by which the oldest are found, unless it was set not long ago."""
    if _days(folder, name) > IN_USE_DAYS:
        os.utime(name, dir_fd=folder)


def _days(folder: int, name: str) -> float:
    return (time.time() - os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime) / 86400


def _tidy(folder: int, most_files: int) -> None:
    """Remove what nobody has used for long, what is too many, and what writers that were killed have left."""
    listed = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        names = os.listdir(listed)
    finally:
        os.close(listed)
    ages: list[tuple[float, str]] = []
    for name in names:
        with suppress(FileNotFoundError):  # another process tidies too
            if name.endswith(SUFFIX):
                ages.append((_days(folder, name), name))
            elif (name.endswith(LOCK) or f"{SUFFIX}." in name) and _days(folder, name) > LEFT_OVER_DAYS:
                os.unlink(name, dir_fd=folder)
    for rank, (age, name) in enumerate(sorted(ages)):
        if age > MOST_DAYS or rank >= most_files:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
