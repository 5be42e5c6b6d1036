"""What is tuned for a model is what is looked up for it: dtypes, windows and softcap. Nothing here is timed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedkern import recommend
from pagedkern.autotune import profile as profiles
from pagedkern.autotune import store, workloads
from pagedkern.autotune.cli import main
from pagedkern.autotune.edge_cases import dense
from pagedkern.autotune.measure import Bench
from pagedkern.autotune.profile import ModelShape, distil
from pagedkern.autotune.recommend import find
from pagedkern.autotune.report.serving import show_served
from pagedkern.autotune.runs import Order, TuningRun, carry_out, serve
from pagedkern.autotune.space import BLOCK_SIZES, Space, Workload, candidates, problems_of
from pagedkern.autotune.store import device
from pagedkern.autotune.store import profiles as stored
from pagedkern.autotune.workloads import Model, Quantiles, Traffic, causal_pairs, model
from pagedkern.backends.base import ITEMSIZE
from tests.autotune.recordings import recording
from tests.autotune.test_search import Simulated

GEMMA = model("gemma-2-9b")
SMALL = replace(GEMMA, num_heads=4, num_kv_heads=2, head_dim=16, dtype="float32", sliding_window=19)


def tuned(of: Model, **more: Any) -> TuningRun:
    """A run for a model on this machine, with times that are given."""

    def runner(space: Space, seed: int) -> Simulated:
        return Simulated(lambda c: (300 + abs(c.block_size - 32)) * (1e-6 if c.is_default else 9e-7), 0.01, seed=seed)

    order = Order(problems_of(of, "cpu"), BLOCK_SIZES, ["cpu", "reference"], budget=1e9)
    run = carry_out(order, make_runner=runner, **more)
    assert run.exit_code == 0
    return run


@pytest.mark.parametrize("name", workloads.model_names())
def test_what_is_tuned_for_a_model_is_what_is_looked_up_for_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    of = model(name)
    assert recommend("chat", "99GB", model=name).tier == "default"
    run = tuned(of)
    assert len(run.outcomes) == 2 * len(of.windows)
    assert recommend("chat", "99GB", model=name).tier == "tuned"
    assert main(["explain", "--model", name, "--memory", "99GB", "--device", "cpu", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["tier"] == "tuned"
    assert [(k["kind"], k["sliding_window"], k["tier"]) for k in said["kernels"]] == [
        (kind, window, "tuned") for kind in ("decode", "prefill") for window in of.windows
    ]
    assert main(["explain", "--model", name, "--memory", "99GB", "--device", "cpu"]) == 0
    assert ("window 4,096" in capsys.readouterr().out) == (of.sliding_window is not None)


def test_a_plain_run_measures_what_is_asked_for_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry-run", "--json", "--device", "cpu"]) == 0
    planned = [Workload(**p["workload"]) for p in json.loads(capsys.readouterr().out)["problems"]]
    assert planned == problems_of(model("llama-3-8b"), "cpu")
    assert {w.dtype for w in planned} == {"bfloat16"}
    assert ModelShape.of_problems(planned) == ModelShape.of(model("llama-3-8b"))


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ("mistral-7b", "for another shape"),  # of the same heads, with a window
        ("llama-3-8b,softcap=30", "for another shape"),
        ("llama-3-8b,kv_dtype=int8", "for another shape"),
        ("llama-3-8b,dtype=float32", "for another shape"),
    ],
)
def test_another_window_softcap_or_dtype_is_another_shape(
    other: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned(model("llama-3-8b"))
    assert main(["explain", "--model", other, "--memory", "99GB", "--device", "cpu", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["tier"] == "tuned-nearest"
    assert why in said["reason"]
    assert {k["tier"] for k in said["kernels"]} == {"default"}


def test_a_preset_with_changes() -> None:
    llama = model("llama-3-8b")
    changed = model("llama-3-8b,dtype=float32,kv_dtype=int8")
    assert (changed.dtype, changed.cache_dtype, changed.num_layers) == ("float32", "int8", 32)
    assert (changed.weight_bytes, changed.num_weights) == (2 * llama.weight_bytes, llama.num_weights)
    assert model("llama-3-8b,weight_bytes=8e9,dtype=float32").weight_bytes == 8 * 10**9
    for wrong in ("llama-3-8b,", "llama-3-8b,x", "llama-4,dtype=float32", "llama-3-8b,dtype=float3", "dtype=int8,x"):
        with pytest.raises(workloads.InvalidArgument, match="expected"):
            model(wrong)


def test_the_windows_of_a_model_are_those_of_its_layers() -> None:
    assert [model(n).windows for n in ("llama-3-8b", "mistral-7b", "gemma-2-9b")] == [
        (None,), (4096,), (None, 4096),
    ]  # fmt: skip
    names = [ModelShape.of(model(n)).name() for n in workloads.model_names()]
    assert names[:2] == ["h32-g8-d128-bfloat16", "h64-g8-d128-bfloat16"]
    assert "h16-g8-d256-bfloat16-all-w4096-softcap" in names
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("start", "end"), [(0, 1), (0, 50), (7, 50), (30, 50), (50, 50)])
@pytest.mark.parametrize("window", [None, 1, 7, 30, 50, 99])
def test_pairs_are_those_that_are_seen(start: int, end: int, window: int | None) -> None:
    seen = [sum(window is None or j > p - window for j in range(p + 1)) for p in range(start, end)]
    assert causal_pairs(start, end, window) == sum(seen)
    half = replace(GEMMA, sliding_window=window, window_layers=21)
    assert half.pairs(start, end) == pytest.approx((sum(seen) + causal_pairs(start, end)) / 2)


@pytest.mark.parametrize("window", [1, 13, 40, 99])
def test_bytes_and_operations_of_a_window(window: int) -> None:
    decode, prefill = problems_of(
        replace(SMALL, sliding_window=window, window_layers=42), "cpu", num_seqs=3, context=53
    )
    assert decode.kv_bytes == sum(min(n, window) for n in decode.seq_lens) * 2 * 2 * 16 * 4
    assert prefill.kv_bytes == sum(prefill.seq_lens) * 2 * 2 * 16 * 4  # the first queries see what the last do not
    seen = sum(min(p + 1, window) for n in prefill.seq_lens for p in range(n))
    assert prefill.flops == 4 * 4 * 16 * seen
    assert decode.problem(8).sliding_window == window
    assert decode.problem(8).softcap


def test_the_truth_of_a_window_and_a_softcap_is_that_of_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, generator=generator) for n in ((5, 2, 8), (1, 40, 1, 8), (1, 40, 1, 8)))
    out = dense(q, k, v, [40], [5], torch.float64, sliding_window=11, softcap=0.7)
    for row in range(5):
        position = 35 + row
        keys = range(position - 10, position + 1)
        for head in range(2):
            scores = [float(q[row, head].double() @ k[0, j, 0].double()) / math.sqrt(8) for j in keys]
            capped = torch.tensor([0.7 * math.tanh(s / 0.7) for s in scores], dtype=torch.float64)
            expected = capped.softmax(0) @ v[0, list(keys), 0].double()
            torch.testing.assert_close(out[row, head], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("cls", "wrong"), [("Tunable", False), ("NoWindow", True), ("NoSoftcap", True)])
@pytest.mark.parametrize("kind", [0, 1])
def test_who_passes_over_a_window_or_a_softcap_is_found_out(
    kind: int, cls: str, wrong: bool, add_backend: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "last_level_cache", lambda _: 1 << 14)
    add_backend("candidate", cls)
    of = replace(SMALL, window_layers=42, softcap=2.0)
    space = candidates(problems_of(of, "cpu", num_seqs=2, context=53, prompt=21)[kind], [8], ["candidate"])
    bench = Bench(space, 0)
    found = bench.check(next(c for c in space.candidates if c.backend == "candidate"))
    assert (found is not None) == wrong
    assert found is None or "edge cases" in found


@pytest.mark.parametrize("kv_dtype", ITEMSIZE)
@pytest.mark.parametrize("kind", [0, 1])
def test_a_window_in_every_dtype(kind: int, kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN, or the largest number, stands behind the window: who looks there is found out, who does not is right."""
    monkeypatch.setattr(device, "last_level_cache", lambda _: 1 << 14)
    of = replace(SMALL, window_layers=42, kv_dtype=kv_dtype)
    space = candidates(problems_of(of, "cpu", num_seqs=2, context=53, prompt=21)[kind], [8], ["reference"])
    bench = Bench(space, 0)
    assert bench.check(next(c for c in space.candidates if c.backend == "reference")) is None
    edges = bench._edge_cases[8]
    longest = edges.lengths.index(max(edges.lengths))
    first = edges.k_cache[edges.table[longest, 0], 0].to(torch.float32)
    assert (first.isnan() | (first == 127)).all()


def test_a_window_longer_than_the_context_is_checked_with_a_short_one(
    add_backend: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "last_level_cache", lambda _: 1 << 14)
    add_backend("candidate", "NoWindow")
    of = replace(SMALL, window_layers=42, sliding_window=4096)
    space = candidates(problems_of(of, "cpu", num_seqs=2, context=53)[0], [8], ["candidate"])
    bench = Bench(space, 0)
    found = bench.check(next(c for c in space.candidates if c.backend == "candidate"))
    assert found is not None
    assert "edge cases" in found


def fixed(name: str, of: Model | None) -> Traffic:
    lengths = Quantiles((0, 1), (500, 500)), Quantiles((0, 1), (100, 100))
    return Traffic(name, "", "", "", "", 1 << 20, *lengths, model=of)


def test_each_workload_is_rated_by_its_own_shape(capsys: pytest.CaptureFixture[str]) -> None:
    """The machine reads the cache of the second model best in other blocks than that of the first."""
    llama, smol = model("llama-3-8b,dtype=float32"), model("smollm2-135m")
    run = TuningRun(device.identity("cpu"))
    for of in (llama, smol):
        document = distil(recording(of=of))
        assert document is not None
        document.update(device=dict(run.device), code={"cpu": dict(device.code("cpu"))})
        for block_size, speed in document["speeds"].items():
            best = block_size == ("256" if of is smol else "8")
            speed["kv_bytes_per_second"] = 4e10 if best else 1e9
        stored.save_rates(document, ModelShape.of(of).name())
        if of is llama:
            run.profile = profiles.from_json(document)
    serve(
        run,
        [fixed("first", None), fixed("second", smol), fixed("third", model("qwen2.5-7b"))],
        llama,
        lambda of: 10**10,
    )
    chosen = [s.advice.block_size for s in run.served]
    assert chosen[:2] == [8, 256]
    assert [s.advice.tier for s in run.served] == ["tuned", "tuned", "tuned-nearest"]
    assert run.served[2].advice.scores == serve_alone(run, "qwen2.5-7b")
    from rich.console import Console

    show_served(Console(width=80), run.served)
    text = capsys.readouterr().out
    assert text.count("What to serve with") == 3
    assert "Tier tuned-nearest: measured on this machine" in text
    assert max(map(len, text.splitlines())) <= 80


def serve_alone(run: TuningRun, name: str) -> tuple[object, ...]:
    """What `recommend` says of the third workload."""
    profile, _, _ = find(model(name), "cpu")
    assert profile is not None
    return tuple(recommend(fixed("third", None), 10**10, model=name).scores)


def test_rates_of_another_shape_are_taken_where_nothing_could_be_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = TuningRun(device.identity("cpu"))
    document = distil(recording())
    assert document is not None
    run.profile = profiles.from_json(document)
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PAGEDKERN_CACHE_DIR", str(tmp_path / "file"))
    store.reload()
    serve(run, [fixed("other", model("smollm2-135m"))], model("llama-3-8b"), lambda of: 10**9)
    (advice,) = [s.advice for s in run.served]
    assert advice.tier == "tuned-nearest"
    assert advice.reason.startswith("measured in this run for another shape; ")
    assert advice.scores
