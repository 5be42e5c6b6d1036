"""python -m benchmarks.page [RESULT.json ...] [--page FILE]

Writes the tables and pictures of results into a page: what stands between `<!-- NAME -->` and `<!-- /NAME -->` is made
anew, the text around it stays. Results are what `make bench` writes, or `make gpu-check`; without any, those in
benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path

from benchmarks.page import pictures, tables
from benchmarks.page.results import Result, load, side_by_side
from pagedkern.gpucheck.table import render

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MISSING = "Still missing: `make gpu-check` and `make bench` make them on a machine with a GPU."


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="*", type=Path, metavar="RESULT.json")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "benchmarks.md")
    options = parser.parse_args(arguments)
    paths = options.results or sorted(RESULTS.glob("*.json"))
    checks = [path for path in paths if "parts" in json.loads(path.read_text())]
    results = load(path for path in paths if path not in checks)
    folder = options.page.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    for result in results:
        for name, svg in pictures.draw(result).items():
            (folder / f"{result.slug}-{name}.svg").write_text(svg)
    parts = {name: _each(results, part, folder, name) for name, part in PARTS.items()}
    parts |= {"side by side": _compared(), "allocator side by side": _allocator_in_turn(), "gpu": _checked(checks)}
    options.page.write_text(fill(options.page.read_text(), parts))


PARTS: dict[str, Callable[[Result], str]] = {
    "machine": lambda result: f"- {result.caption}.",
    "decode": lambda result: tables.timed(result, "decode"),
    "prefill": lambda result: tables.timed(result, "prefill", rate="gflop_per_s"),
    "block size": tables.block_sizes,
    "operations": lambda result: tables.timed(result, "write_kv", "copy_blocks", "merge_states", "swap"),
    "sharing": lambda result: tables.timed(result, "branch"),
    "allocator": tables.allocator,
    "memory": tables.memory,
}
PICTURES = {"decode": "decode", "sharing": "branch", "allocator": "allocator", "memory": "memory"}


def _each(results: list[Result], part: Callable[[Result], str], folder: Path, name: str) -> str:
    """A part for each machine that has it; the machine is named if there are several."""
    blocks = []
    for result in results:
        if not (text := part(result)):
            continue
        blocks += [f"{result.device}:"] if len(results) > 1 and name != "machine" else []
        picture = f"{result.slug}-{PICTURES.get(name)}.svg"
        if (folder / picture).exists():
            blocks.append(f"![{name}: {result.device}]({folder.name}/{picture})")
        blocks.append(text)
    return "\n\n".join(blocks)


def _compared() -> str:
    remarks, records = side_by_side(RESULTS / "cpu_attention.txt")
    blocks = [f"`{remarks[0]}`. {'. '.join(remarks[1:])}."]
    return "\n\n".join([*blocks, *(f"{what}:\n\n{tables.compared(found)}" for what, found in records.items())])


def _allocator_in_turn() -> str:
    return (RESULTS / "allocator.md").read_text().partition("\n\n")[2].strip()


def _checked(paths: list[Path]) -> str:
    return "\n\n".join(f"```\n{render(json.loads(path.read_text()))}\n```" for path in paths) or MISSING


def fill(page: str, parts: dict[str, str]) -> str:
    """The page with its parts made anew; `KeyError` names one that nobody makes."""

    def made(match: re.Match[str]) -> str:
        return f"<!-- {match[1]} -->\n{parts[match[1]]}\n<!-- /{match[1]} -->"

    return re.sub(r"<!-- ([a-z ]+) -->\n.*?<!-- /\1 -->", made, page, flags=re.DOTALL)


if __name__ == "__main__":
    main()
