"""Draws the Mermaid graphs of the pages as SVG.

Code hosts draw them with a script from the network; the site has to work without one. Only what the pages use
is understood: ``graph TD``, nodes ``name[text]`` and edges ``a --> b``.
"""

from __future__ import annotations

import re
from html import escape
from itertools import pairwise

LETTER, LINE, PADDING = 7.4, 40.0, 14.0
"""Width of a letter, height of a node and space beside its text, in the units of the drawing."""
GAP_X, GAP_Y = 28.0, 44.0

_NODE = re.compile(r"(\w+)(?:\[([^\]]*)\])?")


def drawn(source: str) -> str:
    """The drawing of a graph, as HTML.

    Raises:
        ValueError: the source has a line that is neither node nor edge, or the graph has a cycle.
    """
    labels, edges = parsed(source)
    layers = layered(list(labels), edges)
    widths = {name: len(text) * LETTER + 2 * PADDING for name, text in labels.items()}
    rows = [sum(widths[name] for name in row) + GAP_X * (len(row) - 1) for row in layers]
    total, height = max(rows), len(layers) * (LINE + GAP_Y) - GAP_Y
    place: dict[str, tuple[float, float]] = {}
    for number, (row, used) in enumerate(zip(layers, rows)):
        x = (total - used) / 2
        for name in row:
            place[name] = (x + widths[name] / 2, number * (LINE + GAP_Y))
            x += widths[name] + GAP_X
    lines = [_edge(place[a], place[b]) for a, b in edges]
    boxes = [_box(*place[name], widths[name], text) for name, text in labels.items()]
    return (
        f'<svg class="diagram" viewBox="-2 -2 {total + 4:.0f} {height + 4:.0f}" '
        f'style="max-width: {total:.0f}px" role="img">\n'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0L8 4L0 8z" fill="currentColor"/></marker></defs>\n'
        + "\n".join([*lines, *boxes])
        + "\n</svg>\n"
    )


def parsed(source: str) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """The text of each node, in order, and the edges."""
    first, *lines = source.strip().splitlines()
    if first.split() != ["graph", "TD"]:
        raise ValueError(f"a drawing begins with 'graph TD', not {first!r}")
    labels: dict[str, str] = {}
    edges: list[tuple[str, str]] = []
    for line in filter(None, map(str.strip, lines)):
        chain = [_NODE.fullmatch(part.strip()) for part in line.split("-->")]
        if not all(chain):
            raise ValueError(f"neither node nor edge: {line!r}")
        names = [node[1] for node in chain if node]
        for node in filter(None, chain):
            if node[2] or node[1] not in labels:
                labels[node[1]] = node[2] or node[1]
        edges += pairwise(names)
    return labels, edges


def layered(names: list[str], edges: list[tuple[str, str]]) -> list[list[str]]:
    """Rows of nodes so that every edge leads down; a node stands as near as it can to what it leads to."""
    height: dict[str, int] = {}
    while len(height) < len(names):
        below = {name: [b for a, b in edges if a == name] for name in names if name not in height}
        ready = [name for name, others in below.items() if all(other in height for other in others)]
        if not ready:
            raise ValueError("the graph has a cycle")
        height.update({name: max((height[other] + 1 for other in below[name]), default=0) for name in ready})
    rows: list[list[str]] = []
    for level in sorted(set(height.values()), reverse=True):
        rows.append([name for name in names if height[name] == level])
    return rows


def _edge(start: tuple[float, float], end: tuple[float, float]) -> str:
    (x, y), (u, v) = (start[0], start[1] + LINE), end
    middle = (y + v) / 2
    return (
        f'<path d="M{x:.0f} {y:.0f}C{x:.0f} {middle:.0f} {u:.0f} {middle:.0f} {u:.0f} {v:.0f}" '
        'fill="none" stroke="currentColor" marker-end="url(#tip)"/>'
    )


def _box(x: float, y: float, width: float, text: str) -> str:
    return (
        f'<rect x="{x - width / 2:.0f}" y="{y:.0f}" width="{width:.0f}" height="{LINE:.0f}" rx="5"/>'
        f'<text x="{x:.0f}" y="{y + LINE / 2:.0f}">{escape(text)}</text>'
    )
