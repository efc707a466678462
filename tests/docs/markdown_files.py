"""The Markdown files of the repository, and the blocks, headings and links in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[\w-]*)\n(?P<body>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language (``bash`` for commands) and text."""

    language: str
    text: str


def files() -> list[Path]:
    """Every Markdown file that belongs to the repository."""
    skipped = {"node_modules", "build", "dist", "runs", "__pycache__"}
    return sorted(
        path
        for path in ROOT.rglob("*.md")
        if not any(part in skipped or part.startswith(".") for part in path.relative_to(ROOT).parts)
    )


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text: str, language: str | None = None) -> list[Block]:
    """The fenced blocks of a text, of one language where it is given."""
    found = [Block(match["language"], match["body"]) for match in _FENCE.finditer(text)]
    return [block for block in found if language is None or block.language == language]


def without_blocks(text: str) -> str:
    return _FENCE.sub("", text)


def headings(text: str) -> list[int]:
    """The level of each heading, in order."""
    return [len(match[1]) for match in re.finditer(r"^(#+) ", without_blocks(text), re.MULTILINE)]


def links(text: str) -> list[str]:
    """The targets of links outside code."""
    return _LINK.findall(re.sub(r"`[^`\n]*`", "", without_blocks(text)))


def commands(text: str) -> list[str]:
    """The shell commands of a text: lines of ``bash`` blocks without comments, joined where they go on."""
    found = []
    for block in blocks(text, "bash"):
        for line in block.text.replace("\\\n", " ").splitlines():
            command = " ".join(line.partition("  #")[0].split())
            if command and not command.startswith("#"):
                found.append(command)
    return found
