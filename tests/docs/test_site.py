"""The built site is whole: every page in the navigation, no dead link, nothing fetched, a working search."""

from __future__ import annotations

import json
import os
import posixpath
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from markdown_files import ROOT, files, read

BUILT = "MINDSPEED_SITE"
"""Variable that names a site that was just built; without it the tests build one."""


class Addresses(HTMLParser):
    """The addresses of a page: what it links to, what it loads, and what can be linked to in it."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors.update(filter(None, (found.get("id"), found.get("name") if tag == "a" else None)))
        if tag == "a" and found.get("href"):
            self.links.append(found["href"] or "")
        elif tag in ("script", "img", "iframe", "source") and found.get("src"):
            self.loads.append(found["src"] or "")
        elif tag == "link" and found.get("href") and found.get("rel") != "canonical":
            self.loads.append(found["href"] or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built pages. MkDocs ends with 1 for a page outside the navigation or a link that leads nowhere."""
    if BUILT in os.environ:
        return ROOT / os.environ[BUILT]
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert built.returncode == 0, f"{built.stdout}{built.stderr}\n(pages are listed under nav in mkdocs.yml)"
    return folder


@pytest.fixture(scope="module")
def pages(site) -> dict[str, Addresses]:
    """Every page by its path in the site."""
    found = {path.relative_to(site).as_posix(): Addresses(path) for path in sorted(site.rglob("*.html"))}
    # It is shown under any address, so its links begin at the site's root.
    del found["404.html"]
    return found


def internal(pages: dict[str, Addresses]) -> Iterator[tuple[str, str, str]]:
    """Page, target page and anchor of every link inside the site."""
    for page, addresses in pages.items():
        for link in addresses.links:
            if not re.match(r"[a-z]+:|//", link):
                path, _, anchor = link.partition("#")
                target = posixpath.normpath(posixpath.join(posixpath.dirname(page), unquote(path)))
                yield page, target if path else page, unquote(anchor)


def test_every_link_inside_the_site_leads_to_a_page_and_a_place_in_it(pages):
    dead = [
        (page, target, anchor)
        for page, target, anchor in internal(pages)
        if target not in pages or (anchor and anchor not in pages[target].anchors)
    ]

    assert dead == []


def test_every_page_of_the_documentation_is_in_the_site(pages):
    written = {path.relative_to(ROOT / "docs") for path in files() if path.is_relative_to(ROOT / "docs")}

    assert {path.with_suffix(".html").as_posix() for path in written} - set(pages) == set()


def test_the_navigation_leads_to_every_page_but_the_shown_sources(pages):
    linked = {target for page, target, _ in internal({"index.html": pages["index.html"]})}

    assert {page for page in pages if not page.startswith("source/")} - linked == set()


def test_no_page_loads_anything_from_elsewhere(site, pages):
    elsewhere = {load for page in pages.values() for load in page.loads if re.match(r"[a-z]+:|//", load)}
    styles = [path for path in site.rglob("*.css") if re.search(r"url\(['\"]?(https?:)?//", path.read_text())]

    assert elsewhere == set()
    assert styles == []


def test_what_a_page_loads_is_in_the_site(site, pages):
    missing = {
        (page, load)
        for page, addresses in pages.items()
        for load in addresses.loads
        if not (site / posixpath.dirname(page) / load.partition("?")[0]).is_file()
    }

    assert missing == set()


@pytest.fixture(scope="module")
def index(site) -> dict:
    """The search index as a page from the file system reads it: a script, not a request."""
    script = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    return json.loads(script.removeprefix("var __index = "))


def test_the_search_index_holds_both_languages_and_no_source_listings(index):
    locations = {entry["location"].partition("#")[0] for entry in index["docs"]}

    assert {"quick-start.html", "quick-start.zh-CN.html", "reference/stages.html"} <= locations
    assert [location for location in locations if location.startswith("source/mindspeed_core")] == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("恢复训练 TP=2", ["恢", "复", "训", "练", "TP", "2"]),
        ("`--use-flash-attn`", ["use", "flash", "attn"]),
    ],
)
def test_chinese_is_searched_by_character_and_flags_by_word(index, text, words):
    assert list(filter(None, re.split(index["config"]["separator"], text))) == words


def test_every_page_brings_the_worker_that_searches_without_a_server(pages):
    without = [name for name, page in pages.items() if not any("offline-search.js" in s for s in page.loads)]

    assert without == []


def test_the_page_of_a_feature_holds_its_text_and_its_declarations(site):
    page = (site / "features/mindspeed-kernels/flash-attn.html").read_text(encoding="utf-8")
    manual = read("plugins/mindspeed_kernels/src/mindspeed_kernels/docs/flash-attn.md")
    headings = re.findall(r"^## (.*)$", manual, re.MULTILINE)

    assert headings
    assert [title for title in headings if f"{title}<a" not in page] == []
    assert "core-attention" in page
    assert "How it works</a>" not in page
