"""Each guide is read from its top: what to type, what one sees, what can go wrong, and how we know last."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest
from markdown_files import ROOT, blocks, read, without_blocks

OTHER_PAGES = {
    "architecture": "explains how the core is built",
    "faq": "is nothing but what can go wrong",
    "hook-versions": "states the rules of an interface",
    "programs": "shows what programs print",
}
"""Page of ``docs`` that is no guide: what it is."""
GUIDES = sorted(
    path.stem
    for path in (ROOT / "docs").glob("*.md")
    if not path.stem.endswith(".zh-CN") and path.stem not in OTHER_PAGES
)
FIRST_BLOCK = 25
"""Line of a guide before which something to type stands."""
SHOWN_WITHIN = 70
"""Line before which stands what one sees."""
SEEN = {"text", "json", "diff", "toml"}
"""Languages of blocks that show what a program printed or a file holds."""
LANGUAGES = {
    "": ("What can go wrong", "How we know"),
    ".zh-CN": ("会出什么问题", "我们如何知道"),
}
"""Ending of a page's name: the titles of its last sections."""
SHORTEST = 8
"""Characters of a part of a message that is looked up."""


@cache
def sentences() -> str:
    """Every string of the programs, a zero character where a value is put in."""
    found = []
    for folder in ("mindspeed_core", "packages", "plugins"):
        for path in (ROOT / folder).rglob("*.py"):
            if not {"tests", "build"} & set(path.relative_to(ROOT).parts):
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                    if isinstance(node, ast.JoinedStr):
                        parts = (v.value if isinstance(v, ast.Constant) else "\0" for v in node.values)
                        found.append("".join(map(str, parts)))
                    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                        found.append(node.value)
    return "\n".join(found)


def lines_before(text: str, languages: set[str]) -> int:
    """The number of lines above the first block in one of some languages."""
    for found in re.finditer(r"^ *```([\w-]+)\n.*?^ *```$", text, re.MULTILINE | re.DOTALL):
        if found[1] in languages:
            return text[: found.start()].count("\n")
    return len(text)


def messages(page: str) -> list[str]:
    """The first cells, in code, of the table of what can go wrong."""
    section = read(f"docs/{page}.md").partition("\n## What can go wrong\n")[2].partition("\n## ")[0]
    return [
        span for row in re.findall(r"^\| (.*?) \| ", section, re.M) for span in re.findall(r"`([^`]+)`", row)
    ]


@pytest.mark.parametrize("page", GUIDES)
def test_a_guide_begins_with_what_to_type_and_what_one_sees(page):
    text = read(f"docs/{page}.md")

    assert lines_before(text, {"bash", "python"}) < FIRST_BLOCK
    assert lines_before(text, SEEN) < SHOWN_WITHIN


@pytest.mark.parametrize("ending", LANGUAGES)
@pytest.mark.parametrize("page", GUIDES)
def test_a_guide_says_what_can_go_wrong_and_ends_with_how_we_know(page, ending):
    wrong, known = LANGUAGES[ending]
    text = read(f"docs/{page}{ending}.md")
    titles = re.findall(r"^## (.*)$", without_blocks(text), re.MULTILINE)
    table = text.partition(f"\n## {wrong}\n")[2].partition("\n## ")[0]

    assert titles[-1] == known
    assert titles.count(wrong) == 1
    assert len(re.findall(r"^\| ", table, re.MULTILINE)) >= 4


@pytest.mark.parametrize("page", GUIDES)
def test_a_guide_keeps_its_tests_and_benchmarks_for_its_end(page):
    before = without_blocks(read(f"docs/{page}.md")).partition("\n## How we know\n")[0]

    assert re.findall(r"`[\w/]*test_\w+\.py`", before) == []


@pytest.mark.parametrize("page", GUIDES)
def test_the_messages_of_a_guide_are_those_that_programs_print(page):
    parts = {
        part.strip(" :;,")
        for message in messages(page)
        # Flags, files and commands stand in code too.
        if " " in message and not message.startswith(("--", "mindspeed-", "list "))
        for part in message.split("…")
    }

    assert {part for part in parts if len(part) >= SHORTEST and part not in sentences()} == set()


def test_every_guide_shows_messages():
    assert [page for page in GUIDES if not messages(page)] == []


def test_what_is_no_guide_is_still_there():
    assert all(
        (ROOT / "docs" / f"{page}.md").is_file() and blocks(read(f"docs/{page}.md")) for page in OTHER_PAGES
    )


@pytest.mark.parametrize("page", ["migration", "megatron-lm"])
@pytest.mark.parametrize("ending", LANGUAGES)
def test_guides_for_those_who_have_a_script_begin_with_migrate(page, ending):
    first = re.search(r"^```bash\n(.*)$", read(f"docs/{page}{ending}.md"), re.MULTILINE)
    assert first is not None
    assert first[1].startswith("mindspeed-features migrate pretrain.sh")
