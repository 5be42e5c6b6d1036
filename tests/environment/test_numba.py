"""Variables by which Numba is told what to compile for, or whether: they are obeyed, or refused with a reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from llvmlite import binding
from numba.core import config

from pagedkern.backends.cpu.disk import KernelCache
from pagedkern.environment import compiler
from tests.environment import program
from tests.environment.conditions import ROOT, both, run

HOST = {name for name, on in binding.get_host_cpu_features().items() if on}


def python(code: str, **environment: str) -> str:
    """The output of a fresh interpreter."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")} | environment
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A problem in bfloat16, for which some processors multiply pairs."""
    folder = tmp_path_factory.mktemp("pairs")
    torch.save(program.make("bfloat16", "bfloat16"), folder / "problem.pt")
    return folder


def test_a_lesser_processor(cache: Path, problem: Path) -> None:
    """`NUMBA_CPU_NAME=generic` compiles anew for what every processor has, beside what this one was compiled for."""
    for anew in (["plan", "find_bad_slot", "write", "attend"], []):
        outcome = run(problem, NUMBA_CPU_NAME="generic", **both(cache))
        assert (outcome.right, outcome.warnings, outcome.compiled) == (True, [], anew)
    outcome = run(problem, **both(cache))
    assert (outcome.right, outcome.warnings, outcome.compiled) == (True, [], [])


def test_fewer_instructions(cache: Path, pairs: Path) -> None:
    """Without AVX nothing may be emitted that needs AVX-512: LLVM would end the process."""
    outcome = run(pairs, NUMBA_ENABLE_AVX="0", **both(cache))
    assert (outcome.right, outcome.warnings) == (True, [])


TARGETS = """
import json
from pagedkern.backends.base import ITEMSIZE
from pagedkern.backends.cpu.jit import target
print(json.dumps([list(target(kv, "native", q).key) for kv in ITEMSIZE for q in ("float32", "bfloat16")]))
"""


@pytest.mark.parametrize(
    ("variables", "lanes", "half"),
    [
        ({"NUMBA_CPU_NAME": "generic"}, 4, False),
        ({"NUMBA_CPU_NAME": "Generic"}, 4, False),
        ({"NUMBA_ENABLE_AVX": "0"}, 4, False),
        ({"NUMBA_CPU_FEATURES": "+sse4.2,+avx"}, 4, False),
        ({"NUMBA_CPU_FEATURES": ""}, 4, False),
        ({"NUMBA_CPU_FEATURES": "+avx,+avx2,+f16c,+fma,-avx512bw,-avx512vl"}, 8, True),
    ],
)
def test_what_is_compiled_for(variables: dict[str, str], lanes: int, half: bool) -> None:
    asked = {flag[1:] for flag in variables.get("NUMBA_CPU_FEATURES", "").split(",") if flag.startswith("+")}
    if not asked <= HOST:
        pytest.skip(f"this processor lacks {', '.join(asked - HOST)}")
    for _, *key in json.loads(python(TARGETS, **variables)):
        assert key == [lanes, half, False], variables


def test_no_compilation_at_all(problem: Path) -> None:
    """The backend is not available and says which variable; "auto" passes over it."""
    code = """
import sys, torch, pagedkern
from tests.environment import program
problem = torch.load(sys.argv[1] if sys.argv[1:] else %r, weights_only=True)
print([info.reason for info in pagedkern.backends() if info.name == "cpu"])
try:
    program.compute(problem, "cpu")
except pagedkern.BackendUnavailable as error:
    print(error)
print(program.agree(program.compute(problem, "auto"), problem))
"""
    listed, refused, right = python(code % str(problem / "problem.pt"), NUMBA_DISABLE_JIT="1").splitlines()
    assert "NUMBA_DISABLE_JIT is set" in listed
    assert "backend='cpu' cannot run here: NUMBA_DISABLE_JIT is set" in refused
    assert right == "True"


def test_a_kernel_that_is_imported_without_compilation() -> None:
    code = "import pagedkern.backends.cpu.launch"
    with pytest.raises(AssertionError, match="ImportError: NUMBA_DISABLE_JIT is set"):
        python(code, NUMBA_DISABLE_JIT="1")


def test_instructions_that_the_processor_lacks() -> None:
    """They would end the process."""
    lacking = next(name for name, on in binding.get_host_cpu_features().items() if not on)
    code = "import pagedkern; print([info.reason for info in pagedkern.backends() if info.name == 'cpu'])"
    said = python(code, NUMBA_CPU_FEATURES=f"+sse2,+{lacking}")
    assert f"NUMBA_CPU_FEATURES asks for {lacking}, which this processor does not have" in said
    said = python(code, NUMBA_CPU_FEATURES="+sse2, nonsense")
    assert "NUMBA_CPU_FEATURES: got '+sse2, nonsense', expected features behind + or -" in said


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("OPT", config._OptLevel("max")), ("OPT", config._OptLevel(1)), ("DEBUGINFO_DEFAULT", 1), ("BOUNDSCHECK", 1),
        ("LOOP_VECTORIZE", 0), ("SLP_VECTORIZE", 1), ("LLVM_REFPRUNE_PASS", 0), ("EXTEND_VARIABLE_LIFETIMES", 1),
    ],
)  # fmt: skip
def test_other_settings_are_other_files(setting: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagedkern.backends.cpu.jit import codegen

    def names() -> str:
        return KernelCache(test_other_settings_are_other_files, codegen, "sources").name("signature")

    before = names()
    assert names() == before
    monkeypatch.setattr(config, setting, value)
    assert names() != before
    monkeypatch.undo()
    monkeypatch.setattr(config, "NUMBA_NUM_THREADS", 3)
    monkeypatch.setattr(config, "CACHE_DIR", "/elsewhere")
    assert names() == before, "what does not change the code"
    assert compiler.cache_folder() == "/elsewhere"


def test_other_processors_sources_and_versions_are_other_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def name(triple: str = "x86", cpu: str = "znver4", flags: str = "+avx", sources: str = "s") -> str:
        class Codegen:
            def magic_tuple(self) -> tuple[str, str, str]:
                return triple, cpu, flags

        return KernelCache(name, Codegen, sources).name("signature")

    names = [name(), name(triple="arm"), name(cpu="generic"), name(flags="-avx"), name(sources="t")]
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "_versions", lambda: ("numba 0.1",))
        names.append(name())
    with monkeypatch.context() as patch:
        patch.setattr(sys, "abiflags", "d")
        names.append(name())
    assert len(set(names)) == len(names)
