"""Tables: columns in a pipe, drawn on a wide terminal, never with words cut in pieces on a narrow one."""

from __future__ import annotations

import sys

import pytest

from mindspeed_core.terminal.tables import print_table

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


def test_a_wide_terminal_gets_a_drawing_with_brackets_left_alone(capsys, terminal):
    terminal(100)

    print_table(("name", "flag", "package"), ROWS, title="Features")

    output = capsys.readouterr().out
    assert "───" in output
    assert "[npu] 0.1" in output
    assert "Features" in output


def test_a_narrow_terminal_gets_whole_words(capsys, terminal):
    terminal(24)

    print_table(("name", "flag", "package"), ROWS)

    assert "flash-attn  --use-flash-attn  [npu] 0.1" in capsys.readouterr().out.splitlines()
