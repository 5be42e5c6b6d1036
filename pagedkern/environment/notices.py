"""Warnings about what the environment lacks: each once in a process."""

from __future__ import annotations

import logging
from collections.abc import Hashable

log = logging.getLogger("pagedkern")
_said: dict[Hashable, object] = {}


def warn_once(about: Hashable, message: str) -> None:
    """Log a warning, unless there has been one about the same thing."""
    mine = object()
    if _said.setdefault(about, mine) is mine:  # one step: two threads may be here
        log.warning("pagedkern: %s", message)


def reason(error: BaseException) -> str:
    """An error in a few words: what the system says, and about which file."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error) or type(error).__name__
