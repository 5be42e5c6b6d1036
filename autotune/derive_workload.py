"""Make a workload table (`workloads/*.toml`) from a trace of requests.

    python autotune/derive_workload.py TRACE --name NAME --source TEXT --url URL --licence SPDX > workloads/NAME.toml

TRACE is a CSV file with the columns ContextTokens and GeneratedTokens (Azure Public Dataset), or a file of JSON lines
with input_length, output_length and hash_ids, the ids of the prompt's blocks of 512 tokens (Mooncake). What is kept is
the shape: quantiles of the lengths, how they go together, how much of a prompt was the beginning of an earlier one.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean

SHARES = [0, 0.01, *(i / 20 for i in range(1, 20)), 0.98, 0.99, 0.995, 0.999, 1]
PREFIX_BLOCK = 512


def read(path: Path) -> tuple[list[int], list[int], list[int] | None]:
    """Prompt and output tokens of each request, in the order of arrival; leading tokens of its prompt seen before."""
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        return [int(row["ContextTokens"]) for row in rows], [int(row["GeneratedTokens"]) for row in rows], None
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    seen: set[int] = set()  # an id stands for the block and all before it
    shared = []
    for entry in entries:
        ids = entry["hash_ids"]
        count = next((i for i, ident in enumerate(ids) if ident not in seen), len(ids))
        seen.update(ids)
        shared.append(min(count * PREFIX_BLOCK, entry["input_length"]))
    return [e["input_length"] for e in entries], [e["output_length"] for e in entries], shared


def quantiles(values: Sequence[float]) -> list[float]:
    """At each of SHARES, the value that this share of all do not exceed (the minimum for 0)."""
    ordered = sorted(values)
    return [ordered[max(0, -int(-share * len(ordered) // 1) - 1)] for share in SHARES]


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's, ties given their middle rank."""
    x, y = ranks(a), ranks(b)
    mx, my = fmean(x), fmean(y)
    covariance = sum((p - mx) * (q - my) for p, q in zip(x, y, strict=True))
    return covariance / sqrt(sum((p - mx) ** 2 for p in x) * sum((q - my) ** 2 for q in y))


def ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    result, start = [0.0] * len(values), 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        for i in order[start:end]:
            result[i] = (start + end - 1) / 2
        start = end
    return result


def table(name: str, values: Sequence[float], prompts: Sequence[int], key: str = "tokens") -> list[str]:
    lines = [f"[{name}]", f"mean = {round(fmean(values), 3 if key != 'tokens' else 1)}"]
    if values is not prompts:
        lines.append(f"rank_correlation_with_prompt = {rank_correlation(prompts, values):.3f}")
    return [*lines, f"{key} = {quantiles(values)}", ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    for name in ("name", "source", "url", "licence"):
        parser.add_argument(f"--{name}", required=True)
    options = parser.parse_args()
    prompts, outputs, shared = read(options.trace)
    lines = ["# The shape of a public trace, made by autotune/derive_workload.py. Lengths in tokens."]
    lines += [f"{key} = {json.dumps(getattr(options, key))}" for key in ("name", "source", "url", "licence")]
    lines += [
        f"requests = {len(prompts)}",
        f"longest = {max(p + o for p, o in zip(prompts, outputs, strict=True))}  # prompt and output of one request",
        "# The quantiles below are those of these shares.",
        f"shares = {SHARES}",
        "",
    ]
    lines += table("prompt", prompts, prompts) + table("output", outputs, prompts)
    if shared is not None:
        parts = [round(s / p, 3) for s, p in zip(shared, prompts, strict=True)]
        lines += ["# How much of a prompt was the beginning of an earlier one, in whole blocks: shares of the prompt."]
        lines += table("shared_prefix", parts, prompts, "of_prompt")
        lines[-1:] = [f"block = {PREFIX_BLOCK}", f"of_all_prompt_tokens = {sum(shared) / sum(prompts):.3f}", ""]
    sys.stdout.write("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
