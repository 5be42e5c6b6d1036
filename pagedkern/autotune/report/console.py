"""Where the commands print: a console that shows whatever it is given, on a terminal or file of any kind.

What an encoding does not have is spelled in plain characters. Tables that are wider than the console fold their widest
columns, and where that is not enough become a list: nothing is cut.
"""

from __future__ import annotations

import io
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

PLAIN = {
    "µ": "u",
    "±": "+-",
    "×": "x",
    "…": "...",
    "–": "-",
    "—": "-",
    "•": "*",
    "²": "2",
    "≈": "~",
    "≤": "<=",
    "≥": ">=",
}
GAPS, EDGES = (3, 2), 2  # characters between the columns of a table, the narrower where it is needed; at both ends
NARROWEST = 12  # characters to which a column that folds is narrowed


class Output(io.TextIOBase):
    """Standard output or error as it is now: closed, redirected, or in an encoding that lacks characters."""

    def __init__(self, stream: IO[str] | None) -> None:
        self._stream = stream if stream is not None else io.StringIO()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:
            return self._stream.write(plain(text, self.encoding))

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True


def plain(text: str, encoding: str) -> str:
    """A text in the characters of an encoding: others are spelled, or escaped."""
    spelled = "".join(_spelled(c, encoding) for c in text)
    return spelled.encode(encoding, "backslashreplace").decode(encoding)


def _spelled(character: str, encoding: str) -> str:
    try:
        character.encode(encoding)
    except UnicodeEncodeError:
        return PLAIN.get(character, character)
    return character


def console(error: bool = False) -> Console:
    """A console on standard output, or on standard error."""
    return console_on(sys.stderr if error else sys.stdout)


def console_on(stream: IO[str] | None, **options: Any) -> Console:
    """A console on any stream. A pipe that breaks raises BrokenPipeError, where rich would end the process."""
    from rich.console import Console

    class Quiet(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return Quiet(file=Output(stream), **options)  # type: ignore[arg-type]


def write(text: str) -> None:
    """Print a text as it is on standard output."""
    Output(sys.stdout).write(text)


def complain(text: str) -> None:
    """Print a line on standard error; that nobody can read it is no error."""
    with suppress(OSError, ValueError):
        Output(sys.stderr).write(f"{text}\n")


def printed(show: Callable[[], None], status: int) -> int:
    """Show something, and return the status of what was done before. If whoever read it has seen enough, that is all;
    where it cannot be written, that is said, and 3 is returned instead of 0."""
    try:
        show()
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        forget_output()
    except OSError as error:
        forget_output()
        complain(str(error) if error.filename else f"standard output: {error.strerror or error}")
        return status or 3
    return status


def forget_output() -> None:
    """Nobody reads standard output any more, or it cannot be written: what is left in it goes nowhere, so that Python
    has nothing to complain about when it ends."""
    stream = sys.__stdout__
    if stream is None or stream is not sys.stdout:
        return
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def open_what_is_closed() -> None:
    """Put something in the place of standard streams that are closed: the next file that is opened would be taken for
    one of them."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            with suppress(OSError):
                os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


def say(out: Console, text: str, style: str = "") -> None:
    """Print plain text: no markup is read from it, for reasons and paths may hold brackets. A path on a line of its own
    is left whole, to be copied."""
    whole = text.startswith("  /")
    overflow: Any = "ignore" if whole else "fold"  # rich cuts what it may neither wrap nor leave too long
    out.print(text, style=style or None, highlight=False, markup=False, overflow=overflow, soft_wrap=whole)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    name: str
    right: bool = False
    folds: bool = False  # whether it is narrowed if the table is too wide
    once: bool = False  # whether a table leaves out what the row before had, too


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row of a table: cells as plain text, its style, and whether a new group begins with it."""

    cells: Sequence[str]
    style: str = ""
    begins: bool = False


def show_table(out: Console, columns: Sequence[Column], rows: Sequence[TableRow]) -> None:
    """Print a table, folded as far as need be; a list of its rows where it does not fit at all."""
    from rich import box
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    wide = [max(map(cell_len, [column.name, *(row.cells[i] for row in rows)])) for i, column in enumerate(columns)]
    least = [min(w, NARROWEST) if column.folds else w for w, column in zip(wide, columns, strict=True)]
    gap = next((gap for gap in GAPS if sum(least) + gap * (len(columns) - 1) + EDGES <= out.width), None)
    if gap is None:
        _show_list(out, columns, rows)
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1 if gap == 3 else 0, 0, 1))
    for column, narrowest in zip(columns, least, strict=True):
        options: dict[str, Any] = {"overflow": "fold", "min_width": narrowest} if column.folds else {"no_wrap": True}
        table.add_column(Text(column.name), justify="right" if column.right else "left", **options)
    before: Sequence[str] = [""] * len(columns)
    for i, row in enumerate(rows):
        if row.begins and i:
            table.add_section()
        cells = [
            "" if column.once and cell == last else cell
            for column, cell, last in zip(columns, row.cells, before, strict=True)
        ]
        table.add_row(*map(Text, cells), style=row.style or None)
        before = row.cells
    out.print(table)


def _show_list(out: Console, columns: Sequence[Column], rows: Sequence[TableRow]) -> None:
    """Each row as a paragraph: its first cell, and what the others are."""
    for row in rows:
        named = [f"{column.name} {cell}".strip() for column, cell in zip(columns, row.cells, strict=True) if cell]
        text = ", ".join(named)
        for line in textwrap.wrap(text, max(1, out.width - 2), subsequent_indent="  ") or [""]:
            say(out, line, row.style)
    say(out, "")
