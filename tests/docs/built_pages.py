"""The pages of the built site: their links, and the parts around their text."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

BUILT = "MINDSPEED_SITE"
"""Variable that names a site that was just built; without it the tests build one."""


class Addresses(HTMLParser):
    """The addresses of a page: what it links to, what it loads, and what can be linked to in it.

    Attributes:
        language: of the page.
        links: targets of links.
        loads: files that the page needs.
        anchors: places in it.
        pictures: source and description of each picture.
    """

    def __init__(self, page: Path | str) -> None:
        super().__init__()
        self.language = ""
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.pictures: list[tuple[str, str]] = []
        self.feed(page if isinstance(page, str) else page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors.update(filter(None, (found.get("id"), found.get("name") if tag == "a" else None)))
        if tag == "html":
            self.language = found.get("lang") or ""
        elif tag == "a" and found.get("href"):
            self.links.append(found["href"] or "")
        elif tag in ("script", "img", "iframe", "source") and found.get("src"):
            self.loads.append(found["src"] or "")
            if tag == "img":
                self.pictures.append((found["src"] or "", found.get("alt") or ""))
        elif tag == "link" and found.get("href") and found.get("rel") != "canonical":
            self.loads.append(found["href"] or "")


def navigation(html: str) -> str:
    """The sidebar of a page with its own headings, which lie in it for narrow screens."""
    start = html.index('<nav class="md-nav md-nav--primary"')
    depth = 0
    for tag in re.finditer(r"<(/?)nav\b", html[start:]):
        depth += -1 if tag[1] else 1
        if depth == 0:
            return html[start : start + tag.end()]
    raise ValueError("the sidebar does not end")


def internal(pages: dict[str, Addresses]) -> Iterator[tuple[str, str, str]]:
    """Page, target page and anchor of every link inside the site."""
    for page, addresses in pages.items():
        for link in addresses.links:
            if not re.match(r"[a-z]+:|//", link):
                path, _, anchor = link.partition("#")
                target = posixpath.normpath(posixpath.join(posixpath.dirname(page), unquote(path)))
                yield page, target if path else page, unquote(anchor)
