"""How much work a call does, counted instead of timed: the same on every machine, however busy it is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from pagedkern.scheduler import Request


def bytecodes(call: Callable[[], object]) -> int:
    """The bytecodes that a call executes, those of what it calls included."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def calls(call: Callable[[], object]) -> int:
    """The Python functions that a call calls, those of what it calls included."""
    count = 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return count


def count_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a search for a request among others, which is one bytecode, count as one for each that is looked at."""
    monkeypatch.setattr(Request, "__eq__", lambda self, other: self is other)
    monkeypatch.setattr(Request, "__hash__", object.__hash__)
