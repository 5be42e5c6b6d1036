"""The budget is wall time: whatever is slow on a machine, a run ends in time, with a result as early as can be."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkern.autotune.decision import decide
from pagedkern.autotune.log import Log
from pagedkern.autotune.race import GRACE
from pagedkern.autotune.runs import Order, TuningRun, carry_out
from pagedkern.autotune.search import search
from pagedkern.autotune.space import BLOCK_SIZES, Candidate, Space, problems_of
from pagedkern.autotune.workloads import model
from tests.autotune.test_search import Simulated, make_space, tile_of

COSTS = ("opening", "layout", "compilation", "checking")


def call(candidate: Candidate) -> float:
    """Seconds of a call: a configuration is faster than the untuned one."""
    return 0.02 if candidate.is_default else 0.015


@pytest.mark.parametrize("what", [*COSTS, "everything"])
@pytest.mark.parametrize("seconds", [0.3, 2.0, 9.0, 44.0, 1000.0])
def test_a_search_ends_in_time(what: str, seconds: float) -> None:
    space, runner, log = make_space((8, 16, 32, 64, 128, 256)), Simulated(call), Log()
    for name in COSTS if what == "everything" else (what,):
        setattr(runner, name, seconds)
    spent = search(space, runner, log, 45.0, clock=runner.clock)
    assert spent == runner.now <= 45.0 + GRACE
    assert set(log.screened) | set(log.left_out) == set(space.candidates)
    assert log.ended == "time" or seconds < 10
    if seconds < 10:  # the usual block size is decided, whatever came of the others
        assert 16 in decide(space, log).winners


@pytest.mark.parametrize("what", COSTS)
def test_the_first_result_comes_before_the_other_block_sizes(what: str) -> None:
    """As soon as the usual block size can be decided: nothing else has been laid out or compiled by then."""
    space, runner, log = make_space((8, 16, 32, 64)), Simulated(call), Log()
    setattr(runner, what, 1.0 if what in ("compilation", "checking") else 5.0)
    seen: list[tuple[float, set[int], set[int]]] = []

    def decided() -> None:
        verdict = decide(space, log)
        seen.append((runner.now, set(verdict.winners), {c.block_size for c in runner.prepared}))

    search(space, runner, log, 90.0, clock=runner.clock, decided=decided)
    ((when, winners, prepared),) = seen
    assert winners == prepared == {16}
    assert when < 30
    assert set(decide(space, log).winners) == {8, 16, 32, 64}  # and the others came later
    assert all(tile_of(pick.candidate) != 64 for pick in decide(space, log).winners.values())


def test_without_haste_everything_is_decided_together() -> None:
    space, runner, log = make_space((8, 16, 32)), Simulated(call), Log()
    search(space, runner, log, 1000.0, clock=runner.clock, decided=lambda: pytest.fail("decided twice"))
    assert set(decide(space, log).winners) == {8, 16, 32}


@pytest.mark.parametrize("slow", ["check", "sample", "prepare"])
def test_a_candidate_that_hangs_costs_itself_alone(slow: str) -> None:
    class Hangs(Simulated):
        def step(self, name: str, candidate: Candidate) -> None:
            ready = name != "sample" or self.runs[candidate] > 3
            self.take(1e6 if name == slow and ready and candidate.backend == "slow" else 0.0)

        def prepare(self, candidate: Candidate) -> None:
            self.step("prepare", candidate)
            super().prepare(candidate)

        def check(self, candidate: Candidate) -> str | None:
            self.step("check", candidate)
            return super().check(candidate)

        def sample(self, candidate: Candidate, repeats: int, context: int | None = None) -> float:
            self.step("sample", candidate)
            return super().sample(candidate, repeats, context)

    space, runner, log = make_space((8, 16, 32)), Hangs(call), Log()
    search(space, runner, log, 100.0, clock=runner.clock)
    assert runner.now <= 100.0 + GRACE
    verdict = decide(space, log)
    assert {pick.candidate.backend for pick in verdict.winners.values()} == {"fast"}
    assert 16 in verdict.winners
    assert tile_of(verdict.winners[16].candidate) != 64


class Machine:
    """Runners that share one clock, as the problems of a run do."""

    def __init__(self, costs: dict[str, float], seconds: Callable[[Candidate], float] = call) -> None:
        self._costs, self._seconds = costs, seconds
        self.runners: list[Simulated] = []

    def make(self, space: Space, seed: int) -> Simulated:
        runner = Simulated(self._seconds, seed=seed)
        runner.now = self.clock()
        for name, cost in self._costs.items():
            setattr(runner, name, cost)
        self.runners.append(runner)
        return runner

    def clock(self) -> float:
        return self.runners[-1].now if self.runners else 0.0


def carried_out(machine: Machine, budget: float, name: str = "gemma-2-9b", reserve: float = 0.0) -> TuningRun:
    """Decode and prefill of layers with and without a window: four problems for Gemma, else two."""
    order = Order(problems_of(model(name), "cpu"), BLOCK_SIZES, ["cpu", "reference"], budget=budget)
    return carry_out(order, make_runner=machine.make, clock=machine.clock, reserve=reserve)


@pytest.mark.parametrize("what", COSTS)
@pytest.mark.parametrize("name", ["gemma-2-9b", "llama-3-8b"])
def test_a_run_of_many_problems_ends_in_time(what: str, name: str) -> None:
    for seconds in (0.5, 4.0, 30.0, 1000.0):
        machine = Machine({what: seconds})
        run = carried_out(machine, 60.0, name)
        assert machine.clock() <= 60.0 + GRACE
        assert len(run.outcomes) == len(problems_of(model(name), "cpu"))
        if seconds < 1000:  # something is decided, and the usual block size first of all
            assert 16 in run.outcomes[0].stored


def test_one_problem_is_decided_before_the_next_one_begins() -> None:
    """Half of the time is not enough to lay the first one out: it is given more, and the second one has none left."""
    machine = Machine({"opening": 35.0})
    run = carried_out(machine, 60.0, "llama-3-8b")
    assert machine.clock() <= 60.0 + GRACE
    assert [bool(outcome.verdict.winners) for outcome in run.outcomes] == [True, False]
    assert run.exit_code == 1
    assert run.profile is not None


def test_what_one_problem_leaves_the_next_one_has() -> None:
    quick = Machine({})
    carried_out(quick, 4000.0, "llama-3-8b")
    first, second = (runner.now for runner in quick.runners)
    assert first < 1000  # of 2,000 that were its own
    assert second < 2000


def test_time_is_kept_for_what_comes_after() -> None:
    machine = Machine({"layout": 1.0})
    carried_out(machine, 60.0, reserve=10.0)
    assert 40.0 < machine.clock() <= 50.0 + GRACE
    machine = Machine({"layout": 1.0})
    carried_out(machine, 60.0, reserve=1e9)  # but not all of it
    assert 40.0 < machine.clock() <= 45.0 + GRACE


@given(
    costs=st.fixed_dictionaries({name: st.floats(0, 40) for name in COSTS}),
    budget=st.floats(0.01, 300),
    slowness=st.floats(1e-4, 20),
    name=st.sampled_from(["gemma-2-9b", "llama-3-8b"]),
)
def test_whatever_is_slow_a_run_ends_in_time(
    costs: dict[str, float], budget: float, slowness: float, name: str
) -> None:
    machine = Machine(costs, lambda c: slowness * (1.0 if c.is_default else 0.8))
    run = carried_out(machine, budget, name)
    assert machine.clock() <= budget + GRACE
    needed = sum(costs.values()) + 20 * max(slowness, 5e-3)  # prepared twice, checked, timed 1 + 3 + 5 times
    if needed < 0.9 * budget:
        assert 16 in run.outcomes[0].verdict.winners
    for outcome in run.outcomes:
        assert set(outcome.log.screened) | set(outcome.log.left_out) <= set(outcome.space.candidates)
        assert all(math.isfinite(seconds) for seconds in outcome.log.screened.values())
