"""Every call of the library in a forked child whose parent has used torch's threads: run by test_forked.py.

    python -m tests.forked_calls BACKEND

A case prepares its tensors in the parent, twice. The child runs it and sends a digest of what it gives; the parent runs
it afterwards, so that what is compiled or loaded on first use is in the child. A child has LIMIT seconds: with the
fault it would wait for ever. Prints a line for each case: its name and "same", or what went wrong.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import sys
import traceback
from array import array
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import pagedkern
from pagedkern import BlockAllocator, KVCache

LIMIT = 60  # seconds
LARGE = 1 << 18  # elements; torch divides among threads what has more than 2^15
DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")
TOKENS = 70_000

Run = Callable[[], Sequence[Tensor]]


class Case(NamedTuple):
    name: str
    prepare: Callable[[], Run]  # called in the parent; what it returns is called in the child, or in the parent


def random_bits(shape: Sequence[int], dtype: str, seed: int = 0) -> Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 120, (*shape, kind.itemsize), dtype=torch.uint8, generator=generator)
    return codes.view(kind)[..., 0]


def copies(backend: str) -> Iterator[Case]:
    def case(dtype: str, pairs: Sequence[tuple[int, int]], strided: bool) -> Callable[[], Run]:
        def prepare() -> Run:
            caches = [random_bits((12, 64, 8, 2 * 64), dtype, seed) for seed in (1, 2)]
            views = [x[..., ::2] if strided else x for x in caches]
            src, dst = (torch.tensor(ids) for ids in zip(*pairs, strict=True))

            def run() -> Sequence[Tensor]:
                pagedkern.copy_blocks(views, src, dst, backend=backend)
                return caches

            return run

        return prepare

    apart, chained = [(0, 3), (1, 11), (1, 5)], [(0, 1), (1, 2), (2, 0), (7, 9)]
    for dtype in DTYPES:
        yield Case(f"copy_blocks {dtype}", case(dtype, apart, strided=False))
        yield Case(f"copy_blocks {dtype}, chained", case(dtype, chained, strided=False))
    yield Case("copy_blocks strided", case("float32", apart, strided=True))

    def many() -> Run:
        caches = [random_bits((TOKENS, 3), "int8")]
        ids = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0))
        src, dst = ids.to(torch.int32), ids.flip(0).to(torch.int32)

        def run() -> Sequence[Tensor]:
            pagedkern.copy_blocks(caches, src, dst, backend=backend, debug=True)
            return caches

        return run

    yield Case("copy_blocks of many", many)


def plans(dtype: str) -> Case:
    moves = [("copy", [0, 1], [4, 0]), ("swap_out", [4, 5, 1], [0, 1, 3]), ("swap_in", [1, 3], [2, 7])]

    def prepare() -> Run:
        cache = KVCache(2, 8, 64, 8, 64, dtype=getattr(torch, dtype), device="cpu", num_host_blocks=4)
        pools = [x for i in range(2) for x in cache.layer(i)]
        for seed, pool in enumerate(pools):
            pool.copy_(random_bits(pool.shape, dtype, seed))
        table = memoryview(array("i", range(8)))
        plan = SimpleNamespace(moves=[(k, array("q", s), array("q", d)) for k, s, d in moves], block_table=table)

        def run() -> Sequence[Tensor]:
            cache.apply(plan)
            return pools

        return run

    return Case(f"apply {dtype}", prepare)


def caches() -> Iterator[Case]:
    def made() -> Run:
        def run() -> Sequence[Tensor]:
            cache = KVCache(2, 64, 16, 8, 64, dtype=torch.float32, device="cpu", num_host_blocks=64)
            assert KVCache.from_layers([cache.layer(0)]).num_blocks == 64
            return []

        return run

    yield Case("KVCache", made)

    def inputs() -> Run:
        cache = KVCache(1, TOKENS // 16 + 10, 16, 1, 8, dtype=torch.float32, device="cpu")
        allocator = BlockAllocator(TOKENS // 16 + 10, 16)
        step = allocator.prefill([allocator.create(TOKENS), allocator.create(5)])

        def run() -> Sequence[Tensor]:
            return [x for x in cache.inputs(step) if isinstance(x, Tensor)]

        return run

    yield Case("inputs", inputs)


def writes(backend: str) -> Iterator[Case]:
    def case(dtype: str, kv_dtype: str, slots_dtype: torch.dtype, **options: Any) -> Callable[[], Run]:
        def prepare() -> Run:
            k, v = (random_bits((TOKENS, 2, 16), dtype, seed) for seed in (1, 2))
            pools = [random_bits((TOKENS // 16 + 1, 16, 2, 16), kv_dtype, seed) for seed in (3, 4)]
            slots = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0)).to(slots_dtype)

            def run() -> Sequence[Tensor]:
                pagedkern.write_kv(k, v, *pools, slots, backend=backend, **options)
                return pools

            return run

        return prepare

    scales = {"k_scale": torch.tensor([0.25, 0.5]), "v_scale": torch.tensor([0.5])}
    yield Case("write_kv float32", case("float32", "float32", torch.int64))
    yield Case("write_kv bfloat16 to float16", case("bfloat16", "float16", torch.int32, debug=True))
    for dtype in DTYPES[3:]:
        yield Case(f"write_kv float16 to {dtype}", case("float16", dtype, torch.int64, **scales))


def attention(backend: str) -> Iterator[Case]:
    def decode(**options: Any) -> Callable[[], Run]:
        def prepare() -> Run:
            k, v = (torch.randn(64, 16, 2, 16, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
            rows = TOKENS if backend == "cpu" else 2_000
            q = torch.randn(rows, 4, 16, generator=torch.Generator().manual_seed(3))
            table = torch.arange(64, dtype=torch.int32).repeat(rows // 64 + 1)[:rows, None].repeat(1, 20)
            lens = (torch.arange(rows, dtype=torch.int32) % 17).contiguous()

            def run() -> Sequence[Tensor]:
                return pagedkern.paged_attention(q, k, v, table, lens, return_lse=True, backend=backend, **options)

            return run

        return prepare

    yield Case("paged_attention", decode())
    yield Case("paged_attention, debug", decode(debug=True))
    yield Case("paged_attention of one head", decode(sinks=torch.zeros(4), alibi_slopes=torch.zeros(4)))

    def prefill() -> Run:
        k, v = (torch.randn(64, 16, 2, 64, generator=torch.Generator().manual_seed(i)).half() for i in (1, 2))
        q = torch.randn(900, 8, 64, generator=torch.Generator().manual_seed(3)).half()
        table = torch.randperm(64, generator=torch.Generator().manual_seed(4)).to(torch.int32)[None]
        lens, starts = (torch.tensor(x, dtype=torch.int32) for x in ([1000], [0, 900]))

        def run() -> Sequence[Tensor]:
            options: dict[str, Any] = {"cu_seqlens_q": starts, "return_lse": True, "backend": backend}
            return pagedkern.paged_attention(q, k, v, table, lens, **options)

        return run

    yield Case("paged_attention of a prompt", prefill)


def merges() -> Iterator[Case]:
    def case(dtype: str, **options: Any) -> Callable[[], Run]:
        def prepare() -> Run:
            outs = [torch.randn(TOKENS, 2, 16, generator=torch.Generator().manual_seed(i)) for i in (1, 2)]
            outs = [x.to(getattr(torch, dtype)) for x in outs]
            logs = [torch.randn(TOKENS, 2, generator=torch.Generator().manual_seed(i)) for i in (3, 4)]
            outs[0] = outs[0].mT.contiguous().mT  # not contiguous in the last dimension
            return lambda: pagedkern.merge_states(outs[0], logs[0], outs[1], logs[1], **options)

        return prepare

    for dtype in DTYPES[:3]:
        yield Case(f"merge_states {dtype}", case(dtype))
    yield Case("merge_states, debug", case("float32", debug=True))


def deterministic(case: Case) -> Case:
    """The same while torch fills what `torch.empty` makes."""

    def prepare() -> Run:
        run = case.prepare()

        def filled() -> Sequence[Tensor]:
            torch.use_deterministic_algorithms(True, warn_only=True)
            try:
                return run()
            finally:
                torch.use_deterministic_algorithms(False)

        return filled

    return Case(f"{case.name}, deterministic", prepare)


def cases(backend: str) -> list[Case]:
    plain = [
        *copies(backend), *(plans(dtype) for dtype in DTYPES), *caches(), *writes(backend), *attention(backend),
        *merges(),
    ]  # fmt: skip
    kinds = ("copy_blocks int8, chained", "apply int8", "KVCache", "paged_attention", "merge_states float16")
    return [*plain, *(deterministic(case) for case in plain if case.name in kinds)]


def digest(tensors: Sequence[Tensor]) -> str:
    """Of all bytes; torch is not asked, which might wait."""
    result = hashlib.sha256()
    for x in tensors:
        result.update(ctypes.string_at(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()))
    return result.hexdigest()


def in_child(run: Run) -> str:
    """The digest of what a forked child gets, or what became of it."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if not child:
        signal.alarm(LIMIT)  # ends the process
        try:
            os.write(writing, digest(run()).encode())
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        got = pipe.read()
    _, status = os.waitpid(child, 0)
    return got or (f"ended by signal {status & 127}, 14 if it hung" if status else "raised")


def main(backend: str) -> None:
    torch.set_num_threads(4)
    assert torch.ones(LARGE).add_(1).sum() == 2 * LARGE  # the team is there
    torch.set_num_threads(2 if backend == "cpu" else 4)
    for case in cases(backend):
        first, second = case.prepare(), case.prepare()
        got = in_child(first)
        want = digest(second())
        sys.stdout.write(f"{case.name}: {'same' if got == want else got}\n")


if __name__ == "__main__":
    main(sys.argv[1])
