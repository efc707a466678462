"""Diagrams of the pages become drawings, and what cannot be drawn is an error."""

from __future__ import annotations

import re

import pytest
from diagrams import drawn, layered
from markdown_files import blocks, read


def test_every_node_and_edge_of_the_architecture_is_drawn():
    (block,) = blocks(read("docs/architecture.md"), "mermaid")
    names = set(re.findall(r"(?:^|-->)\s*(\w+)", block.text.partition("\n")[2], re.MULTILINE))
    svg = drawn(block.text)

    assert len(re.findall("<rect ", svg)) == len(names)
    assert len(re.findall("marker-end", svg)) == block.text.count("-->")


def test_an_edge_leads_down_and_a_node_stands_above_what_it_leads_to():
    rows = layered(["a", "b", "c", "late"], [("a", "b"), ("b", "c"), ("late", "c")])

    assert rows == [["a"], ["b", "late"], ["c"]]


@pytest.mark.parametrize("source", ["graph TD\n a --> b\n b --> a", "graph TD\n a -.-> b", "pie\n a"])
def test_what_cannot_be_drawn_is_an_error(source):
    with pytest.raises(ValueError, match=r"cycle|neither|begins"):
        drawn(source)
