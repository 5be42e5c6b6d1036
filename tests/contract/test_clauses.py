"""Clauses 2 to 5: nothing unseen leaks, placement-free, batch-invariant, whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import pagedkern
from tests.contract.checks import (
    assert_same,
    check_batch_invariant,
    check_no_leak,
    check_no_leak_between_rows,
    check_placement,
    check_whole,
    clause,
)
from tests.contract.problems import Spec, build, contents
from tests.contract.targets import Result, Target, torch_settings, torch_threads

SPECS = {
    "decode": Spec(seq_lens=(1, 0, 17, 90)),
    "decode_window": Spec(seq_lens=(1, 0, 30, 90), window=10, block_size=8),
    "decode_split": Spec(heads=2, kv_heads=1, seq_lens=(3, 2500, 0, 700), block_size=24),
    "decode_split_window": Spec(heads=2, kv_heads=1, seq_lens=(3, 2500, 0, 700), window=1200),
    "mixed": Spec(seq_lens=(20, 5, 0, 40, 12), query_lens=(3, 9, 2, 1, 0), spare_rows=2),
    "mixed_window": Spec(seq_lens=(80, 5, 0, 40, 12), query_lens=(13, 9, 2, 1, 0), window=5, block_size=8, sinks=0.5),
    "prefill": Spec(heads=8, seq_lens=(100, 33), query_lens=(100, 33), head_dim=72),
    "not_causal": Spec(seq_lens=(20, 5, 40), query_lens=(3, 9, 1), causal=False, alibi=True),
    "half": Spec(q_dtype="float16", seq_lens=(20, 0, 40), query_lens=(18, 2, 1), head_dim=80, head_dim_v=48),
    "bfloat16": Spec(q_dtype="bfloat16", heads=16, seq_lens=(20, 0, 40), softcap=3.0),
    "float8_e4m3fn": Spec(kv_dtype="float8_e4m3fn", seq_lens=(20, 0, 41), query_lens=(18, 2, 1)),
    "float8_e5m2": Spec(kv_dtype="float8_e5m2", q_dtype="bfloat16", seq_lens=(20, 0, 41)),
    "int8": Spec(kv_dtype="int8", q_dtype="float16", seq_lens=(20, 0, 41), query_lens=(18, 2, 1)),
    "large_group": Spec(heads=128, kv_heads=1, seq_lens=(20, 0, 41), query_lens=(4, 2, 1)),
    "blocks_of_one": Spec(block_size=1, seq_lens=(20, 0, 41), query_lens=(4, 2, 1)),
}
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


@each_spec
def test_nothing_unseen_leaks(target: Target, spec: Spec) -> None:
    check_no_leak(target, spec)


@pytest.mark.parametrize(
    "name", ["decode_window", "mixed", "mixed_window", "prefill", "half", "bfloat16", "large_group"]
)
def test_nothing_leaks_from_row_to_row(target: Target, name: str) -> None:
    check_no_leak_between_rows(target, SPECS[name])


@each_spec
def test_placement_free(target: Target, spec: Spec) -> None:
    check_placement(target, spec)


@each_spec
def test_batch_invariant(target: Target, spec: Spec) -> None:
    check_batch_invariant(target, spec)


@pytest.mark.parametrize("neighbour", [(5000, 1), (0, 1), (64, 64), (9, 200)], ids=str)
@pytest.mark.parametrize("name", ["decode", "decode_split", "mixed_window", "half"])
def test_neighbours_of_another_kind(target: Target, name: str, neighbour: tuple[int, int]) -> None:
    """Beside a sequence far longer, a padding row, a prompt, more queries than tokens."""
    spec, (seq_len, query_len) = SPECS[name], neighbour
    seq_len = min(seq_len, 600) if target.slow else seq_len
    other = replace(spec, seq_lens=(seq_len,), query_lens=(query_len,), seed=99)
    check_batch_invariant(target, spec, contents(other))


def test_many_padding_rows(target: Target) -> None:
    """A captured graph's batch: a few sequences and padding up to its size."""
    check_batch_invariant(target, Spec(seq_lens=(40, 700)), contents(Spec(seq_lens=(0,) * 30)))


@clause
def check_bounds(target: Target, spec: Spec) -> None:
    """`max_seqlen_q` saves a bound: whatever correct one is given, the bits are those without it."""
    call = build(spec, device=target.device)
    want = target.attend(call)
    longest = max(spec.query_lens or (1,))
    for bound in (longest, longest + 1, 10 * longest, call.num_tokens, 2**20):
        assert_same(target.attend(call, max_seqlen_q=bound), want, f"max_seqlen_q={bound}: {spec}")


@pytest.mark.parametrize("name", ["decode", "mixed", "mixed_window", "prefill"])
def test_bounds_change_nothing(target: Target, name: str) -> None:
    check_bounds(target, SPECS[name])


@clause
def check_shared_blocks(target: Target, spec: Spec) -> None:
    """Two sequences that share a prefix through the same blocks give what each gives with blocks of its own."""
    tokens = contents(spec)
    shared = 2 * spec.block_size
    tokens[1].k[:shared], tokens[1].v[:shared] = tokens[0].k[:shared], tokens[0].v[:shared]
    apart = build(spec, tokens, device=target.device)
    want = target.attend(apart)
    apart.args["block_table"][1, :2] = apart.args["block_table"][0, :2]
    assert_same(target.attend(apart), want, "shared blocks")


@pytest.mark.parametrize("query_lens", [None, (5, 40)])
def test_shared_blocks(target: Target, query_lens: tuple[int, ...] | None) -> None:
    check_shared_blocks(target, Spec(seq_lens=(50, 41), query_lens=query_lens))


def test_wider_tables_change_nothing(target: Target) -> None:
    """The width of the table is a capacity: it decides neither spans nor results."""

    @clause
    def check() -> None:
        call = build(Spec(seq_lens=(40, 400 if target.slow else 2500)), device=target.device)
        choice = pagedkern.explain(**call.args, backend=target.name)
        pinned = replace(target, config=choice.config)
        want = pinned.attend(call)
        table = call.args["block_table"]
        for width in (table.shape[1] - 2, 1000, 5000):
            wide = torch.full((2, width), -1, dtype=torch.int32, device=target.device)
            common = min(width, table.shape[1])
            wide[:, :common] = table[:, :common]
            call.args["block_table"] = wide
            assert_same(pinned.attend(call), want, f"a table of {width} columns")

    check()


@pytest.mark.parametrize("out_layout", ["plain", "slice", "odd"])
@each_spec
def test_whole(target: Target, spec: Spec, out_layout: str) -> None:
    check_whole(target, spec, out_layout)


DIMS: list[dict[str, Any]] = [
    {"head_dim": d, "head_dim_v": e}
    for d, e in ((72, 72), (80, 80), (96, 96), (192, 192), (192, 128), (128, 192), (16, 256), (256, 16), (40, 24))
]


@pytest.mark.parametrize("dims", DIMS, ids=lambda d: f"{d['head_dim']}-{d['head_dim_v']}")
@pytest.mark.parametrize("q_dtype", ["float32", "bfloat16"])
def test_nothing_beside_head_dims_that_are_no_power_of_two(target: Target, dims: dict[str, Any], q_dtype: str) -> None:
    for query_lens in (None, (1, 7, 3)):
        check_whole(target, Spec(seq_lens=(1, 20, 33), query_lens=query_lens, q_dtype=q_dtype, **dims), "odd")


@pytest.mark.parametrize("name", ["decode_split", "mixed_window", "prefill", "half"])
def test_threads_change_nothing(target: Target, name: str) -> None:
    """How a call is spread over threads decides its speed, not one bit of its result."""

    @clause
    def check() -> None:
        call = build(SPECS[name], device=target.device)
        want = target.attend(call)
        for number in (1, 2, 3, 5):
            with torch_threads(number):
                out, lse = pagedkern.paged_attention(
                    **call.args, return_lse=True, backend=target.name, config=target.config
                )
            assert_same(Result(out, lse), want, f"{number} threads")

    check()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("default_dtype", torch.float64),
        ("default_dtype", torch.bfloat16),
        ("default_device", "meta"),
        ("float32_matmul_precision", "medium"),
        ("float32_matmul_precision", "high"),
    ],
)
@pytest.mark.parametrize("name", ["decode", "mixed_window", "float8_e4m3fn", "int8"])
def test_settings_of_torch_change_nothing(target: Target, name: str, setting: str, value: Any) -> None:
    """A host program's defaults are not ours, and float32 stays float32 where it lets torch round its products."""

    @clause
    def check() -> None:
        call = build(SPECS[name], device=target.device)
        want = target.attend(call)
        with torch_settings(setting, value):
            out, lse = pagedkern.paged_attention(
                **call.args, return_lse=True, backend=target.name, config=target.config
            )
            merged = pagedkern.merge_states(out, lse, out, lse)
        assert_same(Result(out, lse), want, f"{setting} = {value}")
        assert merged[0].device == out.device
        assert (merged[0].dtype, merged[1].dtype) == (out.dtype, lse.dtype)

    check()


def test_autocast_changes_nothing(target: Target) -> None:
    @clause
    def check() -> None:
        call = build(SPECS["mixed_window"], device=target.device)
        want = target.attend(call)
        with torch.autocast(target.device, dtype=torch.bfloat16):
            out, lse = pagedkern.paged_attention(
                **call.args, return_lse=True, backend=target.name, config=target.config
            )
        assert_same(Result(out, lse), want, "under autocast")

    check()


def test_runs_are_repeatable(target: Target) -> None:
    """The same call again gives the same bits, whatever ran between."""

    @clause
    def check() -> None:
        call = build(SPECS["mixed"], device=target.device)
        want = target.attend(call)
        for _ in range(3):
            target.attend(build(SPECS["half" if target.slow else "prefill"], device=target.device))
            assert_same(target.attend(call), want, "the same call again")

    check()
