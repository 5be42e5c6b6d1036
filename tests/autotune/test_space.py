"""Workloads and candidates."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import pagedkern.backends as registry
from pagedkern.autotune import space
from pagedkern.autotune.measure import Bench
from pagedkern.autotune.space import BLOCK_SIZES, candidates, usable_backends, workloads
from pagedkern.autotune.store import device


def test_the_default_problems_are_ragged_and_end_in_part_of_a_block() -> None:
    decode, prefill = workloads("cpu")
    assert (decode.kind, decode.query_len) == ("decode", 1)
    assert (prefill.kind, prefill.query_len) == ("prefill", prefill.context)
    assert len(set(decode.seq_lens)) == decode.num_seqs > 1
    assert max(decode.seq_lens) == decode.context
    assert min(decode.seq_lens) >= 0.7 * decode.context
    assert all(w.context % b for w in (decode, prefill) for b in BLOCK_SIZES)


@pytest.mark.parametrize(("seqs", "context", "prompt"), [(1, 1, 1), (3, 50, 20), (7, 33, 8)])
def test_bytes_and_operations_are_those_of_the_formula(seqs: int, context: int, prompt: int) -> None:
    for w in workloads("cpu", dtype="bfloat16", heads=(6, 2, 16), num_seqs=seqs, context=context, prompt=prompt):
        pairs = sum(1 for n in w.seq_lens for row in range(w.query_len) for j in range(n) if j <= n - w.query_len + row)
        assert w.flops == pairs * 6 * (2 * 16 + 2 * 16)  # a multiply and an add for each element of q k and p v
        assert w.kv_bytes == sum(w.seq_lens) * 2 * 2 * 16 * 2
        problem = w.problem(8)
        assert problem.num_tokens == seqs * w.query_len
        assert problem.max_seqlen_k == -(-w.context // 8) * 8


def test_the_problem_fits_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "free_memory", lambda _: 4 << 30)
    decode, _ = workloads("cuda")
    assert 1 <= decode.num_seqs < 32
    assert 12 * decode.kv_bytes < 0.3 * (4 << 30)
    monkeypatch.setattr(device, "free_memory", lambda _: 1 << 20)
    assert workloads("cuda")[0].num_seqs == 1
    monkeypatch.setattr(device, "free_memory", lambda _: 80 << 30)
    assert workloads("cuda")[0].num_seqs == 32


@pytest.mark.parametrize(("seqs", "context", "kv_dtype"), [(1, 1, None), (3, 1000, "int8"), (5, 777, "bfloat16")])
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_memory_covers_the_tensors_of_the_bench(
    kind: str, seqs: int, context: int, kv_dtype: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "last_level_cache", lambda _: 1 << 18)
    both = workloads(
        "cpu", "float32", kv_dtype, heads=(4, 2, 16), num_seqs=seqs, context=context, prompt=context // 3 + 1
    )
    w, sizes = both[kind == "prefill"], [8, 24, 256]
    bench = Bench(candidates(w, sizes, ["reference"]), 0)
    for block_size in sizes:
        bench.lay_out(block_size)
    bench.reserve()
    assert bench._pool is not None
    laid_out = [tensor for layout in bench._checked.values() for tensor in layout[:2]]
    tensors = [bench._q, bench._out, bench._truth, bench._k, bench._v, *laid_out, *bench._pool._memory]
    taken = sum(tensor.nbytes for tensor in tensors)
    needed = space.memory(w, sizes)
    assert taken <= needed
    assert needed <= 1.5 * taken + 100 * w.num_seqs * w.query_len * (64 + 4 * w.context)


def test_memory_of_absurd_problems_is_found_at_once() -> None:
    w = workloads("cpu", num_seqs=2**31 - 1, context=2**31 - 1)[0]
    assert space.memory(w, BLOCK_SIZES) > 2**70


def test_the_first_candidate_is_the_yardstick(add_backend: Callable[[str, str], None]) -> None:
    add_backend("tunable", "Tunable")
    w = workloads("cpu", num_seqs=1, context=64, prompt=64)[0]
    found = candidates(w, [64, 16, 8], list(registry.names()))
    default = space._untuned(w.problem(16))
    assert found.candidates[0] == found.baseline == found.untuned(16)
    assert found.baseline.backend == default
    assert found.block_sizes == [8, 16, 64]
    tunable = [c for c in found.candidates if c.backend == "tunable"]
    assert len(tunable) == 9
    assert [c.fields for c in tunable if c.is_default] == [{"tile": 64}] * 3
    assert [c.fields["tile"] for c in tunable[:3]] == [64, 32, 128]  # the default before the others
    backends = [c.backend for c in found.candidates]
    assert backends == sorted(backends, key=backends.index)  # all of the untuned backend first


@pytest.mark.parametrize(("sizes", "expected"), [([8, 32], 8), ([32, 64], 32), ([1, 24, 256], 24), ([16, 17], 16)])
def test_the_yardstick_is_at_the_block_size_nearest_to_the_usual(sizes: list[int], expected: int) -> None:
    w = workloads("cpu", num_seqs=1, context=64, prompt=64)[0]
    assert candidates(w, sizes, ["reference"]).baseline.block_size == expected


def test_the_untuned_choice_is_measured_whatever_was_asked_for(add_backend: Callable[[str, str], None]) -> None:
    add_backend("tunable", "Tunable")
    w = workloads("cpu", num_seqs=1, context=64, prompt=64)[0]
    found = candidates(w, [16], ["tunable"])
    default = space._untuned(w.problem(16))
    assert [c.backend for c in found.candidates] == [default, "tunable", "tunable", "tunable"]


def test_a_refusal_gives_its_reason_and_block_sizes(add_backend: Callable[[str, str], None]) -> None:
    add_backend("picky", "Picky")
    w = workloads("cpu", num_seqs=1, context=64, prompt=64)[0]
    found = candidates(w, [8, 16, 32], ["picky"])
    assert found.refused == ("block size 16, 8: picky: blocks are smaller than 32 tokens",)
    assert {c.block_size for c in found.candidates if c.backend == "picky"} == {32}


def test_backends_that_cannot_be_measured(add_backend: Callable[[str, str], None]) -> None:
    add_backend("absent", "Absent")
    add_backend("emulated", "Emulated")
    usable, refused = usable_backends("cpu")
    assert "reference" in usable
    assert not {"absent", "emulated"} & set(usable)
    assert refused[-2:] == [
        "absent: no module named 'absent': pip install pagedkern[absent]",
        "emulated: emulated on this machine",
    ]
    assert usable_backends("cpu", ["emulated", "absent"]) == (["emulated"], refused[-2:-1])
