"""Draws the figures of the pages into ``docs/figures``, from declarations and from recorded runs.

``python docs/figures/draw.py`` writes every figure; with ``--check`` it writes nothing, names stale ones and
exits with 1. What runs have to give is recorded by ``record.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from declared_figures import families_figure, schedule_figures, stages_figure
from recorded_figures import (
    loads_figure,
    losses_figure,
    memory_figure,
    overlap_figure,
    plan_figure,
    ring_figure,
    ulysses_figure,
)

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))

from generate import tree_registry  # noqa: E402


def render() -> dict[Path, str]:
    """Return every figure by its path."""
    figures = {
        "stages": stages_figure(),
        "families": families_figure(tree_registry()),
        **schedule_figures(),
        "memory": memory_figure(),
        "ring": ring_figure(),
        "ulysses": ulysses_figure(),
        "overlap": overlap_figure(),
        "losses": losses_figure(),
        "loads": loads_figure(),
        "plan": plan_figure(),
    }
    return {FOLDER / f"{name}.svg": text for name, text in figures.items()}


def stale(figures: dict[Path, str]) -> list[Path]:
    """Return figures that differ from what would be drawn now, and those that nothing draws."""
    differing = [
        path
        for path, text in figures.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    return differing + sorted({*FOLDER.glob("*.svg")} - set(figures))


def main(arguments: Sequence[str]) -> int:
    """Write or check the figures; the exit status."""
    figures = render()
    found = stale(figures)
    if "--check" in arguments:
        for path in found:
            print(f"docs/figures/{path.name} is not up to date: run docs/figures/draw.py", file=sys.stderr)
        return 1 if found else 0
    for path in found:
        path.unlink() if path not in figures else path.write_text(figures[path], encoding="utf-8")
        print(f"docs/figures/{path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
