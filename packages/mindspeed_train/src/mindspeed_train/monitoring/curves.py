"""Curves of a run over its steps: the loss as a PNG, any series as SVG text for a page of one file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from io import StringIO
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_core.terminal.foreign_text import for_html

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]

LOSS = "loss (nats per token)"
SWITCH = "MINDSPEED_CURVES"
"""Environment variable; ``0`` draws nothing: of a training of seconds drawing is most of its time."""
_MOST_POINTS = 600


def wanted() -> bool:
    """Return whether a run draws its curves at its end."""
    return os.environ.get(SWITCH) != "0"


def loss_series(history: Sequence[Mapping[str, Any]]) -> dict[str, Points]:
    """Return training, validation and test loss by name from the records of ``metrics.jsonl``."""
    keys = {"training": "loss", "validation": "validation_loss", "test": "test_loss"}
    return {name: series(history, key) for name, key in keys.items()}


def series(history: Sequence[Mapping[str, Any]], key: str) -> Points:
    """Return ``(step, value)`` of every record that has a value under ``key``."""
    return [(row["step"], row[key]) for row in history if row.get(key) is not None]


def draw_loss_curve(
    history: Sequence[Mapping[str, Any]], path: Path, references: Mapping[str, float] | None = None
) -> None:
    """Draw the losses in records of ``metrics.jsonl`` into a PNG.

    ``references`` become horizontal lines by label, for instance the unigram entropy of the data.
    """
    _figure(LOSS, loss_series(history), references or {}, (8, 5)).savefig(path, dpi=120)


def svg_curve(title: str, curves: Mapping[str, Points]) -> str:
    """Draw series of ``(step, value)`` over a common axis; values that are not finite are left out.

    Returns:
        One ``<svg>`` element that refers to nothing, the same for the same points; an empty string when no
        point is left.
    """
    if not any(isfinite(y) for points in curves.values() for _, y in points):
        return ""
    from matplotlib import rc_context

    figure = _figure(title, curves, {}, (8, 3))
    text = StringIO()
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(text, format="svg")
    drawing = text.getvalue()
    width, height = figure.get_size_inches() * 72
    # Several drawings share a page, where an id may stand once; nothing here is referred to by its own.
    content = re.sub(r' id="[^"]*"', "", drawing[drawing.index('<g id="figure') :])
    return f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{for_html(title)}">\n{content}'


def _figure(
    title: str, curves: Mapping[str, Points], references: Mapping[str, float], size: tuple[float, float]
) -> Figure:
    """Plot what is finite; without clipping and tick marks, which an SVG makes of references to its parts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    for index, (name, points) in enumerate(curves.items()):
        kept = thinned([point for point in points if isfinite(point[1])])
        if len(kept) == 1:
            (x, y) = kept[0]
            axes.scatter([x], [y], label=name, clip_on=False, facecolors=f"C{index}", edgecolors="none")
        elif kept:
            axes.plot(*zip(*kept), color=f"C{index}", label=name, linewidth=1.2, clip_on=False)
    for label, value in references.items():
        axes.axhline(value, linestyle="--", color="grey", label=f"{label} ({value:.3f})", clip_on=False)
    axes.set_xlabel("step")
    axes.set_ylabel(title)
    axes.grid(alpha=0.3, clip_on=False)
    axes.tick_params(length=0, bottom=False, left=False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    return figure


def thinned(points: Points) -> list[tuple[float, float]]:
    """Return at most some hundred points: the lowest and highest of each stretch, so that spikes stay."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    stretch = -(-len(points) * 2 // _MOST_POINTS)
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    if kept[-1] != points[-1]:
        kept.append(points[-1])
    return kept
