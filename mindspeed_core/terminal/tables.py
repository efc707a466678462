"""Tables on a terminal and in a pipe.

rich draws them where a person looks at a terminal; in a pipe they are plain columns that grep and awk
understand, and rich is not even imported (77 ms).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def print_table(headers: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> None:
    """Print a table, its cells shown with ``str``."""
    cells = [[str(cell) for cell in row] for row in rows]
    if sys.stdout.isatty() and _print_rich(headers, cells, title):
        return
    if title:
        print(title)
    columns = [list(column) for column in zip(headers, *cells)]
    widths = [max(len(cell) for cell in column) for column in columns]
    for line in ([str(header) for header in headers], *cells):
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())


def _print_rich(headers: Sequence[str], rows: Sequence[Sequence[str]], title: str) -> bool:
    """Draw the table, unless the terminal is so narrow that words would be cut in pieces."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    needed = [
        max(len(word) for cell in column for word in cell.split() or [""]) for column in zip(headers, *rows)
    ]
    if sum(needed) + 3 * len(needed) > console.width:
        return False
    table = Table(title=title or None, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for header, width in zip(headers, needed):
        table.add_column(header, min_width=width)
    for row in rows:
        # Text keeps square brackets in flags and versions from being read as markup.
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
    return True
