"""What was planned, measured, decided and stored, as JSON objects for programs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from pagedkern.autotune.decision import ERROR_RATE, compare
from pagedkern.autotune.profile import Profile, to_json
from pagedkern.autotune.recommend import Recommendation
from pagedkern.autotune.runs import Outcome, Serving, TuningRun
from pagedkern.autotune.space import Candidate, Space
from pagedkern.autotune.store import StoreEntry
from pagedkern.autotune.store import device as machine


def document(run: TuningRun) -> dict[str, object]:
    """Everything that was measured and decided, as a JSON object."""
    return {
        "device": dict(run.device),
        "driver": machine.driver(str(run.device["type"])),
        "interrupted": run.interrupted,
        "failures": run.failures,
        "unusable_backends": run.unusable,
        "problems": [_outcome_document(outcome) for outcome in run.outcomes],
        "profile": to_json(run.profile) if run.profile else None,
        "workloads": [served_document(served) for served in run.served],
        "records": str(run.records) if run.records else None,
    }


def served_document(served: Serving) -> dict[str, object]:
    """What the block sizes give for a workload, as a JSON object."""
    found = served.advice
    return {
        "workload": served.traffic.name,
        "model": asdict(served.model),
        "memory": served.memory,
        **advice_document(found),
        "block_size": found.block_size if found.scores else None,
    }


def advice_document(found: Recommendation) -> dict[str, object]:
    """A recommendation as a JSON object."""
    return asdict(found)


def plan_document(spaces: Iterable[Space], unusable: list[str]) -> dict[str, object]:
    """What a run would measure, as a JSON object."""
    problems = [
        {
            "workload": asdict(space.workload),
            "candidates": [_candidate_document(candidate) for candidate in space.candidates],
            "refused": list(space.refused),
        }
        for space in spaces
    ]
    return {"unusable_backends": unusable, "problems": problems}


def stored_document(stored: Iterable[StoreEntry]) -> list[dict[str, object]]:
    """The contents of the store, as a list of JSON objects."""
    return [
        {
            "path": str(entry.path),
            "device": dict(entry.device),
            "problem": asdict(entry.key),
            "backend": entry.backend,
            "config": dict(entry.tuned.config),
            "gain": entry.tuned.gain,
            "gain_low": entry.tuned.gain_low,
            "when": entry.tuned.when,
            "driver": entry.tuned.driver,
            "state": entry.state,
        }
        for entry in stored
    ]


def rates_document(profiles: Iterable[tuple[str, Path, Profile]]) -> list[dict[str, object]]:
    """Profiles with their states, see `recommend.known`, as a list of JSON objects."""
    return [{"path": str(path), "state": state, **to_json(profile)} for state, path, profile in profiles]


def _outcome_document(outcome: Outcome) -> dict[str, object]:
    space, log, verdict = outcome.space, outcome.log, outcome.verdict
    workload = space.workload
    rows = []
    for c in space.candidates:
        seconds = log.seconds(c)
        winner = verdict.winners.get(c.block_size)
        ratio = compare(log, c, space.baseline, ERROR_RATE)
        rows.append(
            {
                **_candidate_document(c),
                "seconds": seconds,
                "kv_bytes_per_second": workload.kv_bytes / seconds if seconds else None,
                "flops_per_second": workload.flops / seconds if seconds else None,
                "share_of_read_bandwidth": outcome.share(c),
                "speed": ratio.ratio if ratio.rounds else None,
                "untuned": c == space.untuned(c.block_size),
                "chosen": winner is not None and winner.candidate == c,
                "left_out": log.left_out.get(c),
                "rounds": [times.get(c) for times in log.finals],
            }
        )
    best = verdict.best and {
        **_candidate_document(verdict.best.candidate),
        "gain": verdict.gain and verdict.gain.ratio,
        "gain_low": verdict.gain and verdict.gain.low,
        "confidence": 1 - ERROR_RATE,
    }
    return {
        "workload": {**asdict(workload), "seq_lens": workload.seq_lens},
        "baseline": _candidate_document(space.baseline) if space.candidates else None,
        "read_bytes_per_second": log.reads,
        "rows": rows,
        "refused": list(space.refused),
        "best": best,
        "stored": {block_size: str(path) for block_size, path in outcome.stored.items()},
        "not_stored": outcome.not_stored or None,
        "ended": log.ended or "complete",
    }


def _candidate_document(candidate: Candidate) -> dict[str, object]:
    return {"block_size": candidate.block_size, "backend": candidate.backend, "config": candidate.fields}
