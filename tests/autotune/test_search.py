"""Search and decision on recorded or simulated times: nothing here looks at a real clock."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkern.autotune import search as searching
from pagedkern.autotune.decision import (
    ERROR_RATE,
    MIN_ROUNDS,
    Gain,
    compare,
    decide,
    lower_bound,
    rounds_needed,
)  # fmt: skip
from pagedkern.autotune.log import Log
from pagedkern.autotune.runner import OutOfTime
from pagedkern.autotune.search import search
from pagedkern.autotune.space import Candidate, Space, workloads
from pagedkern.autotune.store import MIN_GAIN

WORKLOAD = workloads("cpu", num_seqs=1, context=64, prompt=64)[0]
FAST, SLOW = "fast", "slow"


def make_space(block_sizes: tuple[int, ...] = (16, 32), tiles: tuple[int, ...] = (64, 32, 128)) -> Space:
    """Two backends; "fast" is used untuned; tile 64 is the default of both."""
    found = [
        Candidate(b, name, f'{{"tile": {tile}}}', is_default=tile == tiles[0])
        for name in (FAST, SLOW)
        for b in block_sizes
        for tile in tiles
    ]
    return Space(WORKLOAD, tuple(found), ())


class Simulated:
    """Runs candidates on a simulated clock, with noise that all share and noise of each call's own.

    As the worker's, its calls are cut short when their time is over, and what it costs to lay out, to compile and to
    check can be set.
    """

    def __init__(
        self, seconds: Callable[[Candidate], float], noise: float = 0.0, drift: float = 0.0, seed: int = 0
    ) -> None:
        self.seconds = seconds
        self.noise, self.drift = noise, drift
        self.now = 0.0
        self.wrong: dict[Candidate, str] = {}
        self.compilation = 0.0  # seconds that the first call of each candidate takes longer
        self.opening = self.layout = self.checking = 0.0  # seconds that these take
        self.prepared: list[Candidate] = []
        self.laid_out: list[int] = []
        self.ends = math.inf
        self._compiled: set[Candidate] = set()
        self.runs: Counter[Candidate] = Counter()
        self.interrupt_after = math.inf
        self._rng = random.Random(seed)

    def clock(self) -> float:
        return self.now

    def take(self, seconds: float) -> None:
        """Time passes."""
        if self.now + seconds > self.ends:
            self.now = max(self.now, self.ends)
            raise OutOfTime
        self.now += seconds

    def open(self) -> None:
        self.take(self.opening)

    def end_at(self, seconds: float) -> None:
        self.ends = self.now + seconds

    def lay_out(self, block_size: int) -> None:
        self.take(self.layout)
        self.laid_out.append(block_size)

    def compile_ahead(self, candidates: Sequence[Candidate], seconds: float) -> Mapping[Candidate, str]:
        return {}

    def prepare(self, candidate: Candidate) -> None:
        self.prepared.append(candidate)
        self.take(self.compile(candidate) + self.seconds(candidate) / 4)

    def compile(self, candidate: Candidate) -> float:
        if candidate in self._compiled:
            return 0.0
        self._compiled.add(candidate)
        return self.compilation

    def check(self, candidate: Candidate) -> str | None:
        self.take(self.checking)
        self._run(candidate)
        return self.wrong.get(candidate)

    def sample(self, candidate: Candidate, repeats: int, context: int | None = None) -> float:
        return sum(self._run(candidate) for _ in range(repeats)) / repeats

    def read_bandwidth(self) -> float:
        return 1e10

    def product_rate(self) -> float:
        return 1e12

    def _run(self, candidate: Candidate) -> float:
        if sum(self.runs.values()) >= self.interrupt_after:
            raise KeyboardInterrupt
        self.runs[candidate] += 1
        loaded = 1 + self.drift * (1 + math.sin(self.now / 3))  # somebody else's load comes and goes
        seconds = self.seconds(candidate) * loaded * math.exp(self._rng.gauss(0, self.noise)) + self.compile(candidate)
        self.take(seconds)
        return seconds


def run(space: Space, runner: Simulated, budget: float = 1000.0, seed: int = 0) -> Log:
    log = Log()
    search(space, runner, log, budget, clock=runner.clock, seed=seed)
    return log


def tile_of(candidate: Candidate) -> object:
    return candidate.fields["tile"]


def test_the_faster_configuration_and_block_size_are_found() -> None:
    space = make_space((8, 16, 32))
    factor = {64: 1.0, 32: 0.8, 128: 1.1}
    block = {8: 1.2, 16: 1.0, 32: 0.9}
    slowness = {FAST: 1.0, SLOW: 1.5}

    def seconds(c: Candidate) -> float:
        return 0.01 * factor[int(str(tile_of(c)))] * block[c.block_size] * slowness[c.backend]

    log = run(space, Simulated(seconds, noise=0.05, drift=2.0))
    verdict = decide(space, log)
    assert set(verdict.winners) == {8, 16, 32}
    for pick in verdict.winners.values():
        assert (pick.candidate.backend, tile_of(pick.candidate)) == (FAST, 32)
        assert pick.gain.ratio == pytest.approx(1 / 0.8, rel=0.05)
        assert MIN_GAIN <= pick.gain.low <= pick.gain.ratio
    for picks in verdict.picks.values():
        assert tile_of(picks[SLOW].candidate) == 32  # each backend is tuned for calls that name it
        assert picks[SLOW].gain.ratio == pytest.approx(1 / (0.8 * 1.5), rel=0.05)
    assert verdict.best is not None
    assert verdict.gain is not None
    assert verdict.best.candidate.block_size == 32
    assert verdict.gain.ratio == pytest.approx(1 / (0.8 * 0.9), rel=0.06)


def test_another_backend_wins_where_it_is_faster() -> None:
    space = make_space()
    log = run(space, Simulated(lambda c: 0.01 if c.backend == SLOW and c.block_size == 32 else 0.02, noise=0.02))
    winners = decide(space, log).winners
    assert winners[16].candidate == space.untuned(16)
    assert winners[32].candidate.backend == SLOW


@pytest.mark.parametrize("gain", [1.0, 1.005, 1.015])
def test_small_gains_leave_the_default(gain: float) -> None:
    space = make_space()
    log = run(space, Simulated(lambda c: 0.01 if c.is_default else 0.01 / gain, noise=0.001))
    verdict = decide(space, log)
    assert all(pick.candidate == space.untuned(b) for b, pick in verdict.winners.items())
    assert verdict.best is not None
    assert verdict.best.candidate == space.baseline
    assert verdict.best.gain == Gain(1.0, 1.0, searching.MAX_ROUNDS)


def test_noise_alone_rarely_leaves_the_default() -> None:
    """All candidates alike, 15 % noise: by chance something is preferred at a block size in at most 1 run of 20."""
    space = make_space((16,), tuple(range(64, 64 + 8)))
    left = sum(
        decide(space, run(space, Simulated(lambda c: 0.01, noise=0.15, seed=s), seed=s)).winners[16].candidate
        != space.untuned(16)
        for s in range(200)
    )
    assert left <= 10


def test_load_that_all_share_changes_nothing() -> None:
    """The machine is three times slower in some rounds: the ratios within a round do not see it."""
    space = make_space((16,), (64, 32))
    true = {64: 0.010, 32: 0.009}
    rng = random.Random(0)
    log = Log()
    for _ in range(15):
        load = rng.choice([1.0, 3.0])
        log.finals.append({c: load * true[int(str(tile_of(c)))] for c in space.candidates if c.backend == FAST})
    pick = decide(space, log).winners[16]
    assert tile_of(pick.candidate) == 32
    assert pick.gain.low == pick.gain.ratio == pytest.approx(10 / 9)


def test_what_is_wrong_is_never_timed() -> None:
    space = make_space()
    runner = Simulated(lambda c: 0.001 if tile_of(c) == 32 else 0.01)
    runner.wrong = {c: "wrong by 1e-01" for c in space.candidates if tile_of(c) == 32}
    log = run(space, runner)
    assert all(runner.runs[c] == 1 and log.left_out[c] == "wrong by 1e-01" for c in runner.wrong)
    assert all(tile_of(pick.candidate) == 64 for pick in decide(space, log).winners.values())


def test_nothing_is_decided_where_the_untuned_choice_is_wrong() -> None:
    space = make_space()
    runner = Simulated(lambda c: 0.01)
    runner.wrong = {space.untuned(16): "wrong"}
    verdict = decide(space, run(space, runner))
    assert set(verdict.winners) == {32}
    assert verdict.best is None


def test_a_backend_that_is_too_slow_costs_two_calls() -> None:
    space = make_space((8, 16, 32, 64))
    runner = Simulated(lambda c: 0.01 if c.backend == FAST else 0.1)
    log = run(space, runner, budget=60.0)
    slow = [c for c in space.candidates if c.backend == SLOW]
    assert sum(runner.runs[c] for c in slow) == 2 * 3  # checked and timed once, with each of its configurations
    assert set(slow) <= set(log.left_out)
    assert {c.block_size for c in slow if log.left_out[c] == "timed once: too slow"} == {16}  # the first to be entered
    assert log.left_out[slow[-1]] == "too slow at block size 16"
    assert len(log.finals) == searching.MAX_ROUNDS


def test_a_backend_that_would_take_too_much_of_the_time_is_not_even_checked() -> None:
    space = make_space((8, 16, 32, 64))
    runner = Simulated(lambda c: 0.01 if c.backend == FAST else 2.0)
    log = run(space, runner, budget=60.0)
    slow = [c for c in space.candidates if c.backend == SLOW]
    assert sum(runner.runs[c] for c in slow) == 0
    assert {c.block_size for c in slow if c in runner.prepared} == {16}
    assert {log.left_out[c] for c in slow if c.block_size == 16} == {"too slow: 200 times the time of one sequence"}
    assert log.left_out[slow[-1]] == "too slow at block size 16"
    assert len(log.finals) >= searching.MAX_ROUNDS


def test_a_default_that_is_too_slow_is_still_what_others_must_beat() -> None:
    space = make_space()
    log = run(space, Simulated(lambda c: 0.1 if c.backend == FAST else 0.001))
    winners = decide(space, log).winners
    assert {pick.candidate.backend for pick in winners.values()} == {SLOW}
    assert winners[16].gain.ratio == pytest.approx(100)


@pytest.mark.parametrize("budget", [0.0, 0.5, 1.0, 3.0, 10.0, 30.0])
def test_no_call_begins_after_the_deadline(budget: float) -> None:
    space = make_space((8, 16, 32, 64, 128))
    runner = Simulated(lambda c: 0.05 if c.backend == FAST else 0.2, noise=0.1)
    log = run(space, runner, budget)
    longest = 0.2 * math.exp(0.5)
    compiling = sum(runner.seconds(c) / 4 for c in runner.prepared)
    assert runner.now <= budget + compiling + 3 * longest  # a check with its first timing is one step
    assert set(log.screened) | set(log.left_out) == set(space.candidates)  # nobody is forgotten
    verdict = decide(space, log)
    if budget >= 10:
        assert verdict.best is not None
    for block_size, pick in verdict.winners.items():
        assert pick.gain.rounds >= MIN_ROUNDS
        assert block_size == pick.candidate.block_size


def test_a_first_call_that_takes_all_the_time_is_not_repeated() -> None:
    class InThisProcess(Simulated):
        def end_at(self, seconds: float) -> None:
            """Nothing can be cut short."""

        def check(self, candidate: Candidate) -> str | None:
            self.take(30.0 if candidate.backend == SLOW else 0.0)
            return super().check(candidate)

    space = make_space((16,))
    runner = InThisProcess(lambda c: 0.01)
    log = run(space, runner, budget=60.0)
    slow = [c for c in space.candidates if c.backend == SLOW]
    assert runner.runs[slow[0]] == 1
    assert "first call took 30.0 s" in log.left_out[slow[0]]


def test_an_interrupt_while_compiling() -> None:
    class Interrupted(Simulated):
        def prepare(self, candidate: Candidate) -> None:
            raise KeyboardInterrupt

    log = run(make_space(), Interrupted(lambda c: 0.01))
    assert (log.ended, log.screened) == ("interrupted", {})


@pytest.mark.parametrize("after", range(0, 400, 23))
def test_an_interrupt_keeps_what_there_is(after: int) -> None:
    space = make_space()
    runner = Simulated(lambda c: 0.01 if tile_of(c) == 64 else 0.005)
    runner.interrupt_after = after
    log = run(space, runner)
    assert log.ended == "interrupted"
    verdict = decide(space, log)
    complete = sum(len(times) == len(log.finals[0]) for times in log.finals)
    if complete >= 8:
        assert all(tile_of(pick.candidate) != 64 for pick in verdict.winners.values())
    elif complete < MIN_ROUNDS - 1:
        assert verdict.winners == {}


def test_the_same_seed_gives_the_same_order() -> None:
    space = make_space()
    orders = []
    for seed in (1, 1, 2):
        log = run(space, Simulated(lambda c: 0.01), seed=seed)
        orders.append([list(times) for times in log.finals])
    assert orders[0] == orders[1] != orders[2]


def test_short_calls_are_repeated_in_a_sample() -> None:
    space = make_space((16,), (64,))
    runner = Simulated(lambda c: 1e-4)
    log = run(space, runner)
    swept = 3 * (32 + 32 + 20)  # at three lengths, of which shorter ones are repeated more often
    assert runner.runs[space.untuned(16)] == 2 + 20 * (len(log.shortlist) + len(log.finals)) + swept


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=40), st.floats(0.001, 0.3))
def test_the_bound_is_the_order_statistic_of_the_binomial(values: list[float], error_rate: float) -> None:
    bound = lower_bound(values, error_rate)
    n = len(values)
    tail = [sum(math.comb(n, i) for i in range(k + 1)) / 2**n for k in range(n)]
    proven = [v for v, p in zip(sorted(values), tail, strict=True) if p <= error_rate]
    assert bound == (proven[-1] if proven else 0.0)
    assert bound <= median(values)


def test_the_bound_holds_as_often_as_it_says() -> None:
    rng = random.Random(0)
    trials = 4000
    for n in (5, 11, 41):
        over = sum(lower_bound([rng.lognormvariate(0, 0.3) for _ in range(n)], 0.05) > 1.0 for _ in range(trials))
        assert over / trials <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / trials)


def test_the_rounds_needed_are_the_least_that_give_a_bound() -> None:
    for comparisons in range(1, 40):
        n = rounds_needed(comparisons)
        assert lower_bound([1.5] * n, ERROR_RATE / comparisons) == 1.5
        assert lower_bound([1.5] * (n - 1), ERROR_RATE / comparisons) == 0.0


def test_only_rounds_with_both_count() -> None:
    a, b = make_space().candidates[:2]
    log = Log(finals=[{a: 1.0, b: 2.0}, {a: 1.0}, {b: 4.0}, {a: 1.0, b: 4.0}])
    assert compare(log, a, b, 0.05) == Gain(3.0, 0.0, 2)
    assert compare(log, a, a, 0.05) == Gain(1.0, 1.0, 3)
    assert compare(Log(), a, b, 0.05).rounds == 0


@pytest.mark.parametrize(
    ("speeds", "best"),
    [
        ({8: 1.0, 16: 1.0, 32: 1.0}, 16),
        ({8: 0.5, 16: 1.0, 32: 1.2}, 32),
        ({8: 1.2, 16: 1.0, 32: 1.2}, 8),
        ({16: 1.0, 32: 1.3, 64: 1.31, 256: 1.32}, 32),  # larger blocks that are hardly faster
        ({16: 1.0, 32: 1.015, 64: 1.03, 256: 1.06}, 256),
        ({16: 1.0, 32: 1.2, 64: 1.1, 256: 1.19}, 32),
        ({64: 1.0, 256: 1.2}, 256),
    ],
)
def test_the_smallest_block_that_nothing_beats(speeds: dict[int, float], best: int) -> None:
    space = make_space(tuple(speeds), (64,))
    log = Log(finals=[{c: 0.01 / speeds[c.block_size] for c in space.candidates if c.backend == FAST}] * 11)
    verdict = decide(space, log)
    assert verdict.best is not None
    assert verdict.gain is not None
    assert verdict.best.candidate.block_size == best
    assert verdict.gain.ratio == pytest.approx(speeds[best] / speeds[space.baseline.block_size])


def test_a_space_without_candidates() -> None:
    space = Space(WORKLOAD, (), ())
    assert run(space, Simulated(lambda c: 0.01)).finals == []
    assert decide(space, Log()).best is None


def test_a_default_at_the_limit_of_the_machine_keeps_the_others_out_of_the_finals() -> None:
    """The analytic bound: nothing reads K and V faster than memory is read."""
    space = make_space((16, 32))
    limit = WORKLOAD.kv_bytes / 1e10  # seconds, at the plain read of `Simulated`
    runner = Simulated(lambda c: limit * (1.01 if c.block_size == 16 else 1.3) * (1 if c.is_default else 1.002))
    log = run(space, runner)
    finalists = {c for times in log.finals for c in times}
    assert {c.is_default for c in finalists if c.block_size == 16} == {True}
    assert {c.is_default for c in finalists if c.block_size == 32} == {True, False}
    assert "the default is within 2 % of what the machine can do" in log.left_out.values()
    everybody = Log()
    runner = Simulated(runner.seconds)
    search(space, runner, everybody, 1000.0, clock=runner.clock, exhaustive=True)
    assert {c for times in everybody.finals for c in times} == set(space.candidates)


def test_paired_times_do_not_see_a_load_that_comes_and_goes() -> None:
    a, b = make_space((16,), (64, 32)).candidates[:2]
    log = Log()
    for i in range(9):  # b was unlucky: it ran in the loaded rounds only in part
        load = 5.0 if i % 3 else 1.0
        log.final(i, a, 0.010 * load)
        if i % 3:
            log.final(i, b, 0.008 * load)
    assert log.seconds(b) == pytest.approx(0.040)
    assert log.paired_seconds(b, a) == pytest.approx(0.8 * 0.050)
    assert log.paired_seconds(b, a) / (log.seconds(a) or 1) == pytest.approx(0.8)  # type: ignore[operator]
    assert Log(screened={a: 1.0}).paired_seconds(a, b) == 1.0
    assert Log().paired_seconds(a, b) is None
