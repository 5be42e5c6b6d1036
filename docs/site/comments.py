"""For the reference, the comment behind an attribute is its docstring: `seq_lens: array[int]  # int32 [S]: ...`."""

from __future__ import annotations

import re
from typing import Any

from griffe import Attribute, Class, Docstring, Extension

COMMENT = r"\s#\s(?!type:|noqa|fmt:)(.+)$"


class CommentsDocument(Extension):
    def on_class(self, *, cls: Class, **_: Any) -> None:
        """Called once all members of a class are known; one that has a docstring keeps it."""
        for name, member in cls.members.items():
            if isinstance(member, Attribute) and member.docstring is None and (text := _comment(cls, name)):
                first, _, rest = text.partition(" ")
                if first.isalpha():  # not the name of a dtype
                    text = f"{first[0].upper()}{first[1:]} {rest}"
                member.docstring = Docstring(text.strip(), lineno=member.lineno, parent=member)


def _comment(cls: Class, name: str) -> str:
    """What stands behind the first assignment or annotation of that name, or on the line below its bracket."""
    assert cls.lineno is not None
    source = "\n".join(cls.lines_collection[cls.filepath][cls.lineno - 1 : cls.endlineno])
    found = re.search(rf"^ +(?:self\.)?{name}(?:: | = )(?:[^#\n]*|\(\n[^#\n]*){COMMENT}", source, re.MULTILINE)
    return found[1] if found else ""
