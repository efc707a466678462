"""The navigation: packages and flags in their sections, the Chinese pages apart, with their own chrome."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.nav import Navigation, Section
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
CHINESE = ".zh-CN.md"
CHINESE_SECTION = "中文"
SECTION_OF = {
    "mindspeed-memory": "Make it fit",
    "mindspeed-optim": "Make it fit",
    "mindspeed-kernels": "Make it fast",
    "mindspeed-profile": "Make it fast",
    "mindspeed-tune": "Make it fast",
    "mindspeed-cp": "Scale",
    "mindspeed-moe": "Scale",
    "mindspeed-pp": "Scale",
    "mindspeed-tp": "Scale",
    "mindspeed-models": "Train",
    "mindspeed-train": "Train",
    "mindspeed-megatron": "Migrate",
    "mindspeed-testing": "Extend",
}
"""Package: the section of its pages, by what one wants to do."""


def complete(nav: list[Any], features: Iterable[str]) -> None:
    """Add the pages of packages and of flags to their sections.

    Args:
        nav: entries of ``mkdocs.yml``, changed in place.
        features: paths of the features' pages.

    Raises:
        KeyError: a package has no section in `SECTION_OF`, or the section is not in the navigation.
    """
    sections = {title: children for entry in nav for title, children in entry.items()}
    for package, entry in _packages(list(features)):
        sections[SECTION_OF[package]].append(entry)
    flags = sorted((ROOT / "docs" / "reference" / "flags").glob("*.md"))
    pages = [{path.stem.replace("-", " "): f"reference/flags/{path.name}"} for path in flags]
    sections["Reference"].insert(0, {"Flags": [{"All families": "reference/flags.md"}, *pages]})


def _packages(features: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """One section for each package: its page, then those of its features."""
    for readme in sorted((*ROOT.glob("packages/*/README.md"), *ROOT.glob("plugins/*/README.md"))):
        package = readme.parent.name.replace("_", "-")
        pages = sorted(path for path in features if f"/{package}/" in path)
        entries = [{posixpath.basename(page)[:-3]: page.removeprefix("docs/")} for page in pages]
        yield package, {package: [{"Package": f"packages/{package}.md"}, *entries]}


class Languages:
    """The navigation of each language, and what a page of it has around its text."""

    def __init__(self) -> None:
        self._chinese: Navigation | None = None

    def split(self, nav: Navigation) -> Navigation:
        """Return the navigation without the Chinese pages, and keep those."""
        found = [item for item in nav.items if item.title == CHINESE_SECTION]
        children = found[0].children if found and isinstance(found[0], Section) else []
        chinese = [page for page in nav.pages if page.file.src_uri.endswith(CHINESE)]
        self._chinese = Navigation(children or [], chinese)
        pages = [page for page in nav.pages if page not in chinese]
        for page in (pages[-1], chinese[-1]) if chinese else ():
            page.next_page = None
        if chinese:
            chinese[0].previous_page = None
        return Navigation([item for item in nav.items if item not in found], pages)

    def dress(self, context: dict[str, Any], page: Page, config: MkDocsConfig, twins: dict[str, str]) -> None:
        """Give a page the words, the navigation and the switcher of its language.

        Args:
            context: of the page's template, changed in place.
            page: to be written.
            config: of the site; its language and its links are those of this page afterwards.
            twins: address of every page that has one in both languages, by its place.
        """
        uri = page.file.src_uri
        chinese = uri.endswith(CHINESE)
        english = uri.replace(CHINESE, ".md") if chinese else uri
        config.theme["language"] = "zh" if chinese else "en"
        config.extra["homepage"] = "index.zh-CN.html" if chinese else "index.html"
        config.extra["alternate"] = [
            {"name": "English", "lang": "en", "link": twins.get(english, "index.html")},
            {
                "name": "中文",
                "lang": "zh",
                "link": twins.get(english.replace(".md", CHINESE), "index.zh-CN.html"),
            },
        ]
        if chinese:
            context["nav"] = self._chinese
