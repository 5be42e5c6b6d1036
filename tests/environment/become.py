"""`python -m tests.environment.become SPEC COMMAND...`: runs a command under conditions that only root can make.

SPEC is JSON: `mounts`, arguments of mount(8), made for this command alone; `read_only`, folders that it can only read;
`first`, arguments of Python to run then; `limits`, by name, as {"NPROC": 1}; `uid`, the user to become, which need not
exist; `close`, descriptors to close.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

CLONE_NEWNS = 0x00020000


def main() -> None:
    spec: dict[str, Any] = json.loads(sys.argv[1])
    interpreter = Path(sys.base_prefix)
    if spec.keys() & {"mounts", "read_only"} or ("uid" in spec and closed(interpreter)):
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), "unshare")
        mount("--make-rprivate", "/")
    if "uid" in spec:
        let_enter(interpreter)
    for arguments in spec.get("mounts", ()):
        mount(*arguments)
    for path in spec.get("read_only", ()):
        mount("--bind", path, path)
        mount("-o", "remount,bind,ro", path)
    if "first" in spec:
        subprocess.run([sys.executable, *spec["first"]], check=True)
    for name, value in spec.get("limits", {}).items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    if "uid" in spec:
        os.setgroups([])
        os.setgid(spec["uid"])
        os.setuid(spec["uid"])
    for descriptor in spec.get("close", ()):
        os.close(descriptor)
    os.execv(sys.argv[2], sys.argv[2:])


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def closed(folder: Path) -> Path | None:
    """The outermost parent of a folder that not everybody may enter."""
    return next((path for path in reversed(folder.parents) if not path.stat().st_mode & 0o001), None)


def let_enter(folder: Path) -> None:
    """Let everybody enter a folder: the interpreter may lie in the home of root."""
    if (parent := closed(folder)) is not None:
        shown = "/mnt"  # any folder will do
        mount("--bind", str(folder), shown)
        mount("-t", "tmpfs", "-o", "mode=755", "none", str(parent))
        folder.mkdir(parents=True)
        mount("--bind", shown, str(folder))


if __name__ == "__main__":
    main()
