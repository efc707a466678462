"""Sizes of files: one subject each, and the core read in an afternoon."""

from __future__ import annotations

from pathlib import Path

import pytest
from markdown_files import ROOT

LEAST, MOST = 25, 400
"""Lines of a file of source. Those of packages (``__init__``) and programs (``__main__``) may have fewer."""
CORE_LINES, CORE_FILES = 12_000, 90


def source_files() -> list[Path]:
    """Return the files that are installed, and the programs that write the documentation."""
    folders = ("packages/*/src", "plugins/*/src")
    places = [ROOT / "mindspeed_core", ROOT / "docs", ROOT / "tools"]
    places += [place for folder in folders for place in ROOT.glob(folder)]
    return sorted(path for place in places for path in place.rglob("*.py"))


def lines_of(path: Path) -> int:
    """Count the lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def test_a_file_of_source_has_one_subject():
    sizes = {path.relative_to(ROOT).as_posix(): lines_of(path) for path in source_files()}
    whole = ("__init__.py", "__main__.py")
    long = {name for name, lines in sizes.items() if lines > MOST}
    short = {name for name, lines in sizes.items() if lines < LEAST and not name.endswith(whole)}

    assert {f"{name}: {sizes[name]}" for name in long | short} == set()


@pytest.mark.parametrize(("counted", "bound"), [(lines_of, CORE_LINES), (lambda path: 1, CORE_FILES)])
def test_the_core_is_read_in_an_afternoon(counted, bound):
    assert sum(map(counted, (ROOT / "mindspeed_core").rglob("*.py"))) <= bound
