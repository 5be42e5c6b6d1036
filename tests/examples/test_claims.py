"""What each example claims and prints."""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from collections.abc import Callable

import pytest

from tests.examples.conftest import EXAMPLES, Run

Lines = Callable[..., list[str]]
PROMPT = "talenosomiredovafazegahikepurobunoda"  # 18 tokens


def checked(lines: list[str]) -> list[str]:
    return [line.removeprefix("checked: ") for line in lines if line.startswith("checked: ")]


def numbers(line: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", line)]


def find(lines: list[str], start: str) -> str:
    (line,) = [line for line in lines if line.startswith(start)]
    return line


def test_engine_streams_what_it_ends_with(lines: Lines) -> None:
    shown = lines("engine")
    streamed: dict[str, list[tuple[int, str]]] = defaultdict(list)
    ends = {}
    for line in shown:
        if match := re.match(r"step +(\d+): +(\d+) rows, +(\d+) tokens \| (.*)", line):
            step, rows, tokens = map(int, match.groups()[:3])
            assert rows <= tokens <= 12  # the budget
            for name, token in re.findall(r"(\d[a-c]):(\w\w)\b", match[4]):
                streamed[name].append((step, token))
            ends |= dict(re.findall(r"(\d[a-c]) ends \((\w+)\)", match[4]))
    texts = dict(re.findall(r"^(\d[a-c]): \w+ > (\w+)$", "\n".join(shown), re.MULTILINE))
    assert texts == {name: "".join(token for _, token in tokens) for name, tokens in streamed.items()}
    assert sorted(texts) == sorted(ends) == ["1a", "2a", "2b", "3a"]
    for name, reason in ends.items():
        assert (streamed[name][-1][1] == "ne") == (reason == "stop")
    assert set(ends.values()) == {"stop", "length"}
    most = {"1a": 12, "2a": 8, "2b": 8, "3a": 10}
    assert all(len(streamed[name]) == most[name] for name, reason in ends.items() if reason == "length")
    # Who arrived later starts while the first still runs, and the samples of one prompt differ.
    assert streamed["1a"][0][0] < streamed["2a"][0][0] < streamed["1a"][-1][0]
    assert texts["2a"] != texts["2b"]
    count = sum(map(len, streamed.values()))
    assert checked(shown) == [
        f"{count} tokens of 4 texts equal those of the model without a cache",
        "every block is free again",
    ]


def test_parallel_sampling_shares_the_prompt(lines: Lines) -> None:
    shown = lines("parallel_sampling")
    texts = [line.split(" > ")[1] for line in shown if line.startswith(f"{PROMPT} > ")]
    assert len(texts) == 8
    assert len(set(texts)) > 1
    assert {len(text) for text in texts} == {2 * 7}
    # 18 + 6 tokens, the last one is sampled but not computed: 6 blocks each; 4 of them are shared.
    assert numbers(find(shown, "blocks:")) == [4 + 8 * 2, 8 * 6, 7]
    assert len(checked(shown)) == 2


def test_shared_system_prompt_computes_only_what_is_new(lines: Lines) -> None:
    shown = lines("shared_system_prompt")
    computed = [tuple(numbers(line)) for line in shown if line.endswith("computed")]
    assert computed == [(21, 21), (21, 21 - 16), (21, 21), (21, 1)]
    assert checked(shown)[0].startswith("16 tokens are shared")
    assert len(checked(shown)) == 2


def test_beam_search_shares_what_beams_have_in_common(lines: Lines) -> None:
    shown = lines("beam_search")
    beams = [(float(m[1]), m[2]) for line in shown if (m := re.match(r" *(-\d+\.\d+) (\w+)$", line))]
    assert len({text for _, text in beams}) == 4
    assert {len(text) for _, text in beams} == {2 * 12}
    assert beams == sorted(beams, reverse=True)
    used, alone, copies = numbers(find(shown, "blocks:"))
    assert used < alone == 4 * 8  # 18 + 11 tokens each, at most
    assert copies > 0
    assert len(checked(shown)) == 3


def test_swap_under_pressure_changes_no_token(lines: Lines) -> None:
    shown = lines("swap_under_pressure")
    assert sum(" > " in line for line in shown) == 6
    assert numbers(find(shown, "with 64 blocks:")) == [64, 0]
    _, swaps, again = numbers(find(shown, "with 14 blocks, swap:"))
    assert swaps > 0
    assert again == 0
    _, drops, again = numbers(find(shown, "with 14 blocks, recompute:"))
    assert drops > 0
    assert again > 0
    assert checked(shown).count("the tokens are the same") == 2


def test_speculative_decoding_saves_steps(lines: Lines) -> None:
    shown = lines("speculative_decoding")
    steps = [numbers(line) for line in shown if line.startswith("step ")]
    assert any(right == guesses for _, right, guesses in steps)
    assert any(right < guesses for _, right, guesses in steps)
    (saved,) = [numbers(claim) for claim in checked(shown) if claim.startswith("60 tokens in")]
    assert 60 - saved[1] <= sum(right for _, right, _ in steps) <= 60 - saved[1] + 4  # the last may be cut off
    assert len(checked(shown)) == 2


def test_sliding_window_stays_in_its_pool(lines: Lines) -> None:
    shown = lines("sliding_window")
    tables = [line for line in shown if "block table" in line]
    assert len(tables) == 5
    for line in tables:
        tokens, *ids = [int(number) for number in re.findall(r"-?\d+", line)]
        assert len(ids) == -(-(tokens - 1) // 4)
        held = [block for block in ids if block >= 0]
        assert ids == [-1] * (len(ids) - len(held)) + held
        assert len(set(held)) == len(held) <= 4
    assert checked(shown)[1:] == ["60 tokens in a pool for 16"]


def test_engine_in_c_gets_attention_over_its_own_table(lines: Lines) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    shown = lines("engine_in_c")
    steps = [line.split(" |") for line in shown if line.startswith("step ")]
    assert len(steps) == 8
    for _, *rows in steps:
        ids = [number for row in rows for number in numbers(row)]
        assert len(ids) == len(set(ids))  # no block is in two tables
    assert set(numbers(steps[3][2])) & set(numbers(steps[4][1]) + numbers(steps[4][2]))  # freed, and used again
    assert float(find(shown, "largest error").split()[-1]) < 1e-6
    assert len(checked(shown)) == 1


def check_arrays(shown: list[str], kind: str) -> None:
    steps = [line for line in shown if "sequences" in line]
    assert len(steps) == 6
    assert all(kind in line and float(line.split()[-1]) < 1e-5 for line in steps)
    assert checked(shown) == ["every row is what dense attention gives"]


def test_cupy_arrays_run_or_say_why_not(run: Run) -> None:
    done = run("cupy_arrays")
    if done.returncode == 0:
        check_arrays(done.stdout.splitlines(), "cupy.ndarray")
    else:
        assert re.fullmatch(r"CuPy (finds no GPU here|is missing).*--numpy\n", done.stderr)


def test_cupy_arrays_as_numpy_arrays(lines: Lines) -> None:
    check_arrays(lines("cupy_arrays", "--numpy"), "numpy.ndarray")


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++, which the emulation compiles the kernels with")
def test_cupy_arrays_on_the_emulated_backend(lines: Lines) -> None:
    """The kernels of the CuPy backend themselves, over arrays that are not torch's."""
    launcher = {"PAGEDKERN_CUPY_LAUNCHER": "tests.emulation.cuda_host.launcher:HostLauncher"}
    check_arrays(lines("cupy_arrays", "--numpy", "--backend", "cupy", **launcher), "numpy.ndarray")


def test_cupy_arrays_need_no_torch_in_their_code() -> None:
    assert not re.search(r"^\s*(import|from) torch", (EXAMPLES / "cupy_arrays.py").read_text(), re.MULTILINE)
