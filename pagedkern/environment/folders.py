"""Where caches are: one answer for the tuned choices and for everything that is compiled.

`PAGEDKERN_CACHE_DIR`, else `XDG_CACHE_HOME/pagedkern`, else `~/.cache/pagedkern`, where the home is that of `HOME` or
of the passwd entry. A user may have none of these, as in a container that runs under a mere number: then there is
none.
"""

from __future__ import annotations

import os
import pwd
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from pagedkern.environment import trusted
from pagedkern.environment.trusted import MODE

VARIABLE = "PAGEDKERN_CACHE_DIR"


def cache_folder() -> Path | None:
    """The cache folder, which need not exist; None if the environment has no place for one."""
    if given := os.environ.get(VARIABLE):
        return expanded(given)
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # a relative one counts as none, by the specification
        return Path(base) / "pagedkern"
    home = home_folder()
    return home and home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "pagedkern"


def compiled_folder(backend: str, given: str = "") -> Path | None:
    """Where a backend keeps what it compiles: in `given`, the folder that the user names to its compiler, else in the
    cache folder."""
    base = expanded(given) if given else cache_folder()
    if base is None:
        return None
    return base / "pagedkern" / backend if given else base / backend


def home_folder() -> Path | None:
    """The user's home: that of `HOME`, else of the passwd entry. None if neither is an absolute path."""
    home = os.environ.get("HOME", "")
    if not os.path.isabs(home):
        home = _passwd_home("")
    return Path(home) if os.path.isabs(home) else None


def expanded(path: str) -> Path | None:
    """A path in which "~" or "~user" may stand for a home; None if there is no such home."""
    if not path.startswith("~"):
        return Path(path)
    user, _, rest = path[1:].partition("/")
    home = Path(_passwd_home(user)) if user else home_folder()
    return home / rest if home is not None and home.is_absolute() else None


def _passwd_home(user: str) -> str:
    """The home in the passwd entry of a user, "" is this one; "" if there is none."""
    try:
        return (pwd.getpwnam(user) if user else pwd.getpwuid(os.getuid())).pw_dir
    except (KeyError, OSError):
        return ""


def make(folder: Path) -> None:
    """Make a folder and its parents, which others cannot write, whatever the umask. Raises `OSError`."""
    try:
        folder.mkdir(MODE)
    except FileExistsError:
        if not folder.is_dir():
            raise
    except FileNotFoundError:
        if folder.parent == folder:
            raise
        make(folder.parent)
        folder.mkdir(MODE, exist_ok=True)


_scratch: dict[int, Path] = {}  # by process


def scratch() -> Path:
    """A folder of this process alone, which goes when it ends. Raises `OSError` if there is no place for one."""
    if (found := _scratch.get(os.getpid())) is not None and found.is_dir():
        return found
    try:
        made = _made_safely(None)
    except OSError:  # no folder for temporary files, or one in which others could put theirs in the place of ours
        made = _made_safely("/dev/shm")
    if not _scratch:
        import atexit

        atexit.register(_remove_scratch)
    _scratch[os.getpid()] = made
    return made


def _made_safely(parent: str | None) -> Path:
    made = Path(tempfile.mkdtemp(prefix="pagedkern-", dir=parent))
    try:
        with trusted.opened(made):
            return made
    except OSError:
        made.rmdir()
        raise


def _remove_scratch() -> None:
    made = _scratch.pop(os.getpid(), None)
    if made is not None:
        with suppress(OSError):
            shutil.rmtree(made)
