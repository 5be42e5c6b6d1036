"""`recommend` and the lookups behind it: what rests on what, tier by tier."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pagedkern
from pagedkern import recommend
from pagedkern._selection import choose
from pagedkern.autotune import profile as profiles
from pagedkern.autotune import store
from pagedkern.autotune.recommend import parse_memory
from pagedkern.autotune.store import device, files, save
from pagedkern.autotune.store import profiles as stored
from pagedkern.autotune.workloads import model
from pagedkern.errors import InvalidArgument, InvalidType
from tests.autotune.recordings import recording
from tests.autotune.test_store import DECODE, TUNED

MEMORY = 8 * 10**9
FLOAT32 = "heads=32,kv_heads=8,head_dim=128,layers=32,dtype=float32,weight_bytes=32e9"  # the shape of the recording


@pytest.fixture
def document() -> dict[str, Any]:
    """What a run on this machine would have stored."""
    made = profiles.distil(recording())
    assert made is not None
    return {**made, "device": dict(device.identity("cpu")), "code": {"cpu": dict(device.code("cpu"))}}


def imported(document: dict[str, Any]) -> Path:
    path, _ = stored.take_over(document, "shape")
    return path


def store_rates(document: dict[str, Any]) -> Path:
    return stored.save_rates(document, profiles.from_json(document).shape.name())


def test_an_untuned_machine_gets_the_usual_block_size() -> None:
    found = recommend("chat", MEMORY)
    assert (found.block_size, found.tier, found.tokens_per_second) == (16, "default", None)
    assert found.num_blocks == MEMORY // (16 * 131072)
    assert "run python -m pagedkern.autotune" in found.reason


def test_what_was_measured_here_for_the_shape(document: dict[str, Any]) -> None:
    store_rates(document)
    found = recommend("chat", "8GB", model=FLOAT32)
    assert found.tier == "tuned"
    assert found.block_size in (32, 64, 128)
    assert found.num_blocks == MEMORY // (found.block_size * 262144)
    best = max(s.tokens_per_second for s in found.scores)
    assert found.tokens_per_second == pytest.approx(best, rel=0.01)  # of those that are alike, the smallest
    assert "decode: 8 sequences" in found.reason
    assert str(found).startswith(f"block size {found.block_size} (")


def test_another_shape_is_a_near_one(document: dict[str, Any]) -> None:
    store_rates(document)
    other = {**document, "shape": {**document["shape"], "head_dim": 64}}
    store_rates(other)
    found = recommend("chat", MEMORY, model="llama-3-8b")  # bfloat16, as nothing that was measured
    assert found.tier == "tuned-nearest"
    assert "another shape" in found.reason
    assert "head dim 128" in found.reason


def test_changed_kernels_are_said(document: dict[str, Any]) -> None:
    code = {"cpu": {**document["code"]["cpu"], "kernel": "of another version"}}
    store_rates({**document, "code": code})
    found = recommend("chat", MEMORY, model=FLOAT32)
    assert found.tier == "tuned-nearest"
    assert "with other kernels or libraries" in found.reason
    assert found.block_size in (32, 64, 128)


def test_changed_libraries_are_said(document: dict[str, Any]) -> None:
    code = {"cpu": {**document["code"]["cpu"], "libraries": {"torch": "1.0"}}}
    store_rates({**document, "code": code})
    assert recommend("chat", MEMORY, model=FLOAT32).tier == "tuned-nearest"
    store_rates({**document, "code": {}})  # of nobody knows what
    assert recommend("chat", MEMORY, model=FLOAT32).tier == "tuned-nearest"


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "present", lambda kind: kind == "cpu")
    for name in ("cuda", "cuda:1"):
        with pytest.raises(InvalidArgument, match=r"device: got 'cuda.*torch finds no GPU"):
            recommend("chat", MEMORY, device=name)
    assert recommend("chat", MEMORY, device="cpu:0").block_size == 16


def test_the_machine_most_like_this_one(document: dict[str, Any]) -> None:
    here = device.identity("cpu")
    for name, threads, slow in (("like this", here["threads"], 64), ("unlike", 512, 128)):
        speeds = {b: dict(s) for b, s in document["speeds"].items()}
        speeds[str(slow)]["kv_bytes_per_second"] *= 100  # so that one sees whose it is
        imported({**document, "device": {**here, "name": name, "threads": threads}, "speeds": speeds})
    found = recommend("chat", MEMORY, model=FLOAT32)
    assert (found.block_size, found.tier) == (64, "tuned-nearest")
    assert "not tuned here: measured on like this" in found.reason


@pytest.mark.parametrize("field", [{"arch": "another"}, {"type": "cuda"}])
def test_a_machine_of_another_kind_says_nothing(document: dict[str, Any], field: dict[str, str]) -> None:
    imported({**document, "device": {**document["device"], "name": "other", **field}})
    assert recommend("chat", MEMORY).tier == "default"


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: {**d, "format": 99},  # of another version
        lambda d: {**d, "speeds": {}},
        lambda d: {**d, "read": "fast"},
        lambda d: {**d, "shape": {"heads": 3}},
    ],
)
def test_a_damaged_or_old_profile_is_passed_over(document: dict[str, Any], damage: Any) -> None:
    path = store_rates(document)
    path.write_text(json.dumps(damage(document)))
    found = recommend("chat", MEMORY)
    assert (found.block_size, found.tier) == (16, "default")
    path.write_text("{")
    assert recommend("chat", MEMORY).tier == "default"


def test_memory_too_small_for_the_workload(document: dict[str, Any]) -> None:
    store_rates(document)
    found = recommend("long-context", MEMORY, model=FLOAT32)
    assert (found.block_size, found.tier) == (16, "default")
    assert "does not fit" in found.reason
    with pytest.raises(InvalidArgument, match="expected at least 2,097,152, one block"):
        recommend("chat", 1000)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (100, 100),
        ("100", 100),
        ("1.5 GB", 1_500_000_000),
        ("2GiB", 2 << 30),
        ("24gb", 24 * 10**9),
        (" 3 mb ", 3_000_000),
    ],
)
def test_memory_as_people_write_it(text: int | str, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "much", "-1", "0", "1 XB", "1e9", "9" * 400, 0, -5, 1 << 70])
def test_memory_that_is_none(text: int | str) -> None:
    with pytest.raises(InvalidArgument, match="memory"):
        parse_memory(text)
    for other in (1.5, None, True):
        with pytest.raises(InvalidType, match="memory"):
            parse_memory(other)  # type: ignore[arg-type]


def test_an_unknown_workload_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="expected one of chat"):
        recommend("no such thing", MEMORY)


def test_it_needs_the_standard_library_only(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'numpy', 'numba', 'rich', 'filelock', 'platformdirs'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "import pagedkern\n"
        "print(pagedkern.recommend('chat', '8GB').num_blocks > 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


# Kernels: what `backend="auto"` looks up for want of a choice of its own.


@pytest.fixture
def elsewhere(document: dict[str, Any]) -> dict[str, Any]:
    """A machine like this one, on which "reference" was found best for `DECODE`."""
    key = {name: getattr(store.Key.of(DECODE), name) for name in store.Key.__slots__}
    choice = {"problem": key, "backend": "reference", **store.entry(TUNED, device.code("reference"))}
    return {**document, "device": {**device.identity("cpu"), "name": "another processor"}, "choices": [choice]}


def test_kernels_of_the_nearest_machine(elsewhere: dict[str, Any]) -> None:
    assert choose(DECODE, "auto", "").tier == "default"
    imported(elsewhere)
    store.reload()
    choice = choose(DECODE, "auto", "")
    assert (choice.backend, choice.tier) == ("reference", "tuned-nearest")
    assert "measured on another processor" in choice.reason
    assert store.lookup(DECODE, "cpu") is None
    assert store.lookup(replace(DECODE, block_size=32)) is None
    save(DECODE, {"reference": replace(TUNED, untuned=True, gain=1.0, gain_low=1.0)})
    assert choose(DECODE, "auto", "").tier != "default"
    assert "another processor" not in choose(DECODE, "auto", "").reason  # one's own comes first


@pytest.mark.parametrize("what", ["kernel", "slower", "damaged", "config", "architecture"])
def test_kernels_of_the_nearest_machine_that_do_not_count(what: str, elsewhere: dict[str, Any]) -> None:
    choice = elsewhere["choices"][0]
    if what == "kernel":
        choice["code"] = {**choice["code"], "kernel": "another"}
    elif what == "slower":
        choice["gain_low"] = 0.9
    elif what == "damaged":
        choice["seconds"] = "fast"
    elif what == "config":
        choice["config"] = {"no such field": 1}
    else:
        elsewhere["device"]["arch"] = "another"
    imported(elsewhere)
    store.reload()
    assert choose(DECODE, "auto", "").tier == "default"


@pytest.mark.parametrize("identity", [{"threads": None}, {"name": 3}, {"name": "\x1b[2J"}, {"more": {}}])
def test_a_stored_profile_of_no_machine_is_passed_over(elsewhere: dict[str, Any], identity: dict[str, Any]) -> None:
    path = imported(elsewhere)
    path.write_text(json.dumps({**elsewhere, "device": {**elsewhere["device"], **identity}}))
    store.reload()
    assert choose(DECODE, "auto", "").tier == "default"
    assert recommend("chat", MEMORY).tier == "default"


def test_what_is_imported_is_read_once_a_process(elsewhere: dict[str, Any]) -> None:
    imported(elsewhere)
    store.reload()
    assert store.lookup(DECODE) is not None
    home = files.directory()
    assert home is not None
    for path in (home / "profiles").glob("*.json"):
        path.unlink()
    assert store.lookup(DECODE) is not None
    store.reload()
    assert store.lookup(DECODE) is None


def test_the_public_names() -> None:
    assert pagedkern.recommend is recommend
    assert pagedkern.Recommendation.__name__ == "Recommendation"
    assert model("llama-3-8b").token_bytes == 131072
