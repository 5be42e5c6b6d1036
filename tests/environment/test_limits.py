"""Processors and memory as control groups and limits leave them: in file trees that are made up, and in real groups."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagedkern.environment import cgroups, limits

ROOT = Path(__file__).parents[2]


def tree(root: Path, membership: str, mounts: str, files: dict[str, str | int]) -> Path:
    """A file system: the two files that name groups, and files of groups."""
    for name, text in {"proc/self/cgroup": membership, "proc/self/mountinfo": mounts, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def mount(point: str, top: str = "/", kind: str = "cgroup2", options: str = "rw") -> str:
    return f"30 23 0:26 {top} {point} rw,nosuid shared:4 - {kind} cgroup {options}\n"


V1 = mount("/sys/fs/cgroup/cpu,cpuacct", kind="cgroup", options="rw,cpu,cpuacct") + mount(
    "/sys/fs/cgroup/memory", kind="cgroup", options="rw,memory"
)


@pytest.mark.parametrize(
    ("text", "processors"),
    [
        ("max 100000", None), ("max", None), ("200000 100000", 2), ("150000 100000", 2), ("150001 50000", 4),
        ("50000 100000", 1), ("1000 1000000", 1), ("200000", 2), ("6400000 100000", 64), ("0 100000", None),
        ("100000 0", None), ("-1 100000", None), ("", None), ("nonsense", None), ("9" * 5000, None), ("\x00\xff", None),
    ],
)  # fmt: skip
def test_a_quota_is_rounded_up(text: str, processors: int | None, tmp_path: Path) -> None:
    tree(tmp_path, "0::/", mount("/sys/fs/cgroup"), {"sys/fs/cgroup/cpu.max": text})
    assert cgroups.processors(tmp_path) == processors


@pytest.mark.parametrize(
    ("quota", "period", "processors"),
    [
        (-1, 100000, None),
        (250000, 100000, 3),
        (100, 100000, 1),
        ("", 100000, None),
        (100000, "", None),
        (100000, 0, None),
    ],
)
def test_a_quota_of_version_1(quota: str | int, period: str | int, processors: int | None, tmp_path: Path) -> None:
    group = "sys/fs/cgroup/cpu,cpuacct/docker/abc"
    files = {f"{group}/cpu.cfs_quota_us": quota, f"{group}/cpu.cfs_period_us": period}
    tree(tmp_path, "4:memory:/other\n3:cpu,cpuacct:/docker/abc\n0::/elsewhere", V1, files)
    assert cgroups.processors(tmp_path) == processors


def test_the_smallest_of_all_groups_around_counts(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/cpu.max": "1600000 100000",
        "sys/fs/cgroup/pods/cpu.max": "400000 100000",
        "sys/fs/cgroup/pods/a/cpu.max": "800000 100000",
        "sys/fs/cgroup/pods/b/cpu.max": "100000 100000",  # not around this process
        "sys/fs/cgroup/pods/memory.max": 6000,
        "sys/fs/cgroup/pods/memory.current": 1000,
        "sys/fs/cgroup/pods/a/memory.max": 9000,
        "sys/fs/cgroup/pods/a/memory.current": 500,
    }
    tree(tmp_path, "0::/pods/a", mount("/sys/fs/cgroup"), files)
    assert cgroups.processors(tmp_path) == 4
    assert cgroups.free_memory(tmp_path) == 5000


@pytest.mark.parametrize(
    ("membership", "top"),
    [
        ("/docker/abc", "/docker/abc"),  # the host's path, and that folder is all that can be seen
        ("/", "/"),  # a namespace of its own
        ("/", "/.."),  # mounted by somebody outside of it
        ("/../sibling", "/"),  # moved out of it
        ("/docker/abc (deleted)", "/"),
        ("/docker/abc", "/docker/ab"),
    ],
)
def test_what_can_be_seen_of_the_groups(membership: str, top: str, tmp_path: Path) -> None:
    tree(tmp_path, f"0::{membership}", mount("/cg", top), {"cg/cpu.max": "300000 100000", "cg/memory.max": 70})
    assert cgroups.processors(tmp_path) == 3
    assert cgroups.free_memory(tmp_path) == 70


def test_mounted_elsewhere(tmp_path: Path) -> None:
    mounts = mount("/run/my\\040groups/v2") + mount("/odd:place/cpu", "/a", "cgroup", "rw,cpu")
    files: dict[str, str | int] = {
        "run/my groups/v2/x:y/memory.max": 1000,
        "odd:place/cpu/b/cpu.cfs_quota_us": 500000,
        "odd:place/cpu/b/cpu.cfs_period_us": 100000,
    }
    tree(tmp_path, "1:name=systemd:/z\n2:cpu:/a/b\n0::/x:y", mounts, files)
    assert cgroups.processors(tmp_path) == 5
    assert cgroups.free_memory(tmp_path) == 1000


@pytest.mark.parametrize(
    ("files", "room"),
    [
        ({"memory.max": "max", "memory.current": 10}, None),
        ({"memory.max": 1000, "memory.current": 300}, 700),
        ({"memory.max": 1000, "memory.current": 1300}, 0),
        ({"memory.max": 1000}, 1000),
        ({"memory.max": 1000, "memory.current": 300, "memory.stat": "anon 50\ninactive_file 250\nfile 1"}, 950),
        ({"memory.max": 1000, "memory.current": 300, "memory.stat": "inactive_file 900"}, 1000),
        ({"memory.max": 1000, "memory.high": 400, "memory.current": 300}, 100),
        ({"memory.max": "nonsense"}, None),
    ],
)
def test_memory(files: dict[str, str | int], room: int | None, tmp_path: Path) -> None:
    tree(tmp_path, "0::/a", mount("/cg"), {f"cg/a/{name}": text for name, text in files.items()})
    assert cgroups.free_memory(tmp_path) == room


@pytest.mark.parametrize(
    ("files", "room"),
    [
        ({"memory.limit_in_bytes": 9223372036854771712, "memory.usage_in_bytes": 10}, None),
        ({"memory.limit_in_bytes": 1000, "memory.usage_in_bytes": 300}, 700),
        (
            {
                "memory.limit_in_bytes": 9223372036854771712,
                "memory.usage_in_bytes": 300,
                "memory.stat": "cache 9\nhierarchical_memory_limit 800\ntotal_inactive_file 200",
            },
            700,
        ),
    ],
)
def test_memory_of_version_1(files: dict[str, str | int], room: int | None, tmp_path: Path) -> None:
    tree(tmp_path, "7:memory:/a", V1, {f"sys/fs/cgroup/memory/a/{name}": text for name, text in files.items()})
    assert cgroups.free_memory(tmp_path) == room


@pytest.mark.parametrize("missing", ["proc/self/cgroup", "proc/self/mountinfo", "proc/meminfo", "sys", "proc"])
def test_nothing_to_read_is_no_limit(missing: str, tmp_path: Path) -> None:
    tree(tmp_path, "0::/", mount("/sys/fs/cgroup"), {"proc/meminfo": "MemAvailable: 5 kB", "sys/fs/cgroup/x": ""})
    (tmp_path / missing).rename(tmp_path / "away")
    assert cgroups.processors(tmp_path) is None
    assert cgroups.free_memory(tmp_path) is None
    assert limits.free_memory(tmp_path) == (limits.GUESSED_MEMORY if "proc" in (missing, missing[:-8]) else 5 << 10)


@pytest.mark.parametrize("seed", range(20))
def test_random_trees(seed: int, tmp_path: Path) -> None:
    """Of both versions together, against the minimum over all groups that were put around this process."""
    rng = random.Random(seed)
    files: dict[str, str | int] = {}
    quotas, rooms, membership, mounts = [], [], [], ""
    for version, controllers in ((2, ""), (1, "cpu,cpuacct"), (1, "memory")):
        path = [rng.choice("abc") for _ in range(rng.randrange(4))]
        cut = rng.randrange(len(path) + 1)  # what lies above the mount point is not seen
        point = f"mnt/{version}{controllers}"
        membership.append(f"{0 if version == 2 else 5}:{controllers}:/{'/'.join(path)}")
        kind = "cgroup2" if version == 2 else "cgroup"
        mounts += mount(f"/{point}", "/" + "/".join(path[:cut]), kind, f"rw,{controllers}")
        for depth in range(len(path) - cut + 1):
            group = "/".join([point, *path[cut : cut + depth]])
            if controllers != "memory" and rng.random() < 0.6:
                quota, period = rng.choice([-1, rng.randrange(1, 1000000)]), rng.randrange(1, 1000000)
                files |= (
                    {f"{group}/cpu.max": f"{'max' if quota < 0 else quota} {period}"}
                    if version == 2
                    else {f"{group}/cpu.cfs_quota_us": quota, f"{group}/cpu.cfs_period_us": period}
                )
                quotas += [math.ceil(quota / period)] if quota > 0 else []
            if controllers != "cpu,cpuacct" and rng.random() < 0.6:
                limit, used = rng.randrange(10**10), rng.randrange(10**10)
                names = ("max", "current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
                files |= dict(zip((f"{group}/memory.{name}" for name in names), (limit, used), strict=True))
                rooms.append(max(0, limit - used))
        files[f"{point}/elsewhere/cpu.max"] = "1 100000"  # not around this process
    tree(tmp_path, "\n".join(membership), mounts, files)
    assert cgroups.processors(tmp_path) == min(quotas, default=None)
    assert cgroups.free_memory(tmp_path) == min(rooms, default=None)


def test_limits_of_the_process_count(tmp_path: Path) -> None:
    """`ulimit -v`, beside what the system has."""
    tree(tmp_path, "", "", {"proc/meminfo": "MemAvailable: 8388608 kB", "proc/self/status": "VmSize:\t1048576 kB"})
    assert limits.free_memory(tmp_path) == 8 << 30
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (4 << 40, before[1]))
    try:
        assert limits.free_memory(tmp_path) == 8 << 30
        (tmp_path / "proc/meminfo").write_text(f"MemAvailable: {8 << 30} kB\n")
        assert limits.free_memory(tmp_path) == (4 << 40) - (1 << 30)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


COUNT = """
import json, os, sys
for group in json.loads(sys.argv[1]):
    with open(group + "/cgroup.procs", "w") as file: file.write("0")
from pagedkern.autotune.store import device
import torch
torch.set_num_threads(8)
from pagedkern.backends.cpu import launch
launch.config.NUMBA_NUM_THREADS = 8
counts = device.cpu_threads(), device.identity("cpu")["threads"], device.free_memory("cpu"), launch.threads()
print(json.dumps(counts))
"""


def count(*groups: Path, **environment: str) -> list[int]:
    """What a process in these groups counts: threads, those of the device's key, free memory, those of a call."""
    env = {name: value for name, value in os.environ.items() if name not in limits.VARIABLES} | environment
    command = [sys.executable, "-c", COUNT, json.dumps([str(group) for group in groups])]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout.splitlines()[-1]))


@contextlib.contextmanager
def group(controller: str, files: dict[str, str]) -> Iterator[Path]:
    """A real control group in which files were written, inside of one that this process is in."""
    made = None
    for version, parent in cgroups.groups(controller):
        wanted = {"cpu.max", "memory.max"} if version == 2 else {"cpu.cfs_quota_us", "memory.limit_in_bytes"}
        made = parent / f"pagedkern-test-{os.getpid()}"
        try:
            made.mkdir()
        except OSError:
            continue
        if wanted & {path.name for path in made.iterdir()} & set(files):
            break
        made.rmdir()
    else:
        pytest.skip(f"no control group can be made here that limits {controller}: {made}")
    try:
        for name, text in files.items():
            if (made / name).exists():
                (made / name).write_text(text)
        yield made
    finally:
        made.rmdir()


def test_a_real_quota() -> None:
    """Half a processor is one thread, one and a half are two, whatever torch and Numba would take."""
    for quota, threads in (("50000", 1), ("150000", 2)):
        files = {"cpu.max": f"{quota} 100000", "cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": quota}
        with group("cpu", files) as made:
            bounded = min(threads, len(os.sched_getaffinity(0)))
            found = count(made)
            assert (found[0], found[1], found[3]) == (bounded, bounded, threads)
            assert count(made, OMP_NUM_THREADS="1,4")[0] == 1


def test_a_real_limit_of_memory() -> None:
    with group("memory", {"memory.max": str(600 << 20), "memory.limit_in_bytes": str(600 << 20)}) as made:
        assert 100 << 20 < count(made)[2] < 600 << 20
    assert count()[2] > 600 << 20
