"""What the commands print, wherever it goes: any encoding, closed and broken streams, full disks, any width."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkern.autotune import store, workloads
from pagedkern.autotune.cli import main
from pagedkern.autotune.profile import Profile
from pagedkern.autotune.recommend import known
from pagedkern.autotune.report import serving, terminal
from pagedkern.autotune.report.console import Column, Output, TableRow, console_on, plain, show_table
from pagedkern.autotune.runs import TuningRun, serve
from pagedkern.autotune.workloads import model
from tests.autotune.recordings import recording
from tests.autotune.test_cli import SHAPE
from tests.autotune.test_models import tuned
from tests.autotune.test_records import written

ROOT = Path(__file__).parents[2]
WIDTHS = (20, 27, 40, 60, 79, 80, 81, 100, 137, 200, 300)
RUN = ["tune", *SHAPE, "--device", "cpu", "--block-sizes", "8,16", "--backends", "reference", "--budget", "60s"]
RUN += ["--workload", "chat", "--in-process"]


def command(arguments: list[str], shell: str = "", **env: str) -> subprocess.CompletedProcess[bytes]:
    """A command as a shell starts it, with redirections behind it."""
    line = f'exec "{sys.executable}" -m tests.autotune.quick "$@" {shell}'
    return subprocess.run(
        ["bash", "-c", line, "bash", *arguments], cwd=ROOT, capture_output=True, env={**os.environ, **env}, timeout=120
    )


def squeezed(text: str) -> str:
    return re.sub(r"\s", "", text)


@pytest.fixture(scope="module")
def recorded_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(written(recording(), tmp_path_factory.mktemp("records") / "machine.jsonl"))


# Encodings


@pytest.mark.parametrize(
    "env",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "latin-1"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"LC_ALL": "C", "TERM": "dumb", "NO_COLOR": "1"},
    ],
    ids=lambda env: ",".join(env.values()),
)
def test_a_run_prints_in_any_encoding(env: dict[str, str], home: Path) -> None:
    done = command(RUN, **env)
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr
    text = done.stdout.decode(env.get("PYTHONIOENCODING", "utf-8").partition(":")[0])
    assert "Decode: 2 sequences of 88 to 100 tokens" in text
    assert "Every measurement is in" in text
    if "ascii" in env.get("PYTHONIOENCODING", ""):
        assert re.search(r"\d us", text)  # microseconds
        assert "+-" in text
    assert len(list(home.glob("tuned/*/*.json"))) == 4


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp437", "koi8-r", "utf-8", "shift_jis"])
def test_whatever_a_text_holds_it_can_be_written(encoding: str) -> None:
    texts = ["3 µs ±2 % × 4 …", "Intel® Core™ i7", "дата/日本/x.json", "\udcff\udcfe no UTF-8", "plain"]
    for text in texts:
        written_ = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        Output(written_).write(text)
        written_.flush()
        assert plain(text, encoding).encode(encoding) == written_.buffer.getvalue() or text.isascii()  # type: ignore[attr-defined]
    assert plain("3 µs ±2 % …", "ascii") == "3 us +-2 % ..."


@given(st.text(max_size=60), st.sampled_from(["ascii", "latin-1", "utf-8", "cp1252", "euc_kr"]))
def test_any_text_is_written_in_any_encoding(text: str, encoding: str) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n")
    Output(stream).write(text)
    stream.flush()
    kept = stream.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
    assert kept == text or kept == plain(text, encoding)


@pytest.mark.parametrize("arguments", [["--help"], ["workloads"], ["explain", "--memory", "8GB"], ["show"]])
def test_the_other_commands_print_in_ascii(arguments: list[str]) -> None:
    done = command(arguments, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    done.stdout.decode("ascii")


# Streams


@pytest.mark.parametrize(
    ("shell", "status"),
    [
        ("<&- >&- 2>&-", 0),  # closed
        ("2>&-", 0),
        ("> /dev/full 2>&1", 3),  # stored all the same
        ("| true; exit ${PIPESTATUS[0]}", 0),  # whoever read it is gone
        ("2>&1 >/dev/null | true; exit ${PIPESTATUS[0]}", 0),  # also of the progress
    ],
)
def test_a_run_stores_wherever_its_output_goes(shell: str, status: int, home: Path) -> None:
    done = command(RUN, shell) if "|" not in shell else piped(shell)
    assert done.returncode == status, (done.stdout, done.stderr)
    assert b"Traceback" not in done.stderr
    assert b"Exception ignored" not in done.stderr
    assert len(list(home.glob("tuned/*/*.json"))) == 4
    assert len(list(home.glob("rates/*/*.json"))) == 1
    (journal,) = home.glob("runs/*.jsonl")
    assert b"\n\n" not in journal.read_bytes()
    for line_ in journal.read_text().splitlines():
        json.loads(line_)  # nothing was printed into it


def piped(shell: str) -> subprocess.CompletedProcess[bytes]:
    line = f'"{sys.executable}" -m tests.autotune.quick "$@" {shell}'
    return subprocess.run(["bash", "-c", line, "bash", *RUN], cwd=ROOT, capture_output=True, timeout=120)


def test_the_status_of_a_run_is_not_that_of_its_output() -> None:
    """Nothing was decided, and nobody reads it: still nothing was decided."""
    line = f'"{sys.executable}" -m tests.autotune.quick "$@" --budget 0.001s | true; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", line, "bash", *RUN], cwd=ROOT, capture_output=True, timeout=120)
    assert done.returncode == 1


@pytest.mark.parametrize("arguments", [["show"], ["workloads", "chat"], ["explain", "--memory", "8GB"], ["--help"]])
@pytest.mark.parametrize("shell", [">&-", "2>&-", "> /dev/full"])
def test_the_other_commands_end_well(arguments: list[str], shell: str) -> None:
    done = command(arguments, shell)
    assert done.returncode == (3 if "full" in shell and arguments != ["--help"] else done.returncode)
    assert done.returncode in (0, 3, 120)
    assert b"Traceback" not in done.stderr


# Widths


def shown(width: int, show: object) -> str:
    file = io.StringIO()
    show(console_on(file, width=width))  # type: ignore[operator]
    return file.getvalue()


@dataclass
class Filled:
    """A run, and the store that it left."""

    run: TuningRun
    choices: list[store.StoreEntry]
    profiles: list[tuple[str, Path, Profile]]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Filled:
    """A run of a model with long names, in a store of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGEDKERN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        store.reload()
        run = tuned(model("gemma-2-9b"), journal=tmp_path_factory.mktemp("runs") / "run.jsonl")
        chosen = [workloads.load(name) for name in ("chat", "long-context", "parallel-sampling")]
        serve(run, chosen, model("gemma-2-9b"), lambda _: 24 * 10**9)
        made = Filled(run, list(store.contents()), known())
    store.reload()
    return made


@pytest.mark.parametrize("width", WIDTHS)
def test_every_table_shows_all_that_it_has(width: int, filled: Filled) -> None:
    """At any width: wrapped, folded or listed, but nothing is cut."""
    for show, expected in (
        (
            lambda out: terminal.show_stored(out, filled.choices),
            [
                text
                for entry in filled.choices
                for text in (
                    entry.key.filename().removesuffix(".json"),
                    entry.backend,
                    entry.state,
                    entry.tuned.when[:10],
                )
            ],
        ),
        (
            lambda out: terminal.show_rates(out, filled.profiles),
            [text for state, _, p in filled.profiles for text in (state, p.shape.name(), str(p.device["name"]))],
        ),
        (
            lambda out: terminal.show_run(out, filled.run, every=True),
            [str(c) for o in filled.run.outcomes for c in o.space.candidates] + ["Every measurement is in"],
        ),
        (
            lambda out: serving.show_served(out, filled.run.served),
            [one.traffic.name for one in filled.run.served]
            + ["tokens/s", "token_budget", "max_num_seqs", "gemma-2-9b"],
        ),
        (
            lambda out: serving.show_terms(out, filled.run.served[0].advice.scores, 16),
            ["block", "seqs", "waste", "request", "cached", "tok/s", "of best", "256"],
        ),
    ):
        text = shown(width, show)
        lines = [line for line in text.splitlines() if not line.startswith("  /")]  # a path is left whole
        assert max(map(len, lines)) <= width
        for part in expected:
            assert squeezed(part) in squeezed(text) or squeezed(part) in squeezed(folded(text)), (width, part)
        assert "…" not in text


def folded(text: str) -> str:
    """The columns of the tables in a text, one after the other, their lines joined: what was folded is whole again."""
    lines, joined = text.splitlines(), ""
    for i, line in enumerate(lines):
        if "───" in line:
            body = lines[i + 1 :]
            end = next((n for n, other in enumerate(body) if "───" in other), len(body))
            for heading in re.finditer(r"\S+(?: \S+)*", lines[i - 1]):
                start = heading.start()
                joined += "|" + "".join(re.split(r"\s{2,}", other[start:])[0] for other in body[:end])
    return joined


@given(
    cells=st.lists(
        st.lists(st.text("abcxyz0189-_.=(), ", max_size=40), min_size=3, max_size=3), min_size=1, max_size=6
    ),
    folds=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    width=st.integers(20, 300),
)
def test_no_table_is_cut_at_any_width(cells: list[list[str]], folds: tuple[bool, ...], width: int) -> None:
    columns = [Column(name, right=i == 1, folds=fold) for i, (name, fold) in enumerate(zip("abc", folds, strict=True))]
    file = io.StringIO()
    show_table(console_on(file, width=width), columns, [TableRow(row) for row in cells])
    text = file.getvalue()
    assert max(map(len, text.splitlines()), default=0) <= width
    for character in "xyz0189_=()":  # of the cells alone
        assert text.count(character) == sum(cell.count(character) for row in cells for cell in row)


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_the_commands_fit_the_columns_that_there_are(
    width: int, recorded_file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    memory = ["--memory", "8GB"]
    assert main(["export", recorded_file, "-o", str(Path(recorded_file).with_suffix(".json"))]) == 0
    assert main(["import", str(Path(recorded_file).with_suffix(".json"))]) == 0
    capsys.readouterr()
    for arguments in (["show"], ["explain", *memory], ["replay", recorded_file, *memory], ["workloads"]):
        assert main(arguments) == 0
        printed = capsys.readouterr()
        assert max(len(line) for line in printed.out.splitlines() if not line.startswith("  /")) <= width, arguments
        assert "…" not in printed.out
        assert printed.err == ""


def on_a_terminal(arguments: list[str], width: int, **env: str) -> tuple[int, str]:
    """Status and output of a command on a terminal of its own."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    clean = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR", "TERM")}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.autotune.quick", *arguments],
        cwd=ROOT, stdin=follower, stdout=follower, stderr=follower, env={**clean, "TERM": "xterm", **env},
    )  # fmt: skip
    os.close(follower)
    output = b""
    while True:
        if not select.select([leader], [], [], 120)[0]:
            process.kill()
            raise AssertionError("it hangs")
        try:
            piece = os.read(leader, 1 << 16)
        except OSError:
            break
        if not piece:
            break
        output += piece
    os.close(leader)
    return process.wait(), output.decode()


@pytest.mark.parametrize(
    ("width", "env"),
    [(40, {}), (100, {"NO_COLOR": "1"}), (80, {"TERM": "dumb", "LC_ALL": "C"})],
)
def test_a_run_on_a_terminal(width: int, env: dict[str, str], home: Path) -> None:
    status, text = on_a_terminal(RUN, width, **env)
    assert status == 0
    assert "Traceback" not in text
    assert len(list(home.glob("tuned/*/*.json"))) == 4
    bare = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    for expected in ("Decode:2sequencesof88to100tokens", "Everymeasurementisin", "reference()"):
        assert expected in squeezed(bare)
    if env.get("TERM") == "dumb":
        assert "\x1b[" not in text.rstrip().removesuffix("\x1b[0m")  # which Numba's colours write as a process ends
    if "NO_COLOR" in env:
        assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", text)
    after = bare[bare.index("Decode:") :]
    assert max(len(line) for line in after.splitlines() if "/" not in line) <= width
