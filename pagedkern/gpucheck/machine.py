"""What the figures were taken on."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from typing import Any

import torch

import pagedkern
from pagedkern.autotune.store.device import libraries


def describe() -> dict[str, Any]:
    """Device, driver, versions and date."""
    versions = {"pagedkern": pagedkern.__version__, "python": platform.python_version(), **libraries()}
    facts: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "versions": versions}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts["device"] = {
            "name": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "driver": _driver(),
        }
    else:
        facts["device"] = {"name": f"no GPU: {platform.processor() or platform.machine()}"}
    return facts


def _driver() -> str | None:
    """The driver's version, where its tool is on PATH."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return None
