"""The judge can fail: each check passes on a backend that is right by definition and catches each broken one.

A mutant that survives here means that the contract tests would let that bug through.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import pagedkern
from pagedkern import _selection as choices
from pagedkern.backends import _LOCATIONS, load, probe
from pagedkern.backends.base import Probe, Problem
from pagedkern.errors import BackendUnavailable, PagedKernError, Unsupported
from tests.contract import problems, toys
from tests.contract.cache_checks import check_copy, check_write
from tests.contract.checks import (
    check_batch_invariant,
    check_exact,
    check_no_leak,
    check_no_leak_between_rows,
    check_placement,
    check_special_numbers,
    check_whole,
)
from tests.contract.problems import Spec, build
from tests.contract.targets import MAY_REFUSE, Refused, Target

DECODE = Spec(seq_lens=(1, 0, 17, 40))
MIXED = Spec(seq_lens=(20, 5, 0, 40), query_lens=(3, 9, 2, 1), spare_rows=2)
FEATURES = Spec(seq_lens=(20, 40), query_lens=(3, 1), window=9, softcap=2.0, alibi=True, sinks=0.5)
QUANTIZED = Spec(kv_dtype="int8", seq_lens=(20, 40), query_lens=(3, 1))

Check = Callable[[Target], None]


def exact(spec: Spec) -> Check:
    return lambda target: check_exact(target, spec)


def special(**numbers: list[float]) -> Check:
    return lambda target: check_special_numbers(target, MIXED, **numbers)


def huge_block_stride(target: Target) -> None:
    from tests.contract.test_extremes import check_beyond_32_bits

    check_beyond_32_bits(target, "int8")


def writes(dtype: str) -> Check:
    scales: dict[str, Any] = {"k_scale": 0.5, "v_scale": 0.25} if dtype in problems.QUANTIZED else {}
    return lambda target: check_write(target, Spec(kv_dtype=dtype, head_dim=16), [5, -1, 17, 40], 4, **scales)


def copies(target: Target) -> None:
    check_copy(target, [torch.arange(12.0).view(4, 3), torch.arange(8).view(4, 2)], [0, 1, 2], [1, 2, 0])


MUTANTS: list[tuple[type[toys.RightBackend], Check]] = [
    (toys.MultipliesByZero, lambda t: check_no_leak(t, DECODE)),
    (toys.FollowsTheTail, lambda t: check_no_leak(t, DECODE)),
    (toys.MasksOnlyQueriesOfTheSequence, lambda t: check_no_leak_between_rows(t, MIXED)),
    (toys.HidesNaN, lambda t: check_no_leak_between_rows(t, MIXED)),
    (toys.IgnoresVScale, exact(QUANTIZED)),
    (toys.IgnoresKScale, exact(QUANTIZED)),
    (toys.FirstScaleForAll, exact(QUANTIZED)),
    (toys.WindowOneMore, exact(FEATURES)),
    (toys.WindowOneLess, exact(FEATURES)),
    (toys.BaseTwoLse, exact(DECODE)),
    (toys.ForgetsSinkInLse, exact(FEATURES)),
    (toys.CapsAfterAlibi, exact(FEATURES)),
    (toys.QueriesStandFirst, exact(MIXED)),
    (toys.WrongGroup, exact(DECODE)),
    (toys.RoundsScores, exact(DECODE)),
    (toys.OverflowsInTanh, exact(Spec(softcap=0.01))),
    (toys.OffsetsIn32Bits, huge_block_stride),
    (toys.ForgetsSpareRows, lambda t: check_whole(t, MIXED)),
    (toys.ForgetsPaddingLse, lambda t: check_whole(t, DECODE)),
    (toys.WritesPastOut, lambda t: check_whole(t, DECODE)),
    (toys.WritesTheCache, lambda t: check_whole(t, DECODE)),
    (toys.DependsOnTheBatch, lambda t: check_batch_invariant(t, MIXED)),
    (toys.DependsOnTheOrder, lambda t: check_placement(t, DECODE)),
    (toys.DependsOnStrides, lambda t: check_placement(t, DECODE)),
    (toys.RefusesSilently, exact(Spec(head_dim=24))),
    (toys.WritesNegativeSlots, writes("float32")),
    (toys.WritesNegativeSlots, writes("float8_e5m2")),
    (toys.Truncates, writes("int8")),
    (toys.WrapsAround, writes("int8")),
    (toys.CopiesOneByOne, copies),
    (toys.IgnoresNaNSinks, special(sinks=[math.nan, 0.5, -1.0, 0.0])),
    (toys.WritesZeroWhereNothingIsSeen, special(sinks=[math.nan, 0.5, -1.0, 0.0])),
    (toys.SubtractsInfinity, special(sinks=[0.5, math.inf, -1.0, 0.0])),
]
CHECKS: dict[str, Check] = {
    "exact_decode": exact(DECODE),
    "exact_mixed": exact(MIXED),
    "exact_features": exact(FEATURES),
    "exact_quantized": exact(QUANTIZED),
    "no_leak": lambda t: check_no_leak(t, MIXED),
    "no_leak_between_rows": lambda t: check_no_leak_between_rows(t, MIXED),
    "placement": lambda t: check_placement(t, MIXED),
    "batch_invariant": lambda t: check_batch_invariant(t, DECODE),
    "batch_invariant_ragged": lambda t: check_batch_invariant(t, MIXED),
    "whole": lambda t: check_whole(t, MIXED),
    "beyond_32_bits": huge_block_stride,
    "special_sinks": special(sinks=[math.nan, math.inf, -math.inf, 0.5]),
    "special_slopes": special(alibi_slopes=[math.nan, math.inf, -math.inf, 0.5], sinks=[0.5, 0.5, 0.5, math.inf]),
    **{f"write_{dtype}": writes(dtype) for dtype in ("float16", "int8", "float8_e4m3fn", "float8_e5m2")},
    "copy": copies,
}


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[type[toys.RightBackend]], Target]]:
    """Puts a toy into the registry under the name "toy", through which the public functions find it."""

    def forget() -> None:
        load.cache_clear()
        probe.cache_clear()
        choices.choose.cache_clear()

    def add(toy: type[toys.RightBackend]) -> Target:
        forget()
        monkeypatch.setitem(_LOCATIONS, "toy", f"{toy.__module__}:{toy.__name__}")
        return Target("toy")

    yield add
    monkeypatch.undo()
    forget()


Register = Callable[[type[toys.RightBackend]], Target]


@pytest.mark.parametrize("name", CHECKS)
def test_a_right_backend_passes(register: Register, name: str) -> None:
    CHECKS[name](register(toys.RightBackend))


@pytest.mark.parametrize(("toy", "check"), MUTANTS, ids=[toy.__name__ for toy, _ in MUTANTS])
def test_a_broken_backend_is_caught(register: Register, toy: type[toys.RightBackend], check: Check) -> None:
    try:
        check(register(toy))
    except AssertionError:
        return
    except PagedKernError as error:
        pytest.fail(f"the call itself was refused: {error}")
    pytest.fail(f"{toy.__name__} passes")


class Unavailable(toys.RightBackend):
    def probe(self) -> Probe:
        return Probe(False, "needs a quantum computer: pip install qubits")


class TakesNoSinks(toys.RightBackend):
    def supports(self, problem: Problem) -> str | None:
        return "sinks are not implemented" if problem.sinks else None


def test_an_unavailable_backend_says_what_is_missing(register: Register) -> None:
    target = register(Unavailable)
    with pytest.raises(BackendUnavailable, match=r"toy.*pip install qubits"):
        target.attend(build(DECODE))
    (info,) = (b for b in pagedkern.backends() if b.name == "toy")
    assert (info.available, info.emulated) == (False, False)
    assert "pip install qubits" in info.reason


def test_a_refusal_that_is_allowed_ends_the_check(register: Register, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error with the reason is asserted, then there is nothing more to check; other problems are computed."""
    target = register(TakesNoSinks)
    with pytest.raises(AssertionError, match="may not refuse"):
        check_exact(target, FEATURES)
    monkeypatch.setitem(MAY_REFUSE, "toy", lambda problem: problem.sinks)
    check_exact(target, FEATURES)
    check_exact(target, DECODE)
    with pytest.raises(Refused, match="sinks are not implemented"):
        target.attend(build(FEATURES))


def test_auto_passes_over_what_cannot_do_it(register: Register, monkeypatch: pytest.MonkeyPatch) -> None:
    """And `explain` says why."""
    register(TakesNoSinks)
    toy = {"toy": _LOCATIONS["toy"]}
    monkeypatch.setattr(pagedkern.backends, "_LOCATIONS", {**toy, **_LOCATIONS})  # the toy is preferred
    assert pagedkern.explain(**build(DECODE).args).backend == "toy"
    choice = pagedkern.explain(**build(FEATURES).args)
    assert choice.backend != "toy"
    assert "sinks are not implemented" in choice.reason
    monkeypatch.setattr(pagedkern.backends, "_LOCATIONS", toy)
    choices.choose.cache_clear()
    with pytest.raises(Unsupported, match="sinks are not implemented"):
        pagedkern.paged_attention(**build(FEATURES).args)


def test_every_toy_is_used() -> None:
    mutants = {toy for toy, _ in MUTANTS}
    assert mutants == {toy for toy in toys.RightBackend.__subclasses__() if toy.__module__ == toys.__name__}
