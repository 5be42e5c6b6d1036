"""A machine's own measurements come before those of any other, also with other threads, drivers or libraries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkern import recommend
from pagedkern._selection import choose
from pagedkern.autotune import profile as profiles
from pagedkern.autotune import store
from pagedkern.autotune.profile import ModelShape
from pagedkern.autotune.recommend import find, known
from pagedkern.autotune.store import Key, device, files, machines
from pagedkern.autotune.store import profiles as stored
from pagedkern.autotune.workloads import model
from tests.autotune.recordings import LLAMA, recording
from tests.autotune.test_store import DECODE, TUNED

ROOT = Path(__file__).parents[2]
Identity = dict[str, Any]


@pytest.fixture
def here() -> Identity:
    return dict(device.identity("cpu"))


@pytest.fixture
def base() -> dict[str, Any]:
    document = profiles.distil(recording(rounds=7))
    assert document is not None
    return {**document, "code": {"cpu": dict(device.code("cpu"))}}


def rates(base: dict[str, Any], identity: Identity, fastest: int, **more: Any) -> None:
    """What a tuner on a machine stores, which is fastest at one block size: so one sees whose it is."""
    document = {**base, "device": identity, **more}
    stored.save_rates(marked(document, fastest), profiles.from_json(document).shape.name())


def marked(document: dict[str, Any], fastest: int) -> dict[str, Any]:
    speeds = {b: dict(speed) for b, speed in document["speeds"].items()}
    for block_size, speed in speeds.items():
        speed["kv_bytes_per_second"] = 4e10 if block_size == str(fastest) else 2e8
    return {**document, "speeds": speeds}


def choices(identity: Identity, gain: float, **code: Any) -> None:
    """A kernel that a tuner on a machine has stored, with a gain of its own."""
    path = store.save(DECODE, {"reference": replace(TUNED, gain=gain, gain_low=gain)})
    document = json.loads(path.read_text())
    document["device"] = identity
    document["choices"]["reference"]["code"].update(code)
    home = files.directory()
    assert home is not None
    other = home / "tuned" / device.slug_of(identity) / path.name
    other.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(document)
    if other != path:
        path.unlink()
    other.write_text(text)
    store.reload()


def imported(base: dict[str, Any], identity: Identity, fastest: int, gain: float) -> None:
    """All that a foreign machine has exported: its rates, and a kernel."""
    choice = {
        "problem": {name: getattr(Key.of(DECODE), name) for name in Key.__slots__},
        "backend": "reference",
        **store.entry(replace(TUNED, gain=gain, gain_low=gain), device.code("reference")),
    }
    document = {**base, "device": identity, "choices": [choice]}
    stored.take_over(marked(document, fastest), f"imported-{fastest}")
    store.reload()


def chosen() -> tuple[int, str]:
    found = recommend("chat", "8GB", model=LLAMA)
    return found.block_size, f"{found.tier}: {found.reason}"


def foreign(here: Identity) -> Identity:
    """A machine that is as like this one as another can be."""
    return {**here, "name": "Another Processor (6/1/1)"}


@pytest.mark.parametrize("threads", [1, 3, 64])
def test_another_number_of_threads_comes_before_a_foreign_machine(
    threads: int, here: Identity, base: dict[str, Any]
) -> None:
    imported(base, foreign(here), 256, 9.0)
    assert chosen()[0] == 256
    assert "Another Processor" in choose(DECODE, "auto", "").reason
    other = {**here, "threads": here["threads"] + threads}
    rates(base, other, 8)
    choices(other, 2.0)
    block_size, said = chosen()
    assert block_size == 8
    assert said.startswith(f"tuned-nearest: measured on this machine with {other['threads']} threads, 2026-01-01, ")
    choice = choose(DECODE, "auto", "")
    assert (choice.tier, choice.backend) == ("tuned-nearest", "reference")
    assert choice.reason.startswith("2.00x the speed of cpu(span=1024); measured on this machine with ")
    assert f"with {other['threads']} threads" in choice.reason
    assert {state for state, _, p in known() if dict(p.device) == other} == {"other threads"}
    assert [entry.state for entry in store.contents()] == ["other threads"]


@pytest.mark.parametrize("what", ["driver", "libraries", "kernel", "pagedkern"])
def test_other_versions_come_before_a_foreign_machine(what: str, here: Identity, base: dict[str, Any]) -> None:
    """Rates whatever has changed; a kernel unless its sources have."""
    imported(base, foreign(here), 256, 9.0)
    code = dict(device.code("cpu"))
    changed = {"libraries": {"torch": "1.0"}, "kernel": "another", "pagedkern": "0.0.1"}
    if what == "driver":
        rates(base, here, 8, driver="Linux 2.4")
        choices(here, 2.0)
    else:
        rates(base, here, 8, code={"cpu": {**code, what: changed[what]}})
        choices(here, 2.0, **{what: changed[what]})
    block_size, said = chosen()
    assert block_size == 8
    fresh = what in ("driver", "pagedkern")
    assert said.startswith("tuned: " if fresh else "tuned-nearest: measured on this machine with other kernels or lib")
    reason = choose(DECODE, "auto", "").reason
    assert ("2.00x" in reason) == (what != "kernel")
    assert ("Another Processor" in reason) == (what == "kernel")


def test_an_exact_match_comes_before_all(here: Identity, base: dict[str, Any]) -> None:
    imported(base, here, 256, 9.0)
    for threads, fastest in ((here["threads"] + 1, 8), (here["threads"], 64)):
        rates(base, {**here, "threads": threads}, fastest)
        choices({**here, "threads": threads}, float(fastest))
    assert chosen()[0] == 64
    assert chosen()[1].startswith("tuned: ")
    assert choose(DECODE, "auto", "").reason.startswith("64.00x")


@given(threads=st.lists(st.integers(1, 512), min_size=1, max_size=5, unique=True), mine=st.integers(1, 512))
def test_the_nearest_number_of_threads_comes_first(threads: list[int], mine: int) -> None:
    identity = {**device.identity("cpu"), "threads": mine}
    others = [{**identity, "threads": n} for n in threads]
    crowd = [*others, foreign(identity), {**identity, "cores": 999}]
    ranked = sorted(crowd, key=lambda other: machines.order(identity, other))
    own = [other["threads"] for other in ranked[: len(others)]]
    assert sorted(own) == sorted(threads)  # all of the machine's own, before any other
    apart = [max(n, mine) / min(n, mine) for n in own]
    assert apart == sorted(apart)


def test_the_nearest_is_what_is_used(here: Identity, base: dict[str, Any]) -> None:
    mine = here["threads"]
    for factor, fastest in ((8, 8), (2, 64), (16, 256)):
        rates(base, {**here, "threads": mine * factor}, fastest)
        choices({**here, "threads": mine * factor}, float(fastest))
    imported(base, foreign(here), 32, 9.0)
    assert chosen()[0] == 64
    assert choose(DECODE, "auto", "").reason.startswith("64.00x")


@pytest.mark.parametrize("field", ["name", "arch", "cores", "features"])
def test_what_makes_another_machine(field: str, here: Identity) -> None:
    other = {**here, field: 99 if field == "cores" else "other"}
    assert not machines.same_machine(here, other)
    assert machines.same_machine(here, {**here, "threads": 77, "cache_kib": 1})
    gpu = {"type": "cuda", "name": "H100", "multiprocessors": 132}
    assert machines.same_machine(gpu, dict(gpu))
    assert not machines.same_machine(gpu, {**gpu, "multiprocessors": 66})


def test_threads_come_before_shapes(here: Identity, base: dict[str, Any]) -> None:
    """Of this machine's own: those with the same threads for another shape, and with others for the same."""
    rates(base, here, 8, shape={**base["shape"], "head_dim": 64})
    rates(base, {**here, "threads": here["threads"] * 4}, 256)
    assert chosen()[0] == 8
    assert "for another shape" in chosen()[1]
    profile, tier, _ = find(model("smollm2-135m"), "cpu")
    assert profile is not None
    assert (profile.shape.head_dim, tier) == (64, "tuned-nearest")
    assert ModelShape.of(LLAMA) != profile.shape


def test_a_damaged_file_of_this_machine_is_passed_over(here: Identity, base: dict[str, Any]) -> None:
    other = {**here, "threads": here["threads"] * 2}
    choices(other, 2.0)
    rates(base, other, 8)
    home = files.directory()
    assert home is not None
    for path in [*home.glob("tuned/*/*.json"), *home.glob("rates/*/*.json")]:
        text = path.read_text()
        for damage in ("", "{", text[:-9], text.replace(str(here["cores"]), '"many"')):
            path.write_text(damage)
            store.reload()
            assert choose(DECODE, "auto", "").tier in ("default", "tuned-nearest")
            chosen()
        path.write_text(text)


ASK = """
import json, sys
import pagedkern
from pagedkern._selection import choose
from pagedkern.autotune.store import device
from tests.autotune.recordings import LLAMA
from tests.autotune.test_store import DECODE
found, choice = pagedkern.recommend("chat", "8GB", model=LLAMA), choose(DECODE, "auto", "")
print(json.dumps([device.cpu_threads(), found.block_size, found.reason, choice.tier, choice.reason]))
"""


def ask(**options: Any) -> list[Any]:
    """What a process of its own is told, with the profiles that ship."""
    done = subprocess.run([sys.executable, "-c", ASK], cwd=ROOT, capture_output=True, text=True, check=True, **options)
    found: list[Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("how", ["OMP_NUM_THREADS", "taskset"])
def test_asked_with_fewer_threads_than_it_was_tuned_with(how: str, here: Identity, base: dict[str, Any]) -> None:
    """What the table of 0.1.0's faults names, in a process that has one thread: the shipped profile was preferred."""
    cores = sorted(os.sched_getaffinity(0))
    rates(base, {**here, "threads": here["threads"] + 1}, 8)
    choices({**here, "threads": here["threads"] + 1}, 2.0)
    env = {**os.environ, **({"OMP_NUM_THREADS": "1"} if how == "OMP_NUM_THREADS" else {})}
    pin: Callable[[], None] | None = None
    if how == "taskset":

        def pin() -> None:
            os.sched_setaffinity(0, cores[:1])

    threads, block_size, reason, tier, kernel = ask(env=env, preexec_fn=pin)
    assert threads == 1
    assert block_size == 8
    assert "measured on this machine with" in reason
    assert tier == "tuned-nearest"
    assert "2.00x" in kernel
