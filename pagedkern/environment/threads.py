"""Starting threads where the system may refuse one: a limit of processes (`ulimit -u`, a container's), or of memory."""

from __future__ import annotations

import threading


def start(thread: threading.Thread) -> bool:
    """Start a thread; False if the system gives none."""
    try:
        thread.start()
    except (RuntimeError, MemoryError):  # "can't start new thread"
        return False
    return True
