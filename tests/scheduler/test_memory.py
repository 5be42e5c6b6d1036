"""How much memory holds no token, on the shapes of public traces; and the contiguous rival by itself."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

from autotune import derive_workload
from benchmarks.memory_waste import ROOT, Workload, compare
from reference.contiguous import ContiguousPool, ContiguousServer, reservation

TABLES = sorted((ROOT / "autotune" / "workloads").glob("*.toml"))
POLICIES = ("max", "pow2", "oracle")


def test_there_are_tables() -> None:
    assert [path.stem for path in TABLES] == [
        "azure-code",
        "azure-conversation",
        "mooncake-conversation",
        "mooncake-synthetic",
    ]


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_waste_on_the_shape_of_a_trace(path: Path) -> None:
    """Kwon et al. (arXiv:2309.06180) report under 4 % for paging; block size 16."""
    found = compare(path, num_requests=200, contexts=2, token_budget=16384)
    rival = found.contiguous
    sys.stdout.write(
        f"{path.stem}: waste of reserved memory: paged {found.paged.waste:.2%}, contiguous "
        + ", ".join(f"{p} {rival[p].waste:.1%}" for p in POLICIES)
        + "; requests resident, paged to contiguous: "
        + ", ".join(f"{p} {found.ratio(p):.1f}" for p in POLICIES)
        + "\n"
    )
    assert found.scheduler.stats["requests_finished"] == 200
    assert not found.scheduler.allocator.sequences
    assert found.paged.waste < 0.04
    assert rival["max"].waste > rival["pow2"].waste > rival["oracle"].waste > found.paged.waste
    assert found.ratio("max") > found.ratio("pow2") > 1.15
    assert found.ratio("oracle") > 1.15
    for usage in (found.paged, *rival.values()):
        assert usage.tokens + usage.later + usage.never + usage.holes == usage.steps * usage.num_slots
    if found.shared is not None:
        assert found.shared.waste < 0.04
        assert found.shared.mean_resident > found.paged.mean_resident, "shared prefixes take memory once"


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_draws_have_the_shape_of_the_table(path: Path) -> None:
    workload = Workload.load(path)
    drawn = list(workload.draw(5000, random.Random(1)))
    assert drawn == list(workload.draw(5000, random.Random(1)))
    data = tomllib.loads(path.read_text())
    assert data["licence"] in ("CC-BY-4.0", "Apache-2.0")
    assert data["requests"] > 3000
    lengths = {"prompt": [d.prompt for d in drawn], "output": [d.output for d in drawn]}
    steps = list(pairwise(data["shares"]))
    for name, values in lengths.items():
        tokens, mean = data[name]["tokens"], data[name]["mean"]
        assert all(low <= high for low, high in pairwise(tokens))
        table = sum((a + b) / 2 * (y - x) for (a, b), (x, y) in zip(pairwise(tokens), steps, strict=True))
        assert abs(table / mean - 1) < 0.06, "the table has the mean of the trace"
        assert abs(sum(values) / len(values) / mean - 1) < 0.12
    if "shared_prefix" in data:
        assert all(d.shared <= d.prompt for d in drawn)
        share = sum(d.shared for d in drawn) / sum(lengths["prompt"])
        assert abs(share - data["shared_prefix"]["of_all_prompt_tokens"]) < 0.08
    wanted = data["output"]["rank_correlation_with_prompt"]
    got = derive_workload.rank_correlation(lengths["prompt"], lengths["output"])
    assert abs(got - wanted) < 0.06
    assert all(d.prompt + d.output <= workload.longest <= workload.context for d in drawn)


def test_a_table_is_derived_from_a_trace(tmp_path: Path) -> None:
    entries = [(1024, 5, [0, 1]), (1600, 7, [0, 1, 2, 3]), (300, 1, [0]), (2000, 3, [8, 9, 10, 11])]
    mooncake = tmp_path / "trace.jsonl"
    mooncake.write_text(
        "\n".join(json.dumps({"input_length": p, "output_length": o, "hash_ids": ids}) for p, o, ids in entries)
    )
    azure = tmp_path / "trace.csv"
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"0,{p},{o}\n" for p, o, _ in entries))
    for trace in (mooncake, azure):
        names = ["--name", "t", "--source", 'a "b"', "--url", "u", "--licence", "MIT"]
        script = ROOT / "autotune" / "derive_workload.py"
        text = subprocess.run(
            [sys.executable, str(script), str(trace), *names], check=True, capture_output=True, text=True
        ).stdout
        data = tomllib.loads(text)
        assert (data["name"], data["source"], data["requests"], data["longest"]) == ("t", 'a "b"', 4, 2003)
        assert data["prompt"]["mean"] == 1231.0
        by_share = dict(zip(data["shares"], data["prompt"]["tokens"], strict=True))
        assert [by_share[share] for share in (0, 0.25, 0.3, 0.5, 0.55, 1)] == [300, 300, 1024, 1024, 1600, 2000]
        assert data["output"]["rank_correlation_with_prompt"] == 0.4
        assert ("shared_prefix" in data) == (trace is mooncake)
    data = tomllib.loads(
        subprocess.run(
            [sys.executable, str(script), str(mooncake), *names], check=True, capture_output=True, text=True
        ).stdout
    )
    shared = data["shared_prefix"]
    assert shared["of_prompt"][0] == 0
    assert shared["of_prompt"][-1] == 1, "all of the third prompt"
    assert shared["mean"] == round((1024 / 1600 + 1) / 4, 3)
    assert shared["of_all_prompt_tokens"] == round((1024 + 300) / 4924, 3)


def test_rank_correlation_with_ties() -> None:
    assert derive_workload.rank_correlation([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert derive_workload.rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert derive_workload.ranks([5, 7, 5, 9]) == [0.5, 2.0, 0.5, 3.0]


def test_first_fit_against_a_bitmap() -> None:
    rng = random.Random(0)
    pool, slots = ContiguousPool(64), [False] * 64
    held: dict[int, int] = {}
    refused = 0
    for _ in range(5000):
        if rng.random() < 0.55:
            length = rng.randint(1, 20)
            first = next((i for i in range(65 - length) if not any(slots[i : i + length])), None)
            start = pool.reserve(length)
            assert start == first
            if start is None:
                refused += pool.num_free >= length
                continue
            held[start] = length
            slots[start : start + length] = [True] * length
        elif held:
            start = rng.choice(list(held))
            length = held.pop(start)
            pool.release(start)
            slots[start : start + length] = [False] * length
            with pytest.raises(KeyError):
                pool.release(start)
        assert pool.num_free == slots.count(False)
        assert all(a + length < b for (a, length), (b, _) in pairwise(pool.holes)), "no two holes touch"
    assert refused > 50, "fragmentation: enough in all, no hole large enough"


def test_what_is_reserved() -> None:
    assert [reservation("pow2", 10, output, 64) for output in (1, 2, 3, 5, 8, 50)] == [11, 12, 14, 18, 18, 64]
    assert reservation("max", 10, 5, 64) == 64
    assert reservation("oracle", 10, 5, 64) == 15
    with pytest.raises(ValueError, match="policy: got 'best'"):
        reservation("best", 1, 1, 1)
    with pytest.raises(ValueError, match="do not fit"):
        ContiguousServer(64, "max", 32, 16).serve([(30, 3)])


def test_the_rival_by_hand() -> None:
    """Memory for two contexts of 8, three requests: the third waits until one of the first is done."""
    usage = ContiguousServer(16, "max", 8, 4).serve([(3, 2), (2, 3), (4, 1)])
    # Step 1: A's prompt and 1 token of B's, C waits for the budget. 2: A ends, B's prompt ends, C waits for memory.
    assert (usage.steps, usage.resident, usage.tokens, usage.later, usage.never, usage.holes) == (1, 1, 2, 3, 3, 8)
    usage = ContiguousServer(16, "max", 8, 16).serve([(3, 2), (2, 3), (4, 1)])
    # Step 1: both prompts, C waits for memory. 2: A ends, B decodes, C waits still. 3: C is in.
    assert (usage.steps, usage.resident, usage.tokens) == (2, 3, 3 + 2 + 3)
    assert (usage.later, usage.never, usage.holes) == (2 + 3 + 2, 3 + 3 + 3, 8)
