"""Records, replay and profiles: on recorded measurements, nothing is timed."""

from __future__ import annotations

import json
import random
import re
from functools import lru_cache
from pathlib import Path

import pytest

from pagedkern.autotune import records, workloads
from pagedkern.autotune.decision import decide
from pagedkern.autotune.log import Log
from pagedkern.autotune.objective import best, score
from pagedkern.autotune.profile import ModelShape, Profile, choices_of, distil, from_json, rates_of, to_json
from pagedkern.autotune.records import Journal, Recording, load, take_up
from pagedkern.autotune.replay import ReplayRunner, SearchResult, exhaustive, regret, replay
from pagedkern.autotune.search import search
from pagedkern.autotune.space import Candidate
from pagedkern.autotune.store import files
from pagedkern.errors import InvalidArgument
from tests.autotune.recordings import recording, usual

ROOT = Path(__file__).parents[2]
LLAMA = workloads.model("llama-3-8b")
MEMORY = {"long-context": 48 * 10**9, "retrieval": 32 * 10**9}  # of the cache, in bytes; else 8 GB


@pytest.fixture(scope="module")
def recorded() -> Recording:
    return recording()


def written(recorded: Recording, path: Path) -> Path:
    with Journal(path, recorded):
        pass
    for log in recorded.logs:
        log.sink = Log().sink
    return path


def begun(recorded: Recording, count: int = 1) -> Recording:
    """The same machine at the beginning of a run of the first problems."""
    logs = [Log() for _ in range(count)]
    return Recording(recorded.device, recorded.when, recorded.spaces[:count], logs, recorded.code[:count], 0.0, "Linux")


def same(a: Log, b: Log) -> bool:
    fields = ("screened", "shortlist", "finals", "lasting", "reads", "products", "lengths")
    return all(getattr(a, name) == getattr(b, name) for name in fields)


def test_what_is_written_is_read(recorded: Recording, tmp_path: Path) -> None:
    found = load(written(recorded, tmp_path / "a.jsonl"))
    fields = ("device", "when", "spaces", "code", "load", "driver")
    assert [getattr(found, name) for name in fields] == [getattr(recorded, name) for name in fields]
    assert [[c.is_default for c in space.candidates] for space in found.spaces] == [
        [c.is_default for c in space.candidates] for space in recorded.spaces
    ]
    assert all(same(a, b) for a, b in zip(found.logs, recorded.logs, strict=True))


def test_a_search_is_written_down_as_it_goes(recorded: Recording, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    runner = ReplayRunner(recorded.spaces[0], recorded.logs[0])
    known = begun(recorded)
    (log,) = known.logs
    with Journal(path, known):
        search(recorded.spaces[0], runner, log, 5.0, clock=runner.clock)
    assert same(load(path).logs[0], log)
    assert len(log.finals) >= 5


def test_a_file_cut_anywhere_loses_its_last_line_only(recorded: Recording, tmp_path: Path) -> None:
    path = written(recording(rounds=2), tmp_path / "a.jsonl")
    content, rng = path.read_bytes(), random.Random(0)
    first = content.index(b"\n") + 1
    for end in sorted(rng.sample(range(first, len(content)), 40)):
        path.write_bytes(content[:end])
        found = load(path)
        again = content[:end].rpartition(b"\n")[0].count(b"\n")
        entries = sum(1 + len(list(records.entries(log))) for log in found.logs)
        assert entries == again
    path.write_bytes(content[: first - 2])
    with pytest.raises(InvalidArgument, match="no complete line"):
        load(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 3: got '{'"),
        ("[1]", "line 3"),
        ('{"record": "screened", "problem": 0, "candidate": 99, "seconds": 1}', "candidate 99 of 60"),
        ('{"record": "screened", "problem": 0, "candidate": -1, "seconds": 1}', "candidate -1"),
        ('{"record": "screened", "problem": 7, "candidate": 0, "seconds": 1}', "line 3"),
        ('{"record": "screened", "problem": 0, "candidate": 0, "seconds": NaN}', "NaN is no number"),
        ('{"record": "screened", "problem": 0, "candidate": 0, "seconds": -1}', "no positive number"),
        ('{"record": "screened", "problem": 0, "candidate": 0}', "'seconds' is missing"),
        ('{"record": "final", "round": 1e9, "problem": 0, "candidate": 0, "seconds": 1}', "no count"),
        ('{"record": "final", "round": 2000000000, "problem": 0, "candidate": 0, "seconds": 1}', "no count"),
        ('{"record": "guess", "problem": 0, "candidate": 0, "seconds": 1}', "no kind of record is called 'guess'"),
    ],
)
def test_a_line_that_is_wrong_is_named(recorded: Recording, tmp_path: Path, line: str, message: str) -> None:
    path = written(recorded, tmp_path / "a.jsonl")
    lines = path.read_text().split("\n")
    path.write_text("\n".join([*lines[:2], line, *lines[2:]]))
    with pytest.raises(InvalidArgument) as error:
        load(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"code": {}}, "no code of fast, slow"),
        ({"candidates": [["16", "fast", {}, True]]}, "'16' is no count"),
        ({"candidates": [[0, "fast", {}, True]]}, "not a candidate"),
        ({"candidates": [[16, "fast", 3, True]]}, "not a candidate: 'fast'"),
        ({"candidates": [[16, "fast", {}, False]]}, "a block size without a default"),
        ({"num_seqs": 0}, "sizes that are none"),
        ({"num_seqs": 1 << 30}, "no count"),
        ({"query_len": 3000}, "sizes that are none"),
        ({"head_dim": "64"}, "'64' is no count"),
        ({"dtype": "float33"}, "no kind or no dtype"),
    ],
)
def test_a_problem_that_is_none_is_named(
    recorded: Recording, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    path = written(recorded, tmp_path / "a.jsonl")
    lines = path.read_text().split("\n")
    problem = json.loads(lines[1])
    (problem if change.keys() <= problem.keys() else problem["workload"]).update(change)
    path.write_text("\n".join([lines[0], json.dumps(problem), ""]))
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        load(path)
    path.write_text(lines[0].replace('"threads": 8', '"threads": "8"') + "\n")
    with pytest.raises(InvalidArgument, match="of no device"):
        load(path)


def test_what_are_no_records(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot be read"):
        load(tmp_path / "no.jsonl")
    for content in (b"\xff\xfe\n\n", b'{"record": "run", "format": 99}\n\n', b"{}\n\n", b""):
        (tmp_path / "a.jsonl").write_bytes(content)
        with pytest.raises(InvalidArgument, match=r"a\.jsonl"):
            load(tmp_path / "a.jsonl")


class Counted(ReplayRunner):
    samples = 0

    def sample(self, candidate: Candidate, repeats: int, context: int | None = None) -> float:
        self.samples += 1
        return super().sample(candidate, repeats, context)


@pytest.mark.parametrize("share", [0.1, 0.4, 0.7, 0.95])
def test_a_killed_run_is_resumed_without_measuring_again(recorded: Recording, tmp_path: Path, share: float) -> None:
    """Cut the journal of a whole search, go on from there, and see how often each candidate runs then."""
    space = recorded.spaces[0]
    known, path = begun(recorded), tmp_path / "run.jsonl"
    (whole,) = known.logs
    runner = ReplayRunner(space, recorded.logs[0])
    with Journal(path, known):
        search(space, runner, whole, 1000.0, clock=runner.clock)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    logs = take_up(load(path), recorded.spaces, recorded.code)
    assert logs is not None
    assert len(logs) == 2
    before = sum(1 for _ in records.entries(logs[0]))
    counted = Counted(space, recorded.logs[0])
    search(space, counted, logs[0], 1000.0, clock=counted.clock)
    after = sum(1 for _ in records.entries(logs[0]))
    assert before > 0.8 * share * sum(1 for _ in records.entries(whole))
    assert after < 1.1 * sum(1 for _ in records.entries(whole))
    assert len(logs[0].finals) == len(whole.finals)
    assert counted.samples <= after - before
    winners = {b: pick.candidate for b, pick in decide(space, logs[0]).winners.items()}
    assert winners == {b: pick.candidate for b, pick in decide(space, whole).winners.items()}


def test_records_of_something_else_are_not_resumed(recorded: Recording) -> None:
    other = recording(seed=1)
    other.code[0] = {"fast": {"kernel": "changed"}}
    assert take_up(other, recorded.spaces, recorded.code) is None
    assert take_up(recording(), list(reversed(recorded.spaces)), recorded.code) is None
    assert take_up(recorded, recorded.spaces, recorded.code) == recorded.logs


@lru_cache(maxsize=1)
def searched(seed: int) -> SearchResult:
    """A search of a machine where every configuration is faster or slower by chance."""
    rng = random.Random(seed)
    factors: dict[tuple[str, object], float] = {}

    def slowness(candidate: Candidate, kind: str) -> float:
        key = (candidate.backend + candidate.config + kind, candidate.block_size)
        return usual(candidate, kind) * factors.setdefault(key, rng.lognormvariate(0, 0.1))

    return replay(recording(slowness, seed))


@pytest.mark.parametrize("name", workloads.names())
@pytest.mark.parametrize("seed", range(3))
def test_the_search_finds_what_is_within_3_percent_of_the_best(seed: int, name: str) -> None:
    """What an exhaustive search of the same records finds is hardly better."""
    found = regret(searched(seed), workloads.load(name), LLAMA, MEMORY.get(name, 8 * 10**9))
    assert found is not None
    assert -1e-9 <= found.share <= 0.03, found


def test_a_search_sees_less_than_all(recorded: Recording) -> None:
    """Otherwise the regret would say nothing."""
    searched = replay(recorded)
    for space, log in zip(recorded.spaces, searched.logs, strict=True):
        finalists = {c for times in log.finals for c in times}
        assert len(finalists) < len(space.candidates)
    assert set(exhaustive(recorded.spaces[0], recorded.logs[0])) == {8, 16, 32, 64, 128, 256}


def test_a_second_machine_differs_where_its_measurements_do(recorded: Recording) -> None:
    def other(candidate: Candidate, kind: str) -> float:  # large blocks are bad there, in decode
        return usual(candidate, kind) * (2.0 if candidate.block_size > 64 and kind == "decode" else 1.0)

    first, second = (replay(r, 600.0) for r in (recorded, recording(other)))
    same_code = [{b: p.candidate.config for b, p in s.verdicts[1].winners.items()} for s in (first, second)]
    assert same_code[0] == same_code[1]
    rates = [
        rates_of(s.recorded.spaces, s.logs, [{b: p.candidate for b, p in v.winners.items()} for v in s.verdicts])
        for s in (first, second)
    ]
    for block_size in (8, 16, 32, 64):
        a, b = (r.speeds[block_size].kv_bytes_per_second for r in rates if r)
        assert a == pytest.approx(b, rel=0.05)
    a, b = (r.speeds[256].kv_bytes_per_second for r in rates if r)
    assert a == pytest.approx(2 * b, rel=0.1)


def test_rates_are_those_of_the_times(recorded: Recording) -> None:
    picks = [exhaustive(space, log) for space, log in zip(recorded.spaces, recorded.logs, strict=True)]
    rates = rates_of(recorded.spaces, recorded.logs, picks)
    assert rates is not None
    assert rates.read == 25e9
    assert rates.compute == 300e9
    assert rates.link == 12.5e9
    assert rates.speeds[64].call_seconds == pytest.approx(50e-6, rel=0.5, abs=3e-4)
    assert rates.speeds[64].kv_bytes_per_second == pytest.approx(20e9 / 0.9, rel=0.1)
    assert rates.speeds[64].prefill_flops == pytest.approx(200e9 / 0.9, rel=0.1)
    assert (rates.speeds[64].backend, json.loads(rates.speeds[64].config)) == ("fast", {"tile": 32})
    assert rates_of(recorded.spaces[1:], recorded.logs[1:], picks[1:]) is None
    assert rates_of(recorded.spaces, [Log(), Log()], picks) is None


def test_a_profile_is_written_and_read(recorded: Recording) -> None:
    document = distil(recorded)
    assert document is not None
    profile = from_json(json.loads(json.dumps(document)))
    assert profile.shape == ModelShape(32, 8, 128, "float32", "float32", (None,), False)
    assert isinstance(profile, Profile)
    assert {k: v for k, v in document.items() if k != "choices"} == to_json(profile)
    kept = choices_of(recorded.spaces[0], recorded.logs[0], decide(recorded.spaces[0], recorded.logs[0]))
    names = {
        (c["problem"]["block_size"], c["backend"]) for c in document["choices"] if c["problem"]["kind"] == "decode"
    }
    assert names == {(b, name) for b, choices in kept.items() for name in choices}
    assert distil(Recording(recorded.device, "", recorded.spaces, [Log(), Log()], recorded.code)) is None
    chosen = best(score(workloads.load("chat"), LLAMA, profile.rates, 8 * 10**9))
    assert chosen is not None
    assert chosen.block_size in (32, 64)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("format",), 1), (("read",), -1), (("read",), "x"), (("compute",), None), (("speeds",), {}),
        (("speeds", "16", "kv_bytes_per_second"), 0), (("speeds", "16", "backend"), 3), (("speeds", "16", "x"), 1),
        (("shape", "head_dim"), 0), (("shape",), []), (("device",), 3), (("code",), None),
        (("shape", "dtype"), "x/../../../../y"), (("shape", "kv_dtype"), "int8/.."), (("shape", "dtype"), ["float32"]),
        (("device", "name"), "\x1b[31m"), (("device", "name"), 3), (("device", "threads"), "8"),
        (("device",), {"type": "cpu", "name": "x"}), (("when",), "\x1b[0m"), (("measured",), 3),
        (("when",), "yesterday"), (("when",), "2026-01-01"), (("driver",), None), (("shape", "windows"), []),
        (("shape", "windows"), [0]), (("shape", "windows"), ["x/../.."]), (("shape", "softcap"), 50),
    ],
)  # fmt: skip
def test_a_profile_that_is_none(recorded: Recording, path: tuple[str, ...], value: object) -> None:
    document = json.loads(json.dumps(distil(recorded)))
    place = document
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    with pytest.raises(files.INVALID):
        from_json(document)


SHIPPED = sorted((ROOT / "pagedkern" / "autotune" / "profiles").glob("*.json"))
NONE = pytest.param(Path("none"), marks=pytest.mark.skip(reason="no machine was recorded yet: make record NAME=..."))
MACHINES = [pytest.param(path, id=path.stem) for path in SHIPPED] or [NONE]


@pytest.mark.parametrize("path", MACHINES)
def test_a_shipped_profile_is_distilled_from_its_records(path: Path) -> None:
    source = ROOT / "autotune" / "records" / f"{path.stem}.jsonl"
    assert json.loads(path.read_text()) == distil(load(source))


@pytest.mark.parametrize("path", MACHINES)
@pytest.mark.parametrize("name", workloads.names())
def test_the_search_is_as_good_on_the_records_of_real_machines(path: Path, name: str) -> None:
    real = load(ROOT / "autotune" / "records" / f"{path.stem}.jsonl")
    assert ModelShape.of_problems([space.workload for space in real.spaces]) == ModelShape.of(LLAMA)
    found = regret(replay(real), workloads.load(name), LLAMA, 8 * workloads.load(name).limit * LLAMA.token_bytes)
    assert found is not None
    assert found.share <= 0.03, found


def test_every_machine_with_records_has_a_profile() -> None:
    sources = {path.stem for path in (ROOT / "autotune" / "records").glob("*.jsonl")}
    assert sources == {path.stem for path in SHIPPED}
