"""Every block of code in the README and in docs/ does what the page says. See pages.py for which is checked how."""

from __future__ import annotations

import doctest
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from pagedkern.abi import include_dir
from pagedkern.autotune import workloads
from tests.docs.pages import BLOCKS, NOT_RUN, PAGES, ROOT, Block, of_kind

NOT_RUN_HERE = {"docs/engine.md": 1}  # programs that are only compiled, by page: none is added unnoticed
SESSIONS = [page for page in PAGES if any(b.page == page and b.kind == "session" for b in BLOCKS)]


@pytest.mark.parametrize("page", SESSIONS, ids=lambda page: page.stem)
def test_a_session_gives_the_output_shown(page: Path) -> None:
    blocks = [b for b in of_kind("session") if b.page == page]
    text = "\n".join("\n" * (b.line - 1) + b.code if b is blocks[0] else b.code for b in blocks)
    session = doctest.DocTestParser().get_doctest(text, {}, page.stem, str(page), 0)
    report: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(session, out=report.append)
    assert result.attempted >= len(blocks)
    assert not result.failed, "".join(report)


@pytest.mark.parametrize("block", [b for b in of_kind("program") if b.is_run], ids=str)
def test_a_program_runs_as_pasted(block: Block, tmp_path: Path) -> None:
    """And shows something for it, unless it only defines a class for another page's file."""
    result = subprocess.run(
        [sys.executable, "-c", block.code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() or "print(" not in block.code


def test_what_is_not_run_says_so_and_is_counted() -> None:
    left = [b for b in of_kind("program") if not b.is_run]
    assert Counter(str(b.page.relative_to(ROOT)) for b in left) == NOT_RUN_HERE
    for block in left:
        assert len(block.code.splitlines()[0]) > len(NOT_RUN) + 10, f"{block}: without a reason"
        compile(block.code, str(block), "exec")


@pytest.mark.parametrize("block", of_kind("excerpt"), ids=str)
def test_an_excerpt_stands_in_its_file(block: Block) -> None:
    files = [path for path in (ROOT / "pagedkern").rglob(Path(block.excerpt_of).name) if _holds(path, block.code)]
    assert files, f"{block}: {block.excerpt_of} does not say this any more"


def _holds(path: Path, code: str) -> bool:
    """Whether these lines stand in the file in a row, however far they are indented there."""
    wanted, lines = ([line.strip() for line in text.splitlines()] for text in (code, path.read_text()))
    return any(lines[i : i + len(wanted)] == wanted for i in range(len(lines) - len(wanted) + 1))


@pytest.mark.parametrize("block", of_kind("c"), ids=str)
def test_c_compiles_and_runs(block: Block, tmp_path: Path) -> None:
    source, program = tmp_path / "block.c", tmp_path / "block"
    source.write_text(block.code)
    whole = "int main(" in block.code
    flags = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-I", str(include_dir())]
    command = ["cc", *flags, *([] if whole else ["-c"]), str(source), "-o", str(program)]
    compiled = subprocess.run(command, capture_output=True, text=True, check=False)
    assert compiled.returncode == 0, compiled.stderr
    if whole:
        ran = subprocess.run([str(program)], capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        shown = [line.split("prints ", 1)[1].strip(" */") for line in block.code.splitlines() if "prints " in line]
        assert ran.stdout.splitlines() == shown, f"{block}: prints what it does not say"


@pytest.mark.parametrize("block", of_kind("toml"), ids=str)
def test_toml_is_a_workload(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(block.code)
    traffic = workloads.load(path)
    assert traffic.name
    assert traffic.draw(10, seed=0)


def test_there_are_blocks_of_every_kind() -> None:
    counts = Counter(block.kind for block in BLOCKS)
    assert set(counts) == {"session", "program", "file", "excerpt", "shell", "c", "toml", "figure"}, counts
