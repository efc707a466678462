"""Tables on a terminal and in a pipe.

rich draws them where a person looks at a terminal that is wide enough; on a narrower one each row is a
paragraph. In a pipe they are plain columns that grep and awk understand, as wide as they need to be, and rich
is not even imported (77 ms).
"""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_core.terminal.foreign_text import clean
from mindspeed_core.terminal.listing import columns, ljust, say, width, words


def print_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[object]],
    title: str = "",
    heading: Sequence[int] = (0,),
) -> None:
    """Print a table, its cells shown with ``str``.

    Args:
        headers: of the columns.
        rows: one cell per column.
        title: a line above.
        heading: columns that head the paragraph of a row where the terminal is too narrow for a table.
    """
    cells = [[clean(cell) for cell in row] for row in rows]
    title, limit = clean(title), columns()
    if limit is None:
        _print_plain(headers, cells, title)
        return
    # Text is wrapped at spaces, and words are never cut in pieces.
    needed = [
        max(width(word.strip(" ")) for cell in column for word in words(cell) or [""])
        for column in zip(headers, *cells)
    ]
    if sum(needed) + 3 * len(needed) > limit:
        _print_paragraphs(headers, cells, title, heading)
    else:
        _print_rich(headers, cells, title, needed, limit)


def _print_plain(headers: Sequence[str], rows: Sequence[Sequence[str]], title: str) -> None:
    if title:
        print(title)
    widths = [max(map(width, column)) for column in zip(headers, *rows)]
    for line in (headers, *rows):
        print("  ".join(ljust(cell, wide) for cell, wide in zip(line, widths)).rstrip())


def _print_paragraphs(
    headers: Sequence[str], rows: Sequence[Sequence[str]], title: str, heading: Sequence[int]
) -> None:
    if title:
        say(title)
    for row in rows:
        say(": ".join(row[index] for index in heading if row[index]), hang=4)
        told = [
            f"{header}: {cell}"
            for index, (header, cell) in enumerate(zip(headers, row))
            if index not in heading and cell not in ("", "-")
        ]
        if told:
            say("; ".join(told), indent=4)


def _print_rich(
    headers: Sequence[str], rows: Sequence[Sequence[str]], title: str, needed: Sequence[int], columns: int
) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for header, wide in zip(headers, needed):
        table.add_column(header, min_width=wide)
    for row in rows:
        # Text keeps square brackets in flags and versions from being read as markup.
        table.add_row(*(Text(cell) for cell in row))
    Console(width=columns).print(table)
