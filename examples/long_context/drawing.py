"""The curve of memory over ranks as an SVG file that needs nothing beside it."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 560, 300, 70, 20, 44, 44


def draw(curve: Mapping[int, int], cap: int, title: str) -> str:
    """Draw bytes by number of ranks, and the limit.

    Args:
        curve: bytes of a process by number of processes.
        cap: the limit, in bytes.
        title: heading.
    """
    top = max(*curve.values(), cap) * 1.1
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    step = (right - _LEFT) / max(1, len(curve))

    def height(size: float) -> float:
        return bottom - size / top * (bottom - _TOP)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(title)}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="20" font-size="14" font-weight="600">{escape(title)}</text>',
        f'<path d="M{_LEFT},{_TOP}V{bottom}H{right}" fill="none" stroke="#888888"/>',
    ]
    places = []
    for index, (ranks, size) in enumerate(sorted(curve.items())):
        middle = _LEFT + step * (index + 0.5)
        places.append(f"{middle:.1f},{height(size):.1f}")
        fits = size <= cap
        colour = "#2a8f4f" if fits else "#d1481d"
        parts += [
            f'<rect x="{middle - step / 5:.1f}" y="{height(size):.1f}" width="{step / 2.5:.1f}" '
            f'height="{bottom - height(size):.1f}" fill="{colour}" opacity="0.35"/>',
            f'<text x="{middle:.1f}" y="{height(size) - 8:.1f}" text-anchor="middle">'
            f"{size / 2**20:,.0f} MiB</text>",
            f'<text x="{middle:.1f}" y="{bottom + 18}" text-anchor="middle">{ranks} '
            f"{'process' if ranks == 1 else 'processes'}{'' if fits else ', does not fit'}</text>",
        ]
    parts += [
        f'<polyline points="{" ".join(places)}" fill="none" stroke="#1f6feb" stroke-width="2"/>',
        f'<path d="M{_LEFT},{height(cap):.1f}H{right}" stroke="#d1481d" stroke-dasharray="6 4"/>',
        f'<text x="{_LEFT - 6}" y="{height(cap) + 4:.1f}" text-anchor="end">{cap / 2**20:,.0f} MiB</text>',
        f'<text x="{right}" y="{height(cap) - 6:.1f}" text-anchor="end" fill="#d1481d">limit</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"
