"""The bench: what it lays out, and what its check lets through. Times are not looked at."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch

from pagedkern.autotune.hostile import GARBAGE
from pagedkern.autotune.measure import Bench
from pagedkern.autotune.space import Candidate, Space, Workload, candidates, workloads
from pagedkern.autotune.store import device
from pagedkern.backends.base import ITEMSIZE


@pytest.fixture(autouse=True)
def small_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A processor with little cache, and one thread: the tensors are too small for more."""
    monkeypatch.setattr(device, "last_level_cache", lambda _: 1 << 14)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small(kind: str, dtype: str = "float32", kv_dtype: str | None = None) -> Workload:
    both = workloads("cpu", dtype, kv_dtype, heads=(6, 2, 16), num_seqs=3, context=53, prompt=21)
    return both[0] if kind == "decode" else both[1]


def space_of(workload: Workload, backend: str, block_sizes: tuple[int, ...] = (8, 24)) -> Space:
    return candidates(workload, block_sizes, [backend])


def first(space: Space, backend: str) -> Candidate:
    return next(c for c in space.candidates if c.backend == backend)


@pytest.mark.parametrize("kind", ["decode", "prefill"])
@pytest.mark.parametrize("kv_dtype", ITEMSIZE)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_reference_passes_the_check(dtype: str, kv_dtype: str, kind: str) -> None:
    space = space_of(small(kind, dtype, kv_dtype), "reference")
    bench = Bench(space, seed=0)
    assert 0 < bench.tolerance < 0.1
    for candidate in (c for c in space.candidates if c.backend == "reference"):
        assert bench.check(candidate) is None
        assert bench.sample(candidate, 2) > 0


@pytest.mark.parametrize("kind", ["decode", "prefill"])
@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        ("OffByLittle", "wrong by 1.0e-03"),
        ("WritesNothing", "wrong by nan"),
        ("SkipsARow", "wrong by nan"),
        ("ReadsPastTheEnd", "wrong by"),
        ("Raises", "RuntimeError: illegal memory access"),
    ],
)
def test_a_wrong_backend_does_not(kind: str, cls: str, reason: str, add_backend: Callable[[str, str], None]) -> None:
    add_backend("wrong", cls)
    space = space_of(small(kind), "wrong")
    bench = Bench(space, seed=0)
    found = bench.check(first(space, "wrong"))
    assert found is not None
    assert found.startswith(reason)
    assert "\n" not in found
    add_backend("right", "Tunable")
    right = space_of(small(kind), "right")
    assert bench.check(first(right, "right")) is None  # the bench is none the worse for it


@pytest.mark.parametrize("block_size", [1, 8, 24, 64])
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_the_layout(kind: str, block_size: int) -> None:
    w = small(kind)
    bench = Bench(space_of(w, "reference", (block_size,)), seed=0)
    copies = bench._caches[block_size]
    assert len(copies) == bench.copies >= 2
    assert bench.copies * w.kv_bytes >= 2 * (1 << 14)  # none of a copy is still in the cache when its turn comes again
    used: list[int] = []
    for k_cache, v_cache, table in copies:
        assert k_cache.shape[1:] == (block_size, w.num_kv_heads, w.head_dim)
        assert k_cache.transpose(1, 2).is_contiguous()
        assert v_cache.stride() == k_cache.stride()
        for i, length in enumerate(w.seq_lens):
            blocks = -(-length // block_size)
            ids = table[i].tolist()
            used += ids[:blocks]
            assert set(ids[blocks:]) <= {GARBAGE}
            tokens = k_cache[ids[:blocks]].flatten(0, 1)
            assert not tokens[:length].isnan().any()
            assert tokens[length:].isnan().all()
    assert len(set(used)) == len(used)
    assert used != sorted(used) or len(used) < 3  # in no order
    nobodys = set(range(len(copies[0][0]))) - set(used)
    assert len(nobodys) == 1
    assert copies[0][0][nobodys.pop()].isnan().all()


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_preparing_runs_the_first_sequence_and_raises_nothing(
    kind: str, add_backend: Callable[[str, str], None]
) -> None:
    add_backend("raises", "Raises")
    space = space_of(small(kind), "raises")
    bench = Bench(space, seed=0)
    bench._out.fill_(math.nan)
    bench.prepare(first(space, "raises"))
    assert bench._out.isnan().all()
    assert set(bench._hostile) == {first(space, "raises").block_size}  # made where no budget counts
    bench.prepare(space.baseline)
    rows = space.workload.query_len
    torch.testing.assert_close(bench._out[:rows].double(), bench._truth[:rows], rtol=0, atol=bench.tolerance)
    assert bench._out[rows:].isnan().all()
    assert bench.check(first(space, "raises")) == "RuntimeError: illegal memory access"


def test_calls_rotate_over_the_copies(add_backend: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.autotune import standins

    add_backend("watched", "Tunable")
    space = space_of(small("decode"), "watched", (8, 16))
    bench = Bench(space, seed=0)
    seen: list[int] = []

    def watch(self: object, call: object, config: object) -> None:
        seen.append(call.block_table.data_ptr())  # type: ignore[attr-defined]

    monkeypatch.setattr(standins.Tunable, "attention", watch)
    bench.sample(first(space, "watched"), 2 * bench.copies)
    assert len(set(seen)) == bench.copies
    assert all(a != b for a, b in pairwise(seen))


def test_the_truth_is_that_of_a_loop_over_keys() -> None:
    w = small("prefill")
    space = space_of(w, "reference", (8,))
    bench = Bench(space, seed=3)
    k_cache, v_cache, table = bench._caches[8][0]
    row, head, length = w.query_len + 4, 5, w.seq_lens[1]  # token 4 of sequence 1
    q = bench._q[row, head].double()
    scores, values = [], []
    for j in range(length - w.query_len + 4 + 1):
        block, slot = int(table[1, j // 8]), j % 8
        scores.append(float(q @ k_cache[block, slot, head // 3].double()) / math.sqrt(16))
        values.append(v_cache[block, slot, head // 3].double())
    weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
    expected = (weights[:, None] * torch.stack(values)).sum(0)
    torch.testing.assert_close(bench._truth[row, head], expected, rtol=1e-12, atol=1e-12)


def test_the_plain_read_reads() -> None:
    bench = Bench(space_of(small("decode"), "reference"), seed=0)
    assert 1e6 < bench.read_bandwidth() < 1e14


def test_equal_seeds_give_equal_data() -> None:
    benches = [Bench(space_of(small("decode"), "reference"), seed) for seed in (1, 1, 2)]
    assert torch.equal(benches[0]._q, benches[1]._q)
    assert torch.equal(benches[0]._caches[8][0][2], benches[1]._caches[8][0][2])
    assert not torch.equal(benches[0]._q, benches[2]._q)
