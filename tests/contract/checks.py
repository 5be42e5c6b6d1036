"""The clauses of the contract (README.md) as functions of a target and a spec. They raise AssertionError.

They are functions rather than tests so that every test file, the property tests and `test_judge.py`, which runs them on
broken backends, use the same ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ParamSpec

import torch

import pagedkern
from tests.contract.problems import LAYOUTS, Q_LAYOUTS, Call, Spec, Tokens, bits, build, contents, same_bits
from tests.contract.targets import Refused, Result, Target

P = ParamSpec("P")


def clause(check: Callable[P, None]) -> Callable[P, None]:
    """A refusal that `Target.check_support` found proper ends the check: there is no result to look at."""

    @functools.wraps(check)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            check(*args, **kwargs)
        except Refused:
            return

    return run


def assert_exact(call: Call, got: Result, compute_dtype: torch.dtype | None = None) -> None:
    """Clause 1: the largest error over the call is at most twice that of torch in the inputs' dtype, plus 1e-6.

    lse is a float32 number: where it is large, one unit of its last place is added.
    """
    from reference.oracle import error

    want_out, want_lse = call.oracle()
    torch_out, torch_lse = call.torch(compute_dtype)
    assert got.out.dtype == call.args["q"].dtype
    assert got.lse.dtype == torch.float32
    finite = want_lse[want_lse.isfinite()].abs()
    last_place = float(finite.max()) * 2.0**-23 if len(finite) else 0.0
    for name, mine, want, peer, extra in (
        ("out", got.out, want_out, torch_out, 0.0),
        ("lse", got.lse, want_lse, torch_lse, last_place),
    ):
        peer_error = error(peer, want)
        assert math.isfinite(peer_error), f"{name}: torch itself fails here, the case needs compute_dtype: {call.spec}"
        bound = 2 * peer_error + 1e-6 + extra
        mine_error = error(mine, want)
        assert mine_error <= bound, (
            f"{name}: error {mine_error:.3g} > {bound:.3g} (torch {peer_error:.3g}): {call.spec}"
        )


@clause
def check_exact(target: Target, spec: Spec, compute_dtype: torch.dtype | None = None, **options: Any) -> None:
    """Clause 1 on one spec."""
    call = build(spec, device=target.device)
    assert_exact(call, target.attend(call, **options), compute_dtype)


@clause
def check_no_leak(target: Target, spec: Spec, fills: Sequence[str] = ("nan", "inf", "mixed")) -> None:
    """Clause 2: what no query sees changes no bit."""
    want = target.attend(build(spec, device=target.device, fill="zero", poisoned=False))
    assert not want.out.isnan().any()
    for fill in fills:
        got = target.attend(build(spec, device=target.device, fill=fill))
        assert_same(got, want, f"unseen memory filled with {fill!r} changed the result: {spec}")


@clause
def check_no_leak_between_rows(target: Target, spec: Spec) -> None:
    """Clause 2 within a sequence: a token that some queries see changes no bit for those behind whose line it is."""
    tokens = contents(spec)
    want = target.attend(build(spec, tokens, device=target.device))
    row = 0
    for i, t in enumerate(tokens):
        seq_len, q_len = len(t.k), len(t.q)
        for j in {seq_len - 1, seq_len - q_len // 2, seq_len - q_len} & set(range(seq_len)):
            bad = [Tokens(x.q, x.k.clone(), x.v.clone()) for x in tokens]
            bad[i].k[j], bad[i].v[j] = math.nan, math.nan
            got = target.attend(build(spec, bad, device=target.device))
            positions = torch.arange(seq_len - q_len, seq_len)
            sees = (j <= positions) if spec.causal else torch.ones(q_len, dtype=torch.bool)
            if spec.window is not None:
                sees &= j > positions - spec.window
            blind = torch.ones(len(got.out), dtype=torch.bool)
            blind[row : row + q_len] = ~sees
            where = f"token {j} of sequence {i}: {spec}"
            assert_same(Result(got.out[blind], got.lse[blind]), Result(want.out[blind], want.lse[blind]), where)
            assert got.out[~blind].isnan().all(), f"NaN that a query sees was hidden, {where}"
        row += q_len


@clause
def check_placement(target: Target, spec: Spec, layouts: Sequence[str] = LAYOUTS) -> None:
    """Clause 3: where tokens lie, and how memory is laid out, changes no bit."""
    tokens = contents(spec)
    want = target.attend(build(replace(spec, layout="NHD", q_layout="plain"), tokens, device=target.device))
    for placement, layout in enumerate(layouts, start=1):
        moved = replace(spec, layout=layout, q_layout=Q_LAYOUTS[placement % len(Q_LAYOUTS)])
        call = build(moved, tokens, device=target.device, placement=placement, spare_blocks=3 + 5 * placement)
        assert_same(target.attend(call), want, f"another placement changed the result: {moved}")


@clause
def check_batch_invariant(target: Target, spec: Spec, neighbours: Sequence[Tokens] = ()) -> None:
    """Clause 4: each sequence alone, and among others in any order, gives the same bits under one configuration."""
    tokens = [*contents(spec), *neighbours]
    ragged = spec if spec.query_lens is not None else replace(spec, query_lens=(1,) * len(spec.seq_lens))
    whole = build(ragged, tokens, device=target.device)
    target.check_support(whole)
    choice = pagedkern.explain(**whole.args, backend=target.name, config=target.config)
    pinned = replace(target, config=choice.config)
    want = _by_sequence(pinned.attend(whole), tokens)
    orders = [[i] for i in range(len(tokens))]
    orders += [list(range(len(tokens)))[::-1], [i for i in range(len(tokens)) for _ in range(2)]]
    for order in orders:
        batch = [tokens[i] for i in order]
        specs = [ragged]
        if all(len(t.q) == 1 for t in batch):
            specs.append(replace(spec, query_lens=None, spare_rows=0))  # the same without cu_seqlens_q
        for alone in specs:
            got = _by_sequence(pinned.attend(build(alone, batch, device=target.device, placement=1)), batch)
            for i, result in zip(order, got, strict=True):
                assert_same(result, want[i], f"sequence {i} differs in the batch {order}: {alone}")


def _by_sequence(result: Result, tokens: Sequence[Tokens]) -> list[Result]:
    lens = [len(t.q) for t in tokens]
    spare = len(result.out) - sum(lens)
    parts = zip(result.out.split([*lens, spare]), result.lse.split([*lens, spare]), strict=True)
    return [Result(*part) for part in parts][: len(lens)]


@clause
def check_whole(target: Target, spec: Spec, out_layout: str = "plain") -> None:
    """Clause 5: every element of out and lse is written, and nothing else: not around out, not in any argument."""
    call = build(spec, device=target.device)
    q = call.args["q"]
    rows, heads, dim = len(q), spec.heads, spec.dim_v
    shape, view = {
        "plain": ((rows + 2, heads, dim), (slice(1, rows + 1), slice(None), slice(None))),
        "slice": ((rows + 2, heads + 2, dim), (slice(1, rows + 1), slice(1, heads + 1), slice(None))),
        "odd": ((rows + 2, heads + 1, dim + 3), (slice(1, rows + 1), slice(heads), slice(1, dim + 1))),
    }[out_layout]
    guard = torch.full(shape, math.nan, dtype=q.dtype, device=q.device)
    out = guard[view]
    before = [bits(x).clone() for x in call.buffers]
    got = target.attend(call, out=out)
    assert got.out.data_ptr() == out.data_ptr()
    assert got.out.stride() == out.stride()
    assert got.lse.shape == (rows, heads)
    for name, x in (("out", out), ("lse", got.lse)):
        assert not x.isnan().any(), f"{name}: {int(x.isnan().sum())} elements not written: {spec}"
    assert_exact(call, got)
    written = out.clone()
    out.fill_(math.nan)
    assert guard.isnan().all(), f"wrote outside out: {spec}"
    for x, old in zip(call.buffers, before, strict=True):
        assert torch.equal(bits(x), old), f"an argument was written to: {spec}"
    alone = pagedkern.paged_attention(**call.args, backend=target.name, config=target.config)
    assert isinstance(alone, torch.Tensor)
    assert same_bits(alone, written), f"without out and lse the result differs: {spec}"


@clause
def check_special_numbers(target: Target, spec: Spec, **numbers: Any) -> None:
    """Numbers of heads that are NaN, infinite or extreme: NaN where the oracle has it, the same infinities, or close.

    numbers: `sinks` and `alibi_slopes` as lists, `softcap`.
    """
    from reference.oracle import error

    call = with_numbers(target, spec, **numbers)
    got = target.attend(call)
    want_out, want_lse = call.oracle()
    close = {"float32": 2e-5, "float16": 8e-3, "bfloat16": 6e-2}[spec.q_dtype]  # of values that seldom exceed 4
    finite = want_lse[want_lse.isfinite()].abs()
    rounding = 2e-5 + 2.0**-22 * (float(finite.max()) if len(finite) else 0.0)
    for name, mine, want, bound in (
        ("out", got.out, want_out, close),
        ("lse", got.lse, want_lse, max(rounding, close / 4)),
    ):
        assert torch.equal(mine.isnan().cpu(), want.isnan()), f"{name}: NaN elsewhere: {spec} {numbers}"
        assert error(mine, want) <= bound, f"{name}: error {error(mine, want):.3g} > {bound:.3g}: {spec} {numbers}"


def with_numbers(target: Target, spec: Spec, **numbers: Any) -> Call:
    """The call with these numbers for its heads."""
    call = build(spec, device=target.device)
    for name, value in numbers.items():
        call.args[name] = torch.tensor(value, device=target.device) if isinstance(value, list) else value
    return call


def assert_same(got: Result, want: Result, message: str) -> None:
    assert same_bits(got.out, want.out), f"out: {message}"
    assert same_bits(got.lse, want.lse), f"lse: {message}"
