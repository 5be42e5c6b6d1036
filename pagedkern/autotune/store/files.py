"""JSON files that several processes read and write: whole at any time, never trusted, bounded in size."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pagedkern.environment import folders, locks, notices

MAX_BYTES = 1 << 20  # of a file; a longer one is not ours
LOCK_SECONDS = 10.0
LEFT_OVER_SECONDS = 3600.0  # after which a file that was being written is a dead writer's, whoever else writes
INVALID = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)  # what a damaged file may raise


def directory() -> Path | None:
    """The cache directory, which need not exist; None if the environment has no place for one."""
    return folders.cache_folder()


def writable() -> Path:
    """The cache directory. Raises `FileNotFoundError` if there is no place for one."""
    home = directory()
    if home is None:
        raise FileNotFoundError("no cache directory: set PAGEDKERN_CACHE_DIR")
    return home


def runs() -> Path | None:
    """Where runs are written down that nobody names a file for; None if there is no place for one."""
    home = directory()
    return home / "runs" if home else None


def slug(text: str) -> str:
    """A name as a part of a path."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40]


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Wait until no other process writes into a folder, which is made, and keep others waiting.

    Yields whether nobody else writes: where there are no locks, or one is never released, a warning says so, and who
    writes goes on: another writer's work may then be lost, ours is not. Raises `OSError` if there is no such folder.
    """
    folders.make(folder)
    path = folder / ".lock"
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        notices.warn_once(("lock", path), f"{path} cannot be locked ({notices.reason(error)}): going on without a lock")
        yield False
        return
    try:
        with locks.held(file, str(path), LOCK_SECONDS) as alone:
            yield alone
    finally:
        os.close(file)


def load(path: Path, form: int) -> dict[str, Any]:
    """The object in a file. Raises one of `INVALID` if there is no file, or none of that format.

    A folder that cannot be entered, or is none, holds no file: `FileNotFoundError`.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        no_folder = error.errno in (errno.ENOTDIR, errno.ELOOP)
        if no_folder or (error.errno == errno.EACCES and not os.access(path.parent, os.X_OK)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from error
        raise
    if len(content) > MAX_BYTES:
        raise ValueError(f"longer than {MAX_BYTES} bytes")
    document = json.loads(content, parse_constant=finite, parse_float=finite)
    json.dumps(document, ensure_ascii=False).encode()  # a half of a surrogate pair cannot be printed: ValueError
    if not isinstance(document, dict) or document.get("format") != form:
        raise ValueError(f"not of format {form}")
    return document


def found(folder: Path, pattern: str) -> list[Path]:
    """The files of a folder that match, sorted; none where it cannot be entered."""
    try:
        return sorted(folder.glob(pattern))
    except OSError:
        return []


def replace(path: Path, document: Mapping[str, object], alone: bool) -> None:
    """Put a file in place in one step. `alone`: nobody else writes, so any temporary file found is a dead writer's."""
    for left in path.parent.glob(f".{path.name}.*"):
        with suppress(FileNotFoundError):  # another writer has just put it in place, or taken it away
            if alone or time.time() - left.stat().st_mtime > LEFT_OVER_SECONDS:
                left.unlink()
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    try:
        _write(path, text)
    except FileNotFoundError:  # who had the lock took our file for a dead writer's
        _write(path, text)


def _write(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def finite(text: str) -> float:
    """A number of a file; raises `ValueError` for NaN and for what is too large for float64."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text:.60} is no finite number")
    return number


def is_plain(value: object) -> bool:
    """Whether a value is a flag, a name, or a number that kernels and their launchers can hold."""
    if type(value) is int:
        return -(2**63) <= value < 2**63
    return isinstance(value, (bool, str)) or (type(value) is float and math.isfinite(value))
