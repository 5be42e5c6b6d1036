"""For the reference, the comment behind an attribute is its docstring: `seq_lens: array[int]  # int32 [S]: ...`."""

from __future__ import annotations

import re
from typing import Any

from griffe import Attribute, Docstring, Extension

COMMENT = re.compile(r"\s#\s(?!type:|noqa|fmt:)(.+)$")


class CommentsDocument(Extension):
    def on_attribute(self, *, attr: Attribute, **_: Any) -> None:
        """Called for every attribute; one that has a docstring keeps it."""
        if attr.docstring is not None or attr.lineno is None or attr.endlineno is None:
            return
        lines = attr.lines_collection[attr.filepath][attr.lineno - 1 : attr.endlineno]
        comments = [found[1] for line in lines if (found := COMMENT.search(line))]
        if comments:
            text = " ".join(comments)
            attr.docstring = Docstring(text[0].upper() + text[1:], lineno=attr.lineno, parent=attr)
