"""Tables and text: columns in a pipe, drawn on a wide terminal, whole words on a narrow one."""

from __future__ import annotations

import contextlib
import io
import re
import sys

import pytest
from made_packages import feature_source
from rich.cells import cell_len

from mindspeed_core.terminal.listing import Cell, cut, for_terminal, paint, print_rows, say, wrap
from mindspeed_megatron.tables import print_table

ROWS = [("flash-attn", "--use-flash-attn", "[npu] 0.1"), ("x", "--y", "")]


@pytest.fixture
def terminal(monkeypatch):
    def of_width(columns: int) -> None:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)

    return of_width


def test_a_pipe_gets_aligned_columns(capsys):
    print_table(("name", "flag", "package"), ROWS)

    assert capsys.readouterr().out.splitlines() == [
        "name        flag              package",
        "flash-attn  --use-flash-attn  [npu] 0.1",
        "x           --y",
    ]


def test_wide_characters_count_double_in_the_columns_of_a_pipe(capsys):
    print_table(("name", "meaning"), [("注意力", "a"), ("norm", "b")])

    assert capsys.readouterr().out.splitlines() == ["name    meaning", "注意力  a", "norm    b"]


def test_a_wide_terminal_gets_a_drawing_with_brackets_left_alone(capsys, terminal):
    terminal(100)

    print_table(("name", "flag", "package"), ROWS, title="Features")

    output = capsys.readouterr().out
    assert "───" in output
    assert "[npu] 0.1" in output
    assert "Features" in output


def test_a_narrow_terminal_gets_a_paragraph_a_row_with_whole_words(capsys, terminal):
    terminal(24)

    print_table(("name", "flag", "package"), ROWS)

    assert capsys.readouterr().out.splitlines() == [
        "flash-attn",
        "    flag:",
        "    --use-flash-attn;",
        "    package: [npu] 0.1",
        "x",
        "    flag: --y",
    ]


def test_the_columns_that_head_a_paragraph_are_not_repeated_in_it(capsys, terminal):
    terminal(20)

    print_table(("#", "name", "why"), [(1, "flash-attn", "a-very-long-reason")], heading=(1,))

    assert capsys.readouterr().out.splitlines() == [
        "flash-attn",
        "    #: 1; why:",
        "    a-very-long-reas",
        "    on",
    ]


@pytest.mark.parametrize("columns", [24, 40, 80, 120])
def test_list_fits_the_terminal(features, install, monkeypatch, capsys, columns):
    summary = (
        "按专家编号计算每个词元的权重，并且在所有张量并行的进程之间求和，然后再除以词元的总数与并行规模的乘积"
    )
    source = feature_source("wide-thing", "platforms = ('cpu',)").replace("A feature for tests", summary)
    install(
        "wide-pack", source + 'DECLARATIONS += (ExtensionPoint("a.spot", "pack_a.spots", "Spots " * 30),)'
    )
    install("bad-pack", "raise RuntimeError('no such driver, ' + 'and no other one ' * 9)")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)

    from mindspeed_core.cli.features import main

    assert main(["list"]) == 0
    lines = capsys.readouterr().out.split("\nbroken:\n")
    assert [line for line in lines[0].splitlines() if cell_len(line) > columns] == []
    # A remedy is a command to copy: it stays in one piece.
    said = [line for line in lines[1].splitlines() if not line.lstrip().startswith("->")]
    assert [line for line in said if cell_len(line) > columns] == []


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_every_screen_fits_the_terminal(features, install, monkeypatch, capsys, columns):
    install("wide-pack", feature_source("wide-thing", "packages = ('absent-pack-with-a-name>=12',)"))
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)

    from mindspeed_core.cli.features import main
    from mindspeed_train.program import main as train

    for arguments in (
        ["list", "--all", "--family", "samples"],
        ["list", "--flags", "--family", "samples"],
        ["show", "wide-thing"],
        ["show", "wide-thing", "--all"],
        ["plan", "--platform", "cpu", "--", "--num-layers", "2", "--use-mcore-models"],
        ["patches", "--platform", "cpu"],
        ["graph"],
    ):
        assert main(arguments) == 0
    assert train(["--help"]) == train(["--help-flag", "num-layers"]) == 0
    # A remedy is a command to copy: it stays in one piece.
    said = [line for line in capsys.readouterr().out.splitlines() if not line.lstrip().startswith("->")]
    assert [line for line in said if cell_len(line) > columns] == []


@pytest.mark.parametrize(
    ("environment", "coloured"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "dumb"}, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, True),
    ],
)
def test_colours_follow_the_terminal_and_the_users_wish(monkeypatch, terminal, environment, coloured):
    terminal(80)
    for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert ("\x1b[" in paint("ok", "good")) == coloured


def test_a_row_is_cut_at_the_width_of_the_terminal_and_whole_in_a_pipe(capsys, terminal, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    rows = [(Cell("a", "name"), "权重 and more words than fit"), ("long-name", "b")]
    print_rows(rows)
    terminal(20)
    print_rows(rows, indent=2)

    assert capsys.readouterr().out.splitlines() == [
        "a\t权重 and more words than fit",
        "long-name\tb",
        "  a          权重 a…",
        "  long-name  b",
    ]


def test_aligned_rows_of_a_pipe_are_whole_too(capsys):
    long = "--a-flag-with-a-value " * 4
    print_rows([(long, "why"), ("b", "c")], tabs=False)

    assert capsys.readouterr().out.splitlines()[0] == f"{long}  why"


def test_an_encoding_without_an_ellipsis_gets_dots(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))

    assert cut("one two three", 9) == "one tw..."


def test_foreign_text_in_a_row_is_cleaned(capsys):
    print_rows([("bad\x1b[31m", Cell("two\nlines"))])

    assert capsys.readouterr().out == "bad\\x1b[31m\ttwo\\nlines\n"


def test_text_is_wrapped_between_words_and_between_wide_characters():
    assert wrap("one two three", 7) == ["one two", "three"]
    assert wrap("权重 weight权重", 6) == ["权重", "weight", "权重"]
    assert wrap("权重权重权", 6) == ["权重权", "重权"]


def test_a_paragraph_hangs_on_a_terminal_and_is_one_line_in_a_pipe(capsys, terminal):
    say("one two three four", indent=2, hang=4)
    terminal(16)
    say("one two three four", indent=2, hang=4)

    assert capsys.readouterr().out.splitlines() == [
        "  one two three four",
        "  one two three",
        "      four",
    ]


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self):
        return True


def test_a_message_breaks_between_words_and_keeps_long_words_and_remedies_whole(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("TERM", "dumb")
    text = (
        "error: --hidden-size 33: is no multiple of --num-attention-heads 2\n"
        "saved /a/folder/with/a/name/longer/than/the/terminal\n"
        "    -> pip install --upgrade mindspeed-core mindspeed-train"
    )

    assert for_terminal(text, Terminal()).splitlines() == [
        "error: --hidden-size 33: is no",
        "    multiple of",
        "    --num-attention-heads 2",
        "saved",
        "    /a/folder/with/a/name/longer/than/the/terminal",
        "    -> pip install --upgrade mindspeed-core mindspeed-train",
    ]
    assert for_terminal(text, io.StringIO()) == text


def test_a_remedy_in_words_breaks_between_them(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("TERM", "dumb")

    assert for_terminal("    -> write a whole number, for instance 4", Terminal()).splitlines() == [
        "    -> write a whole number,",
        "        for instance 4",
    ]


def test_the_problems_of_a_plan_break_between_words(monkeypatch):
    from mindspeed_core.cli.features import main

    monkeypatch.setenv("COLUMNS", "60")
    terminal = Terminal()
    with contextlib.redirect_stdout(terminal):
        assert main(["plan", "--", "--tensor-model-parallel-size", "x"]) == 1

    lines = terminal.getvalue().splitlines()
    assert any("E-FLAG-VALUE" in line for line in lines)
    assert [line for line in lines if len(re.sub(r"\x1b\[\d+m", "", line)) > 60] == []


def test_severities_have_colours_where_the_stream_is_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)

    shown = for_terminal("note: a\nwarning: b\nerror: c\nd error: e", Terminal())

    assert shown == "\x1b[36mnote:\x1b[0m a\n\x1b[33mwarning:\x1b[0m b\n\x1b[31merror:\x1b[0m c\nd error: e"
    assert for_terminal("error: c", io.StringIO()) == "error: c"
