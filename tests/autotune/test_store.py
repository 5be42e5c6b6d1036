"""The store: what is found for which problem, and what happens to damaged, stale, locked and unwritable files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path

import filelock
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pagedkern.backends as registry
from pagedkern._choice import choose, encode_config
from pagedkern.autotune import store
from pagedkern.autotune.store import Key, Tuned, device, files, location, lookup, save
from pagedkern.backends.base import Problem

DECODE = Problem("cpu", "float32", "float32", 8, 2, 64, 64, 16, 4, 4, 1, 2000)
PREFILL = replace(DECODE, num_tokens=1000, max_seqlen_q=250)
TUNED = Tuned(
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
    "another format": lambda text: text.replace('"format": 1', '"format": 2'),
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
def test_a_stale_choice_is_a_miss_said_once(
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
        assert lookup(DECODE) is None
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert [entry.state for entry in store.contents()] == ["stale"]
    save(DECODE, {"reference": TUNED})  # drops it
    assert [entry.state for entry in store.contents()] == ["auto"]


def test_a_library_installed_since_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    save(DECODE, {"reference": TUNED})
    more = {**device.libraries(), "cupy-cuda13x": "13.6.0"}
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


@contextmanager
def unprivileged() -> Iterator[None]:
    """Root may do anything, so be somebody else for a moment."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_read_only_store_is_read_and_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:  # tmp_path is inside folders that only their owner enters
        monkeypatch.setenv("PAGEDKERN_CACHE_DIR", folder)
        path = save(DECODE, {"reference": TUNED})
        folders = [Path(folder), Path(folder) / "tuned", path.parent]
        content = path.read_bytes()
        path.chmod(0o444)
        for p in folders:
            p.chmod(0o555)
        with unprivileged():
            store.reload()
            assert lookup(DECODE) is not None
            with pytest.raises(OSError):
                save(DECODE, {"reference": replace(TUNED, gain=9.0)})
            with pytest.raises(OSError):
                save(replace(DECODE, device="xpu"), {"reference": TUNED})  # whose folder is not there yet
        assert path.read_bytes() == content
        path.chmod(0)
        with unprivileged():
            store.reload()
            assert lookup(DECODE) is None
        for p in folders:
            p.chmod(0o755)


def test_a_cache_directory_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PAGEDKERN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    store.reload()
    assert lookup(DECODE) is None
    with pytest.raises(OSError):
        save(DECODE, {"reference": TUNED})


def test_no_home_is_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGEDKERN_CACHE_DIR")
    monkeypatch.setattr(files, "directory", lambda: None)
    store.reload()
    assert lookup(DECODE) is None
    assert list(store.contents()) == []
    with pytest.raises(OSError, match="PAGEDKERN_CACHE_DIR"):
        save(DECODE, {"reference": TUNED})


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_what_was_there(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(DECODE, {"reference": TUNED})
    content = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(OSError, match="No space left"):
            save(DECODE, {"reference": replace(TUNED, gain=9.0)})
    assert path.read_bytes() == content
    assert {p.name for p in path.parent.iterdir()} == {path.name, ".lock"}


def test_a_lock_that_is_never_released(monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(DECODE, {"reference": TUNED})
    monkeypatch.setattr(files, "LOCK_SECONDS", 0.1)
    with filelock.FileLock(path.parent / ".lock"), pytest.raises(OSError):
        save(DECODE, {"reference": TUNED})
    store.reload()
    assert lookup(DECODE) is not None  # readers need no lock


WRITER = """
import os, signal, sys
from pagedkern.autotune import store
from pagedkern.autotune.store import device
from tests.autotune.test_store import DECODE, TUNED
from dataclasses import replace
device.code = lambda name: {"pagedkern": "x", "kernel": "y", "libraries": {}}
store._fresh = lambda name, code: True
me, rounds, mode = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if mode == "die":
    os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
for i in range(rounds):
    store.save(DECODE, {f"{me}-{i}": TUNED})
    store.save(replace(DECODE, num_heads=8 * (1 + i)), {me: TUNED})
"""


def start_writer(name: str, rounds: int, mode: str = "live") -> subprocess.Popen[bytes]:
    root = Path(__file__).parents[2]
    return subprocess.Popen([sys.executable, "-c", WRITER, name, str(rounds), mode], cwd=root)


def test_writers_in_many_processes_lose_nothing(home: Path) -> None:
    writers, rounds = 4, 15
    processes = [start_writer(f"writer{w}", rounds) for w in range(writers)]
    while any(p.poll() is None for p in processes):
        if path_of().exists():
            json.loads(path_of().read_text())  # whole at any time
    assert [p.returncode for p in processes] == [0] * writers
    names = set(json.loads(path_of().read_text())["choices"])
    assert names == {f"writer{w}" for w in range(writers)} | {
        f"writer{w}-{i}" for w in range(writers) for i in range(rounds)
    }
    for i in range(1, rounds):
        document = json.loads(path_of(replace(DECODE, num_heads=8 * (1 + i))).read_text())
        assert set(document["choices"]) == {f"writer{w}" for w in range(writers)}
    assert not list(path_of().parent.glob(".*.json.*"))


def test_a_writer_killed_at_the_worst_moment() -> None:
    path = save(DECODE, {"reference": TUNED})
    content = path.read_bytes()
    process = start_writer("victim", 1, "die")
    assert process.wait() == -signal.SIGKILL
    assert path.read_bytes() == content
    assert len(list(path.parent.glob(f".{path.name}.*"))) == 1  # what it was writing
    save(DECODE, {"reference": TUNED})
    assert {p.name for p in path.parent.iterdir()} == {path.name, ".lock"}


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
    assert done.stdout.strip() == str(tmp_path / "pagedkern")  # the place that a writer with platformdirs means
    code = "import platformdirs; print(platformdirs.user_cache_path('pagedkern', appauthor=False))"
    with_it = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert with_it.stdout == done.stdout


def test_two_tuners_at_once_lose_nothing_in_100_rounds(home: Path) -> None:
    """Both store the same problem and problems of their own, as fast as they can."""
    rounds = 100
    processes = [start_writer(f"tuner{w}", rounds) for w in range(2)]
    while any(p.poll() is None for p in processes):
        if path_of().exists():
            json.loads(path_of().read_text())  # whole at any time
    assert [p.returncode for p in processes] == [0, 0]
    names = set(json.loads(path_of().read_text())["choices"])
    assert names >= {f"tuner{w}-{i}" for w in range(2) for i in range(rounds)}
    for i in range(1, rounds):
        document = json.loads(path_of(replace(DECODE, num_heads=8 * (1 + i))).read_text())
        assert set(document["choices"]) == {"tuner0", "tuner1"}


def age(path: Path, days: float) -> None:
    then = time.time() - 86400 * days
    os.utime(path, (then, then))


def test_old_entries_that_are_stale_are_evicted(home: Path) -> None:
    paths = [save(replace(DECODE, num_heads=8 * i), {"reference": TUNED}) for i in range(2, 6)]
    for path in paths[:2]:
        document = json.loads(path.read_text())
        document["choices"]["reference"]["code"]["kernel"] = "of long ago"
        path.write_text(json.dumps(document))
    age(paths[0], 91)  # stale and old
    age(paths[1], 89)  # stale: another installation may still use it
    age(paths[2], 1000)  # old and in use
    paths[3].write_text("{")
    age(paths[3], 91)  # damaged and old
    save(DECODE, {"reference": TUNED})
    assert [path.exists() for path in paths] == [False, True, True, False]


def test_there_are_only_so_many_stale_files(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "KEPT_FILES", 3)
    paths = [save(replace(DECODE, num_heads=8 * i), {"reference": TUNED}) for i in range(2, 9)]
    for i, path in enumerate(paths):
        document = json.loads(path.read_text())
        document["choices"]["reference"]["code"]["kernel"] = "of long ago"
        path.write_text(json.dumps(document))
        age(path, 10 - i)
    save(DECODE, {"reference": TUNED})
    assert [path.exists() for path in paths] == [False] * 5 + [True] * 2  # and the new one is the third
