"""Raw measurements as JSON lines: written as they are made, read to resume a run, to replay it, and for reports.

The first line describes the machine, then for each problem a line with its candidates, followed by what was measured of
them; see `log.Log` for the kinds. Every line is complete in itself and flushed, so what a killed run leaves behind is
good but for its last line.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import IO

from pagedkern.autotune.log import Log, Record
from pagedkern.autotune.space import Candidate, Space, Workload
from pagedkern.autotune.store import device as machine
from pagedkern.backends.base import ITEMSIZE
from pagedkern.errors import InvalidArgument

FORMAT = 1
MOST_ROUNDS, MOST_SEQS = 1 << 16, 1 << 20  # a file that names more is not ours

logger = logging.getLogger("pagedkern.autotune")


@dataclass(slots=True)
class Recorded:
    """A file of records."""

    device: Mapping[str, str | int]
    when: str  # UTC, ISO 8601
    spaces: list[Space] = field(default_factory=list)
    logs: list[Log] = field(default_factory=list)
    code: list[Mapping[str, object]] = field(default_factory=list)  # for each problem, by backend: see `device.code`
    load: float | None = None  # of the machine when the run began


class Journal:
    """Writes the records of a run. While another process writes to that file, to one beside it: see `path`."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = path.open("a", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            path = path.with_name(f"{path.stem}-{os.getpid()}{path.suffix}")
            self._file = path.open("w", encoding="utf-8")
        else:
            if path.is_file():
                self._file.truncate(0)
        self.path = path
        self._problems = 0

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._file.close()

    def begin(self, device: Mapping[str, str | int], when: str = "", load: float | None = None) -> None:
        now = when or datetime.now(UTC).isoformat(timespec="seconds")
        load_ = machine.load() if load is None else load
        self._write({"record": "run", "format": FORMAT, "device": dict(device), "when": now, "load": load_})

    def follow(self, space: Space, log: Log, code: Mapping[str, object] | None = None) -> None:
        """Write what a log holds, and from now on what is added to it."""
        number = self._problems
        self._problems += 1
        index = {candidate: i for i, candidate in enumerate(space.candidates)}
        self._write(
            {
                "record": "problem",
                "problem": number,
                "workload": asdict(space.workload),
                "candidates": [[c.block_size, c.backend, c.fields, c.is_default] for c in space.candidates],
                "refused": list(space.refused),
                "code": code or code_of(space),
            }
        )

        def sink(record: Record, candidate: Candidate | None) -> None:
            self._write({**record, "problem": number, **({"candidate": index[candidate]} if candidate else {})})

        for record, candidate in entries(log):
            sink(record, candidate)
        log.sink = sink

    def _write(self, record: Mapping[str, object]) -> None:
        if self._file.closed:
            return
        try:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:  # a full disk costs the records, not the run
            logger.warning("%s: no more records are written: %s", self._file.name, error)
            with suppress(OSError):
                self._file.close()


def code_of(space: Space) -> dict[str, object]:
    """The code of each backend of a space, as `device.code` tells it."""
    return {name: machine.code(name) for name in sorted({c.backend for c in space.candidates})}


def entries(log: Log) -> Iterator[tuple[Record, Candidate | None]]:
    """The records that make a log, in an order in which they could have come."""
    for candidate, seconds in log.screened.items():
        yield {"record": "screened", "seconds": seconds}, candidate
    for kind, rounds in (("heat", log.heats), ("final", log.finals)):
        for i, times in enumerate(rounds):
            for candidate, taken in times.items():
                yield {"record": kind, "round": i, "seconds": taken}, candidate
    for candidate in log.lasting:
        yield {"record": "left out", "reason": log.left_out[candidate]}, candidate
    for value in log.reads:
        yield {"record": "read", "bytes_per_second": value}, None
    for value in log.products:
        yield {"record": "product", "flops_per_second": value}, None
    for candidate, contexts in log.lengths.items():
        for context, samples in contexts.items():
            for seconds in samples:
                yield {"record": "length", "context": context, "seconds": seconds}, candidate


def load(path: Path) -> Recorded:
    """The records of a file. A last line that was cut short is passed over.

    Raises:
        InvalidArgument: it cannot be read, or a line is not what it should be: says which, and why.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "no UTF-8"
        raise InvalidArgument(f"records: {path}: cannot be read: {why}") from error
    found: Recorded | None = None
    for number, line in enumerate(lines, 1):
        if not line.strip() or number == len(lines):  # a whole line ends, so the last piece is empty or cut short
            continue
        try:
            record = json.loads(line, parse_constant=_refuse)
            if found is None:
                if record.get("record") != "run" or record.get("format") != FORMAT:
                    raise ValueError(f"not the records of a run, of format {FORMAT}")
                if not machine.is_identity(record["device"]):
                    raise ValueError("of no device")
                found = Recorded(record["device"], str(record["when"]))
                found.load = None if record["load"] is None else float(record["load"])
            else:
                _add(found, record)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise InvalidArgument(f"records: {path}: line {number}: got {line[:60]!r}: {why}") from error
    if found is None:
        raise InvalidArgument(f"records: {path}: got no complete line, accepted is what a run wrote")
    return found


def _add(found: Recorded, record: Mapping[str, object]) -> None:
    kind = record["record"]
    if kind == "problem":
        space, code = _space(record), dict(record["code"])  # type: ignore[call-overload]
        if unknown := {c.backend for c in space.candidates} - code.keys():
            raise ValueError(f"no code of {', '.join(sorted(unknown))}")
        found.spaces.append(space)
        found.logs.append(Log())
        found.code.append(code)
        return
    number = _small(record["problem"])
    log, space = found.logs[number], found.spaces[number]
    if kind == "read":
        log.read(_positive(record["bytes_per_second"]))
    elif kind == "product":
        log.product(_positive(record["flops_per_second"]))
    elif kind == "left out":
        log.leave(_candidate(space, record), str(record["reason"]), lasting=True)
    else:
        candidate, seconds = _candidate(space, record), _positive(record["seconds"])
        if kind == "screened":
            log.screen(candidate, seconds)
        elif kind in ("heat", "final"):
            (log.heat if kind == "heat" else log.final)(_small(record["round"], MOST_ROUNDS), candidate, seconds)
        elif kind == "length":
            log.length(candidate, _small(record["context"]), seconds)
        else:
            raise ValueError(f"no kind of record is called {kind!r}")


def _space(record: Mapping[str, object]) -> Space:
    w = Workload(**record["workload"])  # type: ignore[arg-type]
    sizes = (w.num_heads, w.num_kv_heads, w.head_dim, w.context, w.query_len)
    if not all(map(_small, sizes)) or not _small(w.num_seqs, MOST_SEQS) or w.query_len > w.context:
        raise ValueError("a workload of sizes that are none")
    if w.kind not in ("decode", "prefill") or w.dtype not in ITEMSIZE or w.kv_dtype not in ITEMSIZE:
        raise ValueError("a workload of no kind or no dtype")
    candidates = []
    for block_size, name, config, default in record["candidates"]:  # type: ignore[attr-defined]
        if not _small(block_size) or not isinstance(name, str) or not isinstance(config, dict):
            raise ValueError(f"a candidate that is none: {name!r:.40}")
        candidates.append(Candidate(block_size, name, json.dumps(config, sort_keys=True), bool(default)))
    if {c.block_size for c in candidates} != {c.block_size for c in candidates if c.is_default}:
        raise ValueError("a block size without a default")
    return Space(w, tuple(candidates), tuple(map(str, record["refused"])))  # type: ignore[call-overload]


def _candidate(space: Space, record: Mapping[str, object]) -> Candidate:
    index = record["candidate"]
    if type(index) is not int or not 0 <= index < len(space.candidates):
        raise ValueError(f"candidate {index!r} of {len(space.candidates)}")
    return space.candidates[index]


def _positive(value: object) -> float:
    if type(value) not in (int, float) or not 0 < value < math.inf:  # type: ignore[operator]
        raise ValueError(f"{value!r} is no positive number")
    return float(value)  # type: ignore[arg-type]


def _small(value: object, most: int = 1 << 31) -> int:
    if type(value) is not int or not 0 <= value < most:
        raise ValueError(f"{value!r} is no count")
    return value


def _refuse(text: str) -> float:
    raise ValueError(f"{text} is no number")


def take_up(recorded: Recorded, spaces: Sequence[Space], code: Sequence[Mapping[str, object]]) -> list[Log] | None:
    """The logs of records of the same problems, candidates and code, to be gone on with; None if they are of others.

    Records of a run that was killed before its last problem are completed with empty logs.
    """
    count = len(recorded.spaces)
    if recorded.spaces != list(spaces[:count]) or recorded.code != list(code[:count]):
        return None
    return [*recorded.logs, *(Log() for _ in spaces[count:])]
