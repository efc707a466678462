"""The rules of CONTRIBUTING about words, as far as a program can check them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from generate import tree_registry
from markdown_files import ROOT

LONGEST = 78
RIDDLES = re.compile(
    r"\b(put away|puts away|lets? go|waits? on the host|comput\w+ again|whole logits|brought back|alive)\b",
    re.IGNORECASE,
)
RIDDLING_NAMES = set("what mine there near told theirs found known let_go put_away putaway".split())
"""Names that do not say what a value is; classes are compared in lower case."""
OF_THEIR_FUNCTION = {("read_space", "known"), ("group_partners", "known")}
"""Parameters whose function says of what: flags that exist, ranks that are known anyway."""
OPENINGS = ("What", "Which", "Whether", "Where", "How", "Who", "When")
FOLDERS = ("mindspeed_core", "packages", "plugins", "examples", "benchmarks", "docs", "tools")
FEATURES = {name: record.cls for name, record in tree_registry().features.items()}


@pytest.mark.parametrize("name", FEATURES)
def test_a_summary_is_a_short_imperative_sentence_in_the_fields_words(name):
    summary = FEATURES[name].summary
    verb = summary.split()[0]

    assert len(summary) <= LONGEST
    assert not summary.endswith(".")
    assert verb[0].isupper()
    assert not verb.endswith("ss") or verb in ("Compress",)
    assert not re.match(r"(The|A|An|What|How)\b|\w+(ed|ing|ions?|ents?)\b", verb)
    assert not RIDDLES.search(summary)


@pytest.mark.parametrize("name", FEATURES)
def test_the_help_of_flags_is_a_sentence_in_the_fields_words(name):
    for flag in FEATURES[name].flags:
        assert flag.help.endswith("."), flag.name
        assert not RIDDLES.search(flag.help), flag.name


def test_no_docstring_opens_with_a_question_word():
    opened = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "build" not in path.relative_to(ROOT).parts:
                opened += [f"{path.relative_to(ROOT)}: {line}" for line in _openings(path)]

    assert opened == []


def test_public_names_say_what_they_are():
    named = []
    for path in sorted([*(ROOT / "mindspeed_core").rglob("*.py"), *ROOT.glob("p*s/*/src/**/*.py")]):
        names = _public_names(ast.parse(path.read_text(encoding="utf-8")))
        riddles = [name for name in names if name.lower() in RIDDLING_NAMES]
        named += [f"{path.relative_to(ROOT)}: {name}" for name in riddles]

    assert named == []


def _public_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names of public functions, classes, their parameters and declared attributes."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("_"):
            yield node.name
            parameters = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            for parameter in parameters:
                if (node.name, parameter.arg) not in OF_THEIR_FUNCTION:
                    yield parameter.arg
        if isinstance(node, ast.ClassDef):
            yield node.name
            attributes = (item.target for item in node.body if isinstance(item, ast.AnnAssign))
            yield from (target.id for target in attributes if isinstance(target, ast.Name))


def _openings(path: Path) -> list[str]:
    """Return the first lines of docstrings that open with a question word."""
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = (
        ast.get_docstring(node) or ""
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, nodes)
    )
    return [text.splitlines()[0] for text in texts if text.startswith(tuple(f"{w} " for w in OPENINGS))]
