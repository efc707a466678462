"""The built site is whole: every page in the navigation, no dead link, nothing fetched, a working search."""

from __future__ import annotations

import posixpath
import re

import pytest
from built_pages import Addresses, internal, navigation
from markdown_files import ROOT, files, read
from search_ranking import Search
from search_words import WORDS
from wanted_pages import WANTED

NAVIGATION_BYTES = 24_000
"""Most that the sidebar of a page may take, which every page repeats; it was 61,000 once."""
FEATURE_BYTES = 80_000
"""Most of a feature's page, navigation and all."""


def test_every_link_inside_the_site_leads_to_a_page_and_a_place_in_it(site, pages):
    dead = [
        (page, target, anchor)
        for page, target, anchor in internal(pages)
        if (target not in pages and not (target.endswith((".svg", ".png")) and (site / target).is_file()))
        or (anchor and anchor not in pages[target].anchors)
    ]

    assert dead == []


def test_every_page_of_the_documentation_is_in_the_site(pages):
    written = {path.relative_to(ROOT / "docs") for path in files() if path.is_relative_to(ROOT / "docs")}

    assert {path.with_suffix(".html").as_posix() for path in written} - set(pages) == set()


def test_the_navigation_leads_to_every_page_but_the_shown_sources_and_proofs(site, pages):
    """A sidebar shows the sections and what is in the open one, so several clicks may be needed."""
    reached, waiting = {"index.html", "index.zh-CN.html"}, ["index.html", "index.zh-CN.html"]
    while waiting:
        page = waiting.pop()
        sidebar = Addresses(navigation((site / page).read_text(encoding="utf-8")))
        found = {target for _, target, _ in internal({page: sidebar})} - reached
        reached |= found
        waiting += found

    assert {page for page in pages if not page.startswith(("source/", "proofs/"))} - reached == set()


def test_the_page_of_a_feature_leads_to_its_proofs(pages):
    proofs = {page for page in pages if page.startswith("proofs/")}
    linked = {target for page, target, _ in internal(pages) if page.startswith("features/")}

    assert len(proofs) > 80
    assert proofs - linked == set()


def test_the_sidebar_of_a_page_stays_small(site, pages):
    sizes = {
        page: len(navigation((site / page).read_text(encoding="utf-8")))
        for page in pages
        # Pages of many headings repeat those in it.
        if not page.startswith(("source/", "reference/", "changelog"))
    }

    assert {page: size for page, size in sizes.items() if size > NAVIGATION_BYTES} == {}


def test_the_page_of_a_feature_is_its_manual_not_its_evidence(site, pages):
    sizes = {
        page: len((site / page).read_text(encoding="utf-8")) for page in pages if page.startswith("features/")
    }

    assert {page: size for page, size in sizes.items() if size > FEATURE_BYTES} == {}


def test_a_picture_is_a_picture_and_says_what_it_shows(pages):
    shown = [(page, *picture) for page, found in pages.items() for picture in found.pictures]

    assert len(shown) > 10
    assert [one for one in shown if not one[1].endswith((".svg", ".png")) or len(one[2]) < 10] == []


def test_a_chinese_page_says_so_and_each_twin_leads_to_the_other(pages):
    chinese = [page for page in pages if page.endswith(".zh-CN.html") and not page.startswith("source/")]
    links = {(page, target) for page, target, _ in internal(pages)}

    assert {pages[page].language for page in chinese} == {"zh"}
    assert {found.language for page, found in pages.items() if ".zh-CN" not in page} == {"en"}
    for page in chinese:
        english = page.replace(".zh-CN", "")
        assert {(page, english), (english, page)} <= links, page


def test_every_flag_has_a_place_of_its_own(pages):
    place = pages["reference/flags/kernels.html"]

    assert "use-flash-attn" in place.anchors
    assert (
        len(
            [a for page, found in pages.items() if page.startswith("reference/flags/") for a in found.anchors]
        )
        > 700
    )


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
    assert "#use-flash-attn" in page
    assert "How it works</a>" not in page


@pytest.fixture(scope="module")
def search(index) -> Search:
    return Search(index)


@pytest.mark.parametrize("query", WANTED)
def test_the_page_that_answers_a_word_is_among_the_first_three(search, query):
    assert WANTED[query] in search.pages(query)[:3]


def test_proofs_and_shown_files_are_not_searched_and_lists_come_last(index, search):
    heads = {entry["location"].partition("#")[0] for entry in index["docs"]}
    found = search.pages("checkpoint")
    lists = [page for page in found if page.startswith("reference/")]

    assert [page for page in heads if page.startswith(("proofs/", "source/"))] == []
    assert lists
    assert found.index("checkpoints.html") < 3
    assert [page for page in found[:20] if page in lists] == []


def test_the_words_of_the_search_belong_to_pages(pages):
    assert [page for page in WORDS if page.replace(".md", ".html") not in pages] == []
