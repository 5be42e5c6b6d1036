"""What a measurement belongs to: devices that are unlike, drivers, dates; and profiles from elsewhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagedkern import recommend
from pagedkern._selection import choose
from pagedkern.autotune import profile as profiles
from pagedkern.autotune import store
from pagedkern.autotune.cli import main
from pagedkern.autotune.recommend import known
from pagedkern.autotune.records import load
from pagedkern.autotune.store import device, save
from pagedkern.autotune.store import profiles as stored
from pagedkern.autotune.workloads import model
from pagedkern.errors import InvalidArgument
from tests.autotune.recordings import LLAMA, recording
from tests.autotune.test_models import tuned
from tests.autotune.test_store import DECODE, TUNED

X86 = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 17
model name\t: AMD EPYC
stepping\t: 1
flags\t\t: fpu avx2 fma avx512f avx512_bf16
"""
ARM = """processor\t: 0
Features\t: fp asimd asimdhp bf16 sve
CPU implementer\t: 0x41
CPU variant\t: 0x1
CPU part\t: 0xd40
CPU revision\t: 1
"""
GPU = {
    "name": "NVIDIA H100", "major": 9, "minor": 0, "multi_processor_count": 132, "total_memory": 80 << 30,
    "L2_cache_size": 50 << 20, "memory_bus_width": 5120, "memory_clock_rate": 2619000, "gcnArchName": "NVIDIA H100",
}  # fmt: skip


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    for cached in (device._cpu, device._gpu, device.driver):
        cached.cache_clear()


def cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpuinfo: str = X86, **more: Any) -> dict[str, str | int]:
    """The identity of a machine with that /proc/cpuinfo, and with other functions of `device`."""
    with monkeypatch.context() as patch:
        (tmp_path / "cpuinfo").write_text(cpuinfo)
        patch.setattr(device, "CPUINFO", tmp_path / "cpuinfo")
        patch.setattr(device.os, "cpu_count", lambda: 8)
        for name, value in more.items():
            patch.setattr(device, name, value)
        device._cpu.cache_clear()
        found = dict(device.identity("cpu"))
        device._cpu.cache_clear()
    return found


def test_processors_that_are_unlike_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = cpu(tmp_path, monkeypatch)
    assert usual["name"] == "AMD EPYC (25/17/1)"
    assert usual["features"] == "avx2 avx512_bf16 avx512f fma"
    others = [
        cpu(tmp_path, monkeypatch, X86.replace("stepping\t: 1", "stepping\t: 2")),  # with a larger cache, say
        cpu(tmp_path, monkeypatch, X86.replace(" avx512_bf16", "")),  # a hypervisor hides it
        cpu(tmp_path, monkeypatch, X86.replace("model\t\t: 17", "model\t\t: 1")),
        cpu(tmp_path, monkeypatch, last_level_cache=lambda _: 1 << 20),  # a slice of the same
        cpu(tmp_path, monkeypatch, cpu_threads=lambda: 3),
        cpu(tmp_path, monkeypatch, os=SimpleNamespace(cpu_count=lambda: 64)),  # a part of a large machine
        cpu(tmp_path, monkeypatch, ARM),
        cpu(tmp_path, monkeypatch, ARM.replace("0xd40", "0xd0c")),
        cpu(tmp_path, monkeypatch, f"{ARM}\n{ARM.replace('0xd40', '0xd0c')}"),  # cores of two kinds
    ]
    slugs = [device.slug_of(identity) for identity in [usual, *others]]
    assert len(set(slugs)) == len(slugs)
    assert cpu(tmp_path, monkeypatch, f"{X86}\n{X86.replace('processor: 0', 'processor: 1')}") == usual
    assert all(device.is_identity(json.loads(json.dumps(identity))) for identity in others)
    assert device.likeness(usual, others[1]) < device.likeness(usual, usual) == 1.0


def test_where_there_is_no_cpuinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "CPUINFO", tmp_path / "none")
    monkeypatch.setattr(sys, "platform", "darwin")

    def told(command: list[str], **_: object) -> SimpleNamespace:
        assert command[-1] == "machdep.cpu.brand_string"
        return SimpleNamespace(stdout="Apple M3 Max\n")

    monkeypatch.setattr(device.subprocess, "run", told)
    assert device._processor() == ("Apple M3 Max", "")
    monkeypatch.setattr(device.subprocess, "run", lambda *_, **__: (_ for _ in ()).throw(OSError()))
    monkeypatch.setattr(device.platform, "processor", lambda: "arm")
    assert device._processor() == ("arm", "")
    (tmp_path / "none").write_text("nothing of a core\n")
    assert device._processor() == ("arm", "")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Two GPUs, the first the current one; what is changed of them counts once caches are cleared."""
    made = [dict(GPU), {**GPU, "name": "NVIDIA A10", "major": 8, "minor": 6}]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda n: SimpleNamespace(**made[n]))
    device._gpu.cache_clear()
    return made


@pytest.mark.parametrize(
    "change",
    [
        {"name": "NVIDIA H100 PCIe"}, {"minor": 3}, {"multi_processor_count": 66}, {"total_memory": 40 << 30},
        {"L2_cache_size": 25 << 20}, {"memory_bus_width": 2560}, {"memory_clock_rate": 1593000},
    ],
)  # fmt: skip
def test_gpus_that_are_unlike_are_told_apart(change: dict[str, Any], gpus: list[dict[str, Any]]) -> None:
    before = device.identity("cuda")
    gpus[0].update(change)
    device._gpu.cache_clear()
    assert device.slug_of(device.identity("cuda")) != device.slug_of(before)
    for name in ("memory_bus_width", "memory_clock_rate"):  # which an older torch does not tell
        del gpus[0][name]
    device._gpu.cache_clear()
    assert device.is_identity(dict(device.identity("cuda")))


def test_two_gpus_of_one_process_have_a_choice_each(
    gpus: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert device.identity("cuda") == device.identity("cuda", 0) != device.identity("cuda", 1)
    problem = replace(DECODE, device="cuda")
    save(problem, {"reference": TUNED})
    assert store.lookup(problem, ordinal=0) == store.lookup(problem) is not None
    assert store.lookup(problem, ordinal=1) is None
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    save(problem, {"reference": replace(TUNED, gain=9.0)})
    gains = [store.lookup(problem, ordinal=n).reason for n in (0, 1)]  # type: ignore[union-attr]
    assert ["1.30x" in gains[0], "9.00x" in gains[1]] == [True, True]
    assert choose(problem, "auto", "", 1).reason == gains[1] != choose(problem, "auto", "", 0).reason


@pytest.mark.usefixtures("gpus")
def test_block_sizes_for_a_gpu_by_its_number() -> None:
    document = profiles.distil(recording())
    assert document is not None
    document.update(device=dict(device.identity("cuda", 1)), code={"reference": dict(device.code("reference"))})
    stored.save_rates(document, "shape")
    assert recommend("chat", "8GB", model=LLAMA, device="cuda:1").tier == "tuned"
    assert recommend("chat", "8GB", model=LLAMA, device="cuda").tier == "default"
    for name, accepted in (("cuda:2", "'cuda:0' to 'cuda:1'"), ("cuda:x", "'cuda:1'"), ("mps", "'cpu', 'cuda'")):
        with pytest.raises(InvalidArgument, match=f"device: got '{name}', expected .*{accepted}"):
            recommend("chat", "8GB", device=name)


def test_the_driver_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for text, expected in (
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n",
            "driver 550.54.15, ",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build\n", "driver 570.124.06, "),
        ("something else\n", ""),
        (None, ""),
    ):
        (tmp_path / "version").write_text(text or "")
        monkeypatch.setattr(device, "NVIDIA", tmp_path / ("version" if text else "none"))
        device.driver.cache_clear()
        assert device.driver("cuda") == f"{expected}CUDA 13.0"


def test_whatever_is_stored_says_where_when_and_with_what(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tuned(model("smollm2-135m"), journal=home / "run.jsonl")
    assert main(["show", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["format"] == 1
    recorded, here, system = load(home / "run.jsonl"), dict(device.identity("cpu")), device.driver("cpu")
    assert recorded.driver == system != ""
    assert run.profile is not None
    made = profiles.distil(recorded)
    assert made is not None
    for entry in (*document["choices"], *document["rates"]):
        assert (entry["device"], entry["driver"]) == (here, system)
        assert entry["when"][:4] == recorded.when[:4]
    for path in [*home.glob("tuned/*/*.json")]:
        for choice in json.loads(path.read_text())["choices"].values():
            assert choice["code"] == device.code("cpu") | {"kernel": choice["code"]["kernel"]}
            # PyPI's package is called 2.13.0 where the module says 2.13.0+cu130
            assert torch.__version__.startswith(choice["code"]["libraries"]["torch"])
    assert {choice["driver"] for choice in made["choices"]} == {system}
    assert made["code"]["cpu"] == device.code("cpu")
    found = store.lookup(run.outcomes[0].space.workload.problem(16))
    assert found is not None
    assert f"{device.describe(here)}, {system}, {recorded.when[:4]}" in found.reason


# Profiles from elsewhere


def exported(path: Path, when: str, fastest: int = 16, here: bool = True) -> str:
    """A file as `export` writes it, of a machine that is fastest at one block size."""
    recorded = recording(rounds=7)
    recorded.device = dict(device.identity("cpu")) if here else recorded.device
    recorded.when = when
    document = profiles.distil(recorded)
    assert document is not None
    for block_size, speed in document["speeds"].items():
        speed["kv_bytes_per_second"] = 4e10 if block_size == str(fastest) else 1e9
    path.write_text(json.dumps({**document, "code": {"cpu": dict(device.code("cpu"))}}))
    return str(path)


@pytest.mark.parametrize("here", [True, False])
def test_of_two_imports_the_later_measurement_stays(
    here: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = exported(tmp_path / "old.json", "2026-02-01T12:00:00+00:00", 8, here)
    new = exported(tmp_path / "new.json", "2026-02-01T12:00:00-01:00", 256, here)  # an hour later
    what = ["kernels", "rates"] if here else ["kernels and rates"]
    for file, block_size, taken in ((old, 8, True), (new, 256, True), (old, 256, False), (new, 256, True)):
        assert main(["import", file]) == 0
        text = capsys.readouterr().out
        for name in what:
            kept = f"Kept: {name} of 2026-02-01T12:00:00-01:00, which are newer"
            assert (f"Taken over: {name}\n" in text, kept in text) == (taken, not taken)
        found = recommend("chat", "8GB", model=LLAMA)
        assert (found.block_size, found.tier) == (block_size, "tuned" if here else "tuned-nearest")


def test_an_import_does_not_replace_what_was_measured_here_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned(LLAMA)
    before = recommend("chat", "8GB", model=LLAMA)
    assert main(["import", exported(tmp_path / "old.json", "2020-01-01T00:00:00+00:00", 8)]) == 0
    assert "Kept: rates of 20" in capsys.readouterr().out
    assert recommend("chat", "8GB", model=LLAMA) == before
    later = exported(tmp_path / "later.json", "2999-01-01T00:00:00+00:00", 256)
    assert main(["import", later]) == 0
    assert recommend("chat", "8GB", model=LLAMA).block_size == 256
    tuned(LLAMA)  # what is measured now counts, whatever a file says of its own date
    assert recommend("chat", "8GB", model=LLAMA).scores == before.scores


def test_what_is_damaged_gives_way_to_an_import(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = exported(tmp_path / "a.json", "2026-02-01T12:00:00+00:00", 8)
    assert main(["import", file]) == 0
    paths = [Path(line.strip()) for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert len(paths) == 2
    for path in paths:
        path.write_text("{")
    assert main(["import", file]) == 0
    assert capsys.readouterr().out.count("Taken over") == 2
    assert recommend("chat", "8GB", model=LLAMA).tier == "tuned"


@pytest.mark.parametrize(("older", "tier"), [(False, "tuned-nearest"), (True, "tuned-nearest")])
def test_a_profile_that_ships_for_this_very_machine(
    older: bool, tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also when its kernels are of an earlier source: block sizes rest on it still, and it is said; kernels do not."""
    run = tuned(LLAMA, journal=tmp_path / "run.jsonl")
    recorded = load(tmp_path / "run.jsonl")
    if older:
        recorded.code = [{name: {**dict(code), "kernel": "older"} for name, code in of.items()} for of in recorded.code]  # type: ignore[call-overload]
    (tmp_path / "shipped").mkdir()
    (tmp_path / "shipped" / "machine.json").write_text(json.dumps(profiles.distil(recorded)))
    monkeypatch.setenv("PAGEDKERN_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setattr(stored, "SHIPPED", tmp_path / "shipped")
    store.reload()
    found = recommend("chat", "8GB", model=LLAMA)
    assert found.tier == tier
    assert found.tokens_per_second is not None
    assert ("with other kernels" in found.reason) == older
    choice = choose(run.outcomes[0].space.workload.problem(found.block_size), "auto", "")
    assert choice.tier == ("default" if older else "tuned-nearest")
    assert [state for state, _, _ in known()] == ["shipped"]
    assert main(["show"]) == 0
    text = capsys.readouterr().out
    assert "shipped" in text
    assert "Nothing of this machine is stored" in text
    assert max(len(line) for line in text.splitlines() if "/" not in line) <= 80


@pytest.mark.parametrize(
    ("minute", "running", "expected"),
    [(7.0, "1/90", 0.0), (7.0, "4/90", 3.0), (0.5, "9/90", 0.5), (2.04, None, 2.0), (2.04, "x", 2.0)],
)
def test_a_load_that_has_ended_is_none(
    minute: float, running: str | None, expected: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device.os, "getloadavg", lambda: (minute, 9.0, 9.0))
    monkeypatch.setattr(device, "LOADAVG", tmp_path / "loadavg")
    if running is not None:
        (tmp_path / "loadavg").write_text(f"{minute} 9.0 9.0 {running} 123\n")
    assert device.load() == expected
