"""``mindspeed-features graph``: requirements, order, conflicts and slots, as text, Mermaid or DOT."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import click

from mindspeed_core.feature import Feature
from mindspeed_core.terminal.feature_names import find_feature
from mindspeed_core.terminal.foreign_text import emit
from mindspeed_core.terminal.listing import Cell, columns, print_heading, print_hint, print_rows, say
from mindspeed_core.terminal.training_flags import (
    UNPROCESSED_FLAGS,
    host_option,
    make_plan,
    platform_option,
    training_flags,
)


@dataclass(frozen=True)
class Edge:
    """A line of the drawing: ``kind`` is requires, any-of, after, conflict or slot."""

    source: str
    target: str
    kind: str


@dataclass(frozen=True)
class Graph:
    """Features by family, required or forbidden flags, slots, and the lines between them, each once."""

    families: Mapping[str, tuple[str, ...]]
    flags: tuple[str, ...]
    slots: tuple[str, ...]
    edges: tuple[Edge, ...]


@click.command(
    "graph", short_help="Draw how features depend on each other.", context_settings=UNPROCESSED_FLAGS
)
@host_option
@platform_option
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "mermaid", "dot"]),
    help="By default text on a terminal and mermaid elsewhere.",
)
@click.option("--around", metavar="NAME", help="Only this feature and those it is related to.")
@training_flags
def command(
    host: str, platform: str | None, form: str | None, around: str | None, flags: tuple[str, ...]
) -> None:
    """Draw how features depend on each other.

    With FLAGS only the features that a training with these flags would switch on. The text counts relations
    by family and names who fills each slot; with --around or FLAGS it lists every relation.
    """
    from mindspeed_core.registry import Registry

    registry = Registry.discover()
    features = {name: record.cls for name, record in registry.features.items()}
    if flags:
        plan = make_plan(registry, flags, host=host, platform=platform).plan
        features = {name: cls for name, cls in features.items() if name in plan}
    graph = graph_of(features)
    if around is not None:
        name = find_feature(registry, around).cls.name
        related = {
            end
            for edge in graph.edges
            if name in (edge.source, edge.target)
            for end in (edge.source, edge.target)
        }
        graph = graph_of({other: cls for other, cls in features.items() if other in {name, *related}})
        graph = replace(graph, edges=tuple(e for e in graph.edges if name in (e.source, e.target)))
    form = form or ("mermaid" if columns() is None else "text")
    if form == "text":
        print_relations(graph) if around or flags else print_overview(graph)
    else:
        emit(as_mermaid(graph) if form == "mermaid" else as_dot(graph))


def graph_of(features: Mapping[str, type[Feature]]) -> Graph:
    """Return the graph of some features; lines to others are left out, a conflict is drawn once."""
    families: dict[str, list[str]] = {}
    flags: set[str] = set()
    slots: set[str] = set()
    edges: dict[Edge, None] = {}
    for name in sorted(features):
        feature = features[name]
        families.setdefault(feature.family, []).append(name)
        for requirement in feature.requires:
            if requirement.flag:
                flags.add(requirement.flag)
                edges[Edge(name, requirement.flag, "requires")] = None
            kind = "any-of" if requirement.any_of else "requires"
            for other in (requirement.feature, *requirement.any_of):
                if other in features:
                    edges[Edge(name, other, kind)] = None
        for other in feature.after:
            if other in features:
                edges[Edge(name, other, "after")] = None
        for other in feature.before:
            if other in features:
                edges[Edge(other, name, "after")] = None
        for conflict in feature.conflicts:
            if conflict.flag:
                flags.add(conflict.flag)
                edges[Edge(name, conflict.flag, "conflict")] = None
            elif conflict.feature in features:
                first, second = sorted((name, conflict.feature))
                edges[Edge(first, second, "conflict")] = None
        for slot in feature.slots:
            slots.add(slot)
            edges[Edge(name, slot, "slot")] = None
    return Graph(
        {family: tuple(names) for family, names in sorted(families.items())},
        tuple(sorted(flags)),
        tuple(sorted(slots)),
        tuple(edges),
    )


def print_overview(graph: Graph) -> None:
    """Print how many relations each family has, and which features fill each slot."""
    rows = [tuple(Cell(text, "dim") for text in ("family", "features", "requires", "conflicts"))]
    for family, names in graph.families.items():
        counts = [
            sum(edge.kind in kinds and bool({edge.source, edge.target} & {*names}) for edge in graph.edges)
            for kinds in (("requires", "any-of"), ("conflict",))
        ]
        rows.append((Cell(family, "bold"), *(Cell(str(number)) for number in (len(names), *counts))))
    print_rows(rows, tabs=False)
    fill: dict[str, list[str]] = {}
    for edge in graph.edges:
        if edge.kind == "slot":
            fill.setdefault(edge.target, []).append(edge.source)
    if fill:
        emit()
        print_heading("slots", "of the features that fill one, one at a time")
        print_rows([(slot, ", ".join(fill[slot])) for slot in sorted(fill)], indent=2, tabs=False)
    emit()
    print_hint(
        "mindspeed-features graph --around NAME lists those of one feature; --format mermaid draws all."
    )


def print_relations(graph: Graph) -> None:
    """Print every relation as one line."""
    words = {"requires": "requires", "any-of": "requires one of", "after": "comes after", "slot": "fills"}
    rows = [
        (Cell(edge.source, "name"), Cell(words.get(edge.kind, "excludes"), "dim"), edge.target)
        for edge in graph.edges
    ]
    print_rows(rows, tabs=False)
    alone = [name for names in graph.families.values() for name in names]
    related = {end for edge in graph.edges for end in (edge.source, edge.target)}
    if without := [name for name in alone if name not in related]:
        say(f"without relations: {', '.join(without)}", hang=2)


_MERMAID_LINES = {
    "requires": "-->|requires|",
    "any-of": "-->|one of|",
    "after": "-.->|after|",
    "conflict": "x--x|conflicts|",
    "slot": "---",
}
_DOT_LINES = {
    "requires": 'label="requires"',
    "any-of": 'label="one of"',
    "after": 'label="after", style=dashed',
    "conflict": 'label="conflicts", dir=none, color=red',
    "slot": "dir=none, style=dotted",
}


def as_mermaid(graph: Graph) -> str:
    """Return the graph as Mermaid text; features in boxes by family, slots rounded, flags slanted."""
    names = [name for members in graph.families.values() for name in members]
    nodes = [*names, *map(_slot_node, graph.slots), *graph.flags]
    ids = {name: f"n{index}" for index, name in enumerate(nodes)}
    lines = ["graph LR"]
    for index, (family, members) in enumerate(graph.families.items()):
        lines.append(f'  subgraph f{index}["{family}"]')
        lines += [f'    {ids[name]}["{name}"]' for name in members]
        lines.append("  end")
    lines += [f'  {ids[_slot_node(slot)]}(["slot {slot}"])' for slot in graph.slots]
    lines += [f'  {ids[flag]}[/"{flag}"/]' for flag in graph.flags]
    lines += [f"  {ids[e.source]} {_MERMAID_LINES[e.kind]} {ids[_target_node(e)]}" for e in graph.edges]
    return "\n".join(lines)


def as_dot(graph: Graph) -> str:
    """Return the graph as Graphviz DOT; features in clusters by family, slots as ellipses, flags as notes."""
    lines = ["digraph features {", "  rankdir=LR;", "  node [shape=box];"]
    for index, (family, members) in enumerate(graph.families.items()):
        lines.append(f'  subgraph cluster_{index} {{ label="{family}";')
        lines += [f'    "{name}";' for name in members]
        lines.append("  }")
    lines += [f'  "{_slot_node(slot)}" [shape=ellipse];' for slot in graph.slots]
    lines += [f'  "{flag}" [shape=note];' for flag in graph.flags]
    lines += [f'  "{e.source}" -> "{_target_node(e)}" [{_DOT_LINES[e.kind]}];' for e in graph.edges]
    lines.append("}")
    return "\n".join(lines)


def _slot_node(slot: str) -> str:
    """Return the node of a slot, which may have the name of a feature."""
    return f"slot {slot}"


def _target_node(edge: Edge) -> str:
    return _slot_node(edge.target) if edge.kind == "slot" else edge.target
