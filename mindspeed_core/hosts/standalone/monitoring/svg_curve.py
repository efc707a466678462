"""Curves as SVG text: a chart that a page can contain, without scripts, fonts or files beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import isfinite

Points = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT = 640, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 28, 28
_COLOURS = ("#1f6feb", "#d1481d", "#2a8f4f", "#8250df")
_MOST_POINTS = 600


def svg_curve(title: str, series: Mapping[str, Points]) -> str:
    """Draw series of ``(step, value)`` over a common axis; values that are not finite are left out.

    Args:
        title: heading of the chart.
        series: points by the name shown in the legend.

    Returns:
        One ``<svg>`` element; an empty string when no point is left.
    """
    kept = {name: thinned([p for p in points if isfinite(p[1])]) for name, points in series.items()}
    kept = {name: points for name, points in kept.items() if points}
    if not kept:
        return ""
    xs = [x for points in kept.values() for x, _ in points]
    ys = [y for points in kept.values() for _, y in points]
    low_x, high_x, low_y, high_y = min(xs), max(xs), min(ys), max(ys)
    span_x, span_y = (high_x - low_x) or 1.0, (high_y - low_y) or 1.0
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def place(point: tuple[float, float]) -> str:
        x = _LEFT + (point[0] - low_x) / span_x * (right - _LEFT)
        y = bottom - (point[1] - low_y) / span_y * (bottom - _TOP)
        return f"{x:.1f},{y:.1f}"

    lines = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">',
        f'<text x="{_LEFT}" y="16" class="title">{escape(title)}</text>',
        f'<path d="M{_LEFT},{_TOP}V{bottom}H{right}" class="axis"/>',
        f'<text x="{_LEFT - 6}" y="{_TOP + 4}" class="end">{high_y:.4g}</text>',
        f'<text x="{_LEFT - 6}" y="{bottom}" class="end">{low_y:.4g}</text>',
        f'<text x="{_LEFT}" y="{_HEIGHT - 8}">{low_x:g}</text>',
        f'<text x="{right}" y="{_HEIGHT - 8}" class="end">step {high_x:g}</text>',
    ]
    for index, (name, points) in enumerate(kept.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        joined = " ".join(map(place, points))
        lines.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        if len(points) == 1:
            x, y = place(points[0]).split(",")
            lines.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>')
        lines.append(
            f'<text x="{right - 130 * index}" y="16" class="end" fill="{colour}">{escape(name)}</text>'
        )
    return "\n".join([*lines, "</svg>"])


def thinned(points: Points) -> list[tuple[float, float]]:
    """At most some hundred points: of each stretch the lowest and the highest, so that no spike is lost."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    stretch = -(-len(points) * 2 // _MOST_POINTS)
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        extremes = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        kept += sorted(extremes)
    if kept[-1] != points[-1]:
        kept.append(points[-1])
    return kept
