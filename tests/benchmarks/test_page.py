"""The page: which figures it takes from where, and that the one in docs shows the results that are kept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.page import __main__ as page
from benchmarks.page import tables
from benchmarks.page.results import load, side_by_side

ROOT = Path(__file__).parents[2]
KEPT = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


def entry(group: str, name: str, seconds: float, **info: Any) -> dict[str, Any]:
    return {
        "group": group,
        "fullname": f"{group}/{name}",
        "stats": {"median": seconds, "iqr": seconds / 10, "rounds": 7},
        "extra_info": {"row": name, **info},
    }


def written(path: Path, entries: list[dict[str, Any]], day: int = 1, device: str = "Abacus (1/2), 3 threads") -> Path:
    machine = {"device": device, "python": "3.11.7", "versions": {"torch": "2.13.0"}}
    data = {"machine_info": machine, "commit_info": {"id": "a" * 40}, "size": "small", "benchmarks": entries}
    path.write_text(json.dumps({**data, "datetime": f"2026-01-0{day}T00:00:00"}))
    return path


def test_a_group_is_sorted_and_compared_with_our_best(tmp_path: Path) -> None:
    rates = {"gb_per_s": 12.0, "of_read": 0.5}
    rows = [("torch SDPA, contiguous", 4e-3), ("cpu", 2e-3), ("reference", 8.0), ("cpu span=64", 1e-3)]
    path = written(tmp_path / "a.json", [entry("decode 1 x 2, int8", name, time, **rates) for name, time in rows])
    (result,) = load([path])
    lines = tables.timed(result, "decode").splitlines()
    assert lines[2:] == [
        "| 1 x 2, int8 | cpu span=64 | 1.00 ms | 10% | 12.0 | 50% | 1.00 × |",
        "|  | cpu | 2.00 ms | 10% | 12.0 | 50% | 2.00 × |",
        "|  | torch SDPA, contiguous | 4.00 ms | 10% | 12.0 | 50% | 4.00 × |",
        "|  | reference | 8.00 s | 10% | 12.0 | 50% | 8,000 × |",
    ]


def test_files_of_one_machine_are_one_result_and_the_last_measurement_counts(tmp_path: Path) -> None:
    late = written(tmp_path / "a.json", [entry("g", "cpu", 2.0)], day=2)
    early = written(tmp_path / "b.json", [entry("g", "cpu", 1.0), entry("g", "torch", 3.0)], day=1)
    other = written(tmp_path / "c.json", [entry("g", "cpu", 9.0)], device="Other, 1 thread")
    first, second = sorted(load([late, early, other]), key=lambda result: result.device)
    assert [(row.name, row.seconds) for row in first.rows.values()] == [("cpu", 2.0), ("torch", 3.0)]
    assert first.dates == {"2026-01-01", "2026-01-02"}
    assert first.slug == "abacus-1-2-3-threads"
    assert [row.seconds for row in second.rows.values()] == [9.0]


def test_allocator_against_its_peer(tmp_path: Path) -> None:
    group = "allocator, decode, no prefix cache, for each sequence"
    entries = [entry(group, "pagedkern", 5e-8), entry(group, "vLLM's block manager", 4e-6)]
    entries.append(entry("allocator, fork, for each fork", "pagedkern", 1e-6))
    (result,) = load([written(tmp_path / "a.json", entries)])
    assert tables.allocator(result).splitlines()[2:] == [
        "| decode, no prefix cache | sequence | 0.050 | 4.00 | 80.0 × |",
        "| fork | fork | 1.000 |  |  |",
    ]


def test_only_the_marked_parts_are_made_anew() -> None:
    text = "a\n<!-- one -->\nold\n<!-- /one -->\nb <!-- no part -->\n<!-- two words -->\n<!-- /two words -->\nc\n"
    made = page.fill(text, {"one": "1", "two words": "2"})
    assert made == text.replace("old", "1").replace("<!-- two words -->\n", "<!-- two words -->\n2\n")
    with pytest.raises(KeyError, match="one"):
        page.fill(text, {})


def test_lines_of_contenders_in_turn(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("# how, when\ndecode    float32        8 x 8192, GQA 4                ms 24.36  gb_s 22.04\n")
    remarks, records = side_by_side(path)
    assert remarks == ["how, when"]
    assert records == {"decode": [{"dtype": "float32", "case": "8 x 8192, GQA 4", "ms": "24.36", "gb_s": "22.04"}]}


def test_a_gpu_check_is_shown(tmp_path: Path) -> None:
    check = {"machine": {"date": "2026-01-01", "device": {"name": "GPU"}}, "emulated": False, "backends": []}
    path = tmp_path / "gpucheck.json"
    path.write_text(json.dumps({**check, "parts": {}, "problems": []}))
    target = tmp_path / "page.md"
    target.write_text("<!-- gpu -->\n<!-- /gpu -->\n")
    page.main([str(path), "--page", str(target)])
    assert "GPU, 2026-01-01" in target.read_text()
    page.main([str(written(tmp_path / "a.json", [])), "--page", str(target)])
    assert page.MISSING in target.read_text()


def test_the_page_in_docs_shows_the_results_that_are_kept(tmp_path: Path) -> None:
    docs = ROOT / "docs" / "benchmarks.md"
    copy = tmp_path / "benchmarks.md"
    shutil.copy(docs, copy)
    assert KEPT
    page.main(["--page", str(copy)])
    assert copy.read_text() == docs.read_text(), "run python -m benchmarks.page"
    assert {path.name for path in (tmp_path / "benchmarks").iterdir()} == {
        path.name for path in (ROOT / "docs" / "benchmarks").iterdir()
    }
