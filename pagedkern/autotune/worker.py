"""The process that candidates run in: `python -m pagedkern.autotune.worker`, started by `isolate`.

Reads commands from its standard input and writes replies to what was its standard output, each a pickled tuple behind
its length. It ends with its parent, ignores Ctrl-C and what else asks a run to end (that is the parent's to answer).
Candidates may allocate only so much more than the tensors of the problem took.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import re
import resource
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

LENGTH = struct.Struct("<Q")
OWN = {"open", "lay_out", "reserve"}  # what allocates for the problem, and for no candidate
ONCE = {"read_bandwidth", "product_rate"}  # what does so when it is first asked for
PR_SET_PDEATHSIG = 1


def send(stream: IO[bytes], message: tuple[Any, ...]) -> None:
    data = pickle.dumps(message)
    stream.write(LENGTH.pack(len(data)) + data)
    stream.flush()


def receive(stream: IO[bytes]) -> tuple[Any, ...] | None:
    """The next message; None at the end."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (count,) = LENGTH.unpack(head)
    message: tuple[Any, ...] = pickle.loads(stream.read(count))
    return message


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _end_with_parent()
    replies = os.fdopen(os.dup(1), "wb")
    _print_to_stderr()
    commands = sys.stdin.buffer
    bench: Any = None
    allowance: int | None = None
    first = set(ONCE)
    while (command := receive(commands)) is not None:
        name, *arguments = command
        try:
            own = name in OWN or name in first
            first.discard(name)
            if own:
                _allow(None)
            if name == "open":
                first = set(ONCE)
                bench = None  # the tensors of the last problem go before those of the next come
                *given, allowance = arguments
                bench = _open(*given)
                result: object = None
            else:
                call: Callable[..., object] = getattr(bench, name)
                result = call(*arguments)
            if own:
                _allow(allowance)
            if bench.workload.device == "cuda":
                _check_gpu()
            send(replies, ("ok", result))
        except _Broken as broken:
            send(replies, ("lost", str(broken)))
            return
        except Exception as error:
            send(replies, ("error", f"{type(error).__name__}: {error}".partition("\n")[0][:300]))


class _Broken(Exception):
    """Nothing can be run in this process any more."""


def _open(space: Any, seed: int, locations: dict[str, str]) -> Any:
    import pagedkern.backends as registry
    from pagedkern.autotune.measure import Bench

    registry._LOCATIONS.update(locations)  # backends that were registered while the parent ran
    return Bench(space, seed)


def _allow(allowance: int | None) -> None:
    """Bound what may be allocated beyond what there is; None: nothing is bounded."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    taken = None if allowance is None else _private_bytes()
    limit = most if taken is None or allowance is None else taken + allowance
    if most != resource.RLIM_INFINITY:
        limit = min(limit, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))


def _print_to_stderr() -> None:
    """What a kernel prints is no reply. Where there is no standard error, it goes nowhere."""
    try:
        os.dup2(2, 1)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):
            os.dup2(nowhere, descriptor)


def _private_bytes() -> int | None:
    """Bytes of private memory of this process, as RLIMIT_DATA counts them."""
    try:
        found = re.search(r"^VmData:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) << 10 if found else None


def _check_gpu() -> None:
    """An error that a kernel left behind comes to light here; after some nothing works on that device any more."""
    import torch

    try:
        torch.cuda.synchronize()
    except Exception as error:
        raise _Broken(f"left the GPU unusable: {error}".partition("\n")[0][:200]) from error


def _end_with_parent() -> None:
    parent = os.getppid()
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):  # not Linux: the end of the input must do
        return
    if os.getppid() != parent:  # it ended just before
        sys.exit()


if __name__ == "__main__":
    main()
