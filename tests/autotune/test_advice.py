"""Which block size is advised: error bars from the spread of what was measured, and the usual one within them."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkern import recommend
from pagedkern.autotune import profile as profiles
from pagedkern.autotune import workloads
from pagedkern.autotune.advice import MARGIN, Advice, advise, proven
from pagedkern.autotune.cli import main
from pagedkern.autotune.decision import decide, interval
from pagedkern.autotune.objective import Score, score
from pagedkern.autotune.profile import UNKNOWN_ERROR, distil, from_json, to_json
from pagedkern.autotune.rates import Rates, Speed
from pagedkern.autotune.rating import NOT_MEASURED, rates_of
from pagedkern.autotune.records import Recording
from pagedkern.autotune.space import Candidate
from pagedkern.autotune.store import device
from pagedkern.autotune.store import profiles as stored
from tests.autotune.recordings import LLAMA, TILE, recording
from tests.autotune.test_records import written

SMALL = replace(LLAMA, weight_bytes=10**8)  # weights take no time, so that attention is what counts
TRUTH = {8: 1.0, 16: 1.0, 32: 1.0, 64: 1.0, 128: 1.0, 256: 1.0}


def machine(block: dict[int, float], noise: float, seed: int = 0, rounds: int = 41) -> Recording:
    """A machine whose kernels take so many times as long at these block sizes."""

    def slowness(candidate: Candidate, kind: str) -> float:
        tile = TILE[int(str(candidate.fields["tile"]))]
        return block[candidate.block_size] * tile * (1.0 if candidate.backend == "fast" else 1.6)

    return recording(slowness, seed, noise, rounds, SMALL)


def rates(recorded: Recording) -> Rates:
    verdicts = [decide(space, log) for space, log in zip(recorded.spaces, recorded.logs, strict=True)]
    picks = [{b: pick.candidate for b, pick in verdict.winners.items()} for verdict in verdicts]
    found = rates_of(recorded.spaces, recorded.logs, picks)
    assert found is not None
    return found


def advice(recorded: Recording, workload: str = "chat", memory: int = 24 * 10**9) -> Advice:
    found = advise(score(workloads.load(workload), SMALL, rates(recorded), memory))
    assert found is not None
    return found


# The error bars


@pytest.mark.parametrize("noise", [0.005, 0.03, 0.1])
def test_an_error_bar_holds_the_truth_as_often_as_it_says(noise: float) -> None:
    """Of machines that are equally fast at all block sizes: in 19 of 20 all bars hold the ratio of 1 together."""
    held, widths = 0, []
    for seed in range(60):
        recorded = machine(TRUTH, noise, seed)
        found = rates(recorded).speeds
        usual = found[16]
        off = {b: abs(s.kv_bytes_per_second / usual.kv_bytes_per_second - 1) for b, s in found.items()}
        held += all(off[b] <= found[b].kv_error * 1.001 + 1e-9 for b in found if found[b].config == usual.config)
        widths += [s.kv_error for b, s in found.items() if b != 16]
        assert usual.kv_error == usual.prefill_error == 0.0
    assert held >= 55
    assert 0.3 * noise < median(widths) < 1.5 * noise


def test_fewer_rounds_and_more_noise_make_longer_bars() -> None:
    def length(noise: float, rounds: int) -> float:
        return median(s.kv_error for b, s in rates(machine(TRUTH, noise, 1, rounds)).speeds.items() if b != 16)

    assert length(0.01, 41) < length(0.03, 41) < length(0.1, 41)
    assert length(0.03, 41) < length(0.03, 12)


@given(st.lists(st.floats(0.5, 2.0), min_size=2, max_size=50), st.floats(0.001, 0.2))
def test_the_interval_is_around_the_median(values: list[float], error_rate: float) -> None:
    low, high = interval(values, error_rate)
    assert low <= median(values) + 1e-12
    assert high >= median(values) - 1e-12
    ordered = sorted(values)
    inside = ordered[0] <= low and high <= ordered[-1]
    assert inside or 2 * 0.5 ** len(values) > error_rate / 2  # too few of them for that confidence


def test_the_interval_leaves_the_median_as_seldom_as_it_says() -> None:
    rng, trials = random.Random(0), 2000
    for n in (9, 21, 41):
        missed = 0
        for _ in range(trials):
            low, high = interval([rng.lognormvariate(0, 0.2) for _ in range(n)], 0.05)
            missed += not low <= 1.0 <= high
        assert missed / trials <= 0.05 + 3 * (0.05 * 0.95 / trials) ** 0.5


@given(
    kv=st.floats(0, 0.2), prefill=st.floats(0, 0.2), share=st.floats(0.1, 1.0), memory=st.integers(2, 64),
    name=st.sampled_from(["chat", "code", "retrieval"]),
)  # fmt: skip
def test_a_score_carries_the_errors_of_its_rates(
    kv: float, prefill: float, share: float, memory: int, name: str
) -> None:
    """The bar is what the objective makes of rates that are all of their error lower, or higher."""
    traffic, size = workloads.load(name), memory * 10**9
    speed = Speed(3e12 * share, 5e-6, 2e14, kv_error=kv, prefill_error=prefill)
    machine_ = Rates(3e12, 4e14, 25e9, {16: speed})
    for one in score(traffic, SMALL, machine_, size):
        ends = []
        for side in (-1, 1):
            moved = replace(
                speed, kv_bytes_per_second=speed.kv_bytes_per_second * (1 + side * kv),
                prefill_flops=speed.prefill_flops * (1 + side * prefill),
            )  # fmt: skip
            (end,) = score(traffic, SMALL, replace(machine_, speeds={16: moved}), size)
            ends.append(end.tokens_per_second)
        assert (one.low, one.high) == pytest.approx(tuple(ends))
        assert one.low <= one.tokens_per_second <= one.high
        assert one.error == pytest.approx((one.high - one.low) / 2 / one.tokens_per_second)


def test_a_block_size_without_prefill_is_not_taken_for_the_fastest() -> None:
    """Where time was too short for it: it had the speed of a matrix product then, and was advised as "2.9 times"."""
    recorded = machine(TRUTH, 0.01)
    prefill = recorded.logs[1]
    for rounds in (prefill.shortlist, prefill.finals):
        for times in rounds:
            for candidate in [c for c in times if c.block_size >= 128]:
                del times[candidate]
    for candidate in [c for c in prefill.screened if c.block_size >= 128]:
        del prefill.screened[candidate]
    found = rates(recorded)
    for b in (128, 256):
        assert found.speeds[b].prefill_flops == found.speeds[64].prefill_flops < found.compute
        assert found.speeds[b].prefill_error == NOT_MEASURED
    assert advice(recorded, "code").score.block_size == 16


# The advice


def made(tokens: dict[int, float], error: float | dict[int, float] = 0.0) -> list[Score]:
    """Scores with so many tokens per second, and errors as shares."""
    (one,) = score(workloads.load("chat"), SMALL, Rates(3e12, 4e14, 25e9, {16: Speed(1e12)}), 24 * 10**9)
    errors = error if isinstance(error, dict) else dict.fromkeys(tokens, error)
    return [
        replace(one, block_size=b, tokens_per_second=t, low=t * (1 - errors[b]), high=t * (1 + errors[b]))
        for b, t in tokens.items()
    ]


@pytest.mark.parametrize(
    ("tokens", "error", "taken", "said"),
    [
        ({16: 100, 256: 100.1}, 0.0, 16, "block sizes 16 and 256 are all within 0.1 %"),  # as in the table of faults
        ({8: 99, 16: 100, 32: 103, 64: 104}, 0.03, 16, "block sizes 8, 16, 32 and 64 are all within 4.0 %"),
        ({8: 99, 16: 100, 32: 103, 64: 104}, 0.001, 64, "at least 3.8 % more tokens per second than with"),
        ({16: 100, 32: 110, 64: 111, 256: 110.5}, 0.01, 32, "64 and 256 within 0.9 % of it"),
        ({8: 110, 16: 100, 32: 110}, 0.001, 8, "32 within 0.0 % of it"),
        ({8: 50, 16: 100, 32: 60}, 0.01, 16, "all others are slower than 16"),
        ({16: 100, 32: 100.5, 256: 50}, 0.01, 16, "block sizes 16 and 32 are within 0.5 %"),
        ({64: 100, 256: 101}, 0.01, 64, "all within 1.0 %, and none is proven better than 64"),
        ({16: 100}, 0.5, 16, "16 is the only one that was measured"),
    ],
)  # fmt: skip
def test_the_usual_block_size_unless_another_is_proven_better(
    tokens: dict[int, float], error: float, taken: int, said: str
) -> None:
    found = advise(made(tokens, error))
    assert found is not None
    assert found.score.block_size == taken
    assert said in str(found)
    assert taken in found.alike


@given(
    tokens=st.dictionaries(st.sampled_from([8, 16, 24, 32, 64, 128, 256]), st.floats(50, 200), min_size=1),
    errors=st.lists(st.floats(0, 0.3), min_size=7, max_size=7),
)
def test_the_advice_is_never_worse_than_the_usual_one(tokens: dict[int, float], errors: list[float]) -> None:
    scores = made(tokens, dict(zip(tokens, errors, strict=False)))
    found = advise(scores)
    assert found is not None
    usual = next((s for s in scores if s.block_size == 16), None)
    if usual is not None:
        assert found.usual == usual
        assert found.score == usual or found.score.low >= MARGIN * usual.high
        assert (found.score == usual) == (not any(proven(s, usual) for s in scores))
    assert not any(proven(s, found.score) for s in scores)  # nothing is proven better than what is advised
    assert found.within == max(abs(s.tokens_per_second / found.score.tokens_per_second - 1) for s in scores
                               if s.block_size in found.alike)  # fmt: skip
    better = [s for s in scores if proven(s, found.usual)]
    for smaller in (s for s in better if s.block_size < found.score.block_size):  # else it would have been taken
        assert any(proven(s, smaller) for s in better)
    assert found.all_alike == (len(found.alike) == len(scores))


def test_there_is_nothing_to_advise_without_scores() -> None:
    assert advise([]) is None


@pytest.mark.parametrize("seed", range(12))
def test_noise_alone_leaves_the_usual_block_size(seed: int) -> None:
    """A machine on which all block sizes are equally fast, measured with noise of random width."""
    rng = random.Random(seed)
    found = advice(machine(TRUTH, rng.choice([0.01, 0.03, 0.1]), seed, rng.choice([9, 21, 41])))
    assert found.score.block_size == 16
    assert "within" in str(found)


@pytest.mark.parametrize("seed", range(6))
def test_a_gain_beyond_the_noise_is_taken(seed: int) -> None:
    block = {8: 2.0, 16: 1.5, 32: 1.1, 64: 1.0, 128: 1.0, 256: 1.02}
    found = advice(machine(block, 0.02, seed))
    assert found.score.block_size in (32, 64)
    assert found.score.low > found.usual.high
    assert "at least" in str(found)


# Where it is said


def test_it_is_said_wherever_block_sizes_are(
    capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    recorded = machine(TRUTH, 0.02)
    recorded.device = dict(device.identity("cpu"))
    recorded.code = [{name: {"kernel": "unknown"} for name in ("fast", "slow")} for _ in recorded.code]
    document = distil(recorded)
    assert document is not None
    stored.save_rates(document, profiles.from_json(document).shape.name())
    found = recommend("chat", "24GB", model=SMALL)
    assert (found.block_size, found.tier) == (16, "tuned")
    assert found.alike == (8, 16, 32, 64, 128, 256)
    assert found.within is not None
    assert 0 < found.within < 0.05
    assert found.error == 0.0  # of the usual one beside itself
    assert all(s.error > 0 for s in found.scores if s.block_size != 16)
    said = f"all within {100 * found.within:.1f} %"
    assert said in found.advice
    assert said in str(found)
    assert found.basis == found.reason.removesuffix(f"; {found.advice}")
    assert "within" not in found.basis
    path = written(recorded, tmp_path_factory.mktemp("records") / "machine.jsonl")
    shape = "heads=32,kv_heads=8,head_dim=128,layers=32,dtype=float32,weight_bytes=1e8"
    for arguments, expected in (
        (["explain", "--model", shape, "--memory", "24GB"], "are all within"),
        (["show"], "±"),
    ):
        assert main(arguments) == 0
        assert expected in " ".join(capsys.readouterr().out.split())
    assert main(["report", str(path), "--model", shape, "--memory", "24GB", "-o", str(path.with_suffix(""))]) == 0
    page = path.with_suffix(".html").read_text()
    assert "are all within" in page
    assert "token_budget=" in page
    assert "<h1>Block size 16: " in page


def test_rates_that_do_not_say_their_error_have_one() -> None:
    """Those of 0.1.0: no field, so that they are taken for as good as usual; and none that is no share."""
    document = distil(machine(TRUTH, 0.02))
    assert document is not None
    old = {**document, "speeds": {b: dict(s) for b, s in document["speeds"].items()}}
    for speed in old["speeds"].values():
        del speed["kv_error"], speed["prefill_error"]
    found = from_json(old)
    assert {(s.kv_error, s.prefill_error) for s in found.rates.speeds.values()} == {(UNKNOWN_ERROR, UNKNOWN_ERROR)}
    again = from_json(to_json(found))
    assert again.rates.speeds == found.rates.speeds
    for wrong in (-0.1, 1.0, float("nan"), "small", None, True):
        old["speeds"]["16"]["kv_error"] = wrong
        with pytest.raises((ValueError, TypeError)):
            from_json(old)
