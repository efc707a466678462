"""Scenarios of features that two value devices can train, as parameters of one test."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

from mindspeed_core.feature import Feature

MOST_RANKS = 2
"""Ranks of a world in which kernels are computed in float64 within the time of a test."""


def device_scenarios(
    declarations: Iterable[Any], *, always: Collection[str] = (), first: int = 0
) -> list[Any]:
    """Return parameters ``(feature's name, scenario)``, without larger worlds and without checkpoints.

    Parametrize ``("feature", "scenario")`` of a test with them that calls ``assert_equals_cpu(scenario)``.

    Args:
        declarations: what the plugin's entry point names.
        always: names of scenarios, or of one feature's (``"FEATURE-SCENARIO"``).
        first: how many of each feature's come along with them; all others get the mark ``thorough``.
    """
    found = []
    for feature in declarations:
        if not (isinstance(feature, type) and issubclass(feature, Feature)):
            continue
        small = [s for s in feature.verify if s.world_size <= MOST_RANKS and s.resume is None]
        for index, scenario in enumerate(small):
            name = f"{feature.name}-{scenario.name}"
            chosen = index < first or bool({scenario.name, name} & {*always})
            marks = () if chosen else (pytest.mark.thorough,)
            found.append(pytest.param(feature.name, scenario, id=name, marks=marks))
    return found
