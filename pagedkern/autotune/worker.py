"""The process that candidates run in: `python -m pagedkern.autotune.worker`, started by `isolate`.

Reads commands from its standard input and writes replies to what was its standard output, each a pickled tuple behind
its length. It ends with its parent, ignores Ctrl-C (that is the parent's to answer), and may allocate only so much more
than the tensors of the problem took.
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with_parent()
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a kernel prints is no reply
    commands = sys.stdin.buffer
    bench: Any = None
    while (command := receive(commands)) is not None:
        name, *arguments = command
        try:
            if name == "open":
                bench = None  # the tensors of the last problem go before those of the next come
                bench = _open(*arguments)
                send(replies, ("ok", None))
                continue
            call: Callable[..., object] = getattr(bench, name)
            result = call(*arguments)
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


def _open(space: Any, seed: int, locations: dict[str, str], allowance: int | None) -> Any:
    import pagedkern.backends as registry
    from pagedkern.autotune.measure import Bench

    registry._LOCATIONS.update(locations)  # backends that were registered while the parent ran
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    bench = Bench(space, seed)
    bench.read_bandwidth()
    bench.product_rate()
    if allowance is not None and (taken := _private_bytes()) is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (taken + allowance, resource.RLIM_INFINITY))
    return bench


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
