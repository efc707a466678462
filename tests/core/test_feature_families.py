"""Families of features are typed on a command line: one word each."""

from __future__ import annotations

from mindspeed_core import Feature, check_feature
from mindspeed_core.registry import Registry


class Spaced(Feature):
    name = "spaced"
    family = "two words"
    summary = "Have a family that needs quotes"


def test_a_family_that_needs_quotes_is_a_fault_of_the_feature():
    assert [problem for problem in check_feature(Spaced) if "'two words'" in problem] != []


def test_every_installed_family_is_one_word():
    families = {record.cls.family for record in Registry.discover().features.values()}

    assert len(families) > 5
    assert {family for family in families if " " in family} == set()
