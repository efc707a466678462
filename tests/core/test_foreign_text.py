"""Text that is not ours reaches terminal, log, Markdown and HTML as text that everybody sees."""

from __future__ import annotations

import ast
import html
import logging
import re
import unicodedata
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_core.errors import UserError
from mindspeed_core.terminal.errors import print_error
from mindspeed_core.terminal.foreign_text import (
    clean,
    emit,
    first_line,
    for_html,
    for_markdown,
    shown,
)
from mindspeed_megatron.quiet import CleanLog, SeverityHandler
from mindspeed_megatron.tables import print_table
from mindspeed_train.monitoring.summary import Summary, as_html, as_markdown

ROOT = Path(__file__).resolve().parents[2]
ANY = st.text(st.characters())
HOSTILE = (
    "\x1b[2J\x1b]0;title\x07 \u202egnp.exe\u2028 <script>alert(1)</script> "
    "| `x` ![a](http://b) \ud800 \x9b31m"
)
HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def hidden_in(text, *, but=""):
    return [c for c in text if unicodedata.category(c) in HIDDEN and c not in "\u200c\u200d" + but]


@settings(deadline=None, max_examples=60)
@given(ANY)
def test_every_character_of_a_cleaned_text_is_visible_and_can_be_written(text):
    cleaned = clean(text)
    assert hidden_in(cleaned) == []
    cleaned.encode()
    assert hidden_in(clean(text, lines=True), but="\n\t") == []


@settings(deadline=None, max_examples=60)
@given(st.text(st.characters(categories=["L", "N", "P", "S", "Zs", "M"])))
def test_visible_text_of_any_script_stays_as_it_is(text):
    assert clean(text) == text


@settings(deadline=None, max_examples=60)
@given(ANY)
def test_cleaning_twice_changes_nothing(text):
    assert clean(clean(text)) == clean(text)


@settings(deadline=None, max_examples=60)
@given(ANY, st.integers(2, 50))
def test_a_message_gets_one_line_of_bounded_length(text, limit):
    assert len(shown(text, limit)) <= limit
    assert "\n" not in first_line(ValueError(text), limit)


class Collected(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.text = [], ""

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, attrs))

    def handle_data(self, data):
        self.text += data


@settings(deadline=None, max_examples=60)
@given(ANY)
def test_html_shows_a_text_and_holds_no_tag_of_it(text):
    parser = Collected()
    parser.feed(f'<b title="{for_html(text)}">{for_html(text)}</b>')
    assert parser.tags == [("b", [("title", clean(text))])]
    assert html.unescape(parser.text) == html.unescape(clean(text)) or parser.text == clean(text)


@settings(deadline=None, max_examples=60)
@given(ANY)
def test_markdown_holds_no_tag_link_span_or_cell_of_a_text(text):
    found = for_markdown(text)
    assert "<" not in found
    assert "\n" not in found
    # What remains without the escaped characters.
    bare = re.sub(r"\\[\\`*\[\]|~$_#+\->=:0-9]", "", found)
    assert not set("\\`*[]|~$") & set(bare)
    assert not re.match(r"\s*[#+\->=:]", found)


@pytest.mark.parametrize(
    "text", ["some-plugin 1.2", "a_b_c", "3.000000 at step 1", "C++ (x) #1", "/data/x.json"]
)
def test_ordinary_names_stay_readable_in_markdown(text):
    assert for_markdown(text) == text


def test_an_object_whose_text_cannot_be_made_is_still_told():
    class Broken:
        def __str__(self):
            raise RuntimeError("no")

    assert clean(Broken()) == "<Broken whose text cannot be made: RuntimeError>"


def test_errors_tables_and_lines_reach_the_terminal_cleaned(capsys):
    print_error(UserError(f"bad {HOSTILE}"))
    try:
        raise ValueError(HOSTILE)
    except ValueError as error:
        print_error(error)
    print_table(("name",), [(HOSTILE,)], title=HOSTILE)
    emit(HOSTILE)
    said = capsys.readouterr()
    for text in said:
        assert "gnp.exe" in text
        assert hidden_in(text, but="\n\t") == []


def test_log_messages_are_cleaned(caplog):
    logger = logging.getLogger("mindspeed_core.test_foreign_text")
    logger.addFilter(CleanLog())
    logger.warning("bad %s", HOSTILE)
    assert "gnp.exe" in caplog.text
    assert hidden_in(caplog.records[-1].getMessage()) == []


def test_a_summary_holds_no_markup_of_a_runs_names():
    summary = Summary(title=HOSTILE, command=HOSTILE, sections={HOSTILE: [(HOSTILE, HOSTILE)]})
    for page in (as_html(summary), as_markdown(summary)):
        assert hidden_in(page, but="\n\t") == []
        lines = [line for line in page.splitlines() if not line.startswith("    ")]
        assert "<script>alert" not in "\n".join(lines)


@pytest.mark.parametrize(
    "folder",
    [
        "mindspeed_core/cli",
        "packages/mindspeed_megatron/src/mindspeed_megatron/doctor",
        "mindspeed_core/terminal",
        "packages/mindspeed_train/src/mindspeed_train/checkpoint",
        "packages/mindspeed_train/src/mindspeed_train/data",
    ],
)
def test_programs_print_through_the_cleaning_printer(folder):
    """Elsewhere click's echo and print would show foreign text as it is."""
    own = {
        # Text of ours alone, or already cleaned.
        "packages/mindspeed_train/src/mindspeed_train/program.py print",
        "packages/mindspeed_megatron/src/mindspeed_megatron/doctor/probe.py print",
        "mindspeed_core/cli/completion_command.py echo",
        "mindspeed_core/terminal/errors.py print",
        "packages/mindspeed_megatron/src/mindspeed_megatron/launch/failure.py print",
        "mindspeed_core/terminal/foreign_text.py print",
        "mindspeed_core/terminal/listing.py print",
    }
    found = set()
    for path in (ROOT / folder).rglob("*.py"):
        if "scaffold" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name in ("print", "echo"):
                found.add(f"{path.relative_to(ROOT)} {name}")
    assert found <= own


def test_what_nobody_configured_is_logged_behind_its_severity(capsys):
    handler = SeverityHandler(logging.WARNING)
    for level in (logging.WARNING, logging.ERROR):
        handler.handle(logging.LogRecord("mindspeed_core", level, "", 0, "the disk is %s", ("full",), None))

    assert capsys.readouterr().err == "warning: the disk is full\nerror: the disk is full\n"
