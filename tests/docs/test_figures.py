"""Figures are what code and recorded runs say, have words for who does not see them, and follow the page."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from declared_figures import courses, stages_figure
from draw import FOLDER, render, stale
from recorded_figures import recorded

from mindspeed_core.discovery.stages import core_stages
from mindspeed_pp.schedules import BUILT_IN

SVG = "{http://www.w3.org/2000/svg}"
FIGURES = render()


def test_the_figures_are_up_to_date():
    assert [path.name for path in stale(FIGURES)] == [], "run python docs/figures/draw.py"


@pytest.mark.parametrize("path", sorted(FIGURES), ids=lambda path: path.stem)
def test_a_figure_has_a_title_a_description_and_both_schemes(path):
    root = ElementTree.fromstring(FIGURES[path])

    assert len(root.findtext(f"{SVG}title")) > 10
    assert len(root.findtext(f"{SVG}desc")) > 20
    assert "prefers-color-scheme:dark" in root.findtext(f"{SVG}style")
    # Nothing is drawn outside of it.
    wide, high = (float(root.get(name)) for name in ("width", "height"))
    for box in root.iter(f"{SVG}rect"):
        x, y, width, height = (float(box.get(name)) for name in ("x", "y", "width", "height"))
        assert x >= 0
        assert y >= 0
        assert x + width <= wide + 1
        assert y + height <= high + 1


def test_every_stage_of_the_core_is_in_the_figure():
    shown = set(re.findall(r'class="m">(\w+)<', stages_figure()))

    assert shown == set(core_stages())


def test_every_built_in_schedule_is_drawn_and_none_idles_more_than_1f1b():
    drawn = {path.stem for path in FIGURES if path.stem.startswith("schedule-")}
    bubbles = {rule.name: course.bubble_share for rule, course in courses()}

    assert drawn == {f"schedule-{rule.name}" for rule in BUILT_IN}
    assert bubbles["zbv"] < bubbles["zb-h1"] < bubbles["1f1b"]


def test_what_the_figures_show_of_runs_is_what_the_features_promise():
    peaks = [side["peak"] for side in recorded("memory")["sides"].values()]
    losses = recorded("losses")
    ring = recorded("exchanges")["ring"]

    assert all(peak < peaks[0] for peak in peaks[1:])
    assert losses["second"][0][0] == losses["first"][-1][0] + 1
    assert losses["second"][-1][1] < losses["first"][0][1]
    sent = [[call["peer"] for call in rank if call["operation"] == "isend"] for rank in ring]
    assert sent == [[(rank + 1) % 4] * 3 for rank in range(4)]


def test_every_figure_is_shown_on_a_page_that_exists():
    shown = {
        name
        for folder in ("docs", "plugins", ".")
        for path in (FOLDER.parents[1] / folder).glob("*.md" if folder != "plugins" else "*/src/*/docs/*.md")
        for name in re.findall(r"figures/([\w-]+)\.svg\)", path.read_text(encoding="utf-8"))
    }

    assert {path.stem for path in FIGURES} == shown
