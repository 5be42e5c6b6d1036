"""The checks that the examples make of themselves can fail, and nobody is left out of the page or the tests."""

from __future__ import annotations

import re
import runpy
import sys
from typing import Any

import pytest
import torch

import pagedkern
from pagedkern.cache import KVCache
from tests.examples.conftest import EXAMPLES, ROOT

NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
SHARED = "tiny_model"  # what the others import
SMALL = [name for name in NAMES if name not in (SHARED, "generate")]
ARGUMENTS = {"cupy_arrays": ["--numpy"]}
MOVING = ("engine", "parallel_sampling", "beam_search", "swap_under_pressure")  # that copy or swap blocks


def run_here(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run an example in this process, with what has been patched."""
    for module in (SHARED, "engine"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [name, *ARGUMENTS.get(name, [])])
    threads = torch.get_num_threads()
    try:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
        for module in (SHARED, "engine"):
            sys.modules.pop(module, None)


@pytest.mark.parametrize("name", SMALL)
def test_attention_over_one_token_less_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = pagedkern.paged_attention

    def wrong(q: Any, k_cache: Any, v_cache: Any, block_table: Any, seq_lens: Any, **options: Any) -> Any:
        return attention(q, k_cache, v_cache, block_table, seq_lens - 1, **options)

    monkeypatch.setattr(pagedkern, "paged_attention", wrong)
    given_back = pagedkern.BlockIndexError  # with a window, what came before it is there no more
    with pytest.raises((SystemExit, given_back), match=r"WRONG|block_table\[0, \d+\] is -1"):
        run_here(name, monkeypatch)


@pytest.mark.parametrize("name", MOVING)
def test_blocks_that_are_not_moved_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = KVCache.__init__

    def poisoned(cache: KVCache, num_layers: int, *sizes: int, **options: Any) -> None:
        """The memory may be that of a run before, and hold what should have been moved."""
        made(cache, num_layers, *sizes, **options)
        for layer in range(num_layers):
            for tensor in cache.layer(layer):
                tensor.fill_(torch.nan)

    monkeypatch.setattr(KVCache, "__init__", poisoned)
    monkeypatch.setattr(KVCache, "apply", lambda *_: None)
    with pytest.raises(SystemExit, match="WRONG"):
        run_here(name, monkeypatch)


def test_copies_that_are_not_made_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pagedkern, "copy_blocks", lambda *_, **__: None)
    with pytest.raises(SystemExit, match="WRONG"):
        run_here("cupy_arrays", monkeypatch)


def test_engine_in_c_says_that_it_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(SystemExit, match="needs a C compiler; there is no 'no-such-compiler' on the PATH"):
        run_here("engine_in_c", monkeypatch)


@pytest.mark.parametrize("name", [name for name in NAMES if name != SHARED])
def test_each_says_how_to_run_it(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()
    assert re.match(r'""".+?^    python examples/' + name + r"\.py\b.*?^\"\"\"", text, re.DOTALL | re.MULTILINE)


def test_the_page_lists_them_all() -> None:
    page = (EXAMPLES / "README.md").read_text()
    files = {path.name for path in EXAMPLES.iterdir() if path.is_file()} - {"README.md"}
    linked = set(re.findall(r"\]\(([^)#:]+)\)", page))
    assert files <= linked
    assert all((EXAMPLES / target).exists() for target in linked)


def test_each_has_a_test_of_its_own() -> None:
    tests = (ROOT / "tests/examples/test_claims.py").read_text()
    for name in SMALL:
        assert re.search(rf"(lines|run)\(\"{name}\"", tests), name
