"""Cells and tables of the generated pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mindspeed_core.feature import Flag


def cell(text: object) -> str:
    """Text as the cell of a Markdown table."""
    return " ".join(str(text).split()).replace("|", "\\|")


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a Markdown table."""
    lines = ["| " + " | ".join(headers) + " |", "|" + "---|" * len(headers)]
    return [*lines, *("| " + " | ".join(cell(value) for value in row) + " |" for row in rows)]


def code(text: object) -> str:
    """Text in a code span; nothing for nothing."""
    return f"`{text}`" if text not in ("", None) else ""


def codes(texts: Iterable[object]) -> str:
    """Several code spans."""
    return ", ".join(code(text) for text in texts)


def flag_table(flags: Iterable[Flag]) -> list[str]:
    """List the value, default and meaning of each flag."""
    return table(
        ("flag", "value", "default", "meaning"),
        ((codes(flag.options), flag_value(flag), flag_default(flag), flag.help) for flag in flags),
    )


def flag_value(flag: Flag) -> str:
    """Describe the value of a flag."""
    if flag.is_switch:
        return "switch"
    kind = codes(flag.choices) if flag.choices else flag.type.__name__
    if flag.nargs is None:
        return kind
    return f"{kind}, {'any number' if flag.nargs in ('*', '+') else flag.nargs}"


def flag_default(flag: Flag) -> str:
    """The value without the flag."""
    return "" if flag.is_switch or flag.default is None else code(flag.default)
