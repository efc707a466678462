"""Real English text that every Python installation has, for trainings without a download.

The reference manual's topics (`pydoc_data.topics`) and the docstrings and comments of the standard library
make a few megabytes of prose. Sources are parsed, never imported; order and content depend on the Python
version only.
"""

from __future__ import annotations

import ast
import inspect
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from mindspeed_core.errors import DataError

_FOREIGN = frozenset({"site-packages", "dist-packages", "__pycache__"})
_COMMENT_BLOCK = re.compile(r"(?:^[ \t]*#[^\n]*\n){3,}", re.MULTILINE)
_COMMENT_MARK = re.compile(r"^[ \t]*#+:? ?", re.MULTILINE)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def corpus_documents() -> Iterator[tuple[str, str]]:
    """Yield ``(name, text)``: one document per topic of the manual and per module of the standard library.

    A text that occurs twice is kept once.
    """
    from pydoc_data.topics import topics

    seen: set[str] = set()
    for name in sorted(topics):
        text = topics[name].strip()
        if text and text not in seen:
            seen.add(text)
            yield f"topic.{name}", text + "\n"
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).parts):
        parts = file.relative_to(root).with_suffix("").parts
        if _FOREIGN.intersection(parts):
            continue
        fresh = [text for text in _prose(file) if text not in seen]
        seen.update(fresh)
        if fresh:
            yield ".".join(("module", *parts)), "\n\n".join(dict.fromkeys(fresh)) + "\n"


def write_corpus(path: str | Path) -> tuple[int, int]:
    """Write the corpus as one text file per document, ready for ``prepare-text``.

    Args:
        path: a folder; it is made if it does not exist.

    Returns:
        Number of documents and of bytes.

    Raises:
        DataError: the folder cannot be written.
    """
    folder = Path(path)
    documents = size = 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in corpus_documents():
            content = text.encode()
            (folder / f"{name}.txt").write_bytes(content)
            documents += 1
            size += len(content)
    except OSError as error:
        raise DataError(
            f"{folder}: the text cannot be written there ({error}); name a folder that can be"
        ) from error
    return documents, size


def _prose(file: Path) -> Iterator[str]:
    """Yield docstrings in source order, then longer comments; nothing if it is not UTF-8 Python."""
    try:
        source = file.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            # Test data of the standard library contains questionable escapes on purpose.
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (OSError, ValueError, SyntaxError):
        return
    documented = [node for node in ast.walk(tree) if isinstance(node, _DOCUMENTED)]
    for node in sorted(documented, key=lambda node: getattr(node, "lineno", 0)):
        docstring = ast.get_docstring(node)
        if docstring and docstring.strip():
            yield docstring.strip()
    for match in _COMMENT_BLOCK.finditer(source):
        comment = inspect.cleandoc(_COMMENT_MARK.sub("", match.group()))
        if len(comment) >= 100:
            yield comment
