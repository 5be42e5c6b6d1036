"""What importing pagedkern costs, and in which direction its parts may import each other."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pagedkern"
OPTIONAL = ("numpy", "torch", "triton", "cupy", "numba", "transformers", "rich", "filelock", "platformdirs")

# Which parts a part may import, besides itself and `environment`, which imports nothing. Nothing may import upwards.
# fmt: off
ALLOWED: dict[str, set[str]] = {
    "__init__": {
        "errors",
        "abi",
        "allocator",
        "scheduler",
        "autotune",
        "backends",
        "cache",
        "gpucheck",
        "integrations",
        "ops",
    },  # for static types; at run time on first use only
    "errors": set(),
    "environment": set(),
    "abi": {"errors"},
    "allocator": {"errors", "abi"},
    "scheduler": {"errors", "abi", "allocator"},
    "backends.base": {"errors", "abi"},
    "backends.checked": {"errors", "abi", "backends.base"},
    "backends.forked": set(),
    "backends": {"errors", "backends.base"},
    "_checks": {"errors", "abi", "backends.base"},
    "autotune.store": {"errors", "abi", "backends.base"},
    "_selection": {"errors", "backends", "backends.base", "autotune.store"},
    "_torch_ops": {
        "errors", "abi", "_checks", "_selection", "backends", "backends.base", "backends.checked", "backends.forked",
    },
    "ops": {"errors", "abi", "_checks", "_selection", "_torch_ops", "backends", "backends.base", "backends.forked"},
    "cache": {"errors", "abi", "_checks", "ops", "backends.forked"},
    "autotune": {
        "errors", "abi", "ops", "_selection", "cache", "backends", "backends.base", "autotune.store", "__init__",
    },
    "gpucheck": {"__init__", "errors", "cache", "ops", "backends", "autotune", "autotune.store"},
    "integrations": {"__init__", "errors", "abi", "allocator", "scheduler", "cache", "ops", "backends"},
}
# fmt: on
SHARED_BY_BACKENDS = {"errors", "abi", "backends.base", "backends.checked", "backends.forked"}


def part_of(module: str) -> str:
    """The part of the library that a module belongs to: the longest of the names above that begins its dotted name."""
    name = module.removeprefix("pagedkern").removeprefix(".") or "__init__"
    pieces = name.split(".")
    if pieces[0] == "backends" and len(pieces) > 1 and pieces[1] not in ("base", "checked", "forked"):
        return ".".join(pieces[:2])
    for length in range(len(pieces), 0, -1):
        if ".".join(pieces[:length]) in ALLOWED:
            return ".".join(pieces[:length])
    raise AssertionError(f"{module} belongs to no known part: give it a place in the order of imports")


def imports_of(path: Path) -> set[str]:
    """Dotted names of every pagedkern module that a file imports, at any depth of the code."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                is_module = (ROOT / f"{full.replace('.', '/')}.py").exists() or (ROOT / full.replace(".", "/")).is_dir()
                found.add(full if is_module else str(node.module))
    return {name for name in found if name.split(".")[0] == "pagedkern"}


def library_files() -> list[tuple[str, Path]]:
    files = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        files.append((name, path))
    return files


@pytest.mark.parametrize(("name", "path"), library_files(), ids=[name for name, _ in library_files()])
def test_imports_run_downward(name: str, path: Path) -> None:
    part = part_of(name)
    allowed = ALLOWED.get(part, SHARED_BY_BACKENDS) | {part, "environment"}
    wrong = {target for target in imports_of(path) if part_of(target) not in allowed}
    assert not wrong, f"{name} (part {part}) imports {sorted(wrong)}, expected only {sorted(allowed)}"


def check_order(files: Iterable[tuple[str, Path]]) -> None:
    """Raises `CycleError`, which lists the modules, if some import each other in a circle, if only for types."""
    TopologicalSorter({name: imports_of(path) - {name} for name, path in files}).prepare()


def test_no_circle_of_imports() -> None:
    check_order(library_files())


def test_a_circle_would_be_found(tmp_path: Path) -> None:
    texts = {
        "pagedkern.ops": "import typing\nif typing.TYPE_CHECKING:\n    from pagedkern.cache import KVCache\n",
        "pagedkern.cache": "def f():\n    import pagedkern.abi\n",
        "pagedkern.abi": "from pagedkern.ops import explain\n",
    }
    paths = {name: tmp_path / f"{name}.py" for name in texts}
    for name, text in texts.items():
        paths[name].write_text(text)
    with pytest.raises(CycleError) as caught:
        check_order(paths.items())
    assert set(caught.value.args[1]) == set(texts)


def test_the_rule_can_fail(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    from pagedkern.ops import paged_attention\n    import pagedkern.backends.cpu\n")
    assert {part_of(name) for name in imports_of(bad)} == {"ops", "backends.cpu"}
    assert not {"ops", "backends.cpu"} & ALLOWED["allocator"]


def test_reference_is_independent() -> None:
    """The judge imports nothing of what it judges: torch and the standard library only."""
    for path in (ROOT / "reference").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [str(node.module)]
            for name in names:
                top = name.split(".")[0]
                assert top in {"torch", "reference"} or top in sys.stdlib_module_names, f"{path.name} imports {name}"


def python(code: str, *, blocked: tuple[str, ...] = ()) -> str:
    """Run code in a fresh interpreter in which importing any of `blocked` fails."""
    guard = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {blocked!r}:\n"
        "            raise ImportError(name + ' is blocked')\n"
        "sys.meta_path.insert(0, Block())\n"
    )
    result = subprocess.run([sys.executable, "-c", guard + code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_loads_nothing() -> None:
    loaded = python("import pagedkern, sys\nprint(*sorted({m.split('.')[0] for m in sys.modules}))").split()
    assert "pagedkern" in loaded
    assert not set(OPTIONAL) & set(loaded)


def test_import_is_quick() -> None:
    code = (
        "import time\nbest = 1.0\n"
        "for _ in range(5):\n"
        "    for name in [m for m in sys.modules if m.startswith('pagedkern')]: del sys.modules[name]\n"
        "    begin = time.process_time()\n    import pagedkern\n    best = min(best, time.process_time() - begin)\n"
        "print(best)"
    )
    assert float(python(code)) < 0.05  # seconds of processor time, best of five


def test_allocator_and_abi_need_the_standard_library_only() -> None:
    code = (
        "import pagedkern\n"
        "from pagedkern import BlockAllocator\n"
        "import pagedkern.abi\n"
        "allocator = BlockAllocator(8, 4)\n"
        "sequence = allocator.create([1, 2, 3, 4, 5])\n"
        "step = allocator.prefill([sequence])\n"
        "allocator.commit(step)\n"
        "step = allocator.append([sequence], [6])\n"
        "allocator.commit(step)\n"
        "allocator.check()\n"
        "print(sequence.num_tokens, len(sequence.block_ids))\n"
    )
    assert python(code, blocked=OPTIONAL).split() == ["6", "2"]


def test_environment_needs_the_standard_library_only() -> None:
    names = [name for name, _ in library_files() if part_of(name) == "environment"]
    assert len(names) > 5
    code = f"import {', '.join(names)}\nprint(pagedkern.environment.limits.threads() >= 1)"
    assert python(code, blocked=OPTIONAL).split() == ["True"]


@pytest.mark.parametrize("order", ["import pagedkern.backends", "import pagedkern.ops", "pass"])
def test_backends_is_package_and_function(order: str) -> None:
    out = python(f"{order}\nimport pagedkern\nprint(pagedkern.backends()[0].name, pagedkern.backends.names()[0])")
    first, name = out.split()
    assert first == name


def test_every_public_name_exists() -> None:
    import pagedkern

    assert set(pagedkern.__all__) == {"__version__", "backends", *pagedkern._HOME}
    for name in pagedkern.__all__:
        assert getattr(pagedkern, name) is not None
        assert name in dir(pagedkern)
    with pytest.raises(AttributeError, match="no attribute 'attend'"):
        pagedkern.attend  # noqa: B018


def test_backends_without_torch_say_so() -> None:
    out = python(
        "import pagedkern\nfor info in pagedkern.backends(): print(info.available, info.reason)", blocked=("torch",)
    )
    lines = out.splitlines()
    assert len(lines) >= 2
    for line in lines:
        assert line.startswith("False")
        assert "torch" in line
        assert "pip install" in line
