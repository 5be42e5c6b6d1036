"""CUDA graphs, torch.compile, the contract's own tests and compute-sanitizer, each by itself."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

import pagedkern
from pagedkern.gpucheck.agreement import same
from pagedkern.gpucheck.problems import CallShape, CallTensors, shrunk

MIXED = CallShape("mixed", (300, 40, 1), (17, 1, 1), 8, 2, 64)


def graph_replay(backend: str) -> str | None:
    """A captured call, replayed after other queries and lengths were put in place, gives the bits of a plain call."""
    for query_lens in (None, MIXED.query_lens):
        problem = CallTensors(CallShape("graph", MIXED.seq_lens, query_lens, 8, 2, 64), "cuda")
        args = problem.args
        out = torch.empty_like(args["q"])
        pagedkern.paged_attention(**args, out=out, backend=backend)  # warm: compiled, loaded
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            _, lse = pagedkern.paged_attention(**args, out=out, return_lse=True, backend=backend)
        args["q"].copy_(args["q"].flip(0))
        args["seq_lens"].copy_(torch.tensor([299, 17, 0], device="cpu"))
        want, want_lse = pagedkern.paged_attention(**args, return_lse=True, backend=backend)
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        if not (same(out, want) and same(lse, want_lse)):
            return f"replaying a graph gives other bits than a call ({'decode' if query_lens is None else 'mixed'})"
    return None


def compiled(backend: str, device: str) -> str | None:
    """`torch.compile(fullgraph=True)` takes the call whole and gives the bits of the eager call."""
    args = CallTensors(shrunk(MIXED), device).args

    def step() -> torch.Tensor:
        result: torch.Tensor = pagedkern.paged_attention(**args, backend=backend) * 2
        return result

    torch._dynamo.reset()
    got = torch.compile(step, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")()
    return None if same(got, step()) else "compiled and eager results differ"


def contract(backends: list[str], seconds: float, every: int) -> dict[str, Any]:
    """Every n-th case of the contract's tests for these backends, where a checkout and pytest are at hand."""
    if not Path("tests/contract/README.md").exists():
        return {"skipped": "no tests/contract here: run in a checkout of the project"}
    missing = [name for name in ("pytest", "hypothesis", "pytest_timeout") if importlib.util.find_spec(name) is None]
    if missing:
        return {"skipped": f"missing: pip install {' '.join(missing).replace('_', '-')}"}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.xml")
        command = [sys.executable, "-m", "pytest", "-q", "tests/contract", "-k", " or ".join(backends)]
        command += [f"--junit-xml={result}", "--timeout=120", "-p", "no:cacheprovider"]
        if importlib.util.find_spec("xdist") is not None:
            command += ["-n", str(min(8, os.cpu_count() or 1))]
        environment = {**os.environ, "CONTRACT_EVERY": str(every)}
        try:
            run = subprocess.run(command, env=environment, timeout=seconds, capture_output=True, text=True, check=False)
        except subprocess.TimeoutExpired as expired:
            output = expired.stdout or b""
            tail = (output if isinstance(output, str) else output.decode(errors="replace"))[-2000:]
            return {"failed": [f"not finished within {seconds:.0f} s"], "output": tail}
        if not result.exists():
            return {"failed": ["pytest gave no result"], "output": (run.stdout + run.stderr)[-4000:]}
        return _junit(result)


def _junit(path: Path) -> dict[str, Any]:
    """Counts, and the names of what failed with the first line of why."""
    cases = list(ElementTree.parse(path).getroot().iter("testcase"))
    failed, skipped = [], 0
    for case in cases:
        bad = [child for child in case if child.tag in ("failure", "error")]
        skipped += any(child.tag == "skipped" for child in case)
        if bad:
            failed.append(f"{case.get('classname')}::{case.get('name')}: {(bad[0].get('message') or '')[:300]}")
    return {"run": len(cases) - skipped, "skipped_cases": skipped, "failed": failed}


def sanitizer(backend: str) -> dict[str, Any]:
    """A small run of the backend under compute-sanitizer."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return {"skipped": "compute-sanitizer is not on PATH"}
    command = [tool, "--error-exitcode", "9", sys.executable, "-m", "pagedkern.gpucheck", "--small"]
    command += ["--parts", "agreement", "--backends", backend]
    run = subprocess.run(command, timeout=120, capture_output=True, text=True, check=False)
    return {"clean": run.returncode == 0, "output": "" if run.returncode == 0 else (run.stdout + run.stderr)[-4000:]}
