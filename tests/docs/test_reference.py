"""The reference in docs/api/ covers what is public, and what it shows says what a caller has to know."""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import pagedkern
from pagedkern import abi, allocator, cache, errors, scheduler
from tests.docs.pages import DOCS

SAID_BY_THE_NAME = {
    "self",
    "cls",
    "seq",
    "seqs",
    "plan",
    "batch",
    "request",
    "file",
    "problem",
    "call",
    "config",
    "fields",
}
OTHERS_DOCUMENT = {"args", "kwargs", "options", "indices", "tokens_to_remove"}  # the latter by transformers
ENTRY = re.compile(r"^::: (\S+)", re.MULTILINE)


def entries() -> list[tuple[str, str]]:
    """(page, dotted name) of everything that the reference shows."""
    return [
        (path.stem, name) for path in sorted((DOCS / "api").glob("*.md")) for name in ENTRY.findall(path.read_text())
    ]


def find(name: str) -> Any:
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:n]))
        except ModuleNotFoundError:
            continue
        for part in parts[n:]:
            found = getattr(found, part)
        return found
    raise AssertionError(f"{name} does not exist")


SHOWN = entries()


def test_whatever_is_public_is_shown() -> None:
    shown = {id(find(name)) for _, name in SHOWN}
    for module in (pagedkern, abi, allocator, scheduler, cache):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) and issubclass(value, errors.PagedKernError):
                assert "pagedkern.errors" in {n for _, n in SHOWN}
            elif callable(value) and not inspect.ismodule(value):
                assert id(value) in shown, f"{module.__name__}.{name} is in no page of docs/api/"
    assert "pagedkern.backends.backends" in {n for _, n in SHOWN}


def test_the_first_page_lists_every_page() -> None:
    text = (DOCS / "api" / "index.md").read_text()
    assert {page for page, _ in SHOWN} == set(re.findall(r"\((\w+)\.md\)", text))
    for page, name in SHOWN:
        short = name.rpartition(".")[2]
        if page in ("kernels", "cache", "allocator", "scheduler"):
            assert f"`{short}`" in text, f"{short} is not on the first page"


def members(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What the reference shows of an entry: itself, and a class's own public methods and properties."""
    yield name, value
    if not inspect.isclass(value) or issubclass(value, enum.Enum):
        return
    for owner in value.__mro__ if value is pagedkern.BlockAllocator else (value,):  # whose page lists inherited ones
        for key, member in vars(owner).items():
            function = getattr(member, "__func__", member)
            if not key.startswith("_") and isinstance(function, property | type(find)):
                yield f"{name}.{key}", function


ENTRIES = [pytest.param(page, *pair, id=pair[0]) for page, name in SHOWN for pair in members(name, find(name))]


@pytest.mark.parametrize(("page", "name", "value"), ENTRIES)
def test_it_says_what_it_is(page: str, name: str, value: Any) -> None:
    text = inspect.getdoc(value) or ""
    assert len(text) > 8, f"{name} has no docstring"
    assert not re.search(r"section \d", text), f"{name}: of which document?"
    assert not re.search(r"::$", text, re.MULTILINE), f"{name}: a colon more than Markdown wants"
    prose = re.sub(r"`[^`]*`", "", text)
    assert not re.search(r"\*\w[^*\n]*\*", prose.replace("**", "")), f"{name}: stars outside of `code` are emphasis"


@pytest.mark.parametrize(("page", "name", "value"), [p for p in ENTRIES if callable(p.values[2])])
def test_it_names_every_argument(page: str, name: str, value: Callable[..., Any]) -> None:
    if inspect.isclass(value) and (_is_record(value) or not _is_made_by_callers(value)):
        return
    text = inspect.getdoc(value) or ""
    names = set(inspect.signature(value).parameters) - SAID_BY_THE_NAME - OTHERS_DOCUMENT
    missing = {n for n in names if not re.search(rf"\b{n}\b", text)}
    assert not missing, f"{name} does not say what {sorted(missing)} are"


def _is_record(value: type) -> bool:
    """Its fields are documented where they stand, one a line."""
    return hasattr(value, "__dataclass_fields__") or hasattr(value, "_fields") or hasattr(value, "_fields_")


def _is_made_by_callers(value: type) -> bool:
    made_elsewhere = (enum.Enum, Exception, allocator.Plan, allocator.Sequence, allocator.Copies)
    elsewhere = issubclass(value, (*made_elsewhere, scheduler.Batch, scheduler.Request, scheduler.Sample))
    return not elsewhere and not getattr(value, "_is_protocol", False)


RECORDS = [(name, find(name)) for _, name in SHOWN if inspect.isclass(find(name)) and _is_record(find(name))]
OBVIOUS = {  # fields that their name and type explain
    "about", "alibi", "available", "backend", "causal", "config", "dtype", "head_dim", "implementation", "licence",
    "name", "num_heads", "num_layers", "op", "problem", "reason", "scale", "sinks", "softcap", "source", "url",
    "weight_bytes",
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), RECORDS, ids=[name for name, _ in RECORDS])
def test_every_field_of_a_record_says_what_it_holds(name: str, value: type) -> None:
    """By a comment behind it, which the reference shows, or in the docstring."""
    if hasattr(value, "_fields_"):
        return  # ctypes: the C header says it
    source, text = inspect.getsource(value), inspect.getdoc(value) or ""
    fields = getattr(value, "__dataclass_fields__", None)
    for field in set(value._fields if fields is None else fields) - OBVIOUS:  # type: ignore[attr-defined]
        commented = re.search(rf"^ +{field}: (?:[^#\n]*|\(\n +[^#\n]*)# \S", source, re.MULTILINE)
        assert commented or re.search(rf"\b{field}\b", text), f"{name}.{field}: neither a comment nor in the docstring"


def test_the_errors_say_when_they_are_raised() -> None:
    for name, value in vars(errors).items():
        if inspect.isclass(value):
            assert len(value.__doc__ or "") > 30, name
            assert name in pagedkern.__all__


def test_sources_are_named() -> None:
    """A path in a page of the reference is one of the repository."""
    for path in (DOCS / "api").glob("*.md"):
        for link in re.findall(r"\]\((\.\./\.\./[^)]+)\)", path.read_text()):
            assert (Path(path).parent / link).exists(), link
