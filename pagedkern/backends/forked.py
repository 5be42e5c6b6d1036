"""torch after fork(): the threads that share its work on large tensors stay behind in the parent.

The OpenMP of GNU, with which torch is built for CPUs, does not notice. An operation on more than some ten thousand
elements, which torch would divide among threads, then waits for ever. So in a process that was forked, torch computes
with one thread for as long as a call of ours lasts. Kernels of our own are not affected: their threads are made anew.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")
NEVER_EXECUTED = 0x40  # PF_FORKNOEXEC of Linux: the process is what fork() made, and no program was started in it since


def _is_forked() -> bool:
    """Whether this process is a fork of one that may have used torch, although this module was not yet loaded there."""
    try:
        with open("/proc/self/stat") as file:
            flags = int(file.read().rpartition(")")[2].split()[6])
    except (OSError, ValueError, IndexError):  # not Linux, or hidden: then only forks from now on are noticed
        return False
    return bool(flags & NEVER_EXECUTED)


class _Held(threading.local):
    threads = 0  # what torch was set to, in a thread that `one_thread` holds to one; 0: it is not


forked = _is_forked()
_held = _Held()


def _after_fork() -> None:
    global forked
    forked = True


os.register_at_fork(after_in_child=_after_fork)


def num_threads() -> int:
    """How many threads torch is set to, whether or not `one_thread` holds it to one."""
    return _held.threads or torch.get_num_threads()


@contextmanager
def one_thread() -> Iterator[None]:
    """Within it torch computes with one thread, in this thread."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    _held.threads = before
    try:
        yield
    finally:
        _held.threads = 0
        torch.set_num_threads(before)


def new_empty(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """`like.new_empty`, which fills what it makes where torch is to be deterministic: with one thread after a fork."""
    return _new_empty_forked(like, shape, dtype) if forked else like.new_empty(shape, dtype=dtype)


def safe_after_fork(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function that calls torch return in a forked process, too."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if not forked or torch.compiler.is_compiling():
            return function(*args, **kwargs)
        with one_thread():
            return function(*args, **kwargs)

    return run


@safe_after_fork
def _new_empty_forked(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return like.new_empty(shape, dtype=dtype)
