"""Measurements as a machine could have given them, without one: for search, replay, profiles and reports."""

from __future__ import annotations

import random
from collections.abc import Callable

from pagedkern.autotune.log import Log
from pagedkern.autotune.records import Recording
from pagedkern.autotune.search import LENGTHS, MAX_ROUNDS
from pagedkern.autotune.space import Candidate, Space, Workload, problems_of
from pagedkern.autotune.workloads import Model, model

DEVICE = {"type": "cpu", "name": "A processor", "arch": "x86_64", "threads": 8}
BLOCK = {8: 1.30, 16: 1.10, 32: 1.03, 64: 1.0, 128: 0.99, 256: 1.0}  # slowness
TILE = {64: 1.0, 32: 0.9, 128: 1.2, 256: 1.3, 512: 1.4}
Slowness = Callable[[Candidate, str], float]


def usual(candidate: Candidate, kind: str) -> float:
    """A fast and a slow backend, each with a configuration that is better than its default."""
    backend = 1.0 if candidate.backend == "fast" else 1.6
    return BLOCK[candidate.block_size] * TILE[int(str(candidate.fields["tile"]))] * backend


LLAMA = model("llama-3-8b,dtype=float32")


def recording(
    slowness: Slowness = usual, seed: int = 0, noise: float = 0.02, rounds: int = MAX_ROUNDS, of: Model = LLAMA
) -> Recording:
    """An exhaustive run: every candidate in every round."""
    rng = random.Random(seed)
    recorded = Recording(DEVICE, "2026-01-01T00:00:00+00:00", load=0.0, driver="Linux 6.1")
    for workload in problems_of(of, "cpu", num_seqs=8, context=2003, prompt=509):
        space = _space(workload)
        at_best = workload.kv_bytes / 20e9 if workload.kind == "decode" else workload.flops / 200e9

        def seconds(candidate: Candidate, load: float = 1.0, best: float = at_best, kind: str = workload.kind) -> float:
            return best * slowness(candidate, kind) * load * rng.lognormvariate(0, noise)

        log = Log()
        for candidate in space.candidates:
            log.screen(candidate, seconds(candidate))
        for i in range(3):
            for candidate in space.candidates:
                log.shortlisted(i, candidate, seconds(candidate))
        for i in range(rounds):
            load = rng.choice((1.0, 1.0, 1.0, 2.5))  # somebody else's, that a whole round shares
            for candidate in space.candidates:
                log.final(i, candidate, seconds(candidate, load))
            log.read(25e9 / load)
            log.product(300e9 / load)
        if workload.kind == "decode":
            for candidate in (c for c in space.candidates if c.block_size == 16 and c.is_default):
                for part in LENGTHS:
                    for _ in range(3):
                        log.length(candidate, workload.context // part, 50e-6 + seconds(candidate) / part)
        recorded.spaces.append(space)
        recorded.logs.append(log)
        recorded.code.append({name: {"pagedkern": "1", "kernel": "k", "libraries": {}} for name in ("fast", "slow")})
    return recorded


def _space(workload: Workload) -> Space:
    found = [
        Candidate(b, name, f'{{"tile": {tile}}}', is_default=tile == 64)
        for name in ("fast", "slow")
        for b in sorted(BLOCK, key=lambda b: (b != 16, b))
        for tile in TILE
    ]
    return Space(workload, tuple(found), ())
