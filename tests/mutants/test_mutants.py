"""The program that plants faults: on a small tree of its own, and whether each of its faults can still be planted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.__main__ import ROOT, Fault, Outcome, faults, judge, without_fault

LIBRARY = "def double(x):\n    return 2 * x\n"
TESTS = "from pagedkern.double import double\n\n\ndef test_three():\n    assert double(3) == 6\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in (("pagedkern/double.py", LIBRARY), ("tests/test_double.py", TESTS)):
        path = tmp_path / name
        path.parent.mkdir()
        (path.parent / "__init__.py").touch()
        path.write_text(text)
    return tmp_path


def outcome(tree: Path, old: str, new: str) -> Outcome:
    return judge(Fault("part", "a fault", "pagedkern/double.py", old, new, ("tests",)), tree)


def test_a_fault_that_a_test_finds(tree: Path) -> None:
    found = outcome(tree, "2 * x", "3 * x")
    assert (found.verdict, found.first) == ("found", "tests/test_double.py::test_three")
    assert (tree / "pagedkern" / "double.py").read_text() == LIBRARY, "the tree stays as it is"


def test_a_fault_that_no_test_finds(tree: Path) -> None:
    assert outcome(tree, "2 * x", "x + 3").verdict == "NOT FOUND"


@pytest.mark.parametrize("old", ["4 * x", "x"])
def test_a_fault_whose_lines_are_gone_or_stand_twice(tree: Path, old: str) -> None:
    assert outcome(tree, old, "0").verdict.startswith("not planted: pagedkern/double.py has ")


def test_tests_that_fail_anyway_find_nothing(tree: Path) -> None:
    assert without_fault(("tests",), tree).verdict == "passes"
    (tree / "pagedkern" / "double.py").write_text(LIBRARY.replace("2", "5"))
    assert without_fault(("tests",), tree).verdict.startswith("FAILS ANYWAY")


@pytest.mark.parametrize("fault", list(faults([])), ids=lambda fault: f"{fault.part}: {fault.what}")
def test_every_fault_can_be_planted(fault: Fault) -> None:
    text = (ROOT / fault.file).read_text()
    assert text.count(fault.old) == 1
    assert fault.new != fault.old
    compile(text.replace(fault.old, fault.new), fault.file, "exec")
    assert all((ROOT / name).exists() for name in fault.tests if name.startswith("tests/"))
