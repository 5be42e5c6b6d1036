"""Raw measurements as JSON lines: written as they are made, read to resume a run, to replay it, and for reports.

The first line describes the machine, then for each problem a line with its candidates, and what was measured of them;
see `log.Log` for the kinds. Every line is complete in itself and flushed, so what a killed run leaves behind is good
but for its last line. A run that is resumed begins a new file with what it knows, which takes the place of the old
one when it is whole.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from glob import escape
from pathlib import Path
from types import TracebackType
from typing import IO

from pagedkern.autotune.log import Log, Record, Sink
from pagedkern.autotune.space import Candidate, Space, Workload
from pagedkern.autotune.store import device as machine
from pagedkern.backends.base import ITEMSIZE
from pagedkern.environment import folders, notices
from pagedkern.errors import InvalidArgument

FORMAT = 2
MOST_ROUNDS, MOST_SEQS = 1 << 16, 1 << 20  # a file that names more is not ours
KEPT_DAYS, KEPT_RUNS = 90, 50  # a file of an earlier run goes when it is older, or when there are more

logger = logging.getLogger("pagedkern.autotune")


@dataclass(slots=True)
class Recording:
    """A file of records."""

    device: Mapping[str, str | int]
    when: str  # UTC, ISO 8601
    spaces: list[Space] = field(default_factory=list)
    logs: list[Log] = field(default_factory=list)
    code: list[Mapping[str, object]] = field(default_factory=list)  # for each problem, by backend: see `device.code`
    load: float | None = None  # of the machine when the run began
    driver: str = ""  # see `device.driver`


class Journal:
    """Writes the records of a run: what there is of them, and from then on what is added to its logs.

    The file is put in place whole, so that a run killed at any time leaves what was there, or what is there now, and
    whatever came after. While another process writes to that file, another one beside it is taken: see `path`.

    Raises:
        OSError: the file cannot be written; what was there is there still.
    """

    def __init__(self, path: Path, recorded: Recording, lost: Callable[[str], None] = lambda _: None) -> None:
        """`lost` is told why if no more can be written."""
        self._lost = lost
        folders.make(path.parent)
        self.path, owner = _claim(path)
        for left in self.path.parent.glob(f".{escape(self.path.name)}.*"):  # by a run that was killed
            left.unlink(missing_ok=True)
        aside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        if self.path.exists() and not self.path.is_file():  # a pipe or a device: written to as it is
            self._file, aside = owner, self.path
        else:
            self._file = aside.open("w", encoding="utf-8")
            with suppress(OSError):  # no locks here: `_claim` has said so
                fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            self._file.writelines(json.dumps(r, allow_nan=False) + "\n" for r in _lines(recorded))
            self._file.flush()
            if aside != self.path:
                os.fsync(self._file.fileno())
                os.replace(aside, self.path)
        except BaseException:
            with suppress(OSError):
                self._file.close()
            if aside != self.path:
                aside.unlink(missing_ok=True)
            raise
        finally:
            if owner is not self._file:
                owner.close()
        for number, (space, log) in enumerate(zip(recorded.spaces, recorded.logs, strict=True)):
            log.sink = self._sink(number, space)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._file.close()

    def _sink(self, number: int, space: Space) -> Sink:
        index = _index(space)
        return lambda record, candidate: self._write(_line(record, candidate, number, index))

    def _write(self, record: Mapping[str, object]) -> None:
        if self._file.closed:
            return
        try:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:  # a full disk costs the records, not the run
            logger.warning("%s: no more records are written: %s", self.path, notices.reason(error))
            self._lost(notices.reason(error))
            with suppress(OSError):
                self._file.close()


def _claim(path: Path) -> tuple[Path, IO[str]]:
    """The file to write, and a lock on it: `path`, or one beside it while another process writes there. Only who holds
    the lock of a file puts another in its place, and holds that one's."""
    while True:
        file = path.open("a", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return path, file
        except BlockingIOError:
            path = path.with_name(f"{path.stem}-{os.getpid()}{path.suffix}")
        except FileNotFoundError:  # gone in between
            pass
        except OSError as error:
            why = notices.reason(error)
            notices.warn_once(("lock", path), f"{path} cannot be locked ({why}): going on without a lock")
            return path, file
        file.close()


def _lines(recorded: Recording) -> Iterator[Record]:
    """The records of a run, in an order in which they could have come."""
    run = {"device": dict(recorded.device), "when": recorded.when, "load": recorded.load, "driver": recorded.driver}
    yield {"record": "run", "format": FORMAT, **run}
    for number, (space, log, code) in enumerate(zip(recorded.spaces, recorded.logs, recorded.code, strict=True)):
        candidates = [[c.block_size, c.backend, c.fields, c.is_default] for c in space.candidates]
        yield {
            "record": "problem", "problem": number, "workload": asdict(space.workload), "candidates": candidates,
            "refused": list(space.refused), "code": dict(code),
        }  # fmt: skip
        index = _index(space)
        yield from (_line(record, candidate, number, index) for record, candidate in entries(log))


def _index(space: Space) -> dict[Candidate, int]:
    return {candidate: i for i, candidate in enumerate(space.candidates)}


def _line(record: Record, candidate: Candidate | None, number: int, index: Mapping[Candidate, int]) -> Record:
    return {**record, "problem": number, **({"candidate": index[candidate]} if candidate else {})}


def evict(folder: Path) -> None:
    """Drop the files of earlier runs that are old, or too many: the newest stay."""
    ages = sorted((time.time() - path.stat().st_mtime, path) for path in _files(folder))
    for rank, (age, path) in enumerate(ages):
        if age > KEPT_DAYS * 86400 or rank >= KEPT_RUNS:
            with suppress(OSError):
                path.unlink()


def _files(folder: Path) -> Iterable[Path]:
    """Those of runs, and what a killed run had not put in place yet."""
    return (path for pattern in ("*.jsonl", ".*.jsonl.*") for path in folder.glob(pattern))


def code_of(space: Space) -> dict[str, object]:
    """The code of each backend of a space, as `device.code` tells it."""
    return {name: machine.code(name) for name in sorted({c.backend for c in space.candidates})}


def entries(log: Log) -> Iterator[tuple[Record, Candidate | None]]:
    """The records that make a log, in an order in which they could have come."""
    for candidate, seconds in log.screened.items():
        yield {"record": "screened", "seconds": seconds}, candidate
    for kind, rounds in (("shortlist", log.shortlist), ("final", log.finals)):
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


def load(path: Path) -> Recording:
    """The records of a file. A last line that was cut short is passed over.

    Raises:
        InvalidArgument: it cannot be read, or a line is not what it should be: says which, and why.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "no UTF-8"
        raise InvalidArgument(f"records: {path}: cannot be read: {why}") from error
    found: Recording | None = None
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
                found = Recording(record["device"], str(record["when"]), driver=str(record["driver"]))
                found.load = None if record["load"] is None else float(record["load"])
            else:
                _add(found, record)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise InvalidArgument(f"records: {path}: line {number}: got {line[:60]!r}: {why}") from error
    if found is None:
        raise InvalidArgument(f"records: {path}: got no complete line, expected what a run wrote")
    return found


def _add(found: Recording, record: Mapping[str, object]) -> None:
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
        elif kind in ("heat", "shortlist", "final"):
            (log.shortlisted if kind != "final" else log.final)(
                _small(record["round"], MOST_ROUNDS), candidate, seconds
            )
        elif kind == "length":
            log.length(candidate, _small(record["context"]), seconds)
        else:
            raise ValueError(f"no kind of record is called {kind!r}")


def _space(record: Mapping[str, object]) -> Space:
    w = Workload(**record["workload"])  # type: ignore[arg-type]
    sizes = (w.num_heads, w.num_kv_heads, w.head_dim, w.context, w.query_len)
    if not all(map(_small, sizes)) or not _small(w.num_seqs, MOST_SEQS) or w.query_len > w.context:
        raise ValueError("a workload of sizes that are none")
    if not all(value is None or 0 < value < 1 << 31 for value in (w.sliding_window, w.softcap)):
        raise ValueError("a workload of no window or no softcap")
    if w.kind not in ("decode", "prefill") or w.dtype not in ITEMSIZE or w.kv_dtype not in ITEMSIZE:
        raise ValueError("a workload of no kind or no dtype")
    candidates = []
    for block_size, name, config, default in record["candidates"]:  # type: ignore[attr-defined]
        if not _small(block_size) or not isinstance(name, str) or not isinstance(config, dict):
            raise ValueError(f"not a candidate: {name!r:.40}")
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


def take_up(recorded: Recording, spaces: Sequence[Space], code: Sequence[Mapping[str, object]]) -> list[Log] | None:
    """The logs of records of the same problems, candidates and code, to be resumed; None if they are of others.

    Records of a run that was killed before its last problem are completed with empty logs.
    """
    count = len(recorded.spaces)
    if recorded.spaces != list(spaces[:count]) or recorded.code != list(code[:count]):
        return None
    return [*recorded.logs, *(Log() for _ in spaces[count:])]
