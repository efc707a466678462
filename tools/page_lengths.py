"""Prints how long the pages of the built site are, beside those of an earlier build.

``python tools/page_lengths.py build/site [EARLIER]`` prints a Markdown table: words of the text, kilobytes of
the page and of its sidebar. ``--all`` lists every page instead of some guides, features and lists.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

SHOWN = (
    "index.html",
    "quick-start.html",
    "checkpoints.html",
    "fault-tolerance.html",
    "migration.html",
    "features/mindspeed-memory/swap-attention.html",
    "features/mindspeed-cp/context-parallel.html",
    "features/mindspeed-kernels/flash-attn.html",
    "features/mindspeed-moe/moe-fb-overlap.html",
    "reference/flags.html",
    "reference/flags/memory.html",
)
"""Pages of the short table."""


@dataclass(frozen=True)
class Length:
    """Size of one page.

    Attributes:
        words: of its text, without the parts around it.
        kilobytes: of the file.
        sidebar: kilobytes of its navigation.
    """

    words: int
    kilobytes: float
    sidebar: float


class _Article(HTMLParser):
    """Counts the words inside of the article."""

    def __init__(self) -> None:
        super().__init__()
        self.words = 0
        self._depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._depth += tag == "article"

    def handle_endtag(self, tag: str) -> None:
        self._depth -= tag == "article"

    def handle_data(self, data: str) -> None:
        self.words += len(data.split()) if self._depth > 0 else 0


def length(page: Path) -> Length:
    """Return the size of a page."""
    html = page.read_text(encoding="utf-8")
    article = _Article()
    article.feed(html)
    return Length(article.words, len(html) / 1024, len(_sidebar(html)) / 1024)


def _sidebar(html: str) -> str:
    """Return the navigation of a page; empty where it has none."""
    start, depth = html.find('<nav class="md-nav md-nav--primary"'), 0
    for tag in re.finditer(r"<(/?)nav\b", html[start:] if start >= 0 else ""):
        depth += -1 if tag[1] else 1
        if depth == 0:
            return html[start : start + tag.end()]
    return ""


def rows(pages: Iterable[str], site: Path, earlier: Path | None) -> Iterable[tuple[str, ...]]:
    """Return the cells of each page; what a build lacks stays empty."""
    for page in pages:
        cells = []
        for folder in (earlier, site):
            if folder is not None:
                found = length(folder / page) if (folder / page).is_file() else None
                cells += _cells(found)
        yield (page, *cells)


def _cells(found: Length | None) -> list[str]:
    if found is None:
        return ["", "", ""]
    return [f"{found.words:,}", f"{found.kilobytes:.0f}", f"{found.sidebar:.0f}"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; the exit status."""
    parser = argparse.ArgumentParser(description="Print how long the pages of the built site are.")
    parser.add_argument("site", type=Path, help="folder of the built site")
    parser.add_argument("earlier", type=Path, nargs="?", help="folder of an earlier build")
    parser.add_argument("--all", action="store_true", help="list every page")
    given = parser.parse_args(arguments)
    pages = sorted(path.relative_to(given.site).as_posix() for path in given.site.rglob("*.html"))
    heads = ["words", "KiB", "sidebar KiB"]
    if given.earlier is not None:
        heads = [f"{head}, {when}" for when in ("before", "after") for head in heads]
    print("| page | " + " | ".join(heads) + " |")
    print("|---|" + "---:|" * len(heads))
    for row in rows(pages if given.all else SHOWN, given.site, given.earlier):
        print("| " + " | ".join(row) + " |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
