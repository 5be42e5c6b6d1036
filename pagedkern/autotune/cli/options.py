"""What the commands share: how a parser looks, and the types of options."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from pagedkern.autotune import arguments, workloads
from pagedkern.autotune.cli import PROG
from pagedkern.autotune.recommend import parse_memory
from pagedkern.autotune.records import Recording, load
from pagedkern.autotune.report import console
from pagedkern.autotune.store import files
from pagedkern.errors import InvalidArgument

FORMAT = 1  # of what --json prints

Add = Callable[..., argparse.Action]
T = TypeVar("T")


def parser(command: str, description: str, epilog: str = "", arguments: str = "") -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"{PROG} {command}",
        usage=f"%(prog)s [options]{arguments}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_serving(add: Add, several: bool = False) -> None:
    """--workload, --model and --memory."""
    names = ", ".join(workloads.names())
    what = f"{names}, or a TOML, CSV or JSONL file"
    if several:
        add(
            "--workload",
            type=workload,
            action="append",
            metavar="NAME",
            help=f"{what}; may be given again (default: all presets)",
        )
    else:
        add("--workload", type=workload, default="chat", metavar="NAME", help=f"{what} (default chat)")
    shape = "heads=32, kv_heads=8, head_dim=128, layers=32, dtype=bfloat16, weight_bytes=16e9 joined by commas alone"
    known = ", ".join(workloads.model_names())
    folder = "a folder with a config.json, or that file"
    change = "either with changes as llama-3-8b,dtype=float32"
    text = f"{known}; {folder}; {change}; or a shape: {shape} (default llama-3-8b)"
    add("--model", type=model, metavar="NAME", help=text)
    add("--memory", type=memory, metavar="BYTES", help="of the KV cache, such as 24GB (default: by what is free)")


def add_json(add: Add, what: str = "a JSON document instead of tables") -> None:
    add("--json", action="store_true", help=f"print {what}")


def seconds(text: str) -> float:
    return _refused(lambda given: arguments.seconds("time", given), text)


def count(text: str) -> int:
    return _refused(lambda given: arguments.count("number", given), text)


def block_sizes(text: str) -> list[int]:
    return _refused(lambda given: arguments.block_sizes("block size", given), text)


def backends(text: str) -> list[str]:
    return _refused(lambda given: arguments.backends("backend", given), text)


def workload(text: str) -> workloads.Traffic:
    return _refused(workloads.load, text)


def model(text: str) -> workloads.Model:
    return _refused(workloads.model, text)


def memory(text: str) -> int:
    return _refused(parse_memory, text)


def _refused(make: Callable[[str], T], text: str) -> T:
    try:
        return make(text)
    except InvalidArgument as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def last_records() -> Path | None:
    """The records of the last run on this machine."""
    folder = files.runs()
    found = sorted(files.found(folder, "*.jsonl"), key=lambda p: p.stat().st_mtime) if folder else []
    return found[-1] if found else None


def records(path: Path | None) -> Recording:
    """The records of a file, or of the last run. Raises `InvalidArgument`."""
    path = path or last_records()
    if path is None:
        raise InvalidArgument(f"records: none of this machine: run {PROG}, or name a file")
    return load(path)


def write_json(document: Mapping[str, object]) -> None:
    """Print a document, with the version of its format: another number once a field means something else or is gone."""
    console.write(json.dumps({"format": FORMAT, **document}, indent=1, allow_nan=False) + "\n")
