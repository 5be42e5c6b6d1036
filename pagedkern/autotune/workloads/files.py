"""Workload files: TOML with quantiles or a trace, CSV and JSONL with a request a line. Errors say where and what."""

from __future__ import annotations

import csv
import itertools
import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from pagedkern.autotune.workloads.models import Model, from_table, model
from pagedkern.autotune.workloads.traffic import Quantiles, Request, Traffic
from pagedkern.errors import InvalidArgument

PROMPT, OUTPUT = ("prompt", "input_length", "ContextTokens"), ("output", "output_length", "GeneratedTokens")
SHARED = ("shared",)
MOST_TOKENS, MOST_ROWS = 1 << 30, 1_000_000
_TEXTS = ("name", "about", "source", "url", "licence", "trace")
_NUMBERS = {  # key of the file: field, least, most
    "limit": ("limit", 2, MOST_TOKENS),
    "families": ("families", 1, 1 << 20),
    "prefix": ("prefix", 0, MOST_TOKENS),
    "samples": ("samples", 1, 1024),
    "concurrency": ("concurrency", 1, 1 << 20),
}
_TABLES = ("prompt", "output", "shared_prefix")
_KEYS = (*_TEXTS, *_NUMBERS, "beam", "survival", "shares", "requests_file", "model", *_TABLES)


def load_file(path: Path) -> Traffic:
    """A workload from its file. Raises `InvalidArgument`."""
    readers = {".toml": _from_toml, ".csv": _from_rows, ".jsonl": _from_rows}
    if path.suffix not in readers:
        raise InvalidArgument(f"workload: {path}: got a {path.suffix or 'nameless'} file, expected .toml, .csv, .jsonl")
    try:
        return readers[path.suffix](path)
    except OSError as error:
        name = error.filename or path  # of its `requests_file`, perhaps
        raise InvalidArgument(f"workload: {name}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"workload: {path}: got bytes that are no UTF-8, expected UTF-8 text") from error
    except InvalidArgument:
        raise
    except (ValueError, csv.Error) as error:  # a number of too many digits, a zero byte in a name, an endless field
        raise InvalidArgument(f"workload: {path}: cannot be read: {error}") from error


def _from_toml(path: Path) -> Traffic:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidArgument(f"workload: {path}: got what is no TOML: {error}") from error
    for key in data:
        if key not in _KEYS:
            raise InvalidArgument(f"workload: {path}: got an unknown key {key!r}, expected {', '.join(_KEYS)}")
    texts = {key: _text(path, key, data.get(key, path.stem if key == "name" else "")) for key in _TEXTS}
    numbers = {
        field: _whole(path, key, data[key], least, most)
        for key, (field, least, most) in _NUMBERS.items()
        if key in data
    }
    beam = data.get("beam", False)
    if not isinstance(beam, bool):
        raise InvalidArgument(f"workload: {path}: beam: got {beam!r}, expected true or false")
    survival = _number(path, "survival", data.get("survival", 0.75), 0, 1)
    common = {**texts, **numbers, "beam": beam, "survival": survival, "model": _model(path, data.get("model"))}
    if "requests_file" in data:
        rows = _rows(path.parent / _text(path, "requests_file", data["requests_file"]))
        common.setdefault("limit", max(r.prompt + r.output for r in rows) + numbers.get("prefix", 0))
        return Traffic(rows=rows, **common)  # type: ignore[arg-type]
    if "limit" not in common:
        raise InvalidArgument(f"workload: {path}: limit is missing, expected the longest context in tokens")
    tables = {name: _quantiles(path, name, data) for name in _TABLES if name in data}
    for name in ("prompt", "output"):
        if name not in tables:
            raise InvalidArgument(f"workload: {path}: [{name}] is missing, expected a table with tokens = [...]")
    return Traffic(prompt=tables["prompt"], output=tables["output"], shared=tables.get("shared_prefix"), **common)  # type: ignore[arg-type]


def _from_rows(path: Path) -> Traffic:
    rows = _rows(path)
    return Traffic(
        name=path.stem, about=f"{len(rows):,} requests", source=str(path), url="", licence="", rows=rows,
        limit=max(r.prompt + r.output for r in rows),
    )  # fmt: skip


def _rows(path: Path) -> tuple[Request, ...]:
    """The requests of a trace: columns or keys of `PROMPT` and `OUTPUT`, and of `SHARED` if there is one."""
    with path.open(newline="", encoding="utf-8-sig") as file:  # spreadsheets begin a file with a mark
        lines: Iterable[tuple[int, Mapping[str, object]]]
        lines = enumerate(csv.DictReader(file), 2) if path.suffix == ".csv" else _json_lines(path, file)
        rows = []
        for number, entry in lines:
            where = f"line {number}"
            prompt, output = (_field(path, where, entry, names, 1) for names in (PROMPT, OUTPUT))
            shared = _field(path, where, entry, SHARED, 0) if any(n in entry for n in SHARED) else 0
            if shared > prompt:
                raise InvalidArgument(f"workload: {path}: {where}: shared: got {shared}, expected 0 to {prompt}")
            rows.append(Request(prompt, output, shared))
            if len(rows) > MOST_ROWS:
                raise InvalidArgument(f"workload: {path}: got more than {MOST_ROWS:,} requests, expected as many")
    if not rows:
        raise InvalidArgument(f"workload: {path}: got no request, expected at least one")
    return tuple(rows)


def _json_lines(path: Path, file: Iterable[str]) -> Iterable[tuple[int, Mapping[str, object]]]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"workload: {path}: line {number}: got what is no JSON: {error}") from error
        if not isinstance(entry, dict):
            raise InvalidArgument(f"workload: {path}: line {number}: got {entry!r:.40}, expected a JSON object")
        yield number, entry


def _field(path: Path, where: str, entry: Mapping[str, object], names: tuple[str, ...], least: int) -> int:
    name = next((n for n in names if n in entry), None)
    if name is None:
        got = ", ".join(map(repr, entry)) or "nothing"
        raise InvalidArgument(
            f"workload: {path}: {where}: {names[0]} is missing: got {got}, expected {' or '.join(names)}"
        )
    value = entry[name]
    if isinstance(value, str) and value.strip().isdecimal() and len(value) < 12:
        value = int(value)
    return _whole(path, f"{where}: {name}", value, least, MOST_TOKENS)


def _quantiles(path: Path, name: str, data: Mapping[str, object]) -> Quantiles:
    table = data[name]
    if not isinstance(table, dict):
        raise InvalidArgument(f"workload: {path}: {name}: got {table!r:.40}, expected a table")
    key = "of_prompt" if name == "shared_prefix" else "tokens"
    top = 1.0 if name == "shared_prefix" else float(MOST_TOKENS)
    accepted = (key, "mean", "rank_correlation_with_prompt", "block", "of_all_prompt_tokens")
    for extra in table:
        if extra not in accepted:
            raise InvalidArgument(
                f"workload: {path}: [{name}]: got an unknown key {extra!r}, expected {', '.join(accepted)}"
            )
    shares = _list(path, "shares", data.get("shares"), 1.0)
    values = _list(path, f"[{name}] {key}", table.get(key), top)
    if len(shares) != len(values) or len(shares) < 2:
        raise InvalidArgument(
            f"workload: {path}: [{name}] {key}: got {len(values)} values, expected as many as shares, "
            f"{len(shares)}, two at least"
        )
    if shares[0] != 0 or shares[-1] != 1 or any(a >= b for a, b in itertools.pairwise(shares)):
        raise InvalidArgument(f"workload: {path}: shares: got {shares}, expected ascending numbers from 0 to 1")
    if any(a > b for a, b in itertools.pairwise(values)):
        raise InvalidArgument(f"workload: {path}: [{name}] {key}: got values that descend, expected quantiles")
    where = f"[{name}] rank_correlation_with_prompt"
    correlation = _number(path, where, table.get("rank_correlation_with_prompt", 0), -1, 1)
    return Quantiles(tuple(shares), tuple(values), correlation)


def _list(path: Path, key: str, value: object, most: float) -> list[float]:
    if not isinstance(value, list):
        raise InvalidArgument(f"workload: {path}: {key}: got {value!r:.40}, expected a list of numbers")
    return [_number(path, f"{key}[{i}]", v, 0, most) for i, v in enumerate(value)]


def _number(path: Path, key: str, value: object, least: float, most: float) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or not least <= value <= most:  # type: ignore[arg-type,operator]
        raise InvalidArgument(f"workload: {path}: {key}: got {value!r:.40}, expected a number from {least} to {most}")
    return float(value)  # type: ignore[arg-type]


def _whole(path: Path, key: str, value: object, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise InvalidArgument(
            f"workload: {path}: {key}: got {value!r:.40}, expected a whole number from {least:,} to {most:,}"
        )
    return value


def _text(path: Path, key: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidArgument(f"workload: {path}: {key}: got {value!r:.40}, expected a string")
    return value


def _model(path: Path, value: object) -> Model | None:
    if value is None:
        return None
    if isinstance(value, str):
        return model(value)
    if not isinstance(value, dict):
        raise InvalidArgument(f"workload: {path}: model: got {value!r:.40}, expected a name or a table")
    return from_table(value, f"workload: {path}: [model]", path.stem)
