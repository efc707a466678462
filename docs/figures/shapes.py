"""Figures of the pages as SVG that need nothing beside them and follow a light or dark page.

Sizes are pixels. Colours are classes: ``c0`` to ``c5`` fill, ``s0`` to ``s5`` draw lines, in the order in
which a figure uses them.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

LIGHT = ("#4c86c6", "#4f9d5d", "#d99a2b", "#9a6bb0", "#c8553d", "#3a9c9c")
DARK = ("#6ea8e6", "#6fbf7d", "#e5b454", "#b98fd0", "#e67a62", "#5cc0c0")
"""Filled areas of the two schemes; text on them is dark in both."""


def _colours(fills: Sequence[str], ink: str, quiet: str, line: str, box: str) -> str:
    named = {"ink": ink, "quiet": quiet, "line": line, "box": box}
    named |= {f"c{number}": fill for number, fill in enumerate(fills)}
    return "svg{" + "".join(f"--{name}:{value};" for name, value in named.items()) + "}"


STYLE = "".join(
    (
        _colours(LIGHT, "#1f2328", "#59636e", "#c8d1da", "#f3f6f9"),
        "@media(prefers-color-scheme:dark){",
        _colours(DARK, "#e6edf3", "#9aa7b4", "#3d4650", "#20262e"),
        "}text{font:13px system-ui,sans-serif;fill:var(--ink)}.q{fill:var(--quiet)}.h{font-weight:600}",
        ".on{fill:#10151b;font-size:11px}.m{font-family:ui-monospace,monospace;font-size:12px}",
        ".box{fill:var(--box);stroke:var(--line)}.l{stroke:var(--line);fill:none}",
        ".i{stroke:var(--ink);fill:none}.ink{fill:var(--ink)}",
        *(f".c{n}{{fill:var(--c{n})}}.s{n}{{stroke:var(--c{n});fill:none;stroke-width:2}}" for n in range(6)),
    )
)


class Drawing:
    """A figure that grows part by part."""

    def __init__(self, title: str, description: str, width: int = 640) -> None:
        """Begin an empty figure.

        Args:
            title: what it shows, for readers that do not see it.
            description: what is to be seen in it, with its numbers.
            width: of the figure.
        """
        self.width = width
        self._title, self._description = title, description
        self._parts: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, kind: str, note: str = "") -> None:
        """Draw a box, with a note that appears under the pointer."""
        inner = f"><title>{escape(note)}</title></rect>" if note else "/>"
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" class="{kind}"{inner}'
        )

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        """Write a line of text; ``y`` is its base line."""
        where = "" if anchor == "start" else f' text-anchor="{anchor}"'
        of_kind = f' class="{kind}"' if kind else ""
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}"{of_kind}{where}>{escape(text)}</text>')

    def path(self, points: Sequence[tuple[float, float]], kind: str = "l", arrow: bool = False) -> None:
        """Draw lines from point to point, with a tip at the end on request."""
        way = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        tip = ' marker-end="url(#tip)"' if arrow else ""
        self._parts.append(f'<path d="{way}" class="{kind}"{tip}/>')

    def legend(self, y: float, entries: Sequence[tuple[str, str]], x: float = 0.0) -> float:
        """Explain colours in rows of text; return where the next row would be."""
        left = x
        for kind, name in entries:
            wide = 24 + 7.2 * len(name)
            if left > x and left + wide > self.width:
                left, y = x, y + 20
            self.rect(left, y - 10, 12, 12, kind)
            self.text(left + 18, y, name, "q")
            left += wide + 14
        return y + 20

    def svg(self, height: float) -> str:
        """Return the figure, cut at a height."""
        size = f'viewBox="0 0 {self.width} {height:.0f}" width="{self.width}" height="{height:.0f}"'
        tip = (
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0 0L8 4L0 8z" class="ink"/></marker></defs>'
        )
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="t d">'
            f'<title id="t">{escape(self._title)}</title><desc id="d">{escape(self._description)}</desc>'
            f"<style>{STYLE}</style>{tip}"
        )
        return "\n".join((head, *self._parts, "</svg>")) + "\n"
