"""A newcomer's tasks, done as the pages say: a backend, a workload, a case of the contract, one file each."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pagedkern
from pagedkern import _selection as choices
from pagedkern.autotune import workloads
from pagedkern.backends import _LOCATIONS, load, probe
from tests.contract import test_extremes
from tests.contract.checks import check_exact
from tests.contract.problems import Spec, build
from tests.contract.targets import Target
from tests.contract.test_judge import CHECKS
from tests.docs.pages import DOCS, ROOT, blocks_of, of_kind


def file_of(page: str) -> tuple[str, str]:
    """The block of a page that is titled with a file's name: title and code."""
    (block,) = [b for b in of_kind("file") if b.page == DOCS / page]
    return block.title, block.code


def one_line(page: str, start: str) -> str:
    """The block of a page that is one line beginning so."""
    (code,) = [b.code for b in blocks_of(DOCS / page) if b.code.startswith(start) and b.code.count("\n") == 1]
    return code.strip().rstrip(",")


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """The backend of docs/backends.md, in the registry as the page says."""
    title, code = file_of("backends.md")
    name, location = re.fullmatch(r'"(\w+)": "([\w.]+:\w+)"', one_line("backends.md", '"loops": "')).groups()  # type: ignore[union-attr]
    module = location.partition(":")[0]
    assert title == f"{module.replace('.', '/')}.py"
    assert not (ROOT / title).exists()
    path = tmp_path_factory.mktemp("backend") / "loops.py"
    path.write_text(code)
    spec = importlib.util.spec_from_file_location(module, path)
    assert spec is not None
    assert spec.loader is not None
    with pytest.MonkeyPatch.context() as patch:
        made = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, module, made)
        spec.loader.exec_module(made)
        patch.setitem(_LOCATIONS, name, location)
        _forget()
        yield Target(name)
    _forget()


def _forget() -> None:
    load.cache_clear()
    probe.cache_clear()
    choices.choose.cache_clear()


@pytest.mark.parametrize("name", CHECKS)
def test_the_backend_of_the_page_keeps_the_contract(loops: Target, name: str) -> None:
    CHECKS[name](loops)


def test_it_computes_scores_of_any_size(loops: Target) -> None:
    """What the page warns of: the logarithm of a sum is lost beside a score of 1e33."""
    test_extremes.test_scores_below_every_sentinel(loops)


def test_it_is_listed_chosen_and_configured_like_any_other(loops: Target) -> None:
    (info,) = (b for b in pagedkern.backends() if b.name == "loops")
    assert info.available
    call = build(Spec(seq_lens=(5, 20)))
    assert pagedkern.explain(**call.args, backend="loops", config={"sums": "float32"}).config.to_dict() == {
        "sums": "float32"
    }
    with pytest.raises(pagedkern.InvalidArgument, match="sums: got 'int8'"):
        pagedkern.explain(**call.args, backend="loops", config={"sums": "int8"})
    for config in load("loops").configs(pagedkern.explain(**call.args, backend="loops").problem):
        check_exact(loops, Spec(seq_lens=(5, 20)), config=config)


def test_the_workload_of_the_page_is_one(tmp_path: Path) -> None:
    """Nothing but its file is needed, where it lies does not matter."""
    title, code = file_of("workloads.md")
    (tmp_path / title).write_text(code)
    traffic = workloads.load(tmp_path / title)
    assert traffic.name == Path(title).stem
    assert any(request.shared for request in traffic.draw(50, seed=0))
    result = subprocess.run(
        [sys.executable, "-m", "pagedkern.autotune", "explain", "--workload", title, "--memory", "24GB"],
        capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "block size" in result.stdout
    assert pagedkern.recommend(tmp_path / title, "24GB").num_blocks > 1000


def test_every_file_of_a_page_is_tried_here() -> None:
    pages = {str(b.page.relative_to(DOCS)) for b in of_kind("file")}
    assert pages == {"backends.md", "workloads.md", "contract.md"}


def test_the_case_of_the_page_is_one() -> None:
    """Pasted at the end of test_cases.py, it is collected for every backend, and runs."""
    title, case = file_of("contract.md")
    source = (ROOT / title).read_text()
    namespace: dict[str, object] = {"__name__": "test_cases"}
    exec(compile(f"{source}\n\n{case}", title, "exec"), namespace)
    name = re.search(r"def (test_\w+)", case)[1]  # type: ignore[index]
    run = namespace[name]
    assert callable(run)
    run(Target("reference"))
