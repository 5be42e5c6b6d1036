"""Every benchmark runs, on tiny problems and once; what it writes becomes a page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.allocator import CASES
from benchmarks.page import __main__ as page
from benchmarks.page.results import load

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of one run, in a process of its own: nothing is emulated there."""
    path = tmp_path_factory.mktemp("bench") / "bench.json"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PAGEDKERN_VLLM"))}
    for name in ("TRITON_INTERPRET", "NUMBA_ENABLE_CUDASIM", "PYTHONPATH"):
        kept.pop(name, None)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "benchmarks",
        "--size",
        "tiny",
        "--device",
        "cpu",
        "-q",
        "-p",
        "no:xdist",
    ]
    command += ["--configs", "all", "--benchmark-json", str(path), "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    return path


@pytest.fixture(scope="module")
def rows(measured: Path) -> list[dict[str, Any]]:
    return list(json.loads(measured.read_text())["benchmarks"])


def test_every_group_is_there(rows: list[dict[str, Any]]) -> None:
    groups: dict[str, set[str]] = {}
    for row in rows:
        groups.setdefault(row["group"], set()).add(row["extra_info"]["row"])
    assert {"cpu", "reference", "torch SDPA, contiguous"} <= groups["decode 2 x 48, float32"]
    assert {"cpu", "reference"} <= groups["decode 2 x 48, float32, cache int8"]
    assert {"cpu", "torch SDPA, contiguous"} <= groups["prefill 2 chunks of 16 after 32, float32"]
    assert any(name.startswith("cpu span=") for name in groups["decode 2 x 48, float32"]), "--configs all"
    assert {f"allocator, {name}, for each {case.unit}" for name, case in CASES.items()} <= set(groups)
    assert len(groups["memory"]) == 4
    for beginning in ("write_kv", "copy_blocks", "merge_states", "swap", "branch a", "branched", "block size, cpu"):
        assert any(name.startswith(beginning) for name in groups), beginning


def test_rows_say_what_they_moved_and_how_fast(rows: list[dict[str, Any]]) -> None:
    (row,) = (r for r in rows if r["group"] == "decode 2 x 48, float32" and r["extra_info"]["row"] == "cpu")
    info = row["extra_info"]
    assert info["bytes"] == 2 * 48 * 2 * 2 * 64 * 4, "sequences, tokens, K and V, KV heads, head dim, bytes"
    assert info["gb_per_s"] == pytest.approx(info["bytes"] / row["stats"]["median"] / 1e9, abs=1e-3)
    assert info["of_read"] == pytest.approx(info["gb_per_s"] / info["read_gb_per_s"], rel=0.05, abs=2e-3)
    (chunks,) = (r for r in rows if r["group"].startswith("prefill") and r["extra_info"]["row"] == "cpu")
    pairs = 2 * sum(range(33, 49))  # sequences, keys that each query sees
    assert chunks["extra_info"]["flops"] == 2 * 2 * pairs * 4 * 64


def test_sharing_moves_a_block_where_contiguous_memory_moves_a_prompt(rows: list[dict[str, Any]]) -> None:
    moved = {r["extra_info"]["row"]: r["extra_info"]["bytes"] for r in rows if r["group"].startswith("branch a")}
    assert moved["torch, contiguous"] == moved["pagedkern"] * 40 // 16, "tokens of the prompt, of a block"


def test_no_name_of_a_host_a_person_or_a_folder(measured: Path) -> None:
    text = measured.read_text()
    data = json.loads(text)
    assert set(data["machine_info"]) == {"device", "python", "system", "versions"}
    assert set(data["commit_info"]) <= {"id", "time", "dirty"}
    for private in (os.uname().nodename, str(ROOT), str(Path.home())):
        assert len(private) < 2 or f'"{private}' not in text
    assert all(len(json.dumps(row["stats"])) < 600 for row in data["benchmarks"]), "statistics, not every round"


def test_results_become_a_page(measured: Path, tmp_path: Path) -> None:
    target = tmp_path / "bench.md"
    target.write_text((ROOT / "docs" / "benchmarks.md").read_text())
    page.main([str(measured), "--page", str(target)])
    text = target.read_text()
    (result,) = load([measured])
    assert result.caption in text
    for name in ("decode", "branch", "allocator", "memory"):
        svg = (tmp_path / "bench" / f"{result.slug}-{name}.svg").read_text()
        assert f"](bench/{result.slug}-{name}.svg)" in text
        assert "<svg" in svg
        assert "NaN" not in svg
    line = next(line for line in text.splitlines() if line.startswith("| 2 x 48, float32 |"))
    assert line.count("|") == 8
    page.main([str(measured), "--page", str(target)])
    assert target.read_text() == text, "made twice, it is the same"
