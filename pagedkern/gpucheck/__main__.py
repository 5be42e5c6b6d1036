"""The command line of the GPU check."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import pagedkern
from pagedkern.gpucheck import agreement, composes, machine, speed, table
from pagedkern.gpucheck.clock import Clock
from pagedkern.gpucheck.problems import DECODE, PREFILL

PARTS = ("agreement", "limits", "decode", "prefill", "operations", "swap", "graphs", "compile", "sanitizer", "contract")
NOT_GPU = ("reference", "cpu")
NEED_A_GPU = ("limits", "decode", "prefill", "operations", "swap", "graphs", "sanitizer", "configs")


def main(arguments: list[str] | None = None) -> int:
    """Run the parts, write the JSON file, print the table. Returns 1 if anything failed."""
    options = _parser().parse_args(arguments)
    start = time.monotonic()
    emulated = not torch.cuda.is_available()
    infos = pagedkern.backends()
    wanted = options.backends or [info.name for info in infos if info.available and info.name not in NOT_GPU]
    chosen = [info.name for info in infos if info.available and info.name in wanted]
    result: dict[str, Any] = {
        "machine": machine.describe(),
        "emulated": emulated,
        "backends": [asdict(info) for info in infos],
        "parts": {},
    }
    check = _Check(chosen, emulated, options.small or emulated, options.every, options.budget, start)
    for part in options.parts:
        result["parts"][part] = check.run(part)
    result["seconds"] = round(time.monotonic() - start, 1)
    result["problems"] = _problems(result["parts"]) + [
        f"{info.name}: {info.reason}" for info in infos if info.name in wanted and not info.available
    ]
    if not wanted:
        result["problems"].append("no GPU backend can run here")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table.render(result))  # noqa: T201 (what the command is for)
    return 1 if result["problems"] else 0


class _Check:
    """The parts by name. What a part raises becomes its result; what starts after the budget is left out by name."""

    def __init__(
        self, backends: list[str], emulated: bool, small: bool, every: int, budget: float, start: float
    ) -> None:
        self._backends, self._emulated, self._small, self._every = backends, emulated, small, every
        self._end = start + budget
        self._device = "cpu" if emulated else "cuda"
        self._clock: Clock | None = None

    def run(self, part: str) -> Any:
        if self._emulated and part in NEED_A_GPU:
            return {"left_out": "needs a GPU"}
        if time.monotonic() > self._end:
            return {"left_out": "the budget was used up"}
        try:
            return getattr(self, f"_{part}")()
        except Exception as error:  # one part must not take the rest with it
            return {"error": f"{type(error).__name__}: {error}"[:2000]}

    @property
    def clock(self) -> Clock:
        self._clock = self._clock or Clock()
        return self._clock

    def _each(self, check: Callable[[str], Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for backend in self._backends:
            try:
                found[backend] = check(backend)
            except Exception as error:
                found[backend] = f"{type(error).__name__}: {error}"[:2000]
        return found

    def _agreement(self) -> Any:
        return self._each(lambda name: agreement.check(name, self._device, self._small, self._every))

    def _limits(self) -> Any:
        return speed.limits(self.clock, speed.Sizes())

    def _decode(self) -> Any:
        return speed.attention(self.clock, self._backends, "decode", DECODE)

    def _prefill(self) -> Any:
        return speed.attention(self.clock, self._backends, "prefill", PREFILL)

    def _operations(self) -> Any:
        return speed.small_operations(self.clock, self._backends, speed.Sizes())

    def _swap(self) -> Any:
        return speed.swap(self.clock, speed.Sizes())

    def _configs(self) -> Any:
        return speed.configurations(self.clock, self._backends, (*DECODE[:4], PREFILL[0]))

    def _graphs(self) -> Any:
        return self._each(composes.graph_replay)

    def _compile(self) -> Any:
        return self._each(lambda name: composes.compiled(name, self._device))

    def _sanitizer(self) -> Any:
        return self._each(composes.sanitizer)

    def _contract(self) -> Any:
        if not self._backends:
            return {"tests": {"skipped": "no backend to run them on"}}
        left = self._end - time.monotonic()
        return {"tests": composes.contract(self._backends, max(20.0, left), 16 if self._emulated else 4)}


def _problems(parts: dict[str, Any]) -> list[str]:
    """Everything that failed, a line each."""
    lines = []
    for part, found in parts.items():
        rows = found if isinstance(found, list) else []
        lines += [f"{part} {row.get('shape', '')} {row['backend']}: {row['failed']}" for row in rows if "failed" in row]
        for name, value in found.items() if isinstance(found, dict) else ():
            if name == "error":
                lines.append(f"{part}: {value}")
            elif isinstance(value, dict):
                lines += [f"{part} {name}: {failed}" for failed in value.get("failed", [])]
                lines += [f"{part} {name}: not clean"] if value.get("clean") is False else []
            elif isinstance(value, str) and name != "left_out":
                lines.append(f"{part} {name}: {value}")
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pagedkern.gpucheck", description=sys.modules["pagedkern.gpucheck"].__doc__
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result as JSON to this file")
    parser.add_argument(
        "--budget", type=float, default=270, metavar="S", help="seconds after which no further part is begun (270)"
    )
    parser.add_argument(
        "--backends",
        type=_backends,
        metavar="NAMES",
        help="names joined by commas (default: all GPU backends that run here)",
    )
    parser.add_argument(
        "--parts",
        type=_parts,
        default=list(PARTS),
        metavar="NAMES",
        help=f"what to do, joined by commas: {', '.join(PARTS)} (default: all of these); and configs, which times "
        "every configuration",
    )
    parser.add_argument("--small", action="store_true", help="small shapes, as under emulation")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="check every n-th shape of the sample (1)")
    return parser


def _parts(text: str) -> list[str]:
    return _names(text, [*PARTS, "configs"])


def _backends(text: str) -> list[str]:
    return _names(text, [info.name for info in pagedkern.backends()])


def _names(text: str, accepted: list[str]) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in accepted]:
        raise argparse.ArgumentTypeError(f"got {unknown[0]!r}, expected {', '.join(accepted)}")
    return names


if __name__ == "__main__":
    raise SystemExit(main())
