"""Ways that a call may take and that must not show: copy paths, pipelines, specialised kernels, sizes of columns.

Run by the emulation, where it stands for the GPU; on a GPU by the real thing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from pagedkern.backends import load, probe
from pagedkern.backends.base import CopyCall, WriteCall
from pagedkern.backends.cupy import launch
from pagedkern.backends.cupy.launcher import current_launcher
from tests.contract.checks import assert_exact, assert_same
from tests.contract.problems import Spec, build, contents
from tests.contract.targets import EMULATED_CONFIG, Target

INFO = probe("cupy")
pytestmark = pytest.mark.skipif(not INFO.available, reason=INFO.reason)
DEVICE = "cpu" if INFO.emulated else "cuda"
CONFIG = dict(EMULATED_CONFIG["cupy"])
SPECS = {
    "float32": Spec(seq_lens=(150, 0, 40), query_lens=(9, 1, 1), head_dim=40, head_dim_v=24),
    "bfloat16": Spec(q_dtype="bfloat16", heads=40, seq_lens=(150, 0, 40), query_lens=(9, 1, 1), window=70),
    "int8": Spec(q_dtype="float16", kv_dtype="int8", seq_lens=(150, 0, 40), query_lens=(9, 1, 1), head_dim=64),
    "float8": Spec(q_dtype="bfloat16", kv_dtype="float8_e4m3fn", seq_lens=(150, 3), head_dim=48, softcap=3.0),
    "mixed": Spec(q_dtype="float16", kv_dtype="float32", seq_lens=(150, 3), alibi=True),
}
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def target(**changes: Any) -> Target:
    return Target("cupy", DEVICE, {**CONFIG, **changes}, INFO.emulated)


@each_spec
def test_copies_and_pipelines_change_nothing(spec: Spec) -> None:
    """From any layout, by any path, through two to eight stages: the same bits."""
    want = target().attend(build(spec, device=DEVICE))
    tokens = contents(spec)
    for layout in ("NHD", "HND", "odd", "fused"):
        call = build(replace(spec, layout=layout), tokens, device=DEVICE)
        for copy, stages in (("plain", 2), ("async", 2), ("async", 5), ("bulk", 2), ("bulk", 8), ("auto", 3)):
            got = target(copy=copy, stages=stages, prefill_stages=stages).attend(call)
            assert_same(got, want, f"{copy}, {stages} stages: {layout}")


@pytest.mark.parametrize("name", ["odd", "plain"])
def test_every_alignment(name: str) -> None:
    """Rows that begin 1, 2, 4 or 8 bytes past a multiple of 16."""
    for kv_dtype, dim in (("int8", 24), ("int8", 40), ("float16", 72), ("float32", 40)):
        spec = Spec(q_dtype="float16", kv_dtype=kv_dtype, head_dim=dim, seq_lens=(70, 9), layout="HND")
        tokens = contents(spec)
        call = build(spec, tokens, device=DEVICE)
        want = target().attend(call)
        for shift in (1, 2, 4, 8) if name == "odd" else (16,):
            for cache in ("k_cache", "v_cache"):
                old = call.args[cache]
                if shift % old.element_size():
                    continue
                memory = torch.zeros(old.numel() + 32, dtype=old.dtype, device=DEVICE)
                moved = memory.as_strided(old.shape, old.stride(), shift // old.element_size())
                moved.view(torch.uint8 if old.element_size() == 1 else old.dtype).copy_(
                    old.view(torch.uint8 if old.element_size() == 1 else old.dtype)
                )
                call.args[cache] = moved
            assert_same(target().attend(call), want, f"{shift} bytes: {spec}")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("head_dim", [64, 200, 256])
def test_long_products_are_exact(head_dim: int, seed: int) -> None:
    """Scores of ten and more out of many products, which one float32 sum after the other would round too often."""
    spec = Spec(heads=13, kv_heads=1, head_dim=head_dim, head_dim_v=72, scale=0.3, seq_lens=(32, 256), seed=seed)
    for query_lens in (None, (7, 1)):
        call = build(replace(spec, query_lens=query_lens), device=DEVICE)
        assert_exact(call, target().attend(call))


@pytest.fixture
def specialised() -> Iterator[None]:
    """Kernels compiled for one instance, as on a GPU, where the emulation reads the constants from the launch."""
    run: Any = current_launcher()
    before, run.generic = run.generic, False
    yield
    run.generic = before


@pytest.mark.parametrize("name", ["bfloat16", "float8", "float32"])
def test_specialised_kernels_give_the_same_bits(name: str, specialised: None) -> None:
    spec = replace(SPECS[name], query_lens=None) if name == "bfloat16" else SPECS[name]
    spec = replace(spec, seq_lens=spec.seq_lens[:2], query_lens=None)
    call, run = build(spec, device=DEVICE), current_launcher()
    got = target().attend(call)
    assert_exact(call, got)
    if run.emulated:
        run.generic = True
        assert_same(got, target().attend(call), f"generic: {spec}")


@pytest.mark.parametrize("sequences", [1, 2])
def test_sequences_in_several_launches(sequences: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many at a time as the partial results have room for: the same bits."""
    run, shapes = current_launcher(), []
    real = run.launch

    def counted(kernel: Any, grid: Any, *rest: Any) -> None:
        shapes.append(grid)
        real(kernel, grid, *rest)

    monkeypatch.setattr(run, "launch", counted)
    for query_lens in (None, (2, 1, 0, 9, 1), (0, 0, 0, 0, 0)):
        spec = Spec(seq_lens=(150, 0, 40, 300, 7), query_lens=query_lens, spare_rows=2 * (query_lens is not None))
        call = build(spec, device=DEVICE)
        want = target().attend(call)
        tokens = 1 if query_lens is None else CONFIG["decode_tokens"]
        with monkeypatch.context() as patch:
            room = sequences * tokens * spec.heads * CONFIG["num_splits"] * (spec.dim_v + 2) * 4
            patch.setattr(launch, "PARTIAL_BYTES", room)
            shapes.clear()
            assert_same(target().attend(call), want, f"{sequences} at a time: {spec}")
        merges = [grid[0] for grid in shapes if grid[2] == 1 and grid[1] == 1]
        parts = [sequences] * (5 // sequences) + [1] * (5 % sequences)
        assert merges == [tokens * n for n in parts]


@pytest.mark.parametrize(
    ("tile", "warps", "group"), [(16, 1, 1), (32, 4, 1), (64, 2, 20), (128, 4, 3), (256, 8, 33), (64, 8, 8)]
)
@pytest.mark.parametrize("q_dtype", ["float32", "float16"])
def test_every_shape_of_block(q_dtype: str, tile: int, warps: int, group: int) -> None:
    """Tiles and warps at both ends of what is accepted."""
    spec = Spec(heads=group, kv_heads=1, q_dtype=q_dtype, seq_lens=(300, 1, 77), query_lens=(2, 1, 30))
    config = {"tile": tile, "warps": warps, "span": 256, "stages": 2, "num_splits": 2, "decode_tokens": 2}
    for prefill_warps, prefill_tile in ((2, 64), (8, 16), (1, 32)):
        call = build(spec, device=DEVICE)
        made = {**config, "prefill_warps": prefill_warps, "prefill_tile": prefill_tile}
        assert_exact(call, Target("cupy", DEVICE, made, INFO.emulated).attend(call))


def test_pairs_beyond_one_column() -> None:
    """So many pairs that a column of shared memory narrows to a few bytes, and caches of three layouts in one call."""
    backend, pairs = load("cupy"), 3000
    order = torch.randperm(pairs, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    made = [torch.randn(pairs, 20, device=DEVICE), torch.randn(pairs, 2, 9, device=DEVICE).transpose(1, 2)]
    made.append(torch.randn(pairs, 7, device=DEVICE)[:, 1:].to(torch.float16))
    want = [x.clone() for x in made]
    for x in want:
        x[torch.arange(pairs, device=DEVICE)] = x.clone()[order]
    backend.copy_blocks(CopyCall(made, order, torch.arange(pairs, device=DEVICE)))
    for x, y in zip(made, want, strict=True):
        assert torch.equal(x, y)


def test_more_caches_than_one_launch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "COPY_CACHES", 3)
    made = [torch.full((4, 5), float(i), device=DEVICE) for i in range(8)]
    for i, x in enumerate(made):
        x[1] = 100 + i
    ids = [torch.tensor([x], device=DEVICE) for x in (1, 3)]
    load("cupy").copy_blocks(CopyCall(made, *ids))
    assert [float(x[3].unique()) for x in made] == [100.0 + i for i in range(8)]
    assert [float(x[2].unique()) for x in made] == [float(i) for i in range(8)]


@pytest.mark.parametrize("offset", [0, 1, 3, 8])
def test_writes_at_every_alignment(offset: int) -> None:
    """The bits as they are, in steps of what is aligned."""
    memory = torch.zeros(2 * 4 * 8 * 2 * 24 + offset, dtype=torch.float16, device=DEVICE)
    k_cache = memory[offset : offset + 4 * 8 * 2 * 24].view(4, 8, 2, 24)
    v_cache = torch.zeros(4, 8, 2, 24, dtype=torch.float16, device=DEVICE)
    k = torch.randint(-(2**15), 2**15, (3, 2, 24), dtype=torch.int16, device=DEVICE).view(torch.float16)
    slots = torch.tensor([9, -1, 30], device=DEVICE)
    load("cupy").write_kv(WriteCall(k, k, k_cache, v_cache, slots, None, None))
    for cache in (k_cache, v_cache):
        bits = cache.view(32, 2, 24).view(torch.int16)
        assert torch.equal(bits[[9, 30]], k[[0, 2]].view(torch.int16))
        assert not bits[[i for i in range(32) if i not in (9, 30)]].any()
