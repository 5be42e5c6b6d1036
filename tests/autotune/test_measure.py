"""The bench: what it lays out, and what its check lets through. Times are not looked at."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch

from pagedkern.autotune.edge_cases import GARBAGE
from pagedkern.autotune.measure import Bench, Pool
from pagedkern.autotune.space import Candidate, Space, Workload, candidates, copies, workloads
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
def test_the_layout_that_is_checked(kind: str, block_size: int) -> None:
    w = small(kind)
    bench = Bench(space_of(w, "reference", (block_size,)), seed=0)
    bench.lay_out(block_size)
    k_cache, v_cache, table = bench._checked[block_size]
    assert k_cache.shape[1:] == (block_size, w.num_kv_heads, w.head_dim)
    assert k_cache.transpose(1, 2).is_contiguous()
    assert v_cache.stride() == k_cache.stride()
    used: list[int] = []
    for i, length in enumerate(w.seq_lens):
        blocks = -(-length // block_size)
        ids = table[i].tolist()
        used += ids[:blocks]
        assert set(ids[blocks:]) <= {GARBAGE}
        tokens = k_cache[ids[:blocks]].flatten(0, 1)
        assert not tokens[:length].isnan().any()
        assert tokens[length:].isnan().all()
    assert len(set(used)) == len(used)
    assert used != sorted(used) or len(used) < 4  # in no order
    nobodys = set(range(len(k_cache))) - set(used)
    assert len(nobodys) == 1
    assert k_cache[nobodys.pop()].isnan().all()


@pytest.mark.parametrize("sizes", [(1,), (8, 16, 24), (64, 7), (256, 8, 96)])
@pytest.mark.parametrize("kind", ["decode", "prefill"])
@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_the_layout_that_is_timed(kind: str, sizes: tuple[int, ...], kv_dtype: str) -> None:
    """All block sizes share memory of twice the processor's cache, and what one copy takes is no other's, whatever its
    block size: so nothing that a call reads is still in the cache from the call before."""
    w = small(kind, kv_dtype=kv_dtype)
    space = space_of(w, "reference", sizes)
    bench = Bench(space, seed=0)
    pool = Pool(w, sizes, bench._k, seed=0)
    assert pool.copies * w.kv_bytes >= 2 * (1 << 14)
    taken: list[set[tuple[int, int]]] = [set() for _ in range(pool.copies)]  # slots of each copy, by any block size
    memory = set()
    for turn in range(1, len(sizes) * pool.copies + 1):
        block_size = sizes[turn % len(sizes)]
        k_cache, v_cache, table = pool.next(block_size)
        assert k_cache.shape == (len(k_cache), block_size, w.num_kv_heads, w.head_dim)
        assert k_cache.transpose(1, 2).is_contiguous()
        assert v_cache.stride() == k_cache.stride()
        assert v_cache.data_ptr() != k_cache.data_ptr()
        memory.add((k_cache.data_ptr(), v_cache.data_ptr()))
        ids = [table[i, : -(-n // block_size)].tolist() for i, n in enumerate(w.seq_lens)]
        flat = [block for row in ids for block in row]
        assert len(set(flat)) == len(flat)
        assert 0 <= min(flat) <= max(flat) < len(k_cache)
        used = {(block * block_size + slot, 0) for block in flat for slot in range(block_size)}
        for other in (c for c in range(pool.copies) if c != turn % pool.copies):
            assert not used & taken[other]
        taken[turn % pool.copies] |= used
        assert not k_cache.to(torch.float32).isnan().any()
    assert len(memory) == 1


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
    count = copies("cpu", space.workload.kv_bytes)
    bench.sample(first(space, "watched"), 2 * count)
    assert len(set(seen)) == count >= 2
    assert all(a != b for a, b in pairwise(seen))


def test_the_truth_is_that_of_a_loop_over_keys() -> None:
    w = small("prefill")
    space = space_of(w, "reference", (8,))
    bench = Bench(space, seed=3)
    bench.lay_out(8)
    k_cache, v_cache, table = bench._checked[8]
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
    for order, bench in enumerate(benches):  # whatever was laid out before
        for block_size in (8, 16)[:: 1 if order else -1]:
            bench.lay_out(block_size)
    assert torch.equal(benches[0]._checked[8][2], benches[1]._checked[8][2])
    assert not torch.equal(benches[0]._q, benches[2]._q)
