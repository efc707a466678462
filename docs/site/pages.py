"""Turns the repository's Markdown into the pages of the site.

MkDocs calls the ``on_…`` functions. Pages outside ``docs`` (the README, the plugins' own pages) join the
site, so do the pages of features, which are made from declarations here. A link to any other file of the
repository leads to a page that shows it, so that the built site is whole without the repository and without
a network.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from diagrams import drawn
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page
from navigation import Languages, complete
from search_words import search_meta

ROOT = Path(__file__).resolve().parents[2]
ROOT_PAGES = {
    "README.md": "index.md",
    "README.zh-CN.md": "index.zh-CN.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
"""Page of the repository's root: its place in the site."""

LANGUAGES = {".py": "python", ".json": "json", ".toml": "toml", ".sh": "bash", ".yml": "yaml"}
LINKING = (".md", "/")
"""Endings of what has links: pages and folders."""
PICTURES = (".svg", ".png")

_CODE = re.compile(r"^(?P<indent> *)```.*?^(?P=indent)```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_TARGET = re.compile(r"(\]\()([^)\s]+)(\))")
_DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MANUAL = re.compile(r"^\[How it works\]\(([^)]+)\)$", re.MULTILINE)


def slug(title: str, separator: str) -> str:
    """The anchor of a heading, as code hosts make it: links work in the repository and in the site."""
    return re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", separator)


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """Text with everything but code blocks and code spans changed."""
    pieces, end = [], 0
    for code in _CODE.finditer(text):
        pieces += [change(text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*pieces, change(text[end:])])


def targets(text: str) -> Iterator[str]:
    """The relative link targets of a page."""
    found: list[str] = []
    outside_code(text, lambda piece: found.extend(match[2] for match in _TARGET.finditer(piece)) or piece)
    return (target for target in found if not re.match(r"[a-z]+:|#|/", target))


def repository_path(origin: str, target: str) -> str:
    """Resolve a link in the page ``origin``: a file of the repository, or a folder without a README."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target.partition("#")[0]))
    readme = posixpath.join(path, "README.md")
    if (ROOT / readme).is_file():
        return readme
    return path + "/" if (ROOT / path).is_dir() else path


def markdown(path: str) -> str:
    """A file or folder as a page: Markdown as it is, code shown, the files of a folder listed."""
    if path in feature_texts():
        return feature_texts()[path]
    if path.endswith("/"):
        names = sorted(child.name for child in (ROOT / path).iterdir() if child.is_file())
        return "\n".join([f"# {path}", "", *(f"- [{name}]({name})" for name in names)])
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    language = LANGUAGES.get(posixpath.splitext(path)[1], "text")
    return f"# {path}\n\n~~~~~~ {language}\n{text}\n~~~~~~\n"


class Places:
    """Return the place of each file of the repository in the site.

    Attributes:
        uri: repository path to the page that shows it.
        origin: page to the repository path that its text comes from.
    """

    def __init__(self) -> None:
        self.uri: dict[str, str] = {}
        self.origin: dict[str, str] = {}

    def add(self, path: str, uri: str) -> None:
        """One page and the file it is made from."""
        self.uri[path] = uri
        self.origin[uri] = path

    def relinked(self, text: str, origin: str, page: str) -> str:
        """Text from the file ``origin``, its links as they must be on ``page``."""

        def moved(match: re.Match[str]) -> str:
            target = match[2]
            if re.match(r"[a-z]+:|#|/", target):
                return match[0]
            uri = self.uri.get(repository_path(origin, target))
            if uri is None:
                return match[0]
            _, mark, anchor = target.partition("#")
            return (
                match[1] + posixpath.relpath(uri, posixpath.dirname(page) or ".") + mark + anchor + match[3]
            )

        return outside_code(text, lambda piece: _TARGET.sub(moved, piece))


_places = Places()
_languages = Languages()
_addresses: dict[str, str] = {}
"""Address of every page, by its place in the site."""


@cache
def feature_texts() -> dict[str, str]:
    """The page of each feature and that of its proofs, made from its declarations."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        from feature_pages import feature_pages
        from generate import tree_registry
        from proofs_of_features import proof_pages
    finally:
        sys.path.remove(str(ROOT / "docs"))
    registry = tree_registry()
    return feature_pages(registry) | proof_pages(registry)


def manuals() -> dict[str, str]:
    """The text of each feature, by the page that the declarations made for it."""
    links = {path: _MANUAL.search(text) for path, text in feature_texts().items()}
    return {path: repository_path(path, link[1]) for path, link in links.items() if link}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Anchors as code hosts make them; packages, features and flags in the navigation."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    complete(config.nav or [], (path for path in feature_texts() if path.startswith("docs/features/")))
    return config


def on_nav(nav: Navigation, **_: object) -> Navigation:
    """The Chinese pages have a navigation of their own."""
    return _languages.split(nav)


def on_page_context(
    context: dict[str, Any], *, page: Page, config: MkDocsConfig, **_: object
) -> dict[str, Any]:
    """The language of a page around its text, and the way to its twin."""
    _languages.dress(context, page, config, _addresses)
    return context


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that do not lie in ``docs``, and one for every file that a page links to."""
    _places.uri.clear()
    _places.origin.clear()
    for file in files.documentation_pages():
        _places.add(f"docs/{file.src_uri}", file.src_uri)
    for path, uri in ROOT_PAGES.items():
        _add(files, config, path, uri)
    for readme in (*ROOT.glob("packages/*/README.md"), *ROOT.glob("plugins/*/README.md")):
        package = readme.parent.name.replace("_", "-")
        _add(files, config, readme.relative_to(ROOT).as_posix(), f"packages/{package}.md")
    for page in feature_texts():
        _add(files, config, page, page.removeprefix("docs/"))
    for page, text in manuals().items():
        _places.uri[text] = page.removeprefix("docs/")
    waiting = [*_places.uri]
    while waiting:
        origin = waiting.pop()
        if not origin.endswith(LINKING):
            continue
        for target in targets(markdown(origin)):
            path = repository_path(origin, target)
            if path in _places.uri or not (ROOT / path).exists():
                continue
            if path.endswith(PICTURES):
                _add_picture(files, config, path)
            else:
                _add(files, config, path, f"source/{path.removesuffix('/').removesuffix('.md')}.md")
                waiting.append(path)
    _addresses.clear()
    _addresses.update({file.src_uri: file.url for file in files.documentation_pages()})
    return files


def _add(files: Files, config: MkDocsConfig, path: str, uri: str) -> None:
    """Adds a file or folder of the repository as a page of the site."""
    files.append(File.generated(config, uri, content=markdown(path)))
    _places.add(path, uri)


def _add_picture(files: Files, config: MkDocsConfig, path: str) -> None:
    """Adds a picture of the repository as it is; those in ``docs`` are in the site already."""
    _places.uri[path] = path.removeprefix("docs/")
    if not path.startswith("docs/"):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))


def on_page_markdown(text: str, *, page: Page, **_: object) -> str:
    """Links as the site needs them; the text of a feature on its page; diagrams drawn."""
    uri = page.file.src_uri
    page.meta.update(search_meta(uri))
    origin = _places.origin[uri]
    if not origin.endswith(LINKING):
        return text
    text = _MANUAL.sub(lambda link: _manual_text(repository_path(origin, link[1]), uri), text)
    text = _places.relinked(text, origin, uri)
    return _DIAGRAM.sub(lambda block: drawn(block[1]), text)


def _manual_text(path: str, page: str) -> str:
    """The text of a feature without its title, linked as on its page."""
    text = (ROOT / path).read_text(encoding="utf-8")
    text = re.sub(r"\A# .*\n", "", text)
    return _places.relinked(text, path, page).strip()
