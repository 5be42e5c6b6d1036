"""What a measurement belongs to: the machine it was taken on and the code that was measured.

Standard library only for a CPU; torch answers for GPUs. Everything is read once in a process.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

from pagedkern.autotune.store import files
from pagedkern.backends import base
from pagedkern.environment import limits

BACKENDS = Path(base.__file__).parent
SOURCES = {".py", ".cu", ".cuh", ".h", ".c", ".cpp"}
LIBRARIES = (  # that a backend may be built on
    "torch", "numba", "llvmlite", "triton", "pytorch-triton-rocm", "cupy", "cupy-cuda12x", "cupy-cuda13x", "numba-cuda",
)  # fmt: skip
FEATURES = {  # of a processor, that decide which instructions kernels are compiled to
    "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_bf16", "avx512_fp16", "amx_bf16",
    "asimd", "asimdhp", "bf16", "i8mm", "sve", "sve2",
}  # fmt: skip
CPUINFO, LOADAVG = Path("/proc/cpuinfo"), Path("/proc/loadavg")
NVIDIA = Path("/proc/driver/nvidia/version")
GUESSED_CACHE = 64 << 20  # bytes, where the system does not tell


def identity(device: str, ordinal: int | None = None) -> Mapping[str, str | int]:
    """The fields by which two machines are the same to a tuner; `device` is a torch device type ("cpu", "cuda"),
    `ordinal` the number of a GPU, None the current one: a process may use several that are unlike."""
    if device != "cuda":
        return _cpu() if device == "cpu" else {"type": device, "name": device}  # nothing is tuned on others
    if ordinal is None:
        import torch  # whoever asks for a GPU has loaded it

        ordinal = torch.cuda.current_device()
    return _gpu(ordinal)


@cache
def _cpu() -> Mapping[str, str | int]:
    name, features = _processor()
    return {
        "type": "cpu",
        "name": name,
        "arch": platform.machine(),
        "threads": cpu_threads(),
        "cores": os.cpu_count() or 1,
        "cache_kib": last_level_cache("cpu") >> 10,
        "features": features,
    }


@cache
def _gpu(ordinal: int) -> Mapping[str, str | int]:
    import torch

    properties = torch.cuda.get_device_properties(ordinal)
    known: dict[str, str | int] = {
        "type": "cuda",
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30),
    }
    told_apart = {  # what is sold under one name with another memory, or is a slice of a GPU; not every torch tells
        "l2_kib": getattr(properties, "L2_cache_size", 0) >> 10,
        "memory_bus_bits": getattr(properties, "memory_bus_width", 0),
        "memory_mhz": getattr(properties, "memory_clock_rate", 0) // 1000,
        "architecture": properties.gcnArchName if torch.version.hip else "",
    }
    return {**known, **{key: value for key, value in told_apart.items() if value}}


@cache
def driver(device: str) -> str:
    """The version of what runs a device, for the record: a GPU's driver, the kernel of the system for a CPU."""
    if device != "cuda":
        return f"{platform.system()} {platform.release().partition('-')[0]}"  # without what a distribution adds
    import torch

    runtime = f"HIP {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    try:
        text = NVIDIA.read_text()
    except OSError:
        return runtime
    found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", text)
    return f"driver {found[1]}, {runtime}" if found else runtime


def present(device: str) -> bool:
    """Whether this machine has a device of that type."""
    if device == "cpu":
        return True
    try:
        import torch
    except ImportError:
        return False
    return device == "cuda" and torch.cuda.is_available()


def slug_of(device: Mapping[str, str | int]) -> str:
    """A machine's identity as a part of a path: its name, and a digest of all of it."""
    digest = hashlib.sha256(json.dumps(dict(device), sort_keys=True).encode()).hexdigest()[:8]
    return f"{files.slug(str(device['name']))}-{digest}"


def is_identity(device: object) -> bool:
    """Whether a value of a file can be a machine's identity: plain fields that can be printed, those of `describe`."""
    if (
        not isinstance(device, dict)
        or not isinstance(device.get("type"), str)
        or not isinstance(device.get("name"), str)
    ):
        return False
    plain = all(type(value) is int or (type(value) is str and value.isprintable()) for value in device.values())
    return plain and (device["type"] != "cpu" or type(device.get("threads")) is int)


def likeness(device: Mapping[str, str | int], other: Mapping[str, object]) -> float:
    """How much another machine says about this one: 0 nothing, 1 all."""
    if device["type"] != other.get("type"):
        return 0.0
    cpu = device["type"] == "cpu"
    kinds = [d.get("arch") if cpu else str(d.get("capability", "")).partition(".")[0] for d in (device, other)]
    if kinds[0] != kinds[1]:
        return 0.0
    counts = [d.get("threads" if cpu else "multiprocessors") for d in (device, other)]
    known = [count for count in counts if isinstance(count, int) and count > 0]
    ratio = min(known) / max(known) if len(known) == 2 else 0.1
    same = 0.4 if device.get("name") == other.get("name") else 0.2
    return same + (0.1 if device.get("features") == other.get("features") else 0.0) + ratio / 2


def describe(device: Mapping[str, str | int]) -> str:
    """A machine's identity in words."""
    if device["type"] == "cpu":
        return f"{device['name']}, {device['threads']} threads"
    return f"{device['name']}, compute capability {device.get('capability', 'unknown')}"


@cache
def code(backend: str) -> Mapping[str, str | Mapping[str, str]]:
    """The version of pagedkern, a hash of the backend's sources, and the versions of the libraries installed."""
    version = sys.modules["pagedkern"].__version__  # the package that this module is in
    return {"pagedkern": version, "kernel": kernel_hash(backend), "libraries": libraries()}


@cache
def kernel_hash(backend: str) -> str:
    """SHA-256, shortened, of every source file of a backend; "unknown" where none are found.

    The sources are looked for by name, in `backends/<name>/` or `backends/<name>.py`, so that nothing is imported. What
    is no identifier names no backend, and could be a path out of there.
    """
    if not backend.isidentifier():
        return "unknown"
    digest = hashlib.sha256()
    try:
        sources = [p for p in sorted((BACKENDS / backend).rglob("*")) if p.suffix in SOURCES]
        sources += [p for p in (BACKENDS / f"{backend}.py",) if p.is_file()]
        for path in sources:
            digest.update(f"{path.relative_to(BACKENDS).as_posix()}\0".encode())
            digest.update(path.read_bytes() + b"\0")
    except OSError:
        return "unknown"
    return digest.hexdigest()[:16] if sources else "unknown"


@cache
def libraries() -> Mapping[str, str]:
    """Versions of those of `LIBRARIES` that are installed."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def cpu_threads() -> int:
    """Threads that this process may use: by its affinity, its container, and the environment.

    What a program sets later (`torch.set_num_threads`) is not asked: an engine that spares a core is still tuned.
    """
    return limits.threads()


def last_level_cache(device: str) -> int:
    """Bytes of the cache nearest to memory."""
    if device != "cpu":
        import torch

        size = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "L2_cache_size", 0)
        return int(size) or GUESSED_CACHE
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            number = re.fullmatch(r"(\d+)([KMG]?)", path.read_text().strip())
        except OSError:
            continue
        if number:
            sizes.append(int(number[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[number[2]])
    return max(sizes, default=0) or GUESSED_CACHE


def load() -> float | None:
    """Processes other than this one that want a core; None where the system does not tell.

    The mean over the last minute, or what wants one now, looked at for a quarter of a second, if that is less: a load
    that has ended disturbs nobody.
    """
    try:
        minute = os.getloadavg()[0]
    except OSError:
        return None
    running = []
    try:
        for _ in range(5):
            running.append(int(LOADAVG.read_text().split()[3].partition("/")[0]) - 1)
            time.sleep(0.05)
    except (OSError, ValueError, IndexError):
        return round(minute, 1)
    return round(max(0.0, min(minute, sum(running) / len(running))), 1)


def is_busy(load_: float | None, threads: object = None) -> bool:
    """Whether others had a machine of so many threads, None is this one: then times are theirs as well as ours."""
    threads = threads if isinstance(threads, int) else cpu_threads()
    return load_ is not None and load_ > 0.5 * threads


def free_memory(device: str) -> int:
    """Bytes that can be allocated now: what the machine has left and what a container and `ulimit` allow."""
    if device != "cpu":
        import torch

        return int(torch.cuda.mem_get_info()[0])
    return limits.free_memory()


def _processor() -> tuple[str, str]:
    """The model as the kernel names it, with the numbers that tell apart what is sold under one name, all kinds of its
    cores; and those of `FEATURES` that it has, which a hypervisor may hide."""
    try:
        text = CPUINFO.read_text()
    except OSError:
        return _processor_elsewhere(), ""
    names, features = [], set(FEATURES)
    for core in text.strip().split("\n\n"):
        fields = dict(re.findall(r"^([^\n:]*?)[ \t]*: *(.*)$", core, re.MULTILINE))
        numbers = [fields[key] for key in _NUMBERS if key in fields]
        name = fields.get("model name") or platform.processor() or platform.machine()
        flags = fields.get("flags") or fields.get("Features")
        if numbers or flags or "model name" in fields:  # else it is of no core
            names.append(f"{name} ({'/'.join(numbers)})" if numbers else name)
            features &= set((flags or "").split())
    if not names:
        return _processor_elsewhere(), ""
    return " + ".join(dict.fromkeys(names)), " ".join(sorted(features))


_NUMBERS = ("cpu family", "model", "stepping", "CPU implementer", "CPU variant", "CPU part", "CPU revision")


def _processor_elsewhere() -> str:
    """The model where there is no /proc/cpuinfo."""
    if sys.platform == "darwin":  # whose `platform.processor` is "arm" for all
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            pass
    return platform.processor() or platform.machine()
