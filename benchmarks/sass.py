"""What a compiled CUDA kernel uses, read from its cubin with the tools that come with Triton's wheel."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_LOAD = re.compile(r"(LDG|LDGSTS)\b[.\w]*")
_WIDTH = re.compile(r"\.(256|128|64|U16|S16|U8|S8)\b")
_BYTES = {"256": 32, "128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
_BULK = re.compile(r"(UBLKCP|UTMALDG)\b[.\w]*")  # copies by the bulk engine: 16 bytes and more
_TENSOR_CORE = re.compile(r"(HMMA|IMMA|QMMA|OMMA|DMMA|HGMMA|IGMMA|QGMMA|UTC\w*MMA)\b[.\w]*")
_LOCAL = re.compile(r"(LDL|STL)\b[.\w]*")


@dataclass(frozen=True)
class Usage:
    """Static counts: instructions of the kernel's code, not how often they run."""

    registers: int  # of a thread
    local_bytes: int  # of a thread's stack: spilled registers, arrays, and now and then reserved for nothing
    local_accesses: int  # instructions that load or store there
    loads: dict[int, int]  # loads from global memory: bytes of one -> instructions
    tensor_core: dict[str, int]  # instructions of the tensor cores -> how many

    @property
    def spills(self) -> bool:
        return self.local_accesses > 0

    @property
    def wide_loads(self) -> int:
        """Loads of at least 16 bytes."""
        return sum(count for size, count in self.loads.items() if size >= 16)


@cache
def usage(cubin: bytes) -> Usage:
    """Of the one kernel in `cubin`."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        resources = _run(tools / "cuobjdump", "-res-usage", file.name)
        code = _run(tools / "nvdisasm", "-c", file.name)
    numbers = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", resources)}
    return read_code(code, registers=numbers["REG"], local_bytes=numbers["STACK"] + numbers["LOCAL"])


def read_code(code: str, registers: int, local_bytes: int) -> Usage:
    """From the text that nvdisasm prints."""
    loads: Counter[int] = Counter()
    for match in _LOAD.finditer(code):
        width = _WIDTH.search(match.group())
        loads[_BYTES[width.group(1)] if width else 4] += 1
    loads[16] += len(_BULK.findall(code))
    return Usage(
        registers=registers,
        local_bytes=local_bytes,
        local_accesses=len(_LOCAL.findall(code)),
        loads=dict(sorted((+loads).items(), reverse=True)),
        tensor_core=dict(Counter(match.group() for match in _TENSOR_CORE.finditer(code))),
    )


def _run(tool: Path, *args: str) -> str:
    done = subprocess.run([tool, *args], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{tool.name} failed: {done.stderr.strip()}")
    return done.stdout
