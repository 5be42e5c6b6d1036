"""Every command that a page gives is one: the target, module, file, extra and option that it names exist."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache

import pytest

from tests.docs.pages import ROOT, Block, of_kind

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each command, without comments and without variables set before it."""
    for line in block.code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        while "&&" in words:
            end = words.index("&&")
            yield words[:end]
            words = words[end + 1 :]
        if words:
            yield words


@pytest.mark.parametrize("block", of_kind("shell"), ids=str)
def test_the_shell_reads_it(block: Block) -> None:
    result = subprocess.run(["bash", "-n"], input=block.code, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert list(commands(block))


@pytest.mark.parametrize("block", of_kind("shell"), ids=str)
def test_what_it_names_exists(block: Block) -> None:
    for command in commands(block):
        check_command(command)


def check_command(words: list[str]) -> None:
    """Raises AssertionError with the part of a command that does not exist."""
    match words:
        case ["make", *rest]:
            targets = [word for word in rest if "=" not in word]
            assert targets, f"{words}: which target?"
            assert set(targets) <= TARGETS, f"{words}: no such target"
        case ["python", "-m", "pytest", *rest]:
            paths = [word for word in rest if "/" in word]
            assert paths or "-k" in rest, words
            assert all((ROOT / path.partition("::")[0]).exists() for path in paths), words
        case ["python", "-m", module, *rest]:
            assert importlib.util.find_spec(module), f"{words}: no module {module}"
            check_options(("-m", module), rest)
        case ["python", file, *rest]:
            assert (ROOT / file).exists(), f"{words}: no file {file}"
            check_options((file,), rest)
        case ["pip", "install", *requirements]:
            for requirement in requirements:
                name, extra = re.fullmatch(r"([\w-]+)(?:\[([\w,]+)\])?", requirement).groups()  # type: ignore[union-attr]
                assert name == PROJECT["name"], f"{words}: the project is {PROJECT['name']}"
                assert set((extra or "").split(",")) - {""} <= set(PROJECT["optional-dependencies"]), words
        case ["cc", *rest]:
            for path in rest:
                assert not path.endswith(".c") or (ROOT / path).exists(), f"{words}: no file {path}"
        case _:
            raise AssertionError(f"{words}: nothing checks this command")


def check_options(program: tuple[str, ...], rest: list[str]) -> None:
    """Each `--option` occurs in what the program, or its subcommand, says of itself."""
    options = [word.partition("=")[0] for word in rest if word.startswith("-")]
    subcommand = rest[:1] if rest and re.fullmatch(r"[a-z-]+", rest[0]) and not rest[0].startswith("-") else []
    if options:
        text = help_of(program, tuple(subcommand))
        for option in options:
            assert option in text, f"{program} {subcommand}: no option {option}"


@cache
def help_of(program: tuple[str, ...], subcommand: tuple[str, ...]) -> str:
    result = subprocess.run(
        [sys.executable, *program, *subcommand, "--help"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    "command",
    [
        "make nothing",
        "python -m pagedkern.nothing",
        "python -m pagedkern.autotune --nothing",
        "python examples/nothing.py",
        "pip install 'pagedkern[nothing]'",
        "rm -rf /",
    ],
)
def test_a_wrong_command_is_caught(command: str) -> None:
    with pytest.raises(AssertionError):
        check_command(shlex.split(command))
