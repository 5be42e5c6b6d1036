"""The ABI in a fresh interpreter in which torch, NumPy and the GPU packages cannot be imported."""

from __future__ import annotations

import doctest
import subprocess
import sys
from pathlib import Path

import pagedkern.abi

PROGRAM = """
import sys
from array import array

BLOCKED = ("torch", "numpy", "triton", "cupy", "numba")
for name in BLOCKED:
    sys.modules[name] = None  # an import of it fails

before = set(sys.modules)
from pagedkern import abi

table = memoryview(array("i", [7, 2, 5, -1])).cast("B").cast("i", (2, 2))
lens = array("i", [20, 3])
batch = abi.validate(block_table=table, seq_lens=lens, slot_mapping=array("q", [35, 82]), block_size=16, num_blocks=8)
abi.validate_contents(batch)
assert abi.to_struct(batch).table_width == 2
csr = abi.to_csr(table, lens, 16)
assert abi.from_csr(*csr, 16).block_table.tolist() == [[7, 2], [5, -1]]
try:
    abi.describe([1, 2], "block_table")
except TypeError as error:
    assert "block_table: got list" in str(error)
else:
    raise SystemExit("a list was accepted")
assert all(sys.modules[name] is None for name in BLOCKED)
outside = {name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
print(sorted(outside))
"""


def test_standard_library_only() -> None:
    root = Path(pagedkern.abi.__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['pagedkern']"


def test_docstring_example() -> None:
    result = doctest.testmod(pagedkern.abi)
    assert result.attempted >= 6
    assert result.failed == 0
