"""Pictures of a plan as inline SVG, coloured by the page's own variables for light and dark.

Every picture has a title for readers that do not see it, and the page has its numbers as a table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from mindspeed_tune.launch_plan import GroupPlan
from mindspeed_tune.memory_plan import MemoryPlan
from mindspeed_tune.quantities import count, duration, size
from mindspeed_tune.schedules import FORWARD
from mindspeed_tune.timeline import Timeline

WIDTH = 960
_LEFT, _RIGHT = 76, 96
_DRAWN = 24_000


def memory_chart(stages: Sequence[MemoryPlan], categories: Sequence[str]) -> str:
    """Draw memory by category, one bar for each pipeline stage, with the capacity of the device."""
    capacity = stages[0].capacity
    limit = max([*(one.needed for one in stages), capacity or 0.0]) * 1.03
    tall = 22 if len(stages) <= 24 else 12
    gap = 6 if len(stages) <= 24 else 3
    inner = WIDTH - _LEFT - _RIGHT
    scale = inner / (limit or 1.0)
    height = len(stages) * (tall + gap) + 44
    parts = []
    for row, one in enumerate(stages):
        y, x = 8 + row * (tall + gap), float(_LEFT)
        parts.append(_text(_LEFT - 8, y + tall - tall / 3.2, f"stage {one.stage}", "end"))
        pieces = [(name, one.categories.get(name, 0.0), f"c{categories.index(name)}") for name in categories]
        pieces += [("allocator's rounding", max(0.0, one.reserved - one.exact), "pad")]
        pieces += [("beside the allocator", one.outside, "pad2")]
        for name, amount, colour in pieces:
            wide = amount * scale
            if wide < 0.05:
                continue
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{tall}" class="{colour}">'
                f"<title>stage {one.stage}, {escape(name)}: {size(amount)}</title></rect>"
            )
            x += wide
        style = "" if one.fits else "bad"
        parts.append(_text(x + 6, y + tall - tall / 3.2, size(one.needed), "start", style))
    bottom = 8 + len(stages) * (tall + gap)
    for step in range(5):
        amount = limit / 1.03 * step / 4
        x = _LEFT + amount * scale
        parts.append(f'<line x1="{x:.1f}" y1="4" x2="{x:.1f}" y2="{bottom}" class="grid"/>')
        parts.append(_text(x, bottom + 16, size(amount), "middle", "quiet"))
    if capacity is not None:
        x = _LEFT + capacity * scale
        parts.append(f'<line x1="{x:.1f}" y1="2" x2="{x:.1f}" y2="{bottom + 4}" class="capacity"/>')
        parts.append(_text(x, bottom + 32, f"capacity {size(capacity)}", "middle", "bad"))
    return _svg(height, "Memory of every pipeline stage at its peak, by category", parts)


def timeline_chart(timeline: Timeline, measured: bool, tail: Sequence[tuple[str, float]]) -> str:
    """Draw when each pipeline stage runs forward and backward passes.

    Args:
        timeline: of the pipeline.
        measured: its times are seconds; otherwise operations, and no times are written.
        tail: what follows on all stages, with its seconds.
    """
    total = (timeline.seconds + sum(length for _, length in tail)) or 1.0
    stages = timeline.stages
    tall = 18 if stages <= 24 else 9
    gap = 4 if stages <= 24 else 2
    inner = WIDTH - _LEFT - 16
    scale = inner / total
    bottom = 8 + stages * (tall + gap)
    paths: dict[tuple[int, str], list[str]] = {}
    for span in timeline.spans[:_DRAWN]:
        x, wide = _LEFT + span.begin * scale, max(0.3, (span.end - span.begin) * scale)
        y = 8 + span.stage * (tall + gap)
        line = 0.4 if wide > 2 else 0.0
        shape = f"M{x:.1f} {y}h{max(0.3, wide - line):.1f}v{tall}h-{max(0.3, wide - line):.1f}z"
        name = f"{span.direction}{span.chunk % 2}"
        paths.setdefault((span.stage, name), []).append(shape)
    parts = [f'<rect x="{_LEFT}" y="6" width="{inner}" height="{bottom - 8}" class="idle"/>']
    for stage in range(stages):
        y = 8 + stage * (tall + gap)
        parts.append(_text(_LEFT - 8, y + tall - tall / 4, f"stage {stage}", "end"))
    for (stage, name), shapes in sorted(paths.items()):
        direction, chunk = name[:-1], name[-1]
        colour = ("fwd" if direction == FORWARD else "bwd") + ("" if chunk == "0" else "2")
        parts.append(
            f'<path class="{colour}" d="{"".join(shapes)}"><title>stage {stage}, {direction} passes, busy '
            f"{timeline.busy(stage) / (timeline.seconds or 1) * 100:.0f} %</title></path>"
        )
    x = _LEFT + timeline.seconds * scale
    for index, (name, length) in enumerate(tail):
        wide = length * scale
        if wide >= 0.5:
            parts.append(
                f'<rect x="{x:.1f}" y="8" width="{wide:.1f}" height="{bottom - 12}" class="tail{index % 2}">'
                f"<title>{escape(name)}: {duration(length)}</title></rect>"
            )
        x += wide
    if measured:
        for step in range(5):
            at = total * step / 4
            anchor = "end" if step == 4 else "middle" if step else "start"
            parts.append(_text(_LEFT + at * scale, bottom + 14, duration(at) if at else "0", anchor, "quiet"))
    return _svg(bottom + 22, "Passes of every pipeline stage over a step", parts)


def groups_chart(groups: Sequence[GroupPlan], devices: int, world_size: int) -> str:
    """Draw every group that communicates: its devices on a node, its nodes, its bytes."""
    row, parts = 30, []
    nodes = max(1, -(-world_size // devices))
    slots = min(devices, 16)
    most = max((one.bytes for one in groups), default=1.0) or 1.0
    name_x, node_x, nodes_x, bytes_x = 4, 330, 330 + slots * 13 + 24, 700
    headings = (
        (name_x, "group of one rank"),
        (node_x, "devices on a node"),
        (nodes_x, "nodes"),
        (bytes_x, "bytes of a rank in a step"),
    )
    parts += [_text(x, 16, text, "start", "quiet") for x, text in headings]
    for index, one in enumerate(groups):
        y = 26 + index * row
        members = {rank % devices for rank in _some(one)}
        on = {rank // devices for rank in _some(one)}
        spanned = len(on) if one.group.ranks.size <= _LOOKED_AT else min(nodes, one.group.ranks.size)
        parts.append(_text(name_x, y + 15, _short(one.group.name), "start"))
        for slot in range(slots):
            colour = ("far" if one.crosses_nodes else "near") if slot in members else "empty"
            parts.append(
                f'<rect x="{node_x + slot * 13}" y="{y + 4}" width="11" height="14" rx="2" class="{colour}"/>'
            )
        crossing = f"{count(spanned)} of {count(nodes)}" if one.crosses_nodes else "within one"
        parts.append(_text(nodes_x, y + 15, crossing, "start", "bad" if one.crosses_nodes else ""))
        wide = one.bytes / most * (WIDTH - bytes_x - 86)
        parts.append(
            f'<rect x="{bytes_x}" y="{y + 4}" width="{max(1.0, wide):.1f}" height="14" '
            f'class="{"far" if one.crosses_nodes else "near"}"><title>{escape(one.group.name)}, '
            f"{one.group.ranks.size} ranks: {escape(str(one.group.ranks))}</title></rect>"
        )
        parts.append(_text(bytes_x + max(1.0, wide) + 6, y + 15, size(one.bytes), "start"))
    return _svg(30 + len(groups) * row, "Groups of a rank on devices and nodes", parts)


def legend(entries: Mapping[str, str]) -> str:
    """Return a legend: names by the class of their colour."""
    items = "".join(
        f'<li><svg width="14" height="14" aria-hidden="true"><rect width="14" height="14" rx="3" '
        f'class="{colour}"/></svg>{escape(name)}</li>'
        for colour, name in entries.items()
    )
    return f'<ul class="legend">{items}</ul>'


_LOOKED_AT = 65536


def _some(one: GroupPlan) -> Sequence[int]:
    ranks = one.group.ranks
    return [ranks[position] for position in range(min(ranks.size, _LOOKED_AT))]


def _short(name: str) -> str:
    words = name.replace("_", " ").lower()
    return words if len(words) <= 44 else words[:43] + "…"


def _text(x: float, y: float, text: str, anchor: str, style: str = "") -> str:
    kind = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{escape(text)}</text>'


def _svg(height: float, title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )
