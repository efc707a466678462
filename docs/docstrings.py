"""Google-style docstrings as Markdown."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

SECTIONS = ("Args", "Attributes", "Returns", "Raises")


def markdown(text: str) -> str:
    """A docstring as Markdown: single backticks, and a single colon before a block that is indented."""
    return re.sub(r"::$", ":", text, flags=re.MULTILINE).replace("``", "`")


def docstring_parts(text: str) -> tuple[str, dict[str, str]]:
    """A Google-style docstring: its prose, and the sections by name."""
    pieces = re.split(rf"^({'|'.join(SECTIONS)}):\n", inspect.cleandoc(text), flags=re.MULTILINE)
    sections = {name: inspect.cleandoc("\n" + body) for name, body in zip(pieces[1::2], pieces[2::2])}
    return markdown(pieces[0].strip()), sections


def entries(section: str) -> Iterator[tuple[str, str]]:
    """The ``name: meaning`` entries of an argument section; a meaning may go on over indented lines."""
    for entry in re.split(r"\n(?=\S)", section.strip()):
        name, colon, meaning = entry.partition(":")
        if colon:
            yield name.strip(), markdown(" ".join(meaning.split()))
