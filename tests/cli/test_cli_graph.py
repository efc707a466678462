"""``graph``: every declared relation becomes one line, in both formats."""

from __future__ import annotations

import pytest

from mindspeed_core.feature import Conflict, Feature, Requirement
from mindspeed_megatron.graph_command import as_dot, as_mermaid, graph_of, print_overview


class Base(Feature):
    name = "base"
    family = "one"
    slots = ("norm",)
    conflicts = (Conflict(feature="user"), Conflict(flag="--fp16"))


class User(Feature):
    name = "user"
    family = "two"
    requires = (
        Requirement(feature="base"),
        Requirement(any_of=("base", "absent")),
        Requirement(flag="--seed"),
    )
    after = ("base", "absent")
    conflicts = (Conflict(feature="base"),)


FEATURES = {"base": Base, "user": User}


def test_each_relation_is_one_line_and_a_mutual_conflict_is_drawn_once():
    found = sorted((e.source, e.target, e.kind) for e in graph_of(FEATURES).edges)

    assert found == [
        ("base", "--fp16", "conflict"),
        ("base", "norm", "slot"),
        ("base", "user", "conflict"),
        ("user", "--seed", "requires"),
        ("user", "base", "after"),
        ("user", "base", "any-of"),
        ("user", "base", "requires"),
    ]


def test_what_comes_before_another_is_drawn_like_what_comes_after_it():
    class First(User):
        requires, after, conflicts = (), (), ()
        before = ("base", "absent")

    assert [
        (e.source, e.target) for e in graph_of({"base": Base, "first": First}).edges if e.kind == "after"
    ] == [("base", "first")]


def test_lines_to_features_that_are_not_drawn_are_left_out():
    assert {e.target for e in graph_of({"user": User}).edges} == {"--seed"}


def test_mermaid_text_is_complete():
    assert as_mermaid(graph_of(FEATURES)).splitlines() == [
        "graph LR",
        '  subgraph f0["one"]',
        '    n0["base"]',
        "  end",
        '  subgraph f1["two"]',
        '    n1["user"]',
        "  end",
        '  n2(["slot norm"])',
        '  n3[/"--fp16"/]',
        '  n4[/"--seed"/]',
        "  n0 x--x|conflicts| n1",
        "  n0 x--x|conflicts| n3",
        "  n0 --- n2",
        "  n1 -->|requires| n0",
        "  n1 -->|one of| n0",
        "  n1 -->|requires| n4",
        "  n1 -.->|after| n0",
    ]


def test_dot_text_declares_every_node_and_line():
    text = as_dot(graph_of(FEATURES))

    assert text.startswith("digraph features {")
    assert text.endswith("}")
    assert text.count(" -> ") == 7
    assert '"user" -> "base" [label="after", style=dashed];' in text


@pytest.mark.parametrize(("form", "start"), [("mermaid", "graph LR"), ("dot", "digraph")])
def test_the_command_draws_what_is_installed(features, install, form, start):
    from made_packages import feature_source

    install("pack-a", feature_source("thing-a"))

    output = features("graph", "--format", form).output

    assert output.startswith(start)
    assert "thing-a" in output


def test_with_flags_only_the_plan_is_drawn(features, install):
    from made_packages import feature_source

    install("pack-a", feature_source("thing-a"))
    install("pack-b", feature_source("thing-b"))

    output = features("graph", "--platform", "cpu", "--", "--thing-a").output

    assert "thing-a" in output
    assert "thing-b" not in output


def test_a_slot_with_the_name_of_a_feature_is_a_node_of_its_own():
    class Filling(Feature):
        name = "norm"
        family = "one"
        slots = ("norm",)

    graph = graph_of({"norm": Filling})

    assert as_mermaid(graph).splitlines()[-2:] == ['  n1(["slot norm"])', "  n0 --- n1"]
    assert '"norm" -> "slot norm" [' in as_dot(graph)


def test_a_terminal_gets_counts_and_who_fills_each_slot(capsys):
    print_overview(graph_of(FEATURES))

    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "family  features  requires  conflicts",
        "one     1         2         2",
        "two     1         3         1",
    ]
    assert "  norm  base" in lines


def test_relations_around_one_feature_are_listed_one_a_line(features, install):
    from made_packages import feature_source

    install("pack-a", feature_source("thing-a", 'requires = (Requirement(feature="thing-b"),)'))
    install("pack-b", feature_source("thing-b", 'slots = ("norm",)'))
    install("pack-c", feature_source("thing-c", 'slots = ("norm",)'))

    output = features("graph", "--around", "thing-a", "--format", "text").output

    assert output == "thing-a  requires  thing-b\n"
