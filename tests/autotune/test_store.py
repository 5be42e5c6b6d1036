"""The store: what is found for which problem, and what happens to damaged, stale, locked and unwritable files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pagedkern.backends as registry
from pagedkern._selection import choose, encode_config
from pagedkern.autotune import store
from pagedkern.autotune.store import Key, Measurement, device, files, location, lookup, save
from pagedkern.backends.base import Problem

DECODE = Problem("cpu", "float32", "float32", 8, 2, 64, 64, 16, 4, 4, 1, 2000)
PREFILL = replace(DECODE, num_tokens=1000, max_seqlen_q=250)
TUNED = Measurement(
    config={}, seconds=0.002, untuned=False, gain=1.3, gain_low=1.25, rounds=41, default="cpu(span=1024)",
    num_seqs=4, num_tokens=4, max_seqlen_q=1, max_seqlen_k=2000, context=1990,
)  # fmt: skip
OTHER = {  # for each field of a problem another value
    "device": "cuda", "q_dtype": "bfloat16", "kv_dtype": "int8", "num_heads": 16, "num_kv_heads": 4, "head_dim": 128,
    "head_dim_v": 32, "block_size": 32, "num_seqs": 5, "num_tokens": 7, "max_seqlen_q": 3, "max_seqlen_k": 4000,
    "causal": False, "sliding_window": 128, "softcap": True, "alibi": True, "sinks": True,
}  # fmt: skip
NEAR = {"num_seqs", "num_tokens", "max_seqlen_q", "max_seqlen_k"}


def path_of(problem: Problem = DECODE) -> Path:
    home = files.directory()
    assert home is not None
    return location(home, Key.of(problem))


def test_nothing_is_found_in_an_empty_store(home: Path) -> None:
    assert lookup(DECODE) is None
    assert not home.exists()  # and looking makes nothing


def test_what_was_saved_is_found_and_used() -> None:
    assert choose(DECODE, "auto", "").tier == "default"
    path = save(DECODE, {"reference": TUNED})
    assert path == path_of()
    found = lookup(DECODE)
    assert found is not None
    assert (found.backend, found.config, found.tier) == ("reference", {}, "tuned")
    assert "1.30x the speed of cpu(span=1024)" in found.reason
    choice = choose(DECODE, "auto", "")
    assert (choice.backend, choice.tier) == ("reference", "tuned")


def test_a_configuration_reaches_the_backend(add_backend: Callable[[str, str], None]) -> None:
    add_backend("tunable", "Tunable")
    assert choose(DECODE, "tunable", "").config.to_dict() == {"tile": 64}
    save(DECODE, {"tunable": replace(TUNED, config={"tile": 128})})
    assert choose(DECODE, "auto", "").config.to_dict() == {"tile": 128}
    assert choose(DECODE, "tunable", "").config.to_dict() == {"tile": 128}
    assert choose(DECODE, "tunable", encode_config({"tile": 32}, "tunable")).tier == "explicit"
    save(DECODE, {"tunable": replace(TUNED, config={"renamed": 1})})  # by a version that had other fields
    assert choose(DECODE, "auto", "").tier == "default"


@pytest.mark.parametrize("name", sorted(set(OTHER) - {"device"}))
@pytest.mark.parametrize("problem", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_fields_that_must_match_and_fields_that_may_differ(problem: Problem, name: str) -> None:
    assert set(OTHER) | {"op"} == {f.name for f in fields(Problem)}
    save(problem, {"reference": TUNED})
    found = lookup(replace(problem, **{name: OTHER[name]}))
    decode = problem is DECODE
    if name in NEAR - {"max_seqlen_q"} or (name == "max_seqlen_q" and not decode) or (name == "causal" and decode):
        assert found is not None
        assert found.backend == "reference"
        assert found.tier == ("tuned" if name == "causal" else "tuned-nearest")
    else:
        assert found is None


def test_another_device_type_is_looked_up_without_its_driver() -> None:
    save(DECODE, {"reference": TUNED})
    assert lookup(replace(DECODE, device="xpu")) is None


@given(
    seqs=st.integers(0, 10_000),
    tokens=st.integers(0, 10**6),
    longest=st.integers(0, 10**6),
    context=st.integers(0, 10**7),
)
def test_the_choice_never_depends_on_the_batch(seqs: int, tokens: int, longest: int, context: int) -> None:
    sizes = {"num_seqs": seqs, "num_tokens": tokens, "max_seqlen_q": longest, "max_seqlen_k": context}
    one, other = replace(DECODE, **sizes), replace(DECODE if longest <= 1 else PREFILL, max_seqlen_k=1)
    assert Key.of(one) == Key.of(other)
    assert Key.of(one).filename().startswith("decode" if longest <= 1 else "prefill")


def test_each_key_has_a_file_name_of_its_own() -> None:
    problems = [DECODE, PREFILL, replace(PREFILL, causal=False)]
    problems += [replace(PREFILL, **{name: OTHER[name]}) for name in OTHER if name not in NEAR | {"causal", "device"}]
    assert len({Key.of(p).filename() for p in problems}) == len(problems)


def test_a_process_keeps_its_choice_until_it_reloads(add_backend: Callable[[str, str], None]) -> None:
    add_backend("tunable", "Tunable")
    assert lookup(PREFILL) is None
    save(DECODE, {"tunable": replace(TUNED, config={"tile": 32})})
    before = lookup(DECODE)
    text = path_of().read_text()
    path_of().write_text(text.replace('"tile": 32', '"tile": 128'))  # as another process would
    path_of(PREFILL).write_text(text.replace('"decode"', '"prefill"'))
    assert lookup(replace(DECODE, num_seqs=99)).config == before.config == {"tile": 32}  # type: ignore[union-attr]
    store.reload()
    assert lookup(DECODE).config == {"tile": 128}  # type: ignore[union-attr]
    assert lookup(PREFILL) is not None


def test_auto_takes_the_greatest_proven_gain(add_backend: Callable[[str, str], None]) -> None:
    add_backend("tunable", "Tunable")
    add_backend("picky", "Picky")
    default = replace(TUNED, untuned=True, gain=1.0, gain_low=1.0)
    save(DECODE, {"reference": default, "tunable": replace(TUNED, gain=1.5, gain_low=1.01)})
    assert lookup(DECODE).backend == "reference"  # type: ignore[union-attr]
    assert lookup(DECODE, "tunable").backend == "tunable"  # type: ignore[union-attr]
    save(DECODE, {"picky": replace(TUNED, gain=1.04, gain_low=1.03)})
    assert lookup(DECODE).backend == "picky"  # type: ignore[union-attr]
    assert lookup(DECODE, "reference") is not None  # kept beside it
    assert lookup(DECODE, "cpu") is None
    save(DECODE, {"tunable": replace(TUNED, gain_low=2.0, default="another(tile=1)")})  # gains over something else
    assert lookup(DECODE).backend == "tunable"  # type: ignore[union-attr]
    assert lookup(DECODE, "picky") is None


def test_only_slower_backends_leave_the_default() -> None:
    save(DECODE, {"reference": replace(TUNED, gain=0.5, gain_low=0.4)})
    assert lookup(DECODE) is None
    assert lookup(DECODE, "reference") is not None


DAMAGE: dict[str, Callable[[str], str | bytes]] = {
    "empty": lambda text: "",
    "a third": lambda text: text[: len(text) // 3],
    "all but the end": lambda text: text[:-4],
    "binary": lambda text: bytes(range(256)),
    "no UTF-8": lambda text: text.replace("cpu", "cpü").encode("latin-1"),
    "nested deeply": lambda text: "[" * 100_000,
    "long": lambda text: text + " " * files.MAX_BYTES,
    "a list": lambda text: f"[{text}]",
    "null": lambda text: "null",
    "another format": lambda text: text.replace(f'"format": {store.FORMAT}', '"format": 1', 1),
    "no device": lambda text: text.replace('"device"', '"machine"', 1),
    "another device": lambda text: text.replace('"threads": ', '"threads": 9'),
    "another problem": lambda text: text.replace('"block_size": 16', '"block_size": 32'),
    "choices as a list": lambda text: json.dumps({**json.loads(text), "choices": [1]}),
    "no choices": lambda text: text.replace('"choices"', '"chosen"'),
    "gain missing": lambda text: text.replace('"gain"', '"profit"'),
    "gain a string": lambda text: text.replace('"gain": 1.3', '"gain": "1.3"'),
    "gain NaN": lambda text: text.replace('"gain": 1.3', '"gain": NaN'),
    "gain infinite": lambda text: text.replace('"gain": 1.3', '"gain": 1e999'),
    "gain negative": lambda text: text.replace('"gain": 1.3', '"gain": -1.3'),
    "rounds a bool": lambda text: text.replace('"rounds": 41', '"rounds": true'),
    "config a list": lambda text: text.replace('"config": {}', '"config": []'),
    "config nested": lambda text: text.replace('"config": {}', '"config": {"a": {"b": 1}}'),
    "config too large": lambda text: text.replace('"config": {}', f'"config": {{"span": {64 * 10**30}}}'),
    "config infinite": lambda text: text.replace('"config": {}', '"config": {"span": 1e999}'),
    "config null": lambda text: text.replace('"config": {}', '"config": {"span": null}'),
    "seconds too large": lambda text: text.replace('"seconds": 0.002', f'"seconds": {10**400}'),
    "seconds of many digits": lambda text: text.replace('"seconds": 0.002', f'"seconds": {"9" * 5000}'),
    "rounds too large": lambda text: text.replace('"rounds": 41', f'"rounds": {10**400}'),
    "half a surrogate pair": lambda text: text.replace('"default": "cpu', r'"default": "\ud800cpu'),
    "device a list": lambda text: json.dumps({**json.loads(text), "device": [1]}),
    "code missing": lambda text: text.replace('"code"', '"codex"'),
    "code a number": lambda text: json.dumps(_with(json.loads(text), code=3)),
}


def _with(document: dict[str, dict[str, dict[str, object]]], **changes: object) -> object:
    document["choices"]["reference"].update(changes)
    return document


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_a_miss_said_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    path = save(DECODE, {"reference": TUNED})
    before = path.read_text()
    after = DAMAGE[name](before)
    assert after != before
    path.write_bytes(after if isinstance(after, bytes) else after.encode())
    for _ in range(3):
        store.reload()
        assert lookup(DECODE) is None
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert str(path) in caplog.text
    assert choose(DECODE, "auto", "").tier == "default"
    assert list(store.contents()) == [] or name == "another device"
    save(DECODE, {"reference": TUNED})  # and it can be tuned again
    assert lookup(DECODE) is not None


@pytest.mark.parametrize("name", ["/usr", "/", "..", "../../tests", "cpu/../cpu", "", ".", "*", "\0"])
def test_a_backend_that_is_a_path_is_not_followed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(DECODE, {"reference": TUNED})
    document = json.loads(path.read_text())
    entry = document["choices"].pop("reference")
    entry["code"]["kernel"] = "unknown"
    path.write_text(json.dumps({**document, "choices": {name: {**entry, "gain_low": 9.0}, "reference": entry}}))

    def walk(self: Path, pattern: str) -> Iterator[Path]:
        raise AssertionError(f"walked {self}")

    device.code.cache_clear()
    device.kernel_hash.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rglob", walk)
        assert device.kernel_hash(name) == "unknown"
        patch.setattr(device, "kernel_hash", lambda _: "unknown")
        store.reload()
        assert lookup(DECODE, name or "?") is None
        assert lookup(DECODE).backend == "reference"  # type: ignore[union-attr]
        assert {entry.backend: entry.state for entry in store.contents()} == {name: "stale", "reference": "auto"}


def test_every_truncation_is_a_miss() -> None:
    path = save(DECODE, {"reference": TUNED})
    content = path.read_bytes()
    for length in range(0, len(content) - 2, 7):
        path.write_bytes(content[:length])
        store.reload()
        assert lookup(DECODE) is None


def test_a_folder_in_place_of_the_file(caplog: pytest.LogCaptureFixture) -> None:
    path = save(DECODE, {"reference": TUNED})
    path.unlink()
    path.mkdir()
    store.reload()
    assert lookup(DECODE) is None
    assert len(caplog.records) == 1


@pytest.mark.parametrize("what", ["kernel", "pagedkern", "libraries", "backend"])
def test_a_stale_choice_is_said_once_and_only_near_if_its_kernels_are_the_same(
    what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = save(DECODE, {"reference": TUNED})
    document = json.loads(path.read_text())
    code = document["choices"]["reference"]["code"]
    if what == "backend":  # one that this version does not have
        document["choices"]["retired"] = document["choices"].pop("reference")
    elif what == "libraries":
        code["libraries"]["torch"] = "1.0"
    else:
        code[what] = "another"
    path.write_text(json.dumps(document))
    for _ in range(2):
        store.reload()
        found = lookup(DECODE)
        if what in ("kernel", "backend"):
            assert found is None
        else:
            assert found is not None
            assert found.tier == "tuned-nearest"
            assert "measured on this machine, other libraries" in found.reason
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert [entry.state for entry in store.contents()] == ["stale"]
    save(DECODE, {"reference": TUNED})  # drops it
    assert [entry.state for entry in store.contents()] == ["auto"]


def test_a_library_installed_since_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    save(DECODE, {"reference": TUNED})
    new = next(name for name in device.LIBRARIES if name not in device.libraries())
    more = {**device.libraries(), new: "13.6.0"}
    monkeypatch.setattr(device, "libraries", lambda: more)
    store.reload()
    assert lookup(DECODE) is not None


def test_the_hash_follows_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "BACKENDS", tmp_path)
    (tmp_path / "mine" / "kernels").mkdir(parents=True)

    def digest() -> str:
        device.kernel_hash.cache_clear()
        return device.kernel_hash("mine")

    seen = [digest()]
    assert seen == ["unknown"]
    for name, text in (
        ("mine/a.cu", "1"),
        ("mine/a.cu", "2"),
        ("mine/kernels/b.h", "2"),
        ("mine/c.py", ""),
        ("mine.py", ""),
    ):
        (tmp_path / name).write_text(text)
        seen.append(digest())
    assert len(set(seen)) == len(seen)
    (tmp_path / "mine" / "notes.txt").write_text("no source")
    (tmp_path / "other.py").write_text("of another backend")
    assert digest() == seen[-1]
    (tmp_path / "mine.py").unlink()
    assert digest() == seen[-2]


@pytest.mark.parametrize("name", registry.names())
def test_every_backend_has_sources_to_hash(name: str) -> None:
    assert device.kernel_hash(name) != "unknown"


LOOK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("filelock", "platformdirs", "rich", "numpy"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Block())
from pagedkern.autotune import store
from pagedkern.backends.base import Problem
problem = Problem("cpu", "float32", "float32", 8, 2, 64, 64, 16, 4, 4, 1, 2000)
assert store.lookup(problem) is None
assert "torch" not in sys.modules
print(store.files.directory())
"""


def test_looking_up_needs_the_standard_library_only(tmp_path: Path) -> None:
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    del env["PAGEDKERN_CACHE_DIR"]
    done = subprocess.run([sys.executable, "-c", LOOK], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "pagedkern")
