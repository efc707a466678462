"""Bytes on the device over one step: recorded as storages come and go, and drawn as an SVG picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_WIDTH, _HEIGHT, _LEFT, _TOP = 900, 320, 90, 40
_POINTS = 2000
_COLOURS = ("#7aa6da", "#8fc77a", "#e6c07b", "#c49ac7", "#5fa35f", "#b9c9e0")
_GIB, _MIB = 2**30, 2**20


@dataclass
class Timeline:
    """A watcher of storages on the device.

    Attributes:
        bytes: alive after each event.
        marks: names of phases, with the event at which each began.
    """

    bytes: list[int] = field(default_factory=list)
    marks: list[tuple[int, str]] = field(default_factory=list)
    _alive: int = 0
    _sizes: dict[int, int] = field(default_factory=dict)

    def taken(self, key: int, size: int) -> None:
        """Count an allocation."""
        self._sizes[key] = size
        self._changed(size)

    def released(self, key: int) -> None:
        """Count a release."""
        self._changed(-self._sizes.pop(key, 0))

    def mark(self, name: str) -> None:
        """Begin a phase."""
        self.marks.append((len(self.bytes), name))

    def _changed(self, amount: int) -> None:
        self._alive += amount
        self.bytes.append(self._alive)


def picture(timeline: Timeline, kept: Mapping[str, int], title: str) -> str:
    """Return the curve of bytes alive over what is kept between steps, by kind, as an SVG picture.

    Args:
        timeline: of one step.
        kept: bytes by kind that are there all the time.
        title: of the picture.
    """
    top = max(*timeline.bytes, sum(kept.values()), 1)
    step = max(1, -(-len(timeline.bytes) // _POINTS))
    # Of each group of events the largest value: no peak is left out.
    curve = [max(timeline.bytes[at : at + step]) for at in range(0, len(timeline.bytes), step)]
    bottom = _TOP + _HEIGHT

    def x(event: float) -> float:
        return _LEFT + _WIDTH * event / max(len(timeline.bytes), 1)

    def y(size: float) -> float:
        return bottom - _HEIGHT * size / top

    points = " ".join(f"{x(number * step):.1f},{y(size):.1f}" for number, size in enumerate(curve))
    parts = [
        f'<polygon points="{_LEFT},{bottom} {points} {_LEFT + _WIDTH},{bottom}" fill="#e8e8e8" '
        'stroke="#555"/>'
    ]
    base = 0
    for colour, (kind, size) in zip(_COLOURS, kept.items()):
        height = _HEIGHT * size / top
        parts.append(
            f'<rect x="{_LEFT}" y="{y(base + size):.1f}" width="{_WIDTH}" height="{height:.1f}" '
            f'fill="{colour}"/><text x="{_LEFT + 6}" y="{y(base) - 3:.1f}">{kind}, {readable(size)}</text>'
        )
        base += size
    peak = max(range(len(curve)), key=curve.__getitem__, default=0)
    for event, name in timeline.marks:
        parts.append(
            f'<line x1="{x(event):.1f}" x2="{x(event):.1f}" y1="{_TOP}" y2="{bottom}" stroke="#999"/>'
            f'<text x="{x(event) + 4:.1f}" y="{bottom + 14}">{name}</text>'
        )
    parts.append(
        f'<circle cx="{x(peak * step):.1f}" cy="{y(top):.1f}" r="3" fill="#c00"/>'
        f'<text x="4" y="{_TOP + 4}">{readable(top)}</text><text x="4" y="{bottom}">0</text>'
        f'<text x="{_LEFT}" y="16">{title}</text>'
    )
    width, height = _LEFT + _WIDTH + 20, bottom + 24
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" role="img">'
        f"<title>{title}</title><style>text{{font:11px sans-serif}}</style>"
        f'<rect width="{width}" height="{height}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def readable(size: float) -> str:
    """Return bytes in MiB, or in GiB where there are so many."""
    return f"{size / _GIB:.3f} GiB" if size >= _GIB else f"{size / _MIB:.3f} MiB"
