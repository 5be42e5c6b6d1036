"""The GPU check without a GPU: what it computes, what it notices, and that one failure takes nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pagedkern
from pagedkern.backends import backends, load
from pagedkern.gpucheck import __main__, agreement, composes, peers, speed
from pagedkern.gpucheck.problems import DECODE, PREFILL, sample, shrunk

SMALL = speed.Sizes(copy_bytes=1 << 16, matrix=16, layers=2, blocks=8, moved=3)
TINY = [replace(shape, num_heads=4, num_kv_heads=2, head_dim=32) for shape in map(shrunk, DECODE)]


class Stopped:
    """A clock for the CPU: runs each call once and says one millisecond."""

    device = "cpu"

    def medians(self, calls: Mapping[str, Callable[[], object]], rounds: int = 1, warm: int = 0) -> dict[str, float]:
        for call in calls.values():
            call()
        return dict.fromkeys(calls, 1e-3)

    def captured(self, call: Callable[[], object]) -> Callable[[], object]:
        return call


def run(out: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = __main__.main(["--out", str(out), *arguments])
    return code, json.loads(out.read_text())


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = "agreement,limits,compile,graphs"
    count = len(sample()[::9]) + 2  # and the two small operations
    code, result = run(tmp_path / "folder" / "r.json", "--backends", "cpu", "--every", "9", "--parts", parts)
    assert code == 0
    assert result["emulated"]
    assert result["problems"] == []
    assert result["parts"]["agreement"]["cpu"] == {"checked": count, "failed": []}
    assert result["parts"]["compile"] == {"cpu": None}
    assert result["parts"]["limits"] == {"left_out": "needs a GPU"}
    assert "torch" in result["machine"]["versions"]
    printed = capsys.readouterr().out
    assert f"{count} checked, 0 failed" in printed
    assert "no speed is measured" in printed
    assert max(map(len, printed.splitlines())) < 80


def test_without_a_backend_nothing_is_checked_and_that_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only_cpu = [info for info in backends() if info.name == "cpu"]
    monkeypatch.setattr(pagedkern, "backends", lambda: only_cpu)
    code, result = run(tmp_path / "r.json", "--parts", "agreement,contract")
    assert code == 1
    assert result["problems"] == ["no GPU backend can run here"]
    assert "skipped" in result["parts"]["contract"]["tests"]
    assert "No GPU: " in capsys.readouterr().out


def test_a_part_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        __main__.main(["--parts", "agreement,abacus"])
    assert "got 'abacus', expected agreement, " in capsys.readouterr().err


def test_a_backend_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        __main__.main(["--backends", "cpu,abacus"])
    assert "got 'abacus', expected triton, cupy, " in capsys.readouterr().err


def test_a_backend_that_cannot_run_is_one_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    infos = [replace(info, available=False, reason="no abacus") if info.name == "cupy" else info for info in backends()]
    monkeypatch.setattr(pagedkern, "backends", lambda: infos)
    code, result = run(tmp_path / "r.json", "--backends", "cpu,cupy", "--parts", "agreement", "--every", "40")
    assert code == 1
    assert result["problems"] == ["cupy: no abacus"]
    assert set(result["parts"]["agreement"]) == {"cpu"}
    assert result["parts"]["agreement"]["cpu"]["failed"] == []


def test_a_part_that_fails_leaves_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(__main__._Check, "_agreement", fail)
    code, result = run(tmp_path / "r.json", "--backends", "cpu", "--parts", "agreement,compile")
    assert code == 1
    assert result["problems"] == ["agreement: RuntimeError: out of luck"]
    assert result["parts"]["compile"] == {"cpu": None}


def test_nothing_begins_after_the_budget(tmp_path: Path) -> None:
    code, result = run(tmp_path / "r.json", "--backends", "cpu", "--parts", "agreement,compile", "--budget", "-1")
    assert code == 0
    assert set(result["parts"]["agreement"]) == set(result["parts"]["compile"]) == {"left_out"}


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (lambda call: call.out.mul_(1.1), "out is wrong by"),
        (lambda call: call.out[-1:].fill_(float("nan")), "never written"),
        (lambda call: None if call.lse is None else call.lse.add_(0.5), "lse"),
        (lambda call: call.out.mul_(1 + 2e-7 * (call.max_seqlen_q > 210)), "looser max_seqlen_q"),
        (lambda call: call.out.mul_(1 + 2e-7 * (len(call.seq_lens) == 1)), "alone"),
        (lambda call: call.out.mul_(1 + 2e-7 * call.k_cache.is_contiguous()), "placed elsewhere"),
    ],
)
def test_each_kind_of_fault_is_noticed(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[Any], object], expected: str
) -> None:
    shape = next(shape for shape in sample() if shape.name == "mixed float32/float32")
    assert agreement.attention("cpu", "cpu", shape) is None
    backend = load("cpu")
    right = backend.attention

    def wrong(call: Any, config: Any) -> None:
        right(call, config)
        fault(call)

    monkeypatch.setattr(backend, "attention", wrong)
    assert expected in (agreement.attention("cpu", "cpu", shape) or "")


def test_faults_of_the_small_operations_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = load("cpu")
    monkeypatch.setattr(backend, "write_kv", lambda call: None)
    monkeypatch.setattr(backend, "copy_blocks", lambda call: None)
    found = agreement.check("cpu", "cpu", True, every=100)
    assert [entry["shape"] for entry in found["failed"]] == ["write_kv", "copy_blocks"]


def test_every_row_of_the_speed_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the clock itself, on small shapes: each backend beside torch, a failure beside the others."""
    clock: Any = Stopped()
    assert set(speed.limits(clock, SMALL)) == {"copy_gb_per_s", "bfloat16_tflop_per_s", "float32_tflop_per_s"}
    rows = speed.attention(clock, ["cpu", "abacus"], "decode", TINY)
    assert len(rows) == 3 * len(TINY) - 1 + 1  # torch reads no float8; flex_attention has one shape
    for row in rows:
        assert ("failed" in row) == (row["backend"] == "abacus"), row
        assert row["backend"] == "abacus" or row["gb_per_s"] > 0
    chunks = [replace(shrunk(shape), num_heads=4, num_kv_heads=2, head_dim=32) for shape in PREFILL]
    rows = speed.attention(clock, ["cpu"], "prefill", chunks)
    assert all(row["tflop_per_s"] > 0 for row in rows)
    assert [row["kind"] for row in speed.small_operations(clock, ["cpu"], SMALL)] == ["write_kv", "copy_blocks"]
    assert [row["gb_per_s"] > 0 for row in speed.swap(clock, SMALL)] == [True, True]
    rows = speed.configurations(clock, ["cpu"], TINY[:1])
    assert len({str(row["config"]) for row in rows}) == len(rows) > 1


def test_torch_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the backends are timed beside is the same attention."""
    import pagedkern
    from pagedkern.gpucheck.problems import CallTensors

    for shape in (TINY[1], replace(shrunk(PREFILL[1]), num_heads=4, num_kv_heads=2, head_dim=32)):
        problem = CallTensors(replace(shape, seq_lens=(40,) * 4, q_dtype="float32"), "cpu")
        want = pagedkern.paged_attention(**problem.args, backend="reference")
        for peer in (peers.contiguous(problem), peers.flex_paged(problem, compiled=False)):
            assert (peer().transpose(1, 2).flatten(0, 1) - want).abs().max() < 1e-5


def test_the_contract_part_names_what_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tmp_path / "r.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="a" name="x"/><testcase classname="a" name="y">'
        '<failure message="not equal"/></testcase><testcase classname="a" name="z"><skipped/></testcase>'
        "</testsuite></testsuites>"
    )
    assert composes._junit(report) == {"run": 2, "skipped_cases": 1, "failed": ["a::y: not equal"]}
    monkeypatch.chdir(tmp_path)
    assert "checkout" in composes.contract(["cpu"], 1, 1)["skipped"]
