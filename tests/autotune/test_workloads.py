"""Workloads and models: the presets are what their sources say, and what is malformed is refused by name."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from statistics import fmean

import pytest

from pagedkern.autotune import workloads
from pagedkern.autotune.workloads import Quantiles, Request, Traffic
from pagedkern.errors import InvalidArgument

TABLES = Path(__file__).parents[2] / "autotune" / "workloads"


@pytest.mark.parametrize("name", workloads.names())
def test_a_preset_has_the_quantiles_and_the_licence_of_its_trace(name: str) -> None:
    preset = tomllib.loads((workloads.FOLDER / f"{name}.toml").read_text())
    table = tomllib.loads((TABLES / f"{preset['trace']}.toml").read_text())
    for key in ("source", "url", "licence", "shares", "prompt", "output", "shared_prefix"):
        assert preset.get(key) == table.get(key), key
    assert preset["licence"]
    assert preset["url"].startswith("https://")


def test_every_preset_file_has_a_name() -> None:
    files = {path.stem for path in workloads.FOLDER.glob("*.toml")} - {"models"}
    assert files == set(workloads.names())
    assert all(workloads.load(name).name == name for name in files)


@pytest.mark.parametrize("name", workloads.names())
def test_what_is_drawn_has_the_means_of_the_trace(name: str) -> None:
    traffic = workloads.load(name)
    assert traffic.prompt is not None
    assert traffic.output is not None
    requests = traffic.draw(4000, seed=1)
    assert all(r.prompt >= 1 and r.output >= 1 and r.prompt + r.output <= traffic.limit for r in requests)
    assert all(0 <= r.shared <= r.prompt for r in requests)
    table = tomllib.loads((TABLES / f"{traffic.trace}.toml").read_text())
    cut = traffic.limit < table["longest"]
    assert fmean(r.prompt for r in requests) == pytest.approx(table["prompt"]["mean"], rel=0.05 if not cut else 0.15)
    assert fmean(r.output for r in requests) == pytest.approx(table["output"]["mean"], rel=0.1)
    if "shared_prefix" in table:
        part = fmean(r.shared / r.prompt for r in requests)
        assert part == pytest.approx(table["shared_prefix"]["mean"], abs=0.04)
    assert requests != traffic.draw(4000, seed=2)
    assert requests == traffic.draw(4000, seed=1)


PARAMETERS = {  # of config.json: hidden, inner, vocabulary, embedding tied, biases of q, k, v, norms a layer
    "llama-3-8b": (4096, 14336, 128256, False, False, 2),
    "llama-3-70b": (8192, 28672, 128256, False, False, 2),
    "qwen2.5-7b": (3584, 18944, 152064, False, True, 2),
    "gemma-2-9b": (3584, 14336, 256000, True, False, 4),
    "mistral-7b": (4096, 14336, 32000, False, False, 2),
    "smollm2-135m": (576, 1536, 49152, True, False, 2),
}


@pytest.mark.parametrize("name", workloads.model_names())
def test_the_weights_of_a_model_are_those_of_its_layers(name: str) -> None:
    m = workloads.model(name)
    hidden, inner, vocabulary, tied, biases, norms = PARAMETERS[name]
    q, kv = m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim
    attention = 2 * hidden * q + 2 * hidden * kv + (q + 2 * kv if biases else 0)
    layer = attention + 3 * hidden * inner + norms * hidden
    embedding = vocabulary * hidden * (1 if tied else 2)
    assert m.num_weights == m.num_layers * layer + embedding + hidden
    assert m.token_bytes == m.num_layers * 2 * kv * 2
    assert m.source.startswith("https://")


def test_a_window_bounds_what_is_read() -> None:
    mistral, gemma, llama = (workloads.model(n) for n in ("mistral-7b", "gemma-2-9b", "llama-3-8b"))
    assert [m.read_tokens(1000) for m in (mistral, gemma, llama)] == [1000, 1000, 1000]
    assert [m.read_tokens(8192) for m in (mistral, gemma, llama)] == [4096, 6144, 8192]
    assert gemma.softcap == 50


def test_a_model_of_ones_own() -> None:
    m = workloads.model("heads=6,kv_heads=2, head_dim=72,layers=3,dtype=float16,kv_dtype=int8,weight_bytes=1.5e6")
    assert (m.num_heads, m.num_kv_heads, m.head_dim, m.num_layers, m.weight_bytes) == (6, 2, 72, 3, 1_500_000)
    assert m.token_bytes == 3 * 2 * 2 * 72


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gpt-5", "model: got 'gpt-5', expected one of llama-3-8b"),
        ("heads=6", "kv_heads is missing"),
        ("heads=6,x=1", "unknown key 'x'"),
        ("heads=6,kv_heads=4,head_dim=64,layers=1,dtype=float32,weight_bytes=1", "expected a multiple of 4"),
        ("heads=-6,kv_heads=4,head_dim=64,layers=1,dtype=float32,weight_bytes=1", "heads: got -6"),
        ("heads=1.5,kv_heads=1,head_dim=64,layers=1,dtype=float32,weight_bytes=1", "heads: got 1.5"),
        ("heads=4,kv_heads=4,head_dim=64,layers=1,dtype=int4,weight_bytes=1", "dtype: got 'int4'"),
        ("heads=4,kv_heads=4,head_dim=64,layers=1,dtype=float32,weight_bytes=nan", "weight_bytes"),
    ],
)
def test_a_model_that_there_is_not(spec: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        workloads.model(spec)


GOOD = """
name = "mine"
limit = 100
shares = [0, 0.5, 1]
[prompt]
tokens = [1, 20, 80]
[output]
tokens = [1, 5, 9]
"""


@pytest.mark.parametrize(
    ("old", "new", "key", "accepted"),
    [
        ("limit = 100", "", "limit", "longest context"),
        ("limit = 100", "limit = 1", "limit", "whole number"),
        ("limit = 100", "limit = 1.5", "limit", "whole number"),
        ("limit = 100", "limits = 100", "'limits'", "limit"),
        ("limit = 100", "limit = 100\nfamilies = 0", "families", "whole number"),
        ("limit = 100", "limit = 100\nbeam = 1", "beam", "true or false"),
        ("limit = 100", "limit = 100\nsurvival = 2", "survival", "number from 0"),
        ("limit = 100", 'limit = 100\nmodel = "x"', "model", "llama-3-8b"),
        ("limit = 100", "limit = 100\nmodel = 3", "model", "name or a table"),
        ("limit = 100", "limit = 100\nmodel = {heads = 3}", "kv_heads", "required"),
        ('name = "mine"', "name = 3", "name", "string"),
        ("[0, 0.5, 1]", "[0, 0.5]", "[prompt] tokens", "as many as shares"),
        ("[0, 0.5, 1]", "[0, 0.5, 0.9]", "shares", "from 0 to 1"),
        ("[0, 0.5, 1]", "[0, 0, 1]", "shares", "ascending"),
        ("[0, 0.5, 1]", '"all"', "shares", "list of numbers"),
        ("[1, 20, 80]", "[1, 20, nan]", "[prompt] tokens[2]", "number"),
        ("[1, 20, 80]", "[1, 90, 80]", "[prompt] tokens", "quantiles"),
        ("[1, 20, 80]", "[1, -2, 80]", "[prompt] tokens[1]", "number from 0"),
        ("[output]", "[outputs]", "'outputs'", "output"),
        ("[output]\ntokens = [1, 5, 9]", "", "[output] is missing", "tokens"),
        ("[output]\ntokens", "[output]\nmeans", "'means'", "tokens"),
        ("[output]", "[output", "no TOML", ""),
    ],
)
def test_a_malformed_file_is_refused_by_name(tmp_path: Path, old: str, new: str, key: str, accepted: str) -> None:
    path = tmp_path / "mine.toml"
    assert old in GOOD
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(InvalidArgument) as error:
        workloads.load(path)
    for expected in (key, accepted):
        assert expected in str(error.value)
    assert str(path) in str(error.value) or "model:" in str(error.value)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD + 'rank_correlation_with_prompt = 1.0\n[model]\nheads = 4\nkv_heads = 2\nhead_dim = 64\n'
                    'layers = 2\ndtype = "float32"\nweight_bytes = 1000\n')  # fmt: skip
    traffic = workloads.load(str(path))
    assert (traffic.name, traffic.limit, traffic.samples) == ("mine", 100, 1)
    assert traffic.model is not None
    assert traffic.model.num_heads == 4
    requests = sorted(traffic.draw(200))
    assert [r.output for r in requests] == sorted(r.output for r in requests)  # of equal rank


def test_a_prefix_comes_before_every_prompt(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD.replace("limit = 100", "limit = 200\nprefix = 50"))
    for request in workloads.load(path).draw(100):
        assert request.shared == 50 < request.prompt <= 130


TRACES = {
    "a.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\nx,10,3\ny,20,4\n",
    "b.csv": "prompt,output,shared\n10,3,0\n20,4,16\n",
    "c.jsonl": '{"input_length": 10, "output_length": 3}\n\n{"input_length": 20, "output_length": 4}\n',
    "d.jsonl": '{"prompt": 10, "output": 3}\n{"prompt": 20, "output": 4, "shared": 16}\n',
}


@pytest.mark.parametrize("name", TRACES)
def test_a_trace_of_ones_own(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(TRACES[name])
    shared = 16 if "shared" in TRACES[name] else 0
    expected = [Request(10, 3, 0), Request(20, 4, shared)]
    assert workloads.load(str(tmp_path / name)).draw(3) == [*expected, expected[0]]
    (tmp_path / "with.toml").write_text(f'requests_file = "{name}"\nsamples = 2\n')
    traffic = workloads.load(tmp_path / "with.toml")
    assert traffic.draw(2) == expected
    assert (traffic.samples, traffic.limit, traffic.name) == (2, 24, "with")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "x,y\n1,2\n", "line 2: prompt is missing: got 'x', 'y', expected prompt or input_length"),
        ("a.csv", "prompt,output\n1,\n", "line 2: output: got ''"),
        ("a.csv", "prompt,output\n1,2\n-4,2\n", "line 3: prompt: got '-4'"),
        ("a.csv", "prompt,output,shared\n4,2,5\n", "line 2: shared: got 5, expected 0 to 4"),
        ("a.csv", "prompt,output\n", "no request"),
        ("a.csv", "", "no request"),
        ("a.jsonl", "{", "line 1: got what is no JSON"),
        ("a.jsonl", "[1]\n", "line 1: got"),
        ("a.jsonl", '{"prompt": 1, "output": 0}', "line 1: output: got 0"),
        ("a.jsonl", '{"prompt": 1.5, "output": 1}', "line 1: prompt: got 1.5"),
        ("a.jsonl", '{"prompt": 99999999999, "output": 1}', "line 1: prompt"),
        ("a.csv", f"prompt,output\n{'9' * 200000},1\n", "cannot be read: field larger"),
        ("a.toml", "limit = " + "[" * 5000, "got what is no TOML"),
        ("a.toml", "limit = " + "9" * 5000, "cannot be read: Exceeds the limit"),
        ("a.txt", "", "got a .txt file, expected .toml, .csv, .jsonl"),
    ],
)
def test_a_malformed_trace_is_refused_by_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidArgument) as error:
        workloads.load(tmp_path / name)
    assert message in str(error.value)
    assert str(tmp_path / name) in str(error.value)


def test_a_trace_of_a_spreadsheet(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbfprompt,output\r\n10,20\r\n")
    assert workloads.load(tmp_path / "a.csv").rows == (workloads.Request(10, 20, 0),)


def test_a_long_trace_is_drawn_from_end_to_end() -> None:
    rows = tuple(workloads.Request(i + 1, 1, 0) for i in range(2500))
    traffic = workloads.Traffic("long", "", "", "", "", limit=4000, rows=rows)
    drawn = [r.prompt for r in traffic.draw(1000)]
    assert drawn == sorted(set(drawn))
    assert abs(sum(drawn) / 1000 - 1250) < 5


def test_what_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot be read: No such file"):
        workloads.load(tmp_path / "no.toml")
    (tmp_path / "of.toml").write_text('requests_file = "rows.csv"')
    with pytest.raises(InvalidArgument, match=r"rows\.csv: cannot be read: No such file"):
        workloads.load(tmp_path / "of.toml")
    with pytest.raises(InvalidArgument, match="expected one of chat, code"):
        workloads.load("chats")
    for name in ("a.toml", "a.csv", "a.jsonl"):
        (tmp_path / name).write_bytes(b"\xff\xfe\x00" + json.dumps({"a": 1}).encode())
        with pytest.raises(InvalidArgument, match=name):
            workloads.load(tmp_path / name)


def test_quantiles_are_linear_between_their_points() -> None:
    quantiles = Quantiles((0, 0.5, 1), (2, 4, 10))
    assert [quantiles.at(share) for share in (-1, 0, 0.25, 0.5, 0.75, 1, 2)] == [2, 2, 3, 4, 7, 10, 10]
    assert quantiles.mean == 5


def test_a_workload_says_what_it_is() -> None:
    assert "4 samples a prompt" in str(workloads.load("parallel-sampling"))
    assert "4 beams a prompt" in str(workloads.load("beam"))
    assert "of a prompt shared" in str(workloads.load("retrieval"))
    assert workloads.load(traffic := workloads.load("chat")) is traffic
    assert isinstance(traffic, Traffic)
