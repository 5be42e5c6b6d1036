"""A worker that measures nothing, answers at once, and comes to harm where it is told to.

`python -m tests.autotune.fake_worker COUNT HARM`: COUNT is a file that grows by a byte for each command, over all the
workers of a run; HARM is JSON, a list of what happens: {"do": "kill", "command": "sample", "from": 10, "until": 12,
"argument": 32, "times": 1}. "command" and "argument" (the first one, the block size of a candidate, the sequences of a
problem) are those to which it happens, "from" and "until" the numbers of the commands, "times" how often; what is left
out is any. COUNT.log has a line for each command: the process, the command, a candidate or another argument, and its
block size.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

from pagedkern.autotune.worker import receive, send

DO = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "segv": signal.SIGSEGV, "abort": signal.SIGABRT}


def main() -> None:
    path, harm = sys.argv[1], json.loads(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "wb")
    while (command := receive(sys.stdin.buffer)) is not None:
        with open(path, "ab") as file:
            file.write(b".")
            number = file.tell()
        with open(f"{path}.log", "a") as log:
            argument = command[1] if len(command) > 1 else None
            block_size = getattr(argument, "block_size", 0)
            seqs = argument.workload.num_seqs if command[0] == "open" else str(argument)
            log.write(json.dumps([os.getpid(), command[0], seqs, block_size]) + "\n")
        for i, one in enumerate(harm):
            if happens(one, number, *command):
                with open(f"{path}.{i}", "ab") as file:
                    file.write(b".")
                    again = file.tell() > one.get("times", sys.maxsize)
                if not again:
                    suffer(one["do"], replies)
        send(replies, ("ok", answer(*command)))


def happens(one: dict[str, Any], number: int, name: str, *arguments: Any) -> bool:
    first = arguments[0] if arguments else None
    argument = first.workload.num_seqs if name == "open" else getattr(first, "block_size", first)
    return (
        one.get("command", name) == name
        and one.get("argument", argument) == argument
        and one.get("from", 0) <= number < one.get("until", sys.maxsize)
    )


def suffer(what: str, replies: Any) -> None:
    if what in DO:
        signal.signal(DO[what], signal.SIG_DFL) if what != "kill" else None
        os.kill(os.getpid(), DO[what])
    elif what == "exit":
        os._exit(7)
    elif what == "hang":
        time.sleep(1000)
    elif what == "half":  # dies in the middle of an answer
        replies.write(b"\x40\0\0\0\0\0\0\0and no more")
        replies.flush()
        os._exit(0)
    elif what == "stop":  # hangs in the middle of an answer
        replies.write(b"\x40\0\0\0\0\0\0\0and no more")
        replies.flush()
        time.sleep(1000)


def answer(name: str, *arguments: Any) -> object:
    if name == "sample":
        candidate, repeats, context = arguments
        turn = repeats * 7 + os.getpid() % 5
        return (0.004 if candidate.is_default else 0.003) * (1 + 1e-3 * (turn % 3)) * (1 if context is None else 0.5)
    return {"read_bandwidth": 1e12, "product_rate": 1e14}.get(name)


if __name__ == "__main__":
    main()
