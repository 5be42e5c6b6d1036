"""Memory that holds no token: paged against contiguous, on the shapes of public traces.

    python benchmarks/memory_waste.py [--requests N] [--contexts N] [--budget N] [--out FILE]

Requests with the lengths of `autotune/workloads/*.toml` are all there from the beginning and go through
`pagedkern.scheduler` over `BlockAllocator`, and through `reference.contiguous` with the same memory, token budget and
order. Nothing is timed and no model runs: the figures are the same on every machine. What is counted is the state after
each step in which somebody waits, from the first step on in which memory, not the token budget, is what they wait for.

For paging, a slot is waste if it is in a block that somebody holds and has no token in it. The blocks of a prompt are
held from its admission on, so prompts that are computed in chunks waste some, too.
"""

from __future__ import annotations

import argparse
import random
import sys
import tomllib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import pi, sin, sqrt
from pathlib import Path
from statistics import NormalDist

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

from pagedkern.allocator import BlockAllocator  # noqa: E402
from pagedkern.scheduler import Scheduler  # noqa: E402
from reference.contiguous import ContiguousServer, Usage  # noqa: E402

BLOCK_SIZE = 16
NOTES = """\
resident: requests in memory, mean over steps. Shares of all memory: "tokens" holds a token; "later" is reserved and
will hold one; "never" is reserved and will not; "free" is not reserved, though somebody waits.
waste: the share of what is reserved that holds no token.
contiguous reserves the longest context (max), the prompt and the next power of two above the output (pow2), or what
will be needed to the token (oracle); paged blocks are held from the admission of their prompt on."""
PARENTS = 64  # a shared prefix is that of one of so many requests before


@dataclass(frozen=True)
class Drawn:
    """Lengths of one request, in tokens."""

    prompt: int
    output: int
    shared: int  # leading tokens of the prompt that an earlier one had


@dataclass(frozen=True)
class Workload:
    """A table of `autotune/workloads`."""

    name: str
    longest: int  # tokens of prompt and output of one request
    shares: list[float]
    tables: dict[str, dict[str, object]]

    @classmethod
    def load(cls, path: Path) -> Workload:
        data = tomllib.loads(path.read_text())
        tables = {key: value for key, value in data.items() if isinstance(value, dict)}
        return cls(data["name"], data["longest"], data["shares"], tables)

    @property
    def context(self) -> int:
        """Tokens that a model must take: the next power of two."""
        return 1 << (self.longest - 1).bit_length()

    def quantile(self, table: str, share: float) -> float:
        """Linear between the table's points."""
        values: list[float] = self.tables[table]["of_prompt" if table == "shared_prefix" else "tokens"]  # type: ignore[assignment]
        for (a, low), (b, high) in pairwise(zip(self.shares, values, strict=True)):
            if share <= b:
                return low + (high - low) * (share - a) / (b - a)
        return values[-1]

    def draw(self, count: int, rng: random.Random) -> Iterator[Drawn]:
        """Requests whose lengths go together by a Gaussian copula with the table's rank correlations."""
        normal = NormalDist()
        for _ in range(count):
            z, drawn = rng.gauss(), {"shared_prefix": 0.0}
            for name in sorted(self.tables):
                rank: float = self.tables[name].get("rank_correlation_with_prompt", 1.0)  # type: ignore[assignment]
                rho = 2 * sin(pi * rank / 6)  # the correlation of the normals that have this rank correlation
                drawn[name] = self.quantile(name, normal.cdf(rho * z + sqrt(max(0, 1 - rho * rho)) * rng.gauss()))
            prompt = max(1, min(round(drawn["prompt"]), self.longest - 1))
            output = max(1, min(round(drawn["output"]), self.longest - prompt))
            yield Drawn(prompt, output, int(drawn["shared_prefix"] * prompt))


def prompts(requests: list[Drawn], rng: random.Random, sharing: bool) -> Iterator[array[int]]:
    """Token ids: no two alike, but for prefixes that are shared with one of the last requests."""
    last: list[array[int]] = []
    fresh = 0
    for request in requests:
        parents = [p for p in last if len(p) >= request.shared] if sharing and request.shared else []
        ids = rng.choice(parents)[: request.shared] if parents else array("q")
        rest = request.prompt - len(ids)
        ids.extend(range(fresh, fresh + rest))
        fresh += rest
        last = [*last[1 - PARENTS :], ids]
        yield ids


def serve_paged(
    requests: list[Drawn], num_slots: int, token_budget: int, *, sharing: bool = False, seed: int = 0, every: int = 8
) -> tuple[Usage, Scheduler]:
    """The same as `ContiguousServer.serve`, paged. Every 8th step is looked at: it is the looking that takes time."""
    allocator = BlockAllocator(num_slots // BLOCK_SIZE, BLOCK_SIZE, prefix_caching=sharing, watermark=0.01)
    scheduler = Scheduler(allocator, token_budget=token_budget, max_num_seqs=1 << 20, policy="recompute")
    for request, ids in zip(requests, prompts(requests, random.Random(seed), sharing), strict=True):
        scheduler.add(ids, max_tokens=request.output)
    usage, steps, full = Usage(num_slots), 0, False
    while scheduler.has_work:
        batch = scheduler.schedule()
        waits = bool(scheduler.waiting)  # once this batch is made
        full = full or (waits and batch.num_tokens < token_budget)
        scheduler.complete(batch, [-1] * len(batch.outputs))
        if full and waits and steps % every == 0:
            look(scheduler, usage)
        steps += 1
    return usage, scheduler


def look(scheduler: Scheduler, usage: Usage) -> None:
    """Count what each block that somebody holds has in it; shared blocks once."""
    size, allocator = BLOCK_SIZE, scheduler.allocator
    full: set[int] = set()
    partial: dict[int, int] = {}
    for seq in allocator.sequences:
        ids, computed = seq.block_ids, seq.num_computed_tokens
        full.update(ids[: computed // size])
        if computed % size:
            block = ids[computed // size]
            partial[block] = max(partial.get(block, 0), computed % size)
    tokens = len(full) * size + sum(count for block, count in partial.items() if block not in full)
    held = (allocator.num_blocks - allocator.num_free_blocks) * size
    usage.steps += 1
    usage.resident += len(scheduler.running)
    usage.tokens += tokens
    usage.later += held - tokens
    usage.holes += usage.num_slots - held


@dataclass(frozen=True)
class Comparison:
    workload: Workload
    paged: Usage
    shared: Usage | None  # paged, with the prefixes of the trace shared
    contiguous: dict[str, Usage]
    scheduler: Scheduler

    def ratio(self, policy: str) -> float:
        """Requests resident at the same memory."""
        return self.paged.mean_resident / self.contiguous[policy].mean_resident


def compare(path: Path, num_requests: int, contexts: int, token_budget: int, seed: int = 0) -> Comparison:
    """With memory for so many contexts of the longest request."""
    workload = Workload.load(path)
    requests = list(workload.draw(num_requests, random.Random(seed)))
    num_slots = contexts * workload.context
    contiguous = {
        policy: ContiguousServer(num_slots, policy, workload.context, token_budget).serve(
            (r.prompt, r.output) for r in requests
        )
        for policy in ("max", "pow2", "oracle")
    }
    paged, scheduler = serve_paged(requests, num_slots, token_budget)
    shared = None
    if "shared_prefix" in workload.tables:
        shared, _ = serve_paged(requests, num_slots, token_budget, sharing=True, seed=seed)
    if not all(usage.steps for usage in (paged, *contiguous.values(), *filter(None, [shared]))):
        raise ValueError(f"{workload.name}: memory is never short, take more requests, less memory or a larger budget")
    return Comparison(workload, paged, shared, contiguous, scheduler)


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--contexts", type=int, default=4, help="memory, in longest contexts of the workload")
    parser.add_argument("--budget", type=int, default=16384, help="tokens a step")
    parser.add_argument("--out", type=Path, help="write the table here, too")
    options = parser.parse_args()
    title = (
        f"Memory for {options.contexts} of the longest contexts, block size {BLOCK_SIZE}, "
        f"{options.requests:,} requests, {options.budget:,} tokens a step"
    )
    columns = ("workload", "allocation", "resident", "paged : this", "tokens", "later", "never", "free", "waste")
    table = Table(*columns, title=title)
    for column in table.columns[2:]:
        column.justify = "right"
    for path in sorted((ROOT / "autotune" / "workloads").glob("*.toml")):
        found = compare(path, options.requests, options.contexts, options.budget)
        rows = {"paged": found.paged}
        if found.shared is not None:
            rows["paged, prefixes shared"] = found.shared
        rows |= {f"contiguous, {policy}": usage for policy, usage in found.contiguous.items()}
        labels = [found.workload.name, f"{found.paged.num_slots:,} tokens", *[""] * len(rows)]
        for label, (name, u) in zip(labels, rows.items(), strict=False):
            parts = (f"{u.share(slots):.1%}" for slots in (u.tokens, u.later, u.never, u.holes))
            ratio = f"{found.paged.mean_resident / u.mean_resident:.1f}"
            table.add_row(label, name, f"{u.mean_resident:.1f}", ratio, *parts, f"{u.waste:.1%}")
        table.add_section()
    console = Console(width=118, record=True)
    console.print(table, NOTES)
    if options.out:
        options.out.write_text(console.export_text())


if __name__ == "__main__":
    main()
